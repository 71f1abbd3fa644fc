"""A transformers model over two ranks out of the cache: the same as `from_pretrained(..., tp_plan="auto")` reads."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.commands import Wcache
from tests.processes import Forge
from tests.ranks import run_ranks
from wcache_async.errors import BindError, ConfigMismatch, ModuleError

transformers = pytest.importorskip("transformers", reason="needs `pip install wcache-async[transformers]`")
pytest.importorskip("accelerate", reason="needs `pip install wcache-async[transformers]`")

# Looked up here, they are imported once in the forge instead of in every rank.
CLASSES = {
    name: (getattr(transformers, f"{name}Config"), getattr(transformers, f"{name}ForCausalLM"))
    for name in ("Llama", "Qwen2")
}

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, tuple[str, dict[str, Any], torch.dtype]] = {
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True}, torch.float32),
    "qwen-tied-bfloat16": ("Qwen2", {"tie_word_embeddings": True}, torch.bfloat16),
}

Outputs = dict[str, list[Any]]


@pytest.fixture
def wcache(forge: Forge, short_tmp: Path) -> Wcache:
    return Wcache(forge, short_tmp / "wcache.sock")


def make_checkpoint(name: str, folder: Path) -> None:
    kind, settings, dtype = MODELS[name]
    make_config, make_model = CLASSES[kind]
    torch.manual_seed(len(name))
    model = make_model(make_config(**SMALL | settings)).to(dtype)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter)  # Biases of zero would tell nothing.
    model.generation_config.max_length = 17
    model.save_pretrained(folder)


def outputs(model: Any) -> Outputs:
    tokens = torch.arange(3, 9)[None]
    with torch.inference_mode():
        logits = model(input_ids=tokens).logits
        generated = model.generate(input_ids=tokens, do_sample=False)
    return {"logits": logits.float().tolist(), "generated": generated.tolist()}


def from_disk(_: int, folder: Path) -> tuple[Outputs, dict[str, str]]:
    warnings.simplefilter("ignore")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
    return outputs(model), structure(model)


def from_cache(rank: int, folder: Path, socket: Path) -> tuple[Outputs, dict[str, str]]:
    from wcache_async.integrations import tensor_parallel

    warnings.simplefilter("ignore")
    model = tensor_parallel.from_cache(folder, "m", socket_path=socket, timeout=30, allow_stale=True)
    assert model.weight_cache_state.config["tp_rank"] == rank
    shards = {tensor.data_ptr() for tensor in model.weight_cache_state.import_tensors().values()}
    for parameter in model.parameters():
        assert getattr(parameter, "_local_tensor", parameter).data_ptr() in shards
    model.weight_cache_state.release()
    return outputs(model), structure(model)


def structure(model: Any) -> dict[str, str]:
    """What each tensor of a model is, but for its bytes."""
    first: dict[int, str] = {}
    found = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        words = (type(tensor).__name__, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)
        found[name] = f"{words} {getattr(tensor, 'placements', '')} {first.setdefault(id(tensor), name)}"
    return found


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_compute_what_they_do_with_weights_from_disk(
    wcache: Wcache, forge: Forge, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "model"
    make_checkpoint(name, folder)
    with wcache.serve(folder, "--name", "m", "--tp-size", "2"):
        disk = run_ranks(forge, 2, tmp_path / "disk", from_disk, folder)
        (folder / "model.safetensors").rename(tmp_path / "model.safetensors")
        cached = run_ranks(forge, 2, tmp_path / "cached", from_cache, folder, wcache.socket_path)
    assert cached == disk
    (tmp_path / "model.safetensors").rename(folder / "model.safetensors")
    whole = outputs(transformers.AutoModelForCausalLM.from_pretrained(folder))
    precision = 0.05 if MODELS[name][2] is torch.bfloat16 else 1e-5
    logits = torch.tensor(cached[0][0]["logits"])
    torch.testing.assert_close(logits, torch.tensor(whole["logits"]), atol=precision, rtol=precision)


def refusals(rank: int, folder: Path, socket: Path) -> dict[str, Any]:
    from wcache_async.integrations import tensor_parallel

    warnings.simplefilter("ignore")
    with pytest.raises(ConfigMismatch) as other_size:
        tensor_parallel.from_cache(folder, "one", socket_path=socket)
    with pytest.raises(BindError) as other_plan:
        tensor_parallel.from_cache(folder, "planned", socket_path=socket)
    with pytest.raises(ModuleError) as no_model:
        tensor_parallel.from_cache(folder.parent, "m", socket_path=socket)
    return {
        "size": other_size.value.differences["tp_size"],
        "plan": sorted(other_plan.value.mismatched),
        "model": str(no_model.value),
    }


def test_states_that_are_cut_otherwise_are_refused(wcache: Wcache, forge: Forge, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_checkpoint("qwen-tied-bfloat16", folder)
    (tmp_path / "plan.json").write_text('{"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.gate_proj": "rowwise"}')
    plan = ("--tp-size", "2", "--tp-plan", tmp_path / "plan.json")
    with wcache.serve(folder, "--name", "planned", *plan):
        for rank in range(2):
            whole = ("--rank", str(rank), "--option", "tp_size=1", "--option", "tp_rank=0")
            assert wcache("load", folder, "--name", "one", *whole).code == 0
        results = run_ranks(forge, 2, tmp_path, refusals, folder, wcache.socket_path)
    for told in results:
        assert told["size"] == [2, 1]
        assert "model.layers.0.self_attn.q_proj.weight" in told["plan"]
        assert "model.layers.0.mlp.gate_proj.weight" in told["plan"]
        assert "model.layers.0.mlp.up_proj.weight" not in told["plan"]
        assert str(tmp_path) in told["model"]

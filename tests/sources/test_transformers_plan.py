"""The plan transformers has for a model cuts a checkpoint as `from_pretrained(..., tp_plan="auto")` would."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from wcache_async.errors import SourceError
from wcache_async.manifest import Cut
from wcache_async.sources.tp_plan import STYLES, TpPlan
from wcache_async.sources.transformers_plan import plan_of_model

if TYPE_CHECKING:
    from tests.sources.conftest import Load

transformers = pytest.importorskip("transformers", reason="needs `pip install wcache-async[transformers]`")

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
}


def save(folder: Path, kind: str = "Llama", suffix: str = "ForCausalLM", **settings: Any) -> Path:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SMALL | settings)
    getattr(transformers, f"{kind}{suffix}")(config).save_pretrained(folder)
    return folder


def plan_at(folder: Path) -> TpPlan:
    file = folder / "config.json"
    return plan_of_model(str(file), file.read_text())


def styles_of(plan: TpPlan) -> dict[str, str]:
    return {rule.pattern: rule.style for rule in plan.rules}


def test_a_llama_is_cut_by_its_own_plan(tmp_path: Path, load: "Load") -> None:
    folder = save(tmp_path, attention_bias=True)
    plan = plan_at(folder)
    base = transformers.LlamaConfig().base_model_tp_plan
    assert {f"model.{pattern}": style for pattern, style in base.items()}.items() <= styles_of(plan).items()
    whole = load(folder).tensors
    # The configuration is found beside a file too.
    shares = [
        load(path, options={"tp_size": 2, "tp_rank": rank})
        for rank, path in enumerate((folder, *folder.glob("*.safetensors")))
    ]
    cuts = shares[0].spec.cuts
    layer = "model.layers.1."
    assert cuts[f"{layer}self_attn.k_proj.weight"] == cuts[f"{layer}self_attn.k_proj.bias"] == Cut(0, (16,), 0, 2)
    assert cuts[f"{layer}mlp.down_proj.weight"] == Cut(1, (64,), 0, 2)
    assert f"{layer}self_attn.o_proj.bias" not in cuts
    assert f"{layer}input_layernorm.weight" not in cuts
    for name, tensor in whole.items():
        parts = [share.tensors[name] for share in shares]
        again = torch.cat(parts, cuts[name].dim) if name in cuts else parts[0]
        assert torch.equal(again, tensor)


def test_a_head_tied_to_its_embeddings_is_in_no_checkpoint_and_no_error(tmp_path: Path, load: "Load") -> None:
    loaded = load(save(tmp_path, "Qwen2", tie_word_embeddings=True), options={"tp_size": 2, "tp_rank": 1})
    assert "lm_head.weight" not in loaded.tensors
    assert "model.embed_tokens.weight" in loaded.spec.cuts


def test_a_base_model_has_the_plan_without_a_prefix(tmp_path: Path, load: "Load") -> None:
    loaded = load(save(tmp_path, suffix="Model"), options={"tp_size": 2, "tp_rank": 0})
    assert loaded.spec.cuts["layers.0.self_attn.q_proj.weight"] == Cut(0, (32,), 0, 2)


def test_what_only_transformers_own_loading_makes_is_not_passed_over(tmp_path: Path, load: "Load") -> None:
    """A checkpoint that is converted while it is loaded has other names, and what should be cut would be whole."""
    folder = save(tmp_path)
    (file,) = folder.glob("*.safetensors")
    with safe_open(file, "pt") as opened:
        renamed = {name.replace("gate_proj", "w1"): opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    save_file(renamed, file)
    with pytest.raises(SourceError, match=r"no tensor for .*mlp\.gate_proj.* of transformers' plan for Llama"):
        load(folder, options={"tp_size": 2, "tp_rank": 0})


@pytest.mark.parametrize(("told", "unit"), [({"head_dim": 16}, 16), ({}, 8)])
def test_a_unit_is_an_attention_head_of_the_model(tmp_path: Path, told: dict[str, int], unit: int) -> None:
    if not hasattr(transformers, "MiniCPM5MoeConfig"):
        pytest.skip("needs transformers 5.25, the first with a model whose heads are units")
    config = transformers.MiniCPM5MoeConfig(**SMALL | {"head_dim": None, "n_routed_experts": 4} | told)
    config.architectures = ["MiniCPM5MoeForCausalLM"]
    config.save_pretrained(tmp_path)
    units = {rule.pattern: rule.unit for rule in plan_at(tmp_path).rules if rule.has_units}
    assert units == {f"model.layers.*.self_attn.{part}_proj": unit for part in "kv"}


def test_sizes_that_do_not_divide_name_the_tensor(tmp_path: Path, load: "Load") -> None:
    folder = save(tmp_path, intermediate_size=66)
    with pytest.raises(SourceError) as caught:
        load(folder, options={"tp_size": 4, "tp_rank": 0})
    assert "mlp." in caught.value.tensor
    assert "66 of its dimension" in caught.value.reason
    assert "4 equal slices" in caught.value.reason


def refused(load: "Load", folder: Path) -> SourceError:
    save_file({"w": torch.ones(2)}, folder / "model.safetensors")
    with pytest.raises(SourceError) as caught:
        load(folder, options={"tp_size": 2, "tp_rank": 0})
    assert caught.value.path == str(folder / "config.json")
    assert caught.value.reason.endswith("; give a --tp-plan")
    return caught.value


def test_a_model_without_a_plan_is_refused(tmp_path: Path, load: "Load") -> None:
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=16)
    config.architectures = ["GPT2Model"]
    config.save_pretrained(tmp_path)
    assert "transformers has no plan for GPT2Model" in refused(load, tmp_path).reason


@pytest.mark.parametrize(
    "config",
    [
        None,
        b"",
        b"\xff",
        b"{}",
        b'{"model_type": "no-such-model"}',
        b'{"model_type": "llama"}',
        b'{"model_type": "llama", "architectures": ["NoSuchModel"]}',
        b'{"model_type": "llama", "architectures": ["AutoConfig"]}',
        b'{"model_type": "llama", "architectures": 3}',
    ],
)
def test_a_configuration_that_names_no_model_is_refused_by_its_file(
    tmp_path: Path, load: "Load", config: bytes | None
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_bytes(config)
    refused(load, tmp_path)


def test_a_configuration_that_changed_is_read_again(tmp_path: Path) -> None:
    save(tmp_path)
    assert "Llama" in plan_at(tmp_path).origin
    config = json.loads((tmp_path / "config.json").read_text())
    config.update(model_type="qwen2", architectures=["Qwen2ForCausalLM"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "Qwen2" in plan_at(tmp_path).origin


def test_without_transformers_it_says_how_to_install_it(
    tmp_path: Path, load: "Load", monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "`pip install wcache-async[transformers]`" in refused(load, tmp_path).reason


def test_every_style_of_transformers_tensor_parallelism_is_known() -> None:
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer

    theirs = {name for name in ALL_PARALLEL_STYLES if isinstance(ALL_PARALLEL_STYLES[name], TensorParallelLayer)}
    assert len(theirs) > 10
    assert theirs <= STYLES.keys()

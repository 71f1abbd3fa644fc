"""transformers models out of the cache: the same outputs, bit for bit, and no weight read from disk.

The models are small and random, made on the spot from their configurations.
"""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from wcache_async import Client, Daemon
from wcache_async.errors import ModuleError, SourceError

transformers = pytest.importorskip("transformers", reason="needs `pip install wcache-async[transformers]`")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
DECODER = {**SMALL, "intermediate_size": 64, "num_key_value_heads": 2, "pad_token_id": 0}
WHISPER = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": 128,
    "num_mel_bins": 16,
    "max_source_positions": 50,
    "max_target_positions": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", DECODER),
    "llama-bfloat16": ("LlamaForCausalLM", "LlamaConfig", DECODER),
    "qwen-tied": ("Qwen2ForCausalLM", "Qwen2Config", {**DECODER, "tie_word_embeddings": True}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**DECODER, "num_local_experts": 4}),
    "bert": ("BertForMaskedLM", "BertConfig", {**SMALL, "intermediate_size": 64}),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "d_model": 32,
            "d_ff": 64,
            "d_kv": 8,
            "num_layers": 2,
            "num_heads": 4,
            "vocab_size": 128,
            "decoder_start_token_id": 0,
        },
    ),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", WHISPER),
    "resnet": (
        "ResNetForImageClassification",
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
    ),
}


def inputs_for(name: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    tokens = torch.randint(3, 128, (2, 6))
    if name == "resnet":
        return {"pixel_values": torch.randn(2, 3, 32, 32)}
    if name == "whisper":
        return {"input_features": torch.randn(2, 16, 100), "decoder_input_ids": tokens}
    if name == "t5":
        return {"input_ids": tokens, "decoder_input_ids": tokens}
    return {"input_ids": tokens}


def make_checkpoint(name: str, folder: Path) -> None:
    class_name, config_name, settings = MODELS[name]
    torch.manual_seed(len(name))
    model = getattr(transformers, class_name)(getattr(transformers, config_name)(**settings))
    if name == "resnet":
        with torch.no_grad():
            for part in model.modules():
                if isinstance(part, torch.nn.BatchNorm2d):
                    part.running_mean.normal_()  # type: ignore[union-attr]
                    part.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    if "bfloat16" in name:
        model = model.to(torch.bfloat16)
    model.save_pretrained(folder)


def outputs(model: Any, name: str) -> list[torch.Tensor]:
    with torch.inference_mode():
        forward = model(**inputs_for(name))
        found = [value for value in forward.to_tuple() if isinstance(value, torch.Tensor)]
        if model.can_generate():
            prompt = {k: v for k, v in inputs_for(name).items() if not k.startswith("decoder_")}
            found.append(model.generate(**prompt, max_new_tokens=8, do_sample=False))
    return found


def same(got: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(got) == len(expected) and all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


Serve = Callable[..., Any]


async def attach_from_cache(daemon: Daemon, name: str) -> Any:
    from wcache_async.integrations.transformers import from_cache

    return await asyncio.to_thread(from_cache, name, socket_path=daemon.socket_path)


@pytest.mark.asyncio(loop_factories=["uvloop"])
@pytest.mark.parametrize("name", MODELS)
async def test_the_model_out_of_the_cache_computes_what_the_one_from_disk_computes(
    name: str, tmp_path: Path, short_tmp: Path
) -> None:
    folder = tmp_path / "model"
    make_checkpoint(name, folder)
    original = getattr(transformers, MODELS[name][0]).from_pretrained(folder, dtype="auto").eval()
    async with Daemon(short_tmp / "wcache.sock") as daemon:
        status = await daemon.load(folder, name="m", kind="transformers")
        assert status.config["source"] == "transformers"
        shutil.rmtree(folder)  # Whatever is read from now on is not read from disk.
        cached = await attach_from_cache(daemon, "m")
        assert not any(parameter.is_meta for parameter in cached.parameters())
        assert same(outputs(cached, name), outputs(original, name))
        assert cached.config.to_dict().keys() >= original.config.to_dict().keys()
        if original.can_generate():
            assert cached.generation_config.to_dict() == original.generation_config.to_dict()
        ties = {key: value.data_ptr() for key, value in cached.state_dict().items()}
        for a, b in [(a, b) for a in ties for b in ties if a < b]:
            tied = original.state_dict()[a].data_ptr() == original.state_dict()[b].data_ptr()
            assert (ties[a] == ties[b]) == tied, (a, b)
        cached.weight_cache_state.release()


@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_an_int8_model_keeps_its_quantised_tensors(tmp_path: Path, short_tmp: Path) -> None:
    pytest.importorskip("torchao", reason="needs `pip install torchao`")
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    folder = tmp_path / "model"
    make_checkpoint("llama", folder)
    quantization = TorchAoConfig(Int8WeightOnlyConfig())
    original = transformers.LlamaForCausalLM.from_pretrained(folder, quantization_config=quantization).eval()
    async with Daemon(short_tmp / "wcache.sock") as daemon:
        options = {"quantization": quantization.to_json_string(use_diff=False)}
        await daemon.load(folder, name="m", kind="transformers", options=options)
        shutil.rmtree(folder)
        cached = await attach_from_cache(daemon, "m")
        weight = cached.model.layers[0].mlp.up_proj.weight
        assert type(weight) is type(original.model.layers[0].mlp.up_proj.weight)
        assert same(outputs(cached, "llama"), outputs(original, "llama"))
        cached.weight_cache_state.release()


async def test_a_state_of_a_plain_checkpoint_is_refused_by_name(tmp_path: Path, short_tmp: Path) -> None:
    folder = tmp_path / "model"
    make_checkpoint("bert", folder)
    async with Daemon(short_tmp / "wcache.sock") as daemon:
        await daemon.load(folder, name="m")
        with pytest.raises(ModuleError, match=r"^m cannot be built: .*--source transformers"):
            await attach_from_cache(daemon, "m")


async def test_what_transformers_cannot_load_is_a_source_error(tmp_path: Path, short_tmp: Path) -> None:
    (tmp_path / "empty").mkdir()
    async with Daemon(short_tmp / "wcache.sock") as daemon, Client(daemon.socket_path) as client:
        for path, options in (
            (tmp_path / "empty", {}),
            (tmp_path / "empty", {"revison": "typo"}),
        ):
            with pytest.raises(SourceError) as caught:
                await client.load(path, "m", source="transformers", options=options)
            assert caught.value.path == str(path)
        assert daemon.status().states[0].phase == "failed"

"""Source transformers: which files a state depends on, and what its config says of how it was made."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from wcache_async import Client, Daemon, standard_config
from wcache_async.errors import ConfigMismatch, SourceError, StaleState
from wcache_async.identity.config import quantization_hash
from wcache_async.sources import open_source

transformers: Any = pytest.importorskip("transformers", reason="needs `pip install wcache-async[transformers]`")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small random Llama as `save_pretrained` writes it, and files beside it that it is not made of."""
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    path = tmp_path / "llama"
    transformers.set_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json", "optimizer.bin", "README.md"):
        (path / name).write_text("{}")
    return path


def test_the_files_are_those_of_the_model_alone(folder: Path) -> None:
    with open_source(str(folder), kind="transformers") as source:
        source.open()
        names = [Path(stamp.path.decode()).name for stamp in source.files()]
    assert names == ["config.json", "generation_config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", True),
        ("adapter_config.json", True),
        ("model.fp16.safetensors", True),
        ("model-00001-of-00002.safetensors", True),
        ("model.safetensors.index.json", True),
        ("pytorch_model.bin", True),
        ("pytorch_model.bin.index.json", True),
        ("adapter_model.safetensors", True),
        ("preprocessor_config.json", False),
        ("model_card.json", False),
        ("modeling.py", False),
        ("consolidated.safetensors", False),
        ("training_args.bin", False),
    ],
)
def test_names_that_from_pretrained_may_read(tmp_path: Path, name: str, read: bool) -> None:
    from wcache_async.sources.transformers import _stamp_folder

    (tmp_path / name).write_bytes(b"")
    assert bool(_stamp_folder(str(tmp_path))) is read


def test_a_hubs_name_is_no_folder() -> None:
    from wcache_async.sources.transformers import _stamp_folder

    assert _stamp_folder("org/model") == _stamp_folder("org\0model") == ()


async def test_a_model_whose_files_have_changed_is_stale_and_its_tokenizer_is_no_part_of_it(
    folder: Path, short_tmp: Path
) -> None:
    from wcache_async.integrations.transformers import from_cache

    async with Daemon(short_tmp / "s") as daemon:
        await daemon.load(folder, name="m", kind="transformers")
        (folder / "tokenizer.json").write_text("{ }")
        model = await asyncio.to_thread(from_cache, "m", socket_path=daemon.socket_path)
        model.weight_cache_state.release()
        (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")
        with pytest.raises(StaleState) as caught:
            await asyncio.to_thread(from_cache, "m", socket_path=daemon.socket_path)
        assert caught.value.path == str(folder / "config.json")
        model = await asyncio.to_thread(from_cache, "m", socket_path=daemon.socket_path, allow_stale=True)
        model.weight_cache_state.release()


def test_files_changed_while_they_are_loaded_are_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = transformers.LlamaForCausalLM.from_pretrained

    def overwritten(*args: Any, **kwargs: Any) -> Any:
        model = load(*args, **kwargs)
        (folder / "model.safetensors").write_bytes(b"")
        return model

    monkeypatch.setattr(transformers.LlamaForCausalLM, "from_pretrained", overwritten)
    with (
        open_source(str(folder), kind="transformers") as source,
        pytest.raises(SourceError, match="changed while they were loaded"),
    ):
        source.open()


async def test_the_same_model_elsewhere_has_the_same_digest(folder: Path, short_tmp: Path, tmp_path: Path) -> None:
    """The documents, which name the folder, are no part of it."""
    shutil.copytree(folder, tmp_path / "elsewhere")
    async with Daemon(short_tmp / "s") as daemon:
        one = await daemon.load(folder, name="one", kind="transformers")
        other = await daemon.load(tmp_path / "elsewhere", name="other", kind="transformers")
        cast = await daemon.load(folder, name="cast", kind="transformers", dtype="bfloat16")
    assert one.digest == other.digest != cast.digest


async def test_what_a_client_computes_of_its_own_process_can_be_expected(folder: Path, short_tmp: Path) -> None:
    pytest.importorskip("torchao", reason="needs `pip install torchao`")
    from torchao.quantization import Int8WeightOnlyConfig

    quantization = transformers.TorchAoConfig(Int8WeightOnlyConfig())
    expected = standard_config(quantization=quantization)
    assert expected["quantization_hash"]
    options = {"quantization": quantization.to_json_string(use_diff=False)}
    async with Daemon(short_tmp / "s") as daemon:
        await daemon.load(folder, name="int8", kind="transformers", options=options)
        await daemon.load(folder, name="plain", kind="transformers", dtype="bfloat16")
        async with Client(daemon.socket_path) as client:
            await client.fetch_state("int8", expect=expected)
            await client.fetch_state("plain", expect=standard_config(dtype="bfloat16"))
            with pytest.raises(ConfigMismatch) as caught:
                await client.fetch_state("plain", expect=expected)
    assert caught.value.differences == {"quantization_hash": [expected["quantization_hash"], ""]}


def test_the_hash_is_of_what_was_asked_for_and_not_of_what_loading_made_of_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers changes a model's config as it loads: a hash taken afterwards would be another."""
    own = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    load = transformers.AutoConfig.from_pretrained

    def quantized(*args: Any, **kwargs: Any) -> Any:
        config = load(*args, **kwargs)
        config.quantization_config = dict(own)
        return config

    class Loaded(transformers.LlamaForCausalLM):  # type: ignore[misc]
        @classmethod
        def from_pretrained(cls, *_: Any, **__: Any) -> Any:
            model = transformers.LlamaForCausalLM(load(folder))
            model.config.quantization_config = {**own, "modules_to_not_convert": ["lm_head"]}
            return model

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", quantized)
    monkeypatch.setattr("wcache_async.sources.transformers.model_class", lambda _: Loaded)
    with open_source(str(folder), kind="transformers") as source:
        source.open()
        assert source.config()["quantization_hash"] == quantization_hash(own)

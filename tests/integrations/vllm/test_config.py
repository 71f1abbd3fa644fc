"""What a state is asked for by: the same wherever the weights would be the same, and another where not."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from wcache_async.errors import SourceError
from wcache_async.integrations.vllm.config import Request, Share, files_digest, model_folder, request_for
from wcache_async.integrations.vllm.options import Options


class HfConfig:
    """As transformers' configs answer."""

    def __init__(self, **fields: Any) -> None:
        self.architectures = ["LlamaForCausalLM"]
        self.__dict__ |= fields

    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


def configured(*, hf: dict[str, Any] | None = None, **model: Any) -> tuple[Any, Any]:
    model_config = SimpleNamespace(
        **{
            "dtype": torch.bfloat16,
            "hf_config": HfConfig(**(hf or {})),
            "revision": None,
            "quantization": None,
            "convert_type": "none",
        }
        | model
    )
    vllm_config = SimpleNamespace(
        speculative_config=None,
        device_config=SimpleNamespace(device=torch.device("cpu")),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        kernel_config=SimpleNamespace(moe_backend="auto"),
    )
    return vllm_config, model_config


@pytest.fixture(autouse=True)
def vllm_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wcache_async.integrations.vllm.config._vllm_version", lambda: "0.32.0")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "model.safetensors").write_bytes(b"weights")
    (path / "config.json").write_text("{}")
    return path


def ask(folder: Path, share: Share | None = None, options: Options | None = None, **configuration: Any) -> Request:
    return request_for(*configured(**configuration), share or Share(), options or Options(), folder=str(folder))


# ------------------------------------------------------------------------------------ the name
def test_all_ranks_of_one_model_have_one_name_and_a_rank_each(folder: Path) -> None:
    shares = [Share(2, t, 3, p, 2, e) for t in range(2) for p in range(3) for e in range(2)]
    requests = [ask(folder, share) for share in shares]
    assert len({request.name for request in requests}) == 1
    assert sorted(request.rank for request in requests) == list(range(12))
    assert requests[0].config != requests[1].config


def test_a_name_that_is_given_is_the_name_and_a_draft_has_another(folder: Path) -> None:
    assert ask(folder, options=Options(name="mine")).name == "mine"
    vllm_config, model_config = configured()
    vllm_config.speculative_config = SimpleNamespace(draft_model_config=model_config)
    draft = request_for(vllm_config, model_config, Share(), Options(name="mine"), folder=str(folder))
    assert draft.name == "mine-draft"
    assert draft.config["role"] == "draft"
    assert request_for(vllm_config, model_config, Share(), Options(), folder=str(folder)).name != ask(folder).name


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": torch.float16},
        {"quantization": "fp8"},
        {"revision": "v2"},
        {"convert_type": "embed"},
        {"hf": {"num_hidden_layers": 3}},
        {"hf": {"quantization_config": {"quant_method": "gptq", "bits": 4}}},
        {"share": Share(tp_size=2)},
        {"options": Options(stage="processed")},
    ],
    ids=str,
)
def test_whatever_the_weights_depend_on_makes_another_name(folder: Path, other: dict[str, Any]) -> None:
    assert ask(folder, **other).name != ask(folder).name


def test_the_config_is_the_same_in_every_process_whatever_objects_it_holds(folder: Path) -> None:
    """An object whose text is its address says its class alone."""

    class Nameless:
        pass

    one, other = (ask(folder, hf={"odd": Nameless(), "names": {"b", "a"}}) for _ in range(2))
    assert one == other


# ----------------------------------------------------------------------------------- the files
def test_files_are_told_by_what_they_are_and_not_by_their_path(folder: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(folder, moved)  # Which keeps the times.
    (tmp_path / "link").symlink_to(folder)
    assert files_digest(str(folder)) == files_digest(str(moved)) == files_digest(str(tmp_path / "link"))


def test_a_checkpoint_written_over_is_another(folder: Path) -> None:
    """Of the same size and with the same header, as a fine-tuned one has."""
    before = files_digest(str(folder))
    (folder / "model.safetensors").write_bytes(b"WEIGHTS")
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert files_digest(str(folder)) != before


def test_what_is_no_weights_does_not_count(folder: Path) -> None:
    before = files_digest(str(folder))
    (folder / "README.md").write_text("read me")
    assert files_digest(str(folder)) == before
    (folder / "model-2.safetensors").write_bytes(b"more")
    assert files_digest(str(folder)) != before


def test_a_folder_without_weights_is_told(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no weights"):
        files_digest(str(tmp_path))


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A hub's cache with one snapshot of ``some/model``, laid out as huggingface_hub has it."""
    cache = tmp_path / "hub"
    model = cache / "models--some--model"
    snapshot = model / "snapshots" / ("c" * 40)
    snapshot.mkdir(parents=True)
    (model / "blobs").mkdir()
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("c" * 40)
    (model / "blobs" / "0a1b").write_bytes(b"weights")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0a1b")
    return cache


def test_a_hubs_name_and_its_snapshots_path_are_one_checkpoint(hub: Path) -> None:
    snapshot = model_folder("some/model", None, str(hub))
    assert snapshot is not None
    assert model_folder(snapshot, None, None) == snapshot
    before = files_digest(snapshot)
    os.utime(hub / "models--some--model/blobs/0a1b", ns=(1, 1))  # Another machine's download.
    assert files_digest(snapshot) == before


def test_what_the_hub_has_not_given_yet_has_no_folder(hub: Path) -> None:
    assert model_folder("some/other", None, str(hub)) is None
    assert model_folder("no/such/thing", None, str(hub)) is None

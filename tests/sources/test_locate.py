"""Which files a path means: one rule per test, and whatever is ambiguous is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from wcache_async.errors import SourceError
from wcache_async.sources.locate import Checkpoint, locate_checkpoint

KINDS = ("safetensors", "torch")


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., str]:
    """A folder with empty files of the given names, and indexes with the given weight maps."""

    def make(*names: str, **indexes: dict[str, str]) -> str:
        for name in names:
            (tmp_path / name).touch()
        for kind, weight_map in indexes.items():
            name = {"safetensors": "model.safetensors", "torch": "pytorch_model.bin"}[kind]
            (tmp_path / f"{name}.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return str(tmp_path)

    return make


def _names(checkpoint: Checkpoint) -> list[str]:
    return [Path(file).name for file in checkpoint.files]


@pytest.mark.parametrize(
    ("files", "chosen"),
    [
        (["model.safetensors"], ["model.safetensors"]),
        (["model.safetensors", "model.fp16.safetensors", "consolidated.safetensors"], ["model.safetensors"]),
        (["other.safetensors", "config.json", "tokenizer.model"], ["other.safetensors"]),
        (["model.safetensors", "pytorch_model.bin"], ["model.safetensors"]),
        (["one.safetensors", "pytorch_model.bin"], ["one.safetensors"]),
        (["m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors"], None),
        (["pytorch_model.bin", "optimizer.pt", "training_args.bin"], ["pytorch_model.bin"]),
        (["weights.pth", "README.md"], ["weights.pth"]),
        (["last.ckpt"], ["last.ckpt"]),
        (["p-00001-of-00002.bin", "p-00002-of-00002.bin"], None),
    ],
)
def test_a_folder_means_its_weights(folder: Callable[..., str], files: list[str], chosen: list[str] | None) -> None:
    checkpoint = locate_checkpoint(folder(*files), KINDS)
    assert _names(checkpoint) == (files if chosen is None else chosen)
    assert checkpoint.kind == ("safetensors" if any(".safetensors" in name for name in files) else "torch")


@pytest.mark.parametrize(("kind", "suffix"), [("safetensors", "safetensors"), ("torch", "bin")])
def test_an_index_names_the_shards(folder: Callable[..., str], kind: str, suffix: str) -> None:
    path = folder(f"s1.{suffix}", f"s2.{suffix}", f"s3.{suffix}", **{kind: {"a": f"s2.{suffix}", "b": f"s1.{suffix}"}})
    checkpoint = locate_checkpoint(path, KINDS)
    assert checkpoint.kind == kind
    assert _names(checkpoint) == [f"s1.{suffix}", f"s2.{suffix}"]
    assert checkpoint.weight_map == {"a": f"{path}/s2.{suffix}", "b": f"{path}/s1.{suffix}"}


def test_an_index_of_another_name_counts_if_it_is_the_only_one(folder: Callable[..., str], tmp_path: Path) -> None:
    path = folder("s.safetensors", "t.safetensors")
    (tmp_path / "diffusion.safetensors.index.json").write_text('{"weight_map": {"a": "t.safetensors"}}')
    assert _names(locate_checkpoint(path, KINDS)) == ["t.safetensors"]


def test_shards_may_be_symbolic_links_as_in_a_hub_cache(folder: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "3fa9").touch()
    (tmp_path / "s.safetensors").symlink_to("blobs/3fa9")
    assert _names(locate_checkpoint(folder(safetensors={"a": "s.safetensors"}), KINDS)) == ["s.safetensors"]


@pytest.mark.parametrize(
    ("files", "named"),
    [
        (["a.safetensors", "b.safetensors"], "a.safetensors, b.safetensors"),
        (["a-00001-of-00001.safetensors", "b.safetensors"], "b.safetensors"),
        (["a-00001-of-00001.safetensors", "b-00001-of-00001.safetensors"], "more than one"),
        (["x.safetensors.index.json", "y.safetensors.index.json"], "more than one"),
        (["a.pt", "b.bin"], "a.pt, b.bin"),
    ],
)
def test_more_than_one_checkpoint_is_refused_naming_them(
    folder: Callable[..., str], files: list[str], named: str
) -> None:
    path = folder(*files)
    with pytest.raises(SourceError, match=named) as caught:
        locate_checkpoint(path, KINDS)
    assert caught.value.path == path
    assert "give the one file's path" in caught.value.reason


def test_an_index_beside_a_whole_model_is_refused(folder: Callable[..., str]) -> None:
    path = folder("model.safetensors", "s.safetensors", safetensors={"a": "s.safetensors"})
    with pytest.raises(SourceError, match="more than one checkpoint"):
        locate_checkpoint(path, KINDS)


def test_an_incomplete_set_of_shards_names_what_is_missing(folder: Callable[..., str]) -> None:
    path = folder("m-00001-of-00004.safetensors", "m-00003-of-00004.safetensors")
    with pytest.raises(SourceError, match=r"2 of 4.*\[2, 4\]"):
        locate_checkpoint(path, KINDS)


def test_a_set_numbered_beyond_its_total_is_refused(folder: Callable[..., str]) -> None:
    path = folder("m-00001-of-00001.safetensors", "m-00002-of-00001.safetensors")
    with pytest.raises(SourceError, match="2 of 1"):
        locate_checkpoint(path, KINDS)


def test_a_shard_in_the_index_and_not_in_the_folder_is_refused(folder: Callable[..., str]) -> None:
    path = folder("s1.safetensors", safetensors={"a": "s1.safetensors", "b": "s2.safetensors", "c": "s2.safetensors"})
    with pytest.raises(SourceError, match=r"no such shard.*1 more") as caught:
        locate_checkpoint(path, KINDS)
    assert (caught.value.path, caught.value.tensor) == (f"{path}/s2.safetensors", "b")


@pytest.mark.parametrize("shard", ["/etc/passwd", "../x.safetensors", "a/../../x.safetensors", "", "x\0.safetensors"])
def test_an_index_names_no_file_outside_its_folder(folder: Callable[..., str], shard: str) -> None:
    path = folder(safetensors={"a": shard})
    with pytest.raises(SourceError, match="not in the index's folder") as caught:
        locate_checkpoint(path, KINDS)
    assert caught.value.tensor == "a"


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"weight_map": 3}', b'{"weight_map": {"a": 1}}', b"\xff", b'{"weight_map":' * 9999]
)
def test_an_index_that_is_none_is_refused(tmp_path: Path, body: bytes) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(body)
    with pytest.raises(SourceError, match="no index of shards") as caught:
        locate_checkpoint(str(tmp_path), KINDS)
    assert caught.value.path.endswith("model.safetensors.index.json")


def test_an_index_without_tensors_is_refused(folder: Callable[..., str]) -> None:
    with pytest.raises(SourceError, match="lists no tensor"):
        locate_checkpoint(folder(safetensors={}), KINDS)


def test_a_folder_without_a_checkpoint_says_what_was_looked_for(folder: Callable[..., str]) -> None:
    path = folder("config.json", "model.gguf")
    with pytest.raises(SourceError, match=r"model\.safetensors\.index\.json.*pytorch_model\.bin.*\.pth") as caught:
        locate_checkpoint(path, KINDS)
    assert caught.value.path == path


def test_a_folder_of_another_kind_than_asked_for_is_none(folder: Callable[..., str]) -> None:
    with pytest.raises(SourceError, match="holds no checkpoint"):
        locate_checkpoint(folder("model.safetensors"), ("torch",))


@pytest.mark.parametrize("name", ["gone.safetensors", "gone.pt", "gone", "gone/gone", "x\0y"])
def test_no_such_file_is_said_of_the_path_given(tmp_path: Path, name: str) -> None:
    with pytest.raises(SourceError, match=r"No such file|null") as caught:
        locate_checkpoint(str(tmp_path / name), KINDS)
    assert caught.value.path == str(tmp_path / name)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_file_whose_name_tells_nothing_is_known_by_its_bytes(tmp_path: Path, legacy: bool) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "3fa9")
    assert locate_checkpoint(str(tmp_path / "3fa9"), KINDS).kind == "safetensors"
    torch.save({"a": torch.ones(2)}, tmp_path / "77c1", _use_new_zipfile_serialization=not legacy)
    assert locate_checkpoint(str(tmp_path / "77c1"), KINDS).kind == "torch"


@pytest.mark.parametrize("body", [b"", b"GGUF\x03\x00\x00\x00", b"#!/bin/sh\nexit\n", bytes(100)])
def test_a_file_that_is_no_checkpoint_is_refused(tmp_path: Path, body: bytes) -> None:
    (tmp_path / "model.gguf").write_bytes(body)
    with pytest.raises(SourceError, match=r"not a checkpoint.*\.safetensors.*\.pt"):
        locate_checkpoint(str(tmp_path / "model.gguf"), KINDS)

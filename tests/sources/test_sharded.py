"""Shares of a checkpoint: put together they are the checkpoint, and no byte of another's is read."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from wcache_async.errors import SourceError
from wcache_async.manifest import Cut
from wcache_async.sources import files, open_source

if TYPE_CHECKING:
    from tests.sources.conftest import Load, Loaded

Same = Callable[[torch.Tensor, torch.Tensor], bool]
Tensors = dict[str, torch.Tensor]


def put_together(shares: Sequence[torch.Tensor], style: str, parts: Sequence[int]) -> torch.Tensor:
    """The whole tensor, by the definition of each style in torch's words."""
    dim = {"colwise": max(shares[0].dim() - 2, 0), "rowwise": shares[0].dim() - 1}[style.removeprefix("packed_")]
    split = [torch.split(share, [part // len(shares) for part in parts], dim) for share in shares]
    return torch.cat([torch.cat(slices, dim) for slices in zip(*split, strict=True)], dim)


@st.composite
def checkpoints(draw: st.DrawFn) -> tuple[Tensors, dict[str, Any], dict[str, tuple[int, ...]], int]:
    """Tensors, a plan, the parts of each tensor that is cut, and a number of ranks."""
    ranks = draw(st.sampled_from([2, 4]))
    tensors, plan, parts = {}, {}, {}
    for number in range(draw(st.integers(1, 4))):
        style = draw(st.sampled_from(["colwise", "rowwise", "packed_colwise", "packed_rowwise", "replicated", ""]))
        dtype = draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64]))
        shape = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
        name = f"layers.{number}.weight"
        if style and style != "replicated":
            dim = max(len(shape) - 2, 0) if "col" in style else len(shape) - 1
            if style == "packed_rowwise" and len(shape) == 1:
                style, dim = "rowwise", 0
            packed = style.startswith("packed")
            parts[name] = tuple(
                ranks * draw(st.integers(0, 3)) for _ in range(draw(st.integers(1, 3)) if packed else 1)
            )
            shape[dim] = sum(parts[name])
            plan[name] = {"style": style, "parts": parts[name]} if packed else style
        elif style:
            plan[name] = style
        nbytes = torch.empty(shape, dtype=dtype, device="meta").nbytes
        generator = torch.Generator().manual_seed(number)
        data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
        tensors[name] = data.view(dtype).reshape(shape)
    return tensors, plan, parts, ranks


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(checkpoint=checkpoints(), chunk=st.sampled_from([8, 24, 8 << 20]))
def test_the_shares_put_together_are_the_checkpoint(
    checkpoint: tuple[Tensors, dict[str, Any], dict[str, tuple[int, ...]], int],
    chunk: int,
    tmp_path: Path,
    load: "Load",
    same: Same,
) -> None:
    tensors, plan, parts, ranks = checkpoint
    save_file(tensors, tmp_path / "m.safetensors")
    (tmp_path / "plan.json").write_text(json.dumps(plan or {"layers.0": "replicated"}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "CHUNK", chunk)
        loaded = [
            load_share(load, tmp_path / "m.safetensors", rank, ranks, tmp_path / "plan.json") for rank in range(ranks)
        ]
    for name, whole in tensors.items():
        shares = [share.tensors[name] for share in loaded]
        if name in parts:
            style = plan[name]["style"] if isinstance(plan[name], dict) else plan[name]
            assert same(put_together(shares, style, parts[name]), whole)
            assert [share.spec.cuts[name].parts for share in loaded] == [parts[name]] * ranks
        else:
            assert all(same(share, whole) for share in shares)
            assert name not in loaded[0].spec.cuts
    assert all(sum(share.advanced) == share.spec.nbytes for share in loaded)


def load_share(load: "Load", path: Path, rank: int, ranks: int, plan: Path | None = None, **kwargs: object) -> "Loaded":
    options = {"tp_size": ranks, "tp_rank": rank, "tp_plan": str(plan or "")}
    return load(path, options=options, **kwargs)


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Path, Path, Tensors]:
    """A checkpoint of two shards, a plan with every style for it, and its tensors."""
    folder = tmp_path / "model"
    folder.mkdir()
    tensors = {
        "model.layers.0.qkv.weight": torch.randn(16, 6),
        "model.layers.0.qkv.bias": torch.randn(16),
        "model.layers.0.o.weight": torch.randn(6, 8).bfloat16(),
        "model.layers.0.o.bias": torch.randn(6),
        "model.norm.weight": torch.randn(6),
        "head.weight": torch.randn(12, 6),
    }
    names = list(tensors)
    weight_map = {name: f"model-{1 + i % 2:05}-of-00002.safetensors" for i, name in enumerate(names)}
    for shard in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    plan = tmp_path / "plan.json"
    styles: dict[str, object] = {
        "layers.*.qkv": {"style": "packed_colwise", "parts": [8, 4, 4]},
        "layers.*.o": "rowwise",
        "norm": "replicated",
        "head": "colwise",
    }
    plan.write_text(json.dumps(styles))
    return folder, plan, tensors


def test_shards_are_cut_where_each_tensor_is(checkpoint: tuple[Path, Path, Tensors], load: "Load", same: Same) -> None:
    folder, plan, tensors = checkpoint
    loaded = load_share(load, folder, 1, 4, plan)
    q, k, v = torch.split(tensors["model.layers.0.qkv.weight"], [8, 4, 4])
    assert same(loaded.tensors["model.layers.0.qkv.weight"], torch.cat([q[2:4], k[1:2], v[1:2]]))
    assert same(loaded.tensors["model.layers.0.o.weight"], tensors["model.layers.0.o.weight"][:, 2:4])
    assert same(loaded.tensors["head.weight"], tensors["head.weight"][3:6])
    for whole in ("model.layers.0.o.bias", "model.norm.weight"):
        assert same(loaded.tensors[whole], tensors[whole])
    assert loaded.config == {"source": "safetensors", "dtype": "mixed", "tp_size": 4, "tp_rank": 1}
    assert loaded.spec.cuts == {
        "model.layers.0.qkv.weight": Cut(0, (8, 4, 4), 1, 4),
        "model.layers.0.qkv.bias": Cut(0, (8, 4, 4), 1, 4),
        "model.layers.0.o.weight": Cut(1, (8,), 1, 4),
        "head.weight": Cut(0, (12,), 1, 4),
    }


def test_only_the_share_is_read(
    checkpoint: tuple[Path, Path, Tensors], load: "Load", monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte for byte: the four ranks' reads together are each cut byte once, and each whole one four times."""
    folder, plan, tensors = checkpoint
    read: list[tuple[int, int, int]] = []
    preadv = os.preadv

    def counted(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        count = preadv(fd, buffers, offset)
        read.append((os.fstat(fd).st_ino, offset, count))
        return count

    monkeypatch.setattr(os, "preadv", counted)
    per_rank = []
    for rank in range(4):
        before = len(read)
        loaded = load_share(load, folder, rank, 4, plan)
        per_rank.append(sum(count for _, _, count in read[before:]))
        assert per_rank[-1] == loaded.spec.nbytes
    whole = sum(tensors[name].nbytes for name in ("model.layers.0.o.bias", "model.norm.weight"))
    everything = sum(tensor.nbytes for tensor in tensors.values())
    assert per_rank == [whole + (everything - whole) // 4] * 4
    assert len({(inode, byte) for inode, offset, count in read for byte in range(offset, offset + count)}) == everything


@pytest.mark.parametrize("chunk", [16, 8 << 20])
def test_a_share_is_cast_like_the_whole(
    checkpoint: tuple[Path, Path, Tensors], load: "Load", same: Same, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, plan, _ = checkpoint
    monkeypatch.setattr(files, "CHUNK", chunk)
    stored, cast = load_share(load, folder, 1, 2, plan), load_share(load, folder, 1, 2, plan, dtype="float16")
    assert all(same(cast.tensors[name], tensor.half()) for name, tensor in stored.tensors.items())
    assert sum(cast.advanced) == cast.spec.nbytes


def test_one_rank_has_everything_and_needs_no_plan(
    checkpoint: tuple[Path, Path, Tensors], load: "Load", same: Same
) -> None:
    folder, _, tensors = checkpoint
    loaded = load_share(load, folder, 0, 1)
    assert all(same(loaded.tensors[name], tensor) for name, tensor in tensors.items())
    assert (loaded.config["tp_size"], loaded.config["tp_rank"]) == (1, 0)
    assert loaded.spec.cuts == {}


def test_a_file_that_changes_under_the_read_is_an_error(checkpoint: tuple[Path, Path, Tensors]) -> None:
    folder, plan, _ = checkpoint
    with open_source(str(folder), options={"tp_size": 2, "tp_rank": 1, "tp_plan": str(plan)}) as source:
        spec = source.open()
        (rows,) = [t for t in spec.tensors if t.name == "model.layers.0.o.weight"]
        buffer = bytearray(spec.storages[rows.storage])
        for shard in folder.glob("*.safetensors"):
            os.truncate(shard, shard.stat().st_size + 1)
        with pytest.raises(SourceError, match="the file was changed after it was opened"):
            source.read(rows.storage, memoryview(buffer), lambda _: None)
        for shard in folder.glob("*.safetensors"):
            os.truncate(shard, 8)
        with pytest.raises(SourceError, match="bytes short; it was cut"):
            source.read(rows.storage, memoryview(buffer), lambda _: None)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"tp_size": 2, "tp_rank": 2}, "there is no tp_rank 2 of tp_size 2"),
        ({"tp_size": 0, "tp_rank": 0}, ">= 1"),
        ({"tp_size": 2, "tp_rank": -1}, ">= 0"),
        ({"tp_size": 2}, "tp_rank"),
        ({"tp_rank": 0}, "tp_size"),
        ({"tp_size": "2", "tp_rank": 0}, "tp_size"),
        ({"tp_size": 2, "tp_rank": 0, "tp_plans": ""}, "tp_plans"),
        ({"tp_size": 2, "tp_rank": 0, "tp_plan": "plan.json"}, "not absolute"),
        ({"tp_size": 2, "tp_rank": 0, "tp_plan": "/no/plan.json"}, "No such file"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    checkpoint: tuple[Path, Path, Tensors], options: dict[str, int | str], told: str
) -> None:
    with (
        pytest.raises(SourceError) as caught,
        open_source(str(checkpoint[0]), options=options) as source,
    ):
        source.open()
    assert told in str(caught.value)


def test_torch_files_are_not_cut(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    with pytest.raises(SourceError, match="takes no options, got tp_size, tp_rank"):
        open_source(str(tmp_path / "w.pt"), kind="torch", options={"tp_size": 2, "tp_rank": 0})
    with pytest.raises(SourceError):
        open_source(str(tmp_path / "w.pt"), options={"tp_size": 2, "tp_rank": 0}).open()


def test_what_a_plan_refuses_leaves_nothing_open(checkpoint: tuple[Path, Path, Tensors], tmp_path: Path) -> None:
    folder, _, _ = checkpoint
    plan = tmp_path / "other.json"
    plan.write_text('{"layers.*.qkv": "colwise", "layers.*.o": "rowwise", "head": "colwise"}')
    before = os.listdir("/proc/self/fd")
    source = open_source(str(folder), options={"tp_size": 8, "tp_rank": 0, "tp_plan": str(plan)})
    with pytest.raises(SourceError) as caught:
        source.open()
    assert (caught.value.path, caught.value.tensor) == (str(folder), "head.weight")
    assert "12 of its dimension 0 cannot be cut into 8 equal slices" in caught.value.reason
    assert os.listdir("/proc/self/fd") == before


def test_a_plan_is_one_of_the_files_a_share_is_made_of(checkpoint: tuple[Path, Path, Tensors]) -> None:
    """Or a client would not be told that the state is stale when it changes."""
    folder, plan, _ = checkpoint
    with open_source(str(folder), options={"tp_size": 2, "tp_rank": 1, "tp_plan": str(plan)}) as source:
        source.open()
        assert os.fsencode(plan) in {stamp.path for stamp in source.files()}


def test_reading_a_share_imports_no_torch(checkpoint: tuple[Path, Path, Tensors]) -> None:
    folder, plan, _ = checkpoint
    code = """
import sys
from wcache_async.sources import open_source
with open_source(sys.argv[1], options={"tp_size": 2, "tp_rank": 1, "tp_plan": sys.argv[2]}) as source:
    for number, nbytes in enumerate(source.open().storages):
        source.read(number, memoryview(bytearray(nbytes)), lambda n: None)
print([name for name in ("torch", "numpy", "safetensors", "transformers") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code, folder, plan], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

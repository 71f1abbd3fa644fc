"""Files while they are read: chunks, progress, casts, changes underneath, and what is left behind."""

import mmap
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from wcache_async.errors import SourceError
from wcache_async.sources import files, open_source

if TYPE_CHECKING:
    from tests.sources.conftest import Load

Same = Callable[[torch.Tensor, torch.Tensor], bool]

KINDS = ("safetensors", "torch", "legacy")


def _save(tensors: dict[str, torch.Tensor], folder: Path, kind: str) -> Path:
    path = folder / ("x.safetensors" if kind == "safetensors" else "x.pt")
    if kind == "safetensors":
        save_file(tensors, path)
    else:
        torch.save(tensors, path, _use_new_zipfile_serialization=kind == "torch")
    return path


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> int:
    """Chunks of 4 KiB, so that a small tensor takes several."""
    monkeypatch.setattr(files, "CHUNK", 4096)
    return 4096


@pytest.mark.parametrize("dtype", ["", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_right_over_many_chunks_and_progress_adds_up_to_the_state(
    tmp_path: Path, load: "Load", same: Same, small_chunks: int, kind: str, dtype: str
) -> None:
    tensors = {"a": torch.randn(5000), "b": torch.randn(3, 7), "c": torch.arange(5000), "d": torch.empty(0)}
    loaded = load(_save(tensors, tmp_path, kind), dtype=dtype)
    for name, tensor in tensors.items():
        wanted = tensor.to(torch.float16) if dtype and tensor.is_floating_point() else tensor
        assert same(loaded.tensors[name], wanted)
    assert sum(loaded.advanced) == loaded.spec.nbytes
    assert max(loaded.advanced) == small_chunks


@pytest.mark.parametrize("cast_to", ["float16", "bfloat16", "float32", "float64"])
def test_a_cast_changes_float_tensors_alone_and_as_torch_does(
    tmp_path: Path, load: "Load", same: Same, small_chunks: int, cast_to: str
) -> None:
    floats = {
        str(dtype): torch.tensor([0.1, -2.5e4, 1e30, float("nan"), float("inf")] * 999).to(dtype)
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    }
    others = {
        "int": torch.arange(9),
        "bool": torch.tensor([True, False]),
        "complex": torch.ones(2, dtype=torch.complex64),
        "fp8": torch.ones(16).to(torch.float8_e4m3fn),
        "scale": torch.ones(16, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        "fp4": torch.ones(16, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    }
    save_file(floats | others, tmp_path / "x.safetensors")
    loaded = load(tmp_path / "x.safetensors", dtype=cast_to)
    target: torch.dtype = getattr(torch, cast_to)
    assert all(same(loaded.tensors[name], tensor) for name, tensor in others.items())
    for name, tensor in floats.items():
        assert same(loaded.tensors[name], tensor.to(target))


def test_the_dtype_is_mixed_where_a_cast_leaves_some(tmp_path: Path, load: "Load") -> None:
    path = _save({"a": torch.ones(1).half(), "b": torch.ones(1).to(torch.float8_e5m2)}, tmp_path, "safetensors")
    assert load(path, dtype="bfloat16").config["dtype"] == "mixed"


@pytest.mark.parametrize(
    ("tensors", "dtype", "expected"),
    [
        ({"a": torch.ones(1), "i": torch.ones(1, dtype=torch.int8)}, "", "float32"),
        ({"a": torch.ones(1), "b": torch.ones(1).half()}, "", "mixed"),
        ({"a": torch.ones(1), "b": torch.ones(1).half()}, "bfloat16", "bfloat16"),
        ({"i": torch.ones(1, dtype=torch.int8)}, "bfloat16", "int8"),
        ({"i": torch.ones(1, dtype=torch.int8), "j": torch.ones(1, dtype=torch.int16)}, "", "mixed"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_the_config_names_the_source_and_the_dtype_of_the_floats(
    tmp_path: Path, load: "Load", kind: str, tensors: dict[str, torch.Tensor], dtype: str, expected: str
) -> None:
    loaded = load(_save(tensors, tmp_path, kind), dtype=dtype)
    assert loaded.config == {"source": "safetensors" if kind == "safetensors" else "torch", "dtype": expected}


@pytest.mark.parametrize("dtype", ["", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_cut_after_it_was_opened_is_a_short_read_naming_the_tensor(
    tmp_path: Path, kind: str, dtype: str
) -> None:
    path = _save({"a": torch.ones(100_000), "b": torch.ones(100_000)}, tmp_path, kind)
    with open_source(str(path), dtype=dtype) as source:
        spec = source.open()
        last = next(tensor.name for tensor in spec.tensors if tensor.storage == 1)
        os.truncate(path, path.stat().st_size - 399_000)
        into = memoryview(bytearray(spec.storages[1]))
        with pytest.raises(SourceError, match="was cut after it was opened") as caught:
            source.read(1, into, lambda _: None)
    assert (caught.value.path, caught.value.tensor) == (str(path), last)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_written_after_it_was_opened_is_refused(tmp_path: Path, kind: str) -> None:
    path = _save({"a": torch.ones(1000)}, tmp_path, kind)
    with open_source(str(path)) as source:
        (nbytes,) = source.open().storages
        os.utime(path, ns=(0, 0))
        with pytest.raises(SourceError, match="changed after it was opened") as caught:
            source.read(0, memoryview(bytearray(nbytes)), lambda _: None)
    assert caught.value.tensor == "a"


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_replaced_after_it_was_opened_is_read_as_it_was(tmp_path: Path, same: Same, kind: str) -> None:
    path = _save({"a": torch.full((1000,), 1.0)}, tmp_path, kind)
    with open_source(str(path)) as source:
        (nbytes,) = source.open().storages
        new = tmp_path / "new"
        new.mkdir()
        _save({"a": torch.full((1000,), 2.0)}, new, kind).replace(path)
        into = bytearray(nbytes)
        source.read(0, memoryview(into), lambda _: None)
    assert same(torch.frombuffer(into, dtype=torch.float32), torch.full((1000,), 1.0))


@pytest.mark.parametrize("kind", KINDS)
def test_storages_are_numbered_in_the_order_of_the_file(
    tmp_path: Path, load: "Load", monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = _save({str(n): torch.ones(100 + n) for n in range(20)}, tmp_path, kind)
    offsets: list[int] = []
    preadv = os.preadv

    def note(fd: int, buffers: list[memoryview], offset: int) -> int:
        offsets.append(offset)
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", note)
    load(path)
    assert len(offsets) == 20
    assert offsets == sorted(offsets)


@pytest.mark.parametrize("dtype", ["", "float16"])
def test_a_stopped_read_leaves_no_reference_to_the_memory(tmp_path: Path, dtype: str) -> None:
    path = _save({"a": torch.ones(10_000)}, tmp_path, "safetensors")

    class Stop(Exception):
        pass

    def stop(_: int) -> None:
        raise Stop

    with open_source(str(path), dtype=dtype) as source:
        (nbytes,) = source.open().storages
        memory = mmap.mmap(-1, nbytes)
        with memoryview(memory) as into, pytest.raises(Stop) as caught:
            source.read(0, into, stop)
        os.truncate(path, 1000)
        with memoryview(memory) as into, pytest.raises(SourceError) as short:
            source.read(0, into, lambda _: None)
        memory.close()  # BufferError if a frame of either traceback still held a view.
    assert caught.tb is not None
    assert short.tb is not None


def test_threads_read_different_storages_at_a_time(tmp_path: Path, small_chunks: int, same: Same) -> None:
    tensors = {str(n): torch.full((50_000,), float(n)) for n in range(8)}
    path = _save(tensors, tmp_path, "safetensors")
    together = threading.Barrier(8)
    with open_source(str(path), dtype="bfloat16") as source, ThreadPoolExecutor(8) as pool:
        spec = source.open()
        buffers = [bytearray(nbytes) for nbytes in spec.storages]

        def read(number: int) -> None:
            together.wait(timeout=30)
            source.read(number, memoryview(buffers[number]), lambda _: None)

        list(pool.map(read, range(8)))
    for tensor in spec.tensors:
        got = torch.frombuffer(buffers[tensor.storage], dtype=torch.bfloat16)
        assert same(got, tensors[tensor.name].to(torch.bfloat16))


def test_memory_of_another_size_is_refused_before_it_is_touched(tmp_path: Path) -> None:
    path = _save({"a": torch.ones(10)}, tmp_path, "safetensors")
    with open_source(str(path)) as source:
        source.open()
        for nbytes in (39, 41, 0):
            into = bytearray(nbytes)
            with pytest.raises(ValueError, match="40 bytes"):
                source.read(0, memoryview(into), lambda _: None)
            assert not any(into)


def test_memory_of_any_item_size_is_filled(tmp_path: Path) -> None:
    path = _save({"a": torch.arange(10.0)}, tmp_path, "safetensors")
    into = torch.zeros(10)
    with open_source(str(path)) as source:
        source.open()
        source.read(0, into.numpy().data, lambda _: None)
    assert torch.equal(into, torch.arange(10.0))


def test_a_source_that_is_not_open_says_so(tmp_path: Path) -> None:
    source = open_source(str(_save({"a": torch.ones(10)}, tmp_path, "safetensors")))
    source.close()
    with pytest.raises(SourceError, match="not open"):
        source.config()
    source.open()
    source.close()
    source.close()
    with pytest.raises(SourceError, match="not open"):
        source.read(0, memoryview(bytearray(40)), lambda _: None)


def test_a_source_that_fails_to_open_leaves_no_file_open(tmp_path: Path) -> None:
    for name in ("m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors"):
        save_file({"a": torch.ones(10)}, tmp_path / name)
    source = open_source(str(tmp_path))
    before = os.listdir("/proc/self/fd")
    with pytest.raises(SourceError, match="twice"):
        source.open()
    assert os.listdir("/proc/self/fd") == before


def test_opening_twice_opens_once(tmp_path: Path) -> None:
    with open_source(str(_save({"a": torch.ones(10)}, tmp_path, "safetensors"))) as source:
        assert source.open() is source.open()


def test_a_fifo_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.safetensors")
    with pytest.raises(SourceError, match="not a regular file"):
        open_source(str(tmp_path / "x.safetensors"))


def test_a_file_that_may_not_be_read_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _save({"a": torch.ones(10)}, tmp_path, "safetensors")
    source = open_source(str(path))

    def refuse(path: str, flags: int) -> int:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "open", refuse)  # Root may read everything.
    with pytest.raises(SourceError, match="Permission denied") as caught:
        source.open()
    assert caught.value.path == str(path)


def test_an_error_of_the_disk_names_file_and_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _save({"a": torch.ones(10)}, tmp_path, "safetensors")

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with open_source(str(path)) as source:
        source.open()
        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(SourceError, match="Input/output error") as caught:
            source.read(0, memoryview(bytearray(40)), lambda _: None)
    assert (caught.value.path, caught.value.tensor) == (str(path), "a")

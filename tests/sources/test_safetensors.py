"""Safetensors: what safetensors writes is read as it reads it, and every malformed file is refused by name."""

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wcache_async.errors import SourceError
from wcache_async.manifest import DTYPE_ITEMSIZE
from wcache_async.sources import open_source
from wcache_async.sources.safetensors import DTYPES

if TYPE_CHECKING:
    from tests.sources.conftest import Load, WriteSafetensors

Same = Callable[[torch.Tensor, torch.Tensor], bool]


def _of_dtype(name: str) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, name)
    values = torch.arange(6 * dtype.itemsize, dtype=torch.uint8)
    return (values % 2 if name == "bool" else values).view(dtype).reshape(2, 3)


# ------------------------------------------------------------------------------ well-formed
@pytest.mark.parametrize("dtype", sorted(DTYPES.values()))
def test_every_dtype_is_read_as_safetensors_reads_it(tmp_path: Path, load: "Load", same: Same, dtype: str) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file({"w": _of_dtype(dtype)}, path)
    with safetensors.safe_open(path, "pt") as file:
        want = file.get_tensor("w")
    assert want.dtype == getattr(torch, dtype)
    assert same(load(path).tensors["w"], want)


def test_the_names_of_dtypes_are_those_of_safetensors() -> None:
    theirs = {name: str(dtype).removeprefix("torch.") for name, dtype in safetensors.torch._TYPES.items()}
    assert theirs.items() <= DTYPES.items()
    assert set(DTYPES.values()) <= DTYPE_ITEMSIZE.keys()


def test_empty_and_zero_dimensional_tensors_are_read(tmp_path: Path, load: "Load", same: Same) -> None:
    tensors = {
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(4.5),
        "after": torch.ones(2),
        "none": torch.empty(2, 0),
    }
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors")
    loaded = load(tmp_path / "x.safetensors")
    assert loaded.tensors.keys() == tensors.keys()
    assert all(same(loaded.tensors[name], tensor) for name, tensor in tensors.items())


def test_each_tensor_has_a_storage_of_its_own_in_the_order_of_the_file(tmp_path: Path, load: "Load") -> None:
    safetensors.torch.save_file({"z": torch.ones(5), "a": torch.ones(3, dtype=torch.int8)}, tmp_path / "x.safetensors")
    loaded = load(tmp_path / "x.safetensors")
    assert [(t.name, t.storage, t.offset) for t in loaded.spec.tensors] == [("z", 0, 0), ("a", 1, 0)]
    assert loaded.spec.storages == (20, 3)
    assert not loaded.spec.aliases


def test_metadata_is_no_tensor(tmp_path: Path, load: "Load") -> None:
    metadata = {"format": "pt", "dtype": "F32", "data_offsets": "x", "shape": "y"}
    safetensors.torch.save_file({"w": torch.ones(3)}, tmp_path / "x.safetensors", metadata=metadata)
    loaded = load(tmp_path / "x.safetensors")
    assert list(loaded.tensors) == ["w"]


def test_a_tensor_may_be_called_like_a_field_of_the_header(tmp_path: Path, load: "Load", same: Same) -> None:
    tensors = {"data_offsets": torch.ones(3), "dtype": torch.zeros(2), 'ünï\n"': torch.ones(1)}
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors")
    loaded = load(tmp_path / "x.safetensors")
    assert loaded.tensors.keys() == tensors.keys()
    assert all(same(loaded.tensors[name], tensor) for name, tensor in tensors.items())


@pytest.fixture
def sharded(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder of two shards and their index, and its tensors."""
    folder = tmp_path / "sharded"
    folder.mkdir()
    tensors = {f"layer.{i}.weight": torch.randn(4, i + 1) for i in range(5)}
    weight_map = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for shard in set(weight_map.values()):
        held = {name: tensors[name] for name, where in weight_map.items() if where == shard}
        safetensors.torch.save_file(held, folder / shard)
    _write_index(folder, weight_map)
    return folder, tensors


def _write_index(folder: Path, weight_map: dict[str, str]) -> None:
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _read_index(folder: Path) -> dict[str, str]:
    index: dict[str, dict[str, str]] = json.loads((folder / "model.safetensors.index.json").read_text())
    return index["weight_map"]


@pytest.mark.parametrize("given_path", ["", "model.safetensors.index.json"])
def test_shards_are_read_through_their_index(
    sharded: tuple[Path, dict[str, torch.Tensor]], load: "Load", same: Same, given_path: str
) -> None:
    folder, tensors = sharded
    loaded = load(folder / given_path)
    assert loaded.tensors.keys() == tensors.keys()
    assert all(same(loaded.tensors[name], tensor) for name, tensor in tensors.items())


def test_shards_are_read_without_an_index_if_they_are_all_there(
    sharded: tuple[Path, dict[str, torch.Tensor]], load: "Load"
) -> None:
    folder, tensors = sharded
    (folder / "model.safetensors.index.json").unlink()
    assert load(folder).tensors.keys() == tensors.keys()


def test_reading_imports_no_torch(tmp_path: Path) -> None:
    safetensors.torch.save_file({"w": torch.ones(3), "i": torch.ones(3, dtype=torch.int32)}, tmp_path / "x.safetensors")
    code = """
import sys
from wcache_async.sources import open_source
with open_source(sys.argv[1], dtype="float32") as source:
    for number, nbytes in enumerate(source.open().storages):
        source.read(number, memoryview(bytearray(nbytes)), lambda n: None)
print([name for name in ("torch", "numpy", "safetensors") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "x.safetensors"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


# -------------------------------------------------------------------------------- malformed
def _entry(dtype: str, shape: object, begin: object, end: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


_A = _entry("F32", [2], 0, 8)

_MALFORMED: dict[str, tuple[object, int, str, str]] = {
    # what is wrong: header, bytes of data, tensor named, part of the reason
    "truncated": ({"a": _A, "b": _entry("F32", [4], 8, 24)}, 20, "b", "truncated"),
    "no data at all": ({"a": _A}, 0, "a", "truncated"),
    "bytes after the last": ({"a": _A}, 9, "a", "1 bytes after it"),
    "hole": ({"a": _A, "b": _entry("U8", [2], 9, 11)}, 11, "b", "belong to no tensor"),
    "hole at the start": ({"a": _entry("U8", [2], 1, 3)}, 3, "a", "belong to no tensor"),
    "overlap": ({"a": _A, "b": _entry("U8", [2], 7, 9)}, 9, "b", "overlap those of 'a'"),
    "same bytes": ({"a": _A, "b": _A}, 8, "b", "overlap those of 'a'"),
    "inside another": ({"a": _A, "b": _entry("U8", [2], 2, 4)}, 8, "b", "overlap"),
    "empty inside another": ({"a": _A, "b": _entry("U8", [0], 2, 2)}, 8, "b", "overlap"),
    "unknown dtype": ({"a": _entry("Q4_K", [2], 0, 8)}, 8, "a", "'Q4_K'"),
    "dtype torch lacks": ({"a": _entry("F6_E2M3", [4], 0, 3)}, 3, "a", "'F6_E2M3'"),
    "too few bytes": ({"a": _entry("F32", [3], 0, 8)}, 8, "a", "takes 12 bytes"),
    "too many bytes": ({"a": _entry("F32", [], 0, 8)}, 8, "a", "takes 4 bytes"),
    "empty with bytes": ({"a": _entry("F32", [0, 2], 0, 8)}, 8, "a", "takes 0 bytes"),
    "end before begin": ({"a": _entry("F32", [2], 8, 0)}, 8, "a", "span -8"),
    "odd F4": ({"a": _entry("F4", [2, 3], 0, 3)}, 3, "a", "pairs"),
    "scalar F4": ({"a": _entry("F4", [], 0, 1)}, 1, "a", "pairs"),
    "negative size": ({"a": _entry("F32", [-2], 0, 8)}, 8, "a", "does not decode"),
    "negative offset": ({"a": _entry("F32", [2], -8, 0)}, 8, "a", "does not decode"),
    "fraction of a size": ({"a": _entry("F32", [2.0], 0, 8)}, 8, "a", "does not decode"),
    "truth as a size": ({"a": _entry("F32", [True], 0, 4)}, 4, "a", "does not decode"),
    "size beyond 63 bits": ({"a": _entry("U8", [2**63], 0, 8)}, 8, "a", "does not decode"),
    "size beyond all bits": ({"a": _entry("U8", [10**400], 0, 8)}, 8, "a", "does not decode"),
    "product beyond 63 bits": ({"a": _entry("U8", [2**62, 2], 0, 8)}, 8, "a", "overflows"),
    "bytes beyond 63 bits": ({"a": _entry("F64", [2**62], 0, 8)}, 8, "a", "overflows"),
    "overflow hidden by a zero": ({"a": _entry("U8", [0, 2**62, 4], 0, 0)}, 0, "a", "overflows"),
    "overflow of a million sizes": ({"a": _entry("U8", [2**62] * 1_000_000, 0, 8)}, 8, "a", "overflows"),
    "three offsets": ({"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 4, 8]}}, 8, "a", "does not decode"),
    "no dtype": ({"a": {"shape": [8], "data_offsets": [0, 8]}}, 8, "a", "does not decode"),
    "no offsets": ({"a": {"dtype": "U8", "shape": [8]}}, 8, "a", "does not decode"),
    "an entry that is none": ({"a": 7}, 0, "a", "does not decode"),
    "an entry nested too deep": (b'{"a":{"x":' + b"[" * 50_000 + b"]" * 50_000 + b"}}", 0, "", "JSON"),
    "no JSON": (b"\x00\x01\x02\x03", 0, "", "JSON"),
    "JSON cut short": (b'{"a":{"dtype":"U8"', 0, "", "JSON"),
    "JSON and more": (b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}} x', 1, "", "JSON"),
    "a list": (b"[1, 2]", 0, "", "JSON"),
    "no UTF-8": (b'{"\xff\xfe":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', 1, "", "JSON"),
    "lone surrogate": (b'{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', 1, "", "JSON"),
    "nothing in the header": (b"", 0, "", "JSON"),
    "metadata that is no text": ({"__metadata__": {"a": 1}, "a": _A}, 8, "", "JSON"),
    "no tensor": ({}, 0, "", "no tensor"),
    "no tensor but metadata": ({"__metadata__": {"format": "pt"}}, 0, "", "no tensor"),
    "a name twice": (
        b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}',
        2,
        "a",
        "twice in the header",
    ),
    "a name twice, beside what only a typed decoder skips": (
        b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2],"x":' + b"9" * 5000 + b"},"
        b'"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}',
        2,
        "",
        "JSON",
    ),
}


@pytest.mark.parametrize("case", _MALFORMED)
def test_a_malformed_file_is_refused_naming_file_and_tensor(write_safetensors: "WriteSafetensors", case: str) -> None:
    header, nbytes, tensor, reason = _MALFORMED[case]
    path = write_safetensors(header, bytes(nbytes))
    with pytest.raises(SourceError) as caught, open_source(str(path)) as source:
        source.open()
    assert (caught.value.path, caught.value.tensor) == (str(path), tensor)
    assert reason in caught.value.reason
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("length", "reason"), [(1000, "ends after"), (100_000_001, "more than"), (2**64 - 1, "more than")]
)
def test_a_header_larger_than_the_file_or_the_format_allows_is_refused(
    write_safetensors: "WriteSafetensors", length: int, reason: str
) -> None:
    path = write_safetensors({"a": _A}, bytes(8), length=length)
    with pytest.raises(SourceError, match=reason), open_source(str(path)) as source:
        source.open()


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8])
def test_a_file_too_short_for_a_header_is_refused(tmp_path: Path, nbytes: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(bytes(nbytes))
    with pytest.raises(SourceError, match=r"x\.safetensors"), open_source(str(path)) as source:
        source.open()


def test_a_tensor_the_index_names_and_its_shard_lacks_is_refused(sharded: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, _ = sharded
    _write_index(folder, _read_index(folder) | {"layer.9.weight": "model-00001-of-00002.safetensors"})
    with pytest.raises(SourceError, match=r"and it is not") as caught, open_source(str(folder)) as source:
        source.open()
    assert (caught.value.path, caught.value.tensor) == (
        str(folder / "model-00001-of-00002.safetensors"),
        "layer.9.weight",
    )


def test_a_tensor_in_another_shard_than_the_index_says_is_refused(
    sharded: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    folder, _ = sharded
    _write_index(folder, _read_index(folder) | {"layer.1.weight": "model-00001-of-00002.safetensors"})
    with pytest.raises(SourceError, match=r"it is in .*00002-of-00002") as caught, open_source(str(folder)) as source:
        source.open()
    assert caught.value.tensor == "layer.1.weight"


def test_a_tensor_the_index_does_not_list_is_refused(sharded: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, _ = sharded
    weight_map = _read_index(folder)
    del weight_map["layer.2.weight"]
    _write_index(folder, weight_map)
    with pytest.raises(SourceError, match="does not list it") as caught, open_source(str(folder)) as source:
        source.open()
    assert (caught.value.path, caught.value.tensor) == (
        str(folder / "model-00001-of-00002.safetensors"),
        "layer.2.weight",
    )


def test_a_tensor_in_two_shards_is_refused(sharded: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, _ = sharded
    first, second = (folder / f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    safetensors.torch.save_file(safetensors.torch.load_file(second) | {"layer.0.weight": torch.ones(1)}, second)
    with pytest.raises(SourceError, match="twice") as caught, open_source(str(folder)) as source:
        source.open()
    assert (caught.value.path, caught.value.tensor) == (str(second), "layer.0.weight")
    assert str(first) in caught.value.reason


def test_a_truncated_shard_is_refused(sharded: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, _ = sharded
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-3])
    with pytest.raises(SourceError, match="truncated") as caught, open_source(str(folder)) as source:
        source.open()
    assert (caught.value.path, caught.value.tensor) == (str(shard), "layer.3.weight")


# ------------------------------------------------------------------------------------ fuzzed
_SEED = safetensors.torch.save(
    {"a": torch.arange(3.0), "b.weight": torch.ones(2, 2, dtype=torch.bfloat16), "c": torch.empty(0, dtype=torch.int8)},
    metadata={"format": "pt"},
)
_TOKENS = [
    b"0",
    b"1",
    b"8",
    b"9",
    b"-",
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"\\",
    b"\xff",
    b"F4",
    b"U8",
    b"BOOL",
    b" ",
]


@st.composite
def _mutated(draw: st.DrawFn) -> bytes:
    blob = bytearray(_SEED)
    length = 8 + struct.unpack("<Q", _SEED[:8])[0]
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, length - 1))
        size = draw(st.integers(0, 3))
        blob[at : at + size] = draw(st.sampled_from(_TOKENS) | st.binary(min_size=size, max_size=size))
    if draw(st.booleans()):  # The header's length is right again, so that what is in it counts.
        blob[:8] = struct.pack("<Q", length - 8 + len(blob) - len(_SEED))
    return bytes(blob[: draw(st.integers(0, len(blob)))]) if draw(st.integers(0, 9)) == 0 else bytes(blob)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(blob=_mutated())
def test_a_mutated_header_is_refused_or_read_as_safetensors_reads_it(tmp_path: Path, load: "Load", blob: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(blob)
    try:
        loaded = load(path)
    except SourceError:
        return
    try:
        theirs: dict[str, dict[str, bytes]] = dict(safetensors.deserialize(blob))  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError:
        assert b"-0" in blob  # A number 0 in JSON, and none in Rust: the only difference in 60,000 mutations.
        return
    assert theirs.keys() == loaded.tensors.keys()
    for name, tensor in loaded.tensors.items():
        assert tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() == bytes(theirs[name]["data"])

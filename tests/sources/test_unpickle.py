"""Files `torch.save` wrote, or did not: code is never run, and damage of any kind is a SourceError."""

import io
import os
import pickle
import shutil
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wcache_async.errors import SourceError
from wcache_async.sources import open_source
from wcache_async.sources.unpickle import Regions

if TYPE_CHECKING:
    from tests.sources.conftest import Load


def _open(path: Path) -> SourceError:
    with pytest.raises(SourceError) as caught, open_source(str(path)) as source:
        source.open()
    assert caught.value.path == str(path)
    assert "/proc/" not in str(caught.value)
    return caught.value


def _saved(*, legacy: bool) -> bytes:
    file = io.BytesIO()
    tensors = {"a": torch.arange(600.0), "b": torch.ones(2, 2, dtype=torch.bfloat16), "c": torch.empty(0)}
    torch.save({"state_dict": tensors}, file, _use_new_zipfile_serialization=not legacy)
    return file.getvalue()


# ------------------------------------------------------------------------------------- code
class _Code:
    """Pickles to a call that makes a file."""

    def __init__(self, made: Path) -> None:
        self._made = made

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, (str(self._made),)


@pytest.mark.parametrize("form", ["archive", "legacy", "pickle 0", "pickle 2", "pickle 4"])
def test_pickled_code_is_refused_and_never_run(tmp_path: Path, form: str) -> None:
    path, made = tmp_path / "x.pt", tmp_path / "made"
    value = {"w": torch.ones(2) if "pickle" not in form else 1, "code": _Code(made)}
    if form.startswith("pickle"):
        path.write_bytes(pickle.dumps(value, protocol=int(form[-1])))
    else:
        torch.save(value, path, _use_new_zipfile_serialization=form == "archive")
    error = _open(path)
    assert "code" in error.reason
    assert "mkdir" in error.reason or form in ("pickle 0", "pickle 4")  # torch stops before it comes to the name
    assert "weights_only" in error.reason
    assert "safetensors" in error.reason
    assert not made.exists()


def test_a_whole_module_is_refused_naming_its_class(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "x.pt")
    error = _open(tmp_path / "x.pt")
    assert "torch.nn.modules.linear.Linear" in error.reason
    assert "state_dict()" in error.reason


# ------------------------------------------------------------------------------- not torch's
@pytest.mark.parametrize(
    "body", [b"", b"\x80", b"hello world" * 100, bytes(1000), b"GGUF" * 9, pickle.dumps({"a": 1}), b"\xff" * 99]
)
def test_what_is_no_torch_checkpoint_is_said_to_be_none(tmp_path: Path, body: bytes) -> None:
    (tmp_path / "x.pt").write_bytes(body)
    assert "no torch checkpoint" in _open(tmp_path / "x.pt").reason


def _archive(path: Path, records: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, body in records.items():
            archive.writestr(f"x/{name}", body)
    return path


def _records() -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(_saved(legacy=False))) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"constants.pkl": b""}, "TorchScript"),
        ({"data.pkl": None}, "torch.save did not write"),
        ({"byteorder": b"big"}, "big-endian"),
        ({"byteorder": b"\xff"}, "damaged"),
        ({"version": None}, "cannot read it"),
        ({"data/0": None}, "cannot read it"),
        ({"data.pkl": b"\x80\x02}."}, "its keys are none"),
    ],
)
def test_an_archive_torch_would_misread_is_refused(
    tmp_path: Path, change: dict[str, bytes | None], reason: str
) -> None:
    records = {name: body for name, body in (_records() | change).items() if body is not None}
    assert reason in _open(_archive(tmp_path / "x.pt", records)).reason


def test_a_compressed_archive_is_refused_as_mapping_it_gives_other_bytes(tmp_path: Path) -> None:
    path = _archive(tmp_path / "x.pt", _records(), zipfile.ZIP_DEFLATED)
    assert "compressed" in _open(path).reason


def test_an_archive_repacked_without_compression_is_read(tmp_path: Path, load: "Load") -> None:
    loaded = load(_archive(tmp_path / "x.pt", _records()))
    assert torch.equal(loaded.tensors["a"], torch.arange(600.0))


def test_a_pickle_protocol_weights_only_cannot_read_is_named(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "x.pt", pickle_protocol=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert _open(tmp_path / "x.pt").reason.endswith("with weights_only: UnpicklingError: Unsupported operand 149")


# ---------------------------------------------------------------------------------- damaged
@pytest.mark.parametrize("legacy", [False, True])
def test_a_file_truncated_anywhere_is_refused(tmp_path: Path, legacy: bool) -> None:
    path, whole = tmp_path / "x.pt", _saved(legacy=legacy)
    for size in {*range(0, 300, 7), *range(300, len(whole), 97), len(whole) - 1}:
        path.write_bytes(whole[:size])
        _open(path)


@pytest.mark.parametrize("legacy", [False, True])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(data=st.data())
def test_a_mutated_file_is_refused_or_read(tmp_path: Path, load: "Load", legacy: bool, data: st.DataObject) -> None:
    blob = bytearray(_saved(legacy=legacy))
    # The pickles come first in both formats; what follows is mostly tensors' bytes, and an archive's directory.
    ends = st.integers(0, 700) | st.integers(len(blob) - 700, len(blob) - 1)
    for _ in range(data.draw(st.integers(1, 3))):
        blob[data.draw(ends)] = data.draw(st.integers(0, 255))
    path = tmp_path / "x.pt"
    path.write_bytes(blob)
    try:
        load(path)
    except SourceError:
        return


def test_a_legacy_file_with_a_storage_of_another_size_is_refused(tmp_path: Path) -> None:
    blob = _saved(legacy=True)
    size = (600).to_bytes(8, "little")
    assert blob.count(size) == 1
    (tmp_path / "x.pt").write_bytes(blob.replace(size, (599).to_bytes(8, "little")))
    assert "cannot read it" in _open(tmp_path / "x.pt").reason


# ------------------------------------------------------------------------------- where it is
def test_a_file_moved_while_it_is_open_is_still_the_one_read(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(_saved(legacy=False))
    with open_source(str(path)) as source:
        (a,) = (tensor for tensor in source.open().tensors if tensor.name == "a")
        shutil.move(path, tmp_path / "y.pt")
        into = bytearray(2400)
        source.read(a.storage, memoryview(into), lambda _: None)
    assert torch.equal(torch.frombuffer(into, dtype=torch.float32), torch.arange(600.0))


def test_a_file_replaced_while_it_is_unpickled_is_still_the_one_read(
    tmp_path: Path, load: "Load", monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"a": torch.full((5,), 1.0)}, tmp_path / "x.pt")
    torch_load = torch.load

    def replace_and_load(path: str, *, map_location: str, weights_only: bool, mmap: bool) -> object:
        torch.save({"b": torch.full((9,), 2.0)}, tmp_path / "new")
        (tmp_path / "new").replace(tmp_path / "x.pt")
        return torch_load(path, map_location=map_location, weights_only=weights_only, mmap=mmap)

    monkeypatch.setattr(torch, "load", replace_and_load)
    assert torch.equal(load(tmp_path / "x.pt").tensors["a"], torch.full((5,), 1.0))


def test_regions_answer_for_whole_ranges_only() -> None:
    regions = Regions()
    regions.add(1000, 100, 5000)
    regions.add(3000, 50, 100)
    assert regions.offset_of(1000, 100) == 5000
    assert regions.offset_of(1099, 1) == 5099
    assert regions.offset_of(3010, 40) == 110
    for address, nbytes in ((999, 1), (1000, 101), (1100, 1), (2999, 2), (3049, 2)):
        assert regions.offset_of(address, nbytes) is None


def test_regions_that_go_on_in_memory_and_file_are_one() -> None:
    regions = Regions()
    regions.add(1000, 100, 5000)
    regions.add(1100, 100, 5100)
    regions.add(1200, 100, 9000)
    assert regions.offset_of(1050, 150) == 5050
    assert regions.offset_of(1150, 60) is None

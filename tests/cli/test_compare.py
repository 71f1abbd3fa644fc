"""Comparing tensors with a checkpoint: whatever lies there, the first byte that differs is found."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.processes import Forge, Peer
from wcache_async.cli.compare import Comparison, Difference, compare_with_source
from wcache_async.sources import open_source

Tensors = dict[str, torch.Tensor]


def compare(path: Path, tensors: Tensors, progress: Callable[[int, int], None] = lambda *_: None) -> Comparison:
    with open_source(str(path)) as source:
        return compare_with_source(source, tensors, progress)


def differences(path: Path, tensors: Tensors) -> list[tuple[str, str, int | None]]:
    return [(found.tensor, found.what, found.offset) for found in compare(path, tensors).differences]


def test_nothing_differs_from_itself_bit_for_bit(tmp_path: Path) -> None:
    """NaNs, negative zeros, no elements, no dimensions, and packed types that torch cannot compare."""
    tensors = {
        "nan": torch.tensor([float("nan"), -0.0, 0.0]),
        "empty": torch.zeros(3, 0, 2),
        "scalar": torch.tensor(7),
        "float8": torch.randn(16).to(torch.float8_e4m3fn),
        "flags": torch.tensor([True, False]),
    }
    save_file(tensors, tmp_path / "m.safetensors")
    assert compare(tmp_path / "m.safetensors", tensors) == Comparison(tensors=5, nbytes=38, differences=[])


@pytest.mark.parametrize("offset", [0, 1, (8 << 20) - 1, 8 << 20, (20 << 20) - 1])
def test_the_first_byte_that_differs_is_found_in_any_chunk(tmp_path: Path, offset: int) -> None:
    """The checkpoint is read in chunks of 8 MiB."""
    tensor = torch.zeros(20 << 20, dtype=torch.uint8)
    save_file({"w": tensor}, tmp_path / "m.safetensors")
    tensor[offset] = 1
    tensor[offset + 1000 :] = 2
    (found,) = compare(tmp_path / "m.safetensors", {"w": tensor}).differences
    assert found == Difference(tensor="w", what="bytes", checkpoint="0x00", client="0x01", offset=offset)
    assert str(found) == f"w: bytes at byte {offset}: checkpoint 0x00, client 0x01"


def test_views_of_one_storage_are_each_compared_where_they_lie(tmp_path: Path) -> None:
    base = torch.arange(4000, dtype=torch.int32)
    torch.save({"head": base[:1000], "middle": base[500:3000], "tail": base[3500:]}, tmp_path / "m.pt")
    same = {"head": base[:1000].clone(), "middle": base[500:3000].clone(), "tail": base[3500:].clone()}
    assert differences(tmp_path / "m.pt", same) == []
    same["middle"][2000] += 1
    assert differences(tmp_path / "m.pt", same) == [("middle", "bytes", 8000)]


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[:, ::2],
        lambda t: t[::3],
        lambda t: t[0].expand(5, -1),
        lambda t: t.view(6, 10, 20).permute(2, 0, 1),
    ],
    ids=["transposed", "columns", "rows", "expanded", "permuted"],
)
def test_strided_tensors_are_compared_by_element_whatever_the_client_s_strides(
    tmp_path: Path, view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    tensor = view(torch.arange(1200, dtype=torch.int16).view(60, 20))
    torch.save({"w": tensor}, tmp_path / "m.pt")
    assert differences(tmp_path / "m.pt", {"w": tensor}) == []
    theirs = tensor.contiguous()
    assert differences(tmp_path / "m.pt", {"w": theirs}) == []
    theirs = theirs.clone()
    theirs.view(-1)[7] += 256
    assert differences(tmp_path / "m.pt", {"w": theirs}) == [("w", "bytes", 15)]
    # Bytes between the elements are nobody's.
    assert differences(tmp_path / "m.pt", {"w": torch.stack([tensor, theirs], -1)[..., 0]}) == []


def test_a_strided_client_s_view_of_a_contiguous_tensor_is_compared_too(tmp_path: Path) -> None:
    tensor = torch.arange(12).view(3, 4)
    save_file({"w": tensor}, tmp_path / "m.safetensors")
    assert differences(tmp_path / "m.safetensors", {"w": tensor.t().contiguous().t()}) == []


def test_a_tied_weight_is_one_whether_or_not_the_client_s_is(tmp_path: Path) -> None:
    weight = torch.arange(10)
    torch.save({"a": weight, "b": weight}, tmp_path / "m.pt")
    assert differences(tmp_path / "m.pt", {"a": weight, "b": weight}) == []
    assert differences(tmp_path / "m.pt", {"a": weight, "b": weight.clone()}) == []
    assert differences(tmp_path / "m.pt", {"a": weight, "b": weight + 1}) == [("b", "bytes", 0)]
    assert differences(tmp_path / "m.pt", {"a": weight}) == [("b", "missing", None)]


def test_structure_is_compared_before_bytes(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(4), "b": torch.zeros(4), "c": torch.zeros(4)}, tmp_path / "m.safetensors")
    theirs = {"a": torch.ones(2, 2), "b": torch.ones(4).half(), "d": torch.zeros(1)}
    assert differences(tmp_path / "m.safetensors", theirs) == [
        ("a", "shape", None),
        ("b", "dtype", None),
        ("c", "missing", None),
        ("d", "unexpected", None),
    ]


def test_progress_ends_at_all_bytes_also_where_tensors_are_missing(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3000), "b": torch.zeros(500)}, tmp_path / "m.safetensors")
    seen: list[tuple[int, int]] = []
    compare(tmp_path / "m.safetensors", {"a": torch.zeros(3000)}, lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1] == (14000, 14000)


# ------------------------------------------------------------------------------------ memory
def _anonymous_kib() -> int:
    with open("/proc/self/status") as status:
        found = re.search(r"RssAnon:\s+(\d+) kB", status.read())
    return int(found[1]) if found else 0


def compare_and_tell_memory(peer: Peer, path: str, nbytes: int) -> None:
    """The most anonymous memory held over what was there before, in KiB, and whether all was equal."""
    with open(path, "r+b") as file:
        file.seek(-nbytes, os.SEEK_END)
        tensor = torch.from_file(path, shared=True, size=os.path.getsize(path), dtype=torch.uint8)[-nbytes:]
    before = _anonymous_kib()
    most = before

    def progress(_: int, __: int) -> None:
        nonlocal most
        most = max(most, _anonymous_kib())

    found = compare(Path(path), {"w": tensor}, progress)
    peer.send((most - before, not found.differences))


def test_one_large_tensor_is_compared_without_holding_a_copy_of_it(tmp_path: Path, forge: Forge) -> None:
    nbytes = 96 << 20
    save_file({"w": torch.zeros(nbytes, dtype=torch.uint8)}, tmp_path / "m.safetensors")
    with forge.start(compare_and_tell_memory, str(tmp_path / "m.safetensors"), nbytes) as child:
        most_kib, equal = child.receive()
    assert equal
    assert most_kib < 32 << 10

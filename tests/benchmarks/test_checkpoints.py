"""The measured checkpoints have exactly the size that the results claim."""

import math
from pathlib import Path

import pytest
from checkpoints import check_tensors, tensor_shapes, write_checkpoint, write_thin


@pytest.mark.parametrize(
    ("tensors", "mebibytes"), [(300, 1024), (5000, 1024), (300, 64), (12, 2), (3, 1), (100_000, 256)]
)
def test_so_many_tensors_have_exactly_so_many_bytes(tensors: int, mebibytes: int) -> None:
    shapes = tensor_shapes(tensors, mebibytes << 20)
    assert len(shapes) == tensors
    assert sum(2 * math.prod(shape) for shape in shapes.values()) == mebibytes << 20


def test_too_little_room_for_the_tensors_is_refused() -> None:
    with pytest.raises(ValueError, match="1048576 bytes are too few for 30000 tensors"):
        tensor_shapes(30_000, 1 << 20)


def test_a_delivery_with_one_wrong_byte_or_name_is_found(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    checkpoint = write_checkpoint(tmp_path, tensors=12, nbytes=2 << 20)
    tensors = load_file(checkpoint.safetensors)
    check_tensors(tensors, 12, 2 << 20)
    tensors["lm_head.weight"][-1, -1] = 1.0
    with pytest.raises(ValueError, match=r"lm_head\.weight came with other bytes"):
        check_tensors(tensors, 12, 2 << 20)
    del tensors["lm_head.weight"]
    with pytest.raises(ValueError, match="11 tensors came that are not the 12"):
        check_tensors(tensors, 12, 2 << 20)


def test_more_tensors_than_can_be_told_apart_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="3 to 32767 tensors here, not 40000"):
        write_checkpoint(tmp_path, 40_000, 64 << 20)
    assert list(tmp_path.iterdir()) == []


def test_a_thin_checkpoint_has_the_shapes_and_takes_no_disk(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    path = tmp_path / "thin.safetensors"
    write_thin(path, 300, 64 << 20)
    loaded = load_file(path)
    assert {name: tuple(tensor.shape) for name, tensor in loaded.items()} == tensor_shapes(300, 64 << 20)
    assert not any(tensor.any() for tensor in loaded.values())
    assert path.stat().st_size > 64 << 20 > 32 * path.stat().st_blocks * 512

"""The checkpoints that are measured: Llama's tensor names, any number of tensors in any number of bytes.

All elements of tensor number i are the 16-bit integer i, looked at as bfloat16, so that what a
method delivered can be told right from wrong afterwards.
"""

import json
import math
import os
import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["Checkpoint", "check_tensors", "tensor_shapes", "write_checkpoint", "write_thin"]

_ITEMSIZE = 2
_LAYER = {
    "input_layernorm.weight": 0,
    "self_attn.q_proj.weight": 4,
    "self_attn.k_proj.weight": 1,
    "self_attn.v_proj.weight": 1,
    "self_attn.o_proj.weight": 4,
    "post_attention_layernorm.weight": 0,
    "mlp.gate_proj.weight": 11,
    "mlp.up_proj.weight": 11,
    "mlp.down_proj.weight": 11,
}
"""Name to the matrix's share of the rows there are; none: a vector."""
_OUTSIDE = {"model.embed_tokens.weight": 32, "model.norm.weight": 0, "lm_head.weight": 32}


@dataclass(frozen=True)
class Checkpoint:
    """The same tensors as a safetensors file and as a torch file."""

    safetensors: Path
    torch: Path

    @classmethod
    def in_folder(cls, folder: Path) -> "Checkpoint":
        """Where `write_checkpoint` puts it."""
        return cls(folder / "model.safetensors", folder / "model.pt")


def tensor_shapes(tensors: int, nbytes: int) -> dict[str, tuple[int, ...]]:
    """Name to shape of `tensors` (at least 3) bfloat16 tensors that have exactly `nbytes` bytes together.

    `nbytes` must be a multiple of 1 MiB.  Raises ValueError where it is too little for so many.
    """
    shares = _shares(tensors)
    width = 16
    while width < 1024 and tensors * (2 * width) ** 2 * _ITEMSIZE <= nbytes:
        width *= 2
    rows = nbytes // (width * _ITEMSIZE)
    unit = (rows - list(shares.values()).count(0)) // sum(shares.values())
    if unit < 1:
        raise ValueError(f"{nbytes} bytes are too few for {tensors} tensors")
    shapes: dict[str, tuple[int, ...]] = {
        name: (share * unit, width) if share else (width,) for name, share in shares.items()
    }
    used = sum(shape[0] if len(shape) == 2 else 1 for shape in shapes.values())
    shapes["lm_head.weight"] = (shapes["lm_head.weight"][0] + rows - used, width)
    return shapes


def write_checkpoint(folder: Path, tensors: int, nbytes: int) -> Checkpoint:
    """Write both files of one checkpoint into `folder`; their pages are in the page cache then.

    Raises ValueError for more tensors than there are 16-bit integers to tell them apart by.
    """
    import torch
    from safetensors.torch import save_file

    if tensors >= 2**15:
        raise ValueError(f"a checkpoint has {len(_OUTSIDE)} to {2**15 - 1} tensors here, not {tensors}")
    state = {
        name: torch.full(shape, number, dtype=torch.int16).view(torch.bfloat16)
        for number, (name, shape) in enumerate(tensor_shapes(tensors, nbytes).items())
    }
    checkpoint = Checkpoint.in_folder(folder)
    save_file(state, checkpoint.safetensors)
    torch.save(state, checkpoint.torch)
    os.sync()  # Lest they are written back while something is measured.
    return checkpoint


def write_thin(path: Path, tensors: int, nbytes: int) -> None:
    """Write a safetensors file of as many zeros: a header and a hole, which takes no disk and no time."""
    header = {}
    end = 0
    for name, shape in tensor_shapes(tensors, nbytes).items():
        start, end = end, end + math.prod(shape) * _ITEMSIZE
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        file.truncate(file.tell() + nbytes)


def check_tensors(tensors: "Mapping[str, torch.Tensor]", count: int, nbytes: int) -> None:
    """Raises ValueError unless these are that checkpoint's tensors; looks at the ends of each."""
    import torch

    shapes = tensor_shapes(count, nbytes)
    if tensors.keys() != shapes.keys():
        raise ValueError(f"{len(tensors)} tensors came that are not the {count} of the checkpoint")
    for number, (name, shape) in enumerate(shapes.items()):
        tensor = tensors[name]
        if tensor.shape != shape or tensor.dtype != torch.bfloat16 or not tensor.is_contiguous():
            raise ValueError(f"{name} came as {tensor.dtype} {tuple(tensor.shape)}, not torch.bfloat16 {shape}")
        values = tensor.view(torch.int16).view(-1)
        if values[0] != number or values[-1] != number:
            raise ValueError(f"{name} came with other bytes than the checkpoint's")


def _shares(tensors: int) -> dict[str, int]:
    if tensors < len(_OUTSIDE):
        raise ValueError(f"a checkpoint has {len(_OUTSIDE)} tensors here, or more, not {tensors}")
    names = dict(_OUTSIDE)
    for name, share in _layers():
        if len(names) == tensors:
            break
        names[name] = share
    return names


def _layers() -> Iterator[tuple[str, int]]:
    layer = 0
    while True:
        for name, share in _LAYER.items():
            yield f"model.layers.{layer}.{name}", share
        layer += 1


if __name__ == "__main__":
    write_checkpoint(Path(sys.argv[1]), tensors=int(sys.argv[2]), nbytes=int(sys.argv[3]))

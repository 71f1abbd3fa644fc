"""DTensors: the shard that this rank holds of a distributed tensor, which part of the whole it is, and back again.

Only tensors of one mesh dimension's making are understood, which is tensor parallelism: a plain
Shard, or the strided one of fused projections, in equal slices, or no cut at all.
"""

import sys
from typing import TYPE_CHECKING, Any, cast

from wcache_async.errors import ModuleError
from wcache_async.manifest import Cut
from wcache_async.modules.wrapped import is_plain

if TYPE_CHECKING:
    import torch

__all__ = ["cut_of", "is_distributed", "local_shard", "placement_text", "with_local_shard"]

_DTENSORS = "torch.distributed.tensor"


def is_distributed(tensor: "torch.Tensor") -> bool:
    """Whether it is a DTensor."""
    if is_plain(tensor):
        return False
    # Nobody has one who has not imported their module, which takes a moment.
    module = sys.modules.get(_DTENSORS)
    return module is not None and isinstance(tensor, module.DTensor)


def local_shard(tensor: "torch.Tensor") -> "torch.Tensor":
    """This rank's shard of a DTensor; the same object each time."""
    # to_local() wraps that of a parameter anew, and ties are told by identity.
    return cast("torch.Tensor", cast(Any, tensor)._local_tensor)


def with_local_shard(name: str, like: "torch.Tensor", local: "torch.Tensor") -> "torch.Tensor":
    """A DTensor as `like` is, on another shard.  Raises ModuleError where that would have to be copied to its mesh."""
    import torch

    mesh = cast(Any, like).device_mesh
    if local.device.type != mesh.device_type:
        # DTensor.from_local would move it there without a word.
        raise ModuleError(
            path=name, reason=f"its mesh is one of {mesh.device_type}, and the state is on {local.device}"
        )
    with torch.no_grad():
        made = sys.modules[_DTENSORS].DTensor.from_local(
            local, mesh, cast(Any, like).placements, run_check=False, shape=like.shape, stride=like.stride()
        )
    return cast("torch.Tensor", made)


def placement_text(tensor: "torch.Tensor") -> str:
    """How a DTensor is distributed, as text that is equal for tensors distributed alike."""
    distributed = cast(Any, tensor)
    return f"{tuple(distributed.placements)} on {distributed.device_mesh}"


def cut_of(name: str, tensor: "torch.Tensor") -> Cut | None:
    """Which part of a DTensor this rank has; None: all of it.  Raises ModuleError for what a Cut cannot say."""
    distributed = cast(Any, tensor)  # Its placements' classes are partly private to torch.
    mesh = distributed.device_mesh
    cutting = [
        (number, placement)
        for number, placement in enumerate(distributed.placements)
        if mesh.size(number) > 1 and not placement.is_replicate()
    ]
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ModuleError(path=name, reason=f"this process is not in its mesh {mesh}")
    if not cutting:
        return None
    (number, placement), *more = cutting
    dim = getattr(placement, "dim", None)
    if more or dim is None:
        raise ModuleError(path=name, reason=f"it is distributed as {placement_text(tensor)}, which is no cut in slices")
    ranks, parts = mesh.size(number), getattr(placement, "split_factor", 1)
    size = tensor.shape[dim]
    if size % (ranks * parts):
        raise ModuleError(
            path=name, reason=f"its dimension {dim} of {size} cannot be cut into {ranks * parts} equal slices"
        )
    return Cut(dim % tensor.dim(), (size // parts,) * parts, coordinate[number], ranks)

"""DTensors: the part that is said of a shard is the part it is, and what no part can be said of is refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from tests.processes import Forge
from tests.ranks import run_ranks
from wcache_async.errors import ModuleError
from wcache_async.manifest import Cut
from wcache_async.modules.distributed import cut_of, is_distributed, local_shard, placement_text, with_local_shard


def share(whole: torch.Tensor, cut: Cut | None) -> torch.Tensor:
    """By the definition of a Cut."""
    if cut is None:
        return whole
    parts = torch.split(whole, list(cut.parts), cut.dim)
    return torch.cat([torch.chunk(part, cut.ranks, cut.dim)[cut.rank] for part in parts], cut.dim)


WHOLE = torch.arange(8 * 12 * 2.0).reshape(8, 12, 2)
PLACEMENTS: dict[str, tuple[Any, tuple[int, tuple[int, ...]] | None]] = {
    "rows": (Shard(0), (0, (8,))),
    "columns": (Shard(1), (1, (12,))),
    "last": (Shard(-1), (2, (2,))),
    "packed": (_StridedShard(0, split_factor=2), (0, (4, 4))),
    "packed columns": (_StridedShard(1, split_factor=3), (1, (4, 4, 4))),
    "whole": (Replicate(), None),
}


def shards_of_each_placement(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for name, (placement, expected) in PLACEMENTS.items():
        tensor = distribute_tensor(WHOLE.clone(), mesh, [placement], src_data_rank=None)
        cut = cut_of("w", tensor)
        assert cut == (None if expected is None else Cut(*expected, rank, 2)), name
        assert torch.equal(local_shard(tensor), share(WHOLE, cut)), name
        again = with_local_shard("w", tensor, share(WHOLE, cut))
        assert isinstance(again, DTensor)
        assert (again.placements, again.device_mesh, again.shape) == (tensor.placements, mesh, WHOLE.shape)
        assert torch.equal(again.full_tensor(), WHOLE), name
        assert placement_text(again) == placement_text(tensor)


def test_a_shard_is_the_part_that_is_said_of_it(forge: Forge, tmp_path: Path) -> None:
    run_ranks(forge, 2, tmp_path, shards_of_each_placement)


def shards_of_a_mesh_of_two_dimensions(rank: int) -> dict[str, str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tensor = distribute_tensor(WHOLE.clone(), mesh, [Replicate(), Shard(1)], src_data_rank=None)
    assert cut_of("w", tensor) == Cut(1, (12,), rank % 2, 2)
    # Where a dimension of the mesh has one rank, it cuts nothing.
    flat = init_device_mesh("cpu", (1, 4))
    tensor = distribute_tensor(WHOLE.clone(), flat, [Shard(1), Shard(0)], src_data_rank=None)
    assert cut_of("w", tensor) == Cut(0, (8,), rank, 4)
    told = {}
    for name, on, placements in (
        ("twice", mesh, [Shard(0), Shard(1)]),
        ("sum", mesh, [Replicate(), Partial()]),
        ("uneven", mesh, [Replicate(), Shard(0)]),
    ):
        whole = torch.empty((7, 12) if name == "uneven" else (8, 12), device="meta")
        local = distribute_tensor(whole, on, [Replicate()] * on.ndim, src_data_rank=None).to_local()
        if name != "sum":
            tensor = distribute_tensor(whole, on, placements, src_data_rank=None)
        else:
            tensor = DTensor.from_local(local, on, placements, run_check=False)
        with pytest.raises(ModuleError) as caught:
            cut_of(name, tensor)
        assert caught.value.path == name
        told[name] = caught.value.reason
    return told


def test_what_is_no_cut_in_equal_slices_is_refused(forge: Forge, tmp_path: Path) -> None:
    for told in run_ranks(forge, 4, tmp_path, shards_of_a_mesh_of_two_dimensions):
        assert told.keys() == {"twice", "sum", "uneven"}
        assert "(Shard(dim=0), Shard(dim=1))" in told["twice"]
        assert told["sum"].endswith("which is no cut in slices")
        assert told["uneven"] == "its dimension 0 of 7 cannot be cut into 2 equal slices"


def shards_kept_and_refused(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(distribute_tensor(WHOLE.clone(), mesh, [Shard(0)], src_data_rank=None))
    # Tied weights are told by the identity of what their bytes are in.
    assert local_shard(parameter) is local_shard(parameter)
    assert not local_shard(parameter).requires_grad
    with pytest.raises(ModuleError, match="its mesh is one of cpu, and the state is on meta"):
        with_local_shard("w", parameter, torch.empty(4, 12, 2, device="meta"))


def test_a_shard_is_never_copied(forge: Forge, tmp_path: Path) -> None:
    run_ranks(forge, 2, tmp_path, shards_kept_and_refused)


def test_other_tensors_are_no_dtensors() -> None:
    assert not is_distributed(torch.ones(2))
    assert not is_distributed(nn.Parameter(torch.ones(2)))

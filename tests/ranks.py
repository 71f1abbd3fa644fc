"""Ranks of a torch.distributed group over gloo, each a process forked with torch imported."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

# What DTensors import when they are first made: seconds, in the forge once instead of in every rank.
import torch._dynamo
import torch.distributed as dist
import torch.distributed.tensor.parallel  # noqa: F401

from tests.processes import Child, Forge, Peer

__all__ = ["run_ranks"]

P = ParamSpec("P")


def run_ranks(
    forge: Forge,
    size: int,
    folder: Path,
    function: Callable[Concatenate[int, P], object],
    *args: P.args,
    **kwargs: P.kwargs,
) -> list[Any]:
    """What `function` returns in each of `size` ranks, called with its rank; `folder` is theirs to meet in."""
    folder.mkdir(exist_ok=True)  # Without it they would wait for one another in vain.
    with ExitStack() as stack:
        children: list[Child] = [
            stack.enter_context(forge.start(_rank, rank, size, str(folder / "group"), function, args, kwargs))
            for rank in range(size)
        ]
        results = [child.receive() for child in children]
        for child in children:
            child.send(None)
        return results


def _rank(
    peer: Peer, rank: int, size: int, meeting: str, function: Callable[..., object], args: Any, kwargs: Any
) -> None:
    # As torchrun sets them; without the interface gloo looks this machine's name up.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    peer.send(function(rank, *args, **kwargs))
    peer.receive()  # The store's file is the first rank's, and goes with it.
    dist.destroy_process_group()

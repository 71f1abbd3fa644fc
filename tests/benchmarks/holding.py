"""A process that attaches and holds on, for what its memory looks like from outside."""

import os

import torch

from tests.processes import Peer
from wcache_async import blocking

__all__ = ["hold"]


def hold(peer: Peer, socket_path: str, write: bool) -> None:
    """Attach to the state `m` and read everything; with `write`, change half of it."""
    tensors = blocking.fetch_state("m", socket_path=socket_path).import_tensors()
    for tensor in tensors.values():
        tensor.view(torch.uint8).sum()
        if write:
            tensor[: len(tensor) // 2] = 0
    peer.send(os.getpid())
    peer.receive()

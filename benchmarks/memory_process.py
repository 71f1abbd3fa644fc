"""One process of `memory.py`: METHOD ADDRESS.  Attaches when told to, touches every page, and holds on.

Says ``imported`` first, and after the touching the addresses that its tensors have, as JSON.
"""

import sys
from contextlib import AsyncExitStack, ExitStack
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

__all__ = ["Held", "address_ranges"]


class Held(Struct, frozen=True):
    """Where a process's tensors are: begins and ends in its memory, in order, none overlapping another."""

    ranges: tuple[tuple[int, int], ...]


def address_ranges(tensors: "Mapping[str, torch.Tensor]") -> tuple[tuple[int, int], ...]:
    """The tensors' memory, neighbours joined."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted((each.data_ptr(), each.data_ptr() + each.nbytes) for each in tensors.values()):
        if joined and start - joined[-1][1] < 4096:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return tuple(joined)


def main(method: str, address: str) -> None:
    import torch
    import uvloop
    from attach_process import BLOCKING, attach_wcache, touch

    def hold(tensors: "dict[str, torch.Tensor]") -> None:
        touch(tensors)
        print(msgspec.json.encode(Held(address_ranges(tensors))).decode(), flush=True)
        sys.stdin.readline()

    async def run() -> None:
        async with AsyncExitStack() as stack:
            hold(await attach_wcache(address, stack))

    print("imported", flush=True)
    if not sys.stdin.readline():
        return
    if method == "wcache":
        uvloop.run(run())
        return
    with ExitStack() as stack:
        tensors = BLOCKING[method.removesuffix("-cast")](address, stack)
        if method.endswith("-cast"):
            tensors = {name: tensor.to(torch.float16) for name, tensor in tensors.items()}
        hold(tensors)


if __name__ == "__main__":
    main(*sys.argv[1:])

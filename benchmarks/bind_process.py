"""One process of `bind.py`: SOCKET DEVICE TENSORS NBYTES.  Prints the seconds that binding took."""

import sys
import time
from collections.abc import Mapping

import torch
import uvloop
from checkpoints import check_tensors, tensor_shapes
from serving import STATE_NAME
from torch import nn

from wcache_async import Client
from wcache_async.client.bind import bind

__all__ = ["build"]


def build(shapes: Mapping[str, tuple[int, ...]]) -> nn.Module:
    """A module with parameters of those names and shapes, in as many modules as the names' dots say."""
    root = nn.Module()
    for name, shape in shapes.items():
        module = root
        *path, leaf = name.split(".")
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(leaf, nn.Parameter(torch.empty(shape, dtype=torch.bfloat16), requires_grad=False))
    return root.eval()


async def measure(socket: str, module: nn.Module) -> float:
    """Seconds to bind the tensors, imported before, to `module`."""
    async with Client(socket) as client:
        state = await client.fetch_state(STATE_NAME, timeout=60)
        tensors = await state.import_tensors()
        start = time.perf_counter()
        bind(module, tensors, state.manifest, state.backend)
        return time.perf_counter() - start


def main() -> None:
    socket, device, tensors, nbytes = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    with torch.device(device):
        module = build(tensor_shapes(tensors, nbytes))
    seconds = uvloop.run(measure(socket, module))
    check_tensors(dict(module.named_parameters()), tensors, nbytes)
    print(seconds)


if __name__ == "__main__":
    main()

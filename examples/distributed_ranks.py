"""Ranks of torch.distributed that each fetch or publish their own shard of a model.

    wcache serve &
    torchrun --nproc-per-node 2 examples/distributed_ranks.py

Started once, each rank builds its shard and publishes it.  Started again, after a crash or a
deployment, each attaches to what is there, with no checkpoint read and nothing copied.
"""

import argparse
import os
import zlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from wcache_async import blocking

WIDTH, HIDDEN, LAYERS = 128, 512, 4


class Shard(nn.Module):
    """One rank's part of a stack of two-layer blocks: columns of the first layer, rows of the second."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(WIDTH, HIDDEN // ranks, bias=False) for _ in range(LAYERS))
        self.down = nn.ModuleList(nn.Linear(HIDDEN // ranks, WIDTH, bias=False) for _ in range(LAYERS))

    def blocks(self) -> Iterator[tuple[nn.Module, nn.Module]]:
        return zip(self.up, self.down, strict=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in self.blocks():
            partial: torch.Tensor = down(torch.relu(up(x)))
            dist.all_reduce(partial)
            x = x + partial
        return x


def build(rank: int, ranks: int) -> Shard:
    """Rank `rank`'s shard of a checkpoint: here random weights by a seed, of which it keeps its part."""
    shard = Shard(ranks)
    generator = torch.Generator().manual_seed(0)
    part = slice(rank * HIDDEN // ranks, (rank + 1) * HIDDEN // ranks)
    for up, down in shard.blocks():
        whole_up = torch.randn(HIDDEN, WIDTH, generator=generator) / WIDTH**0.5
        whole_down = torch.randn(WIDTH, HIDDEN, generator=generator) / HIDDEN**0.5
        up.load_state_dict({"weight": whole_up[part]})
        down.load_state_dict({"weight": whole_down[:, part]})
    return shard.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--socket", help="the daemon's (default: its default address)")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with blocking.Client(chosen.socket) as client:
        # No name: the automatic one, a digest of the config, so that two ranks and four live side by side.
        config: dict[str, str | int] = {"model": "stack", "revision": "1", "tp_size": ranks}
        state = client.fetch_or_publish("", lambda: build(rank, ranks), rank=rank, config=config)
        with torch.device("meta"):
            model = Shard(ranks)
        state.bind(model)
        with torch.inference_mode():
            result = model(torch.linspace(-1, 1, WIDTH).expand(4, WIDTH).contiguous())
    how = "built" if state.built_here else "attached"
    print(f"rank {rank} of {ranks} (pid {os.getpid()}) {how} {state.resident_bytes} bytes", flush=True)
    dist.barrier()
    if rank == 0:
        print(f"result {zlib.crc32(result.numpy().tobytes()):08x}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""One client process of `slow_peers.py`: attaches to ADDRESS as often as each line it reads says.

Says ``ready`` when everything is imported, and answers each line with the seconds every attach
took, connect to a dict of tensors, as a JSON list.
"""

import asyncio
import sys
from time import perf_counter

import msgspec
import torch  # noqa: F401  (the import is no part of attaching)
import uvloop
from serving import STATE_NAME

from wcache_async import Client


async def attach(address: str) -> float:
    """Attach once and hang up; seconds until the tensors were there."""
    started = perf_counter()
    async with Client(address) as client:
        state = await client.fetch_state(STATE_NAME)
        await state.import_tensors()
        return perf_counter() - started


async def main(address: str) -> None:
    print("ready", flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        latencies = [await attach(address) for _ in range(int(line))]
        print(msgspec.json.encode(latencies).decode(), flush=True)


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))

"""One fresh process of `attach.py`: attaches by METHOD to ADDRESS, and prints what it took as JSON.

Everything a user of the method imports is imported before the clock runs; what the method itself
imports later counts.  Attached is attached when a dict of tensors is there.  Then one byte of
every page under every tensor is read, then the tensors are checked, dropped, and attached again.
"""

import argparse
import asyncio
import ctypes
import gc
import mmap
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, ExitStack
from time import perf_counter

import alternatives
import floor
import msgspec
import torch
import uvloop
from checkpoints import check_tensors
from results import Sample
from serving import STATE_NAME

from wcache_async import Client, blocking

Tensors = dict[str, torch.Tensor]


async def attach_wcache(address: str, stack: AsyncExitStack) -> Tensors:
    """`wcache_async.Client`."""
    client = await stack.enter_async_context(Client(address))
    state = await client.fetch_state(STATE_NAME)
    return await state.import_tensors()


def attach_wcache_blocking(address: str, stack: ExitStack) -> Tensors:
    """`wcache_async.blocking`."""
    state = stack.enter_context(blocking.fetch_state(STATE_NAME, socket_path=address))
    return state.import_tensors()


BLOCKING: dict[str, Callable[[str, ExitStack], Tensors]] = {
    "wcache-blocking": attach_wcache_blocking,
    "floor": floor.attach,
    "safetensors": alternatives.attach_safetensors,
    "torch-load": alternatives.attach_torch_load,
    "torch-load-mmap": alternatives.attach_torch_load_mmap,
    "multiprocessing": alternatives.attach_multiprocessing,
    "pickle": alternatives.attach_pickle,
}
ASYNCHRONOUS: dict[str, Callable[[str, AsyncExitStack], Awaitable[Tensors]]] = {"wcache": attach_wcache}


def touch(tensors: Mapping[str, torch.Tensor]) -> float:
    """Seconds it takes to read one byte of every page under every tensor."""
    pages = []
    for tensor in tensors.values():
        start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        nbytes = tensor.data_ptr() + tensor.nbytes - start
        pages.append(memoryview((ctypes.c_ubyte * nbytes).from_address(start)).cast("B")[:: mmap.PAGESIZE])
    started = perf_counter()
    for view in pages:
        view.tobytes()
    return perf_counter() - started


def measure_blocking(attach: Callable[[str, ExitStack], Tensors], address: str, count: int, nbytes: int) -> Sample:
    """Attach, touch, check; then attach again."""
    with ExitStack() as stack:
        started = perf_counter()
        tensors = attach(address, stack)
        attach_s = perf_counter() - started
        touch_s = touch(tensors)
        check_tensors(tensors, count, nbytes)
        del tensors
    gc.collect()
    with ExitStack() as stack:
        started = perf_counter()
        tensors = attach(address, stack)
        again_s = perf_counter() - started
        del tensors
    return Sample(attach_s, touch_s, again_s)


async def measure_asynchronous(
    attach: Callable[[str, AsyncExitStack], Awaitable[Tensors]], address: str, count: int, nbytes: int
) -> Sample:
    """The same in a running loop."""
    async with AsyncExitStack() as stack:
        started = perf_counter()
        tensors = await attach(address, stack)
        attach_s = perf_counter() - started
        touch_s = touch(tensors)
        check_tensors(tensors, count, nbytes)
        del tensors
    gc.collect()
    async with AsyncExitStack() as stack:
        started = perf_counter()
        tensors = await attach(address, stack)
        again_s = perf_counter() - started
        del tensors
    return Sample(attach_s, touch_s, again_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("method", choices=[*ASYNCHRONOUS, *BLOCKING])
    parser.add_argument("address", help="a socket, or a file")
    parser.add_argument("--tensors", type=int, required=True)
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--loop", choices=["uvloop", "asyncio"], default="uvloop")
    options = parser.parse_args()
    if options.method in ASYNCHRONOUS:
        run = uvloop.run if options.loop == "uvloop" else asyncio.run
        sample = run(
            measure_asynchronous(ASYNCHRONOUS[options.method], options.address, options.tensors, options.bytes)
        )
    else:
        sample = measure_blocking(BLOCKING[options.method], options.address, options.tensors, options.bytes)
    sys.stdout.buffer.write(msgspec.json.encode(sample) + b"\n")


if __name__ == "__main__":
    main()

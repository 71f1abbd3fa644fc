"""What the forked processes of `processed.py` do, with everything imported beforehand."""

import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection
from time import perf_counter

import torch
from attach_process import attach_wcache, touch
from forked import Attached, begin, run_child, wait
from safetensors.torch import load_file
from serving import STATE_NAME

from wcache_async import Client

__all__ = ["attach_processed", "process", "process_again", "publish_processed"]

Tensors = dict[str, torch.Tensor]
_QUERY, _KEY, _VALUE = (f".self_attn.{part}_proj.weight" for part in "qkv")


def process(loaded: Mapping[str, torch.Tensor]) -> Tensors:
    """Every tensor as float16, and those of a layer's query, key and value as one."""
    done: Tensors = {}
    for name, tensor in loaded.items():
        if name.endswith(_QUERY):
            layer = name.removesuffix(_QUERY)
            parts = [loaded[layer + part] for part in (_QUERY, _KEY, _VALUE) if layer + part in loaded]
            done[f"{layer}.self_attn.qkv_proj.weight"] = torch.cat([part.to(torch.float16) for part in parts])
        elif not name.endswith((_KEY, _VALUE)):
            done[name] = tensor.to(torch.float16)
    return done


def process_again(connection: Connection, checkpoint: str) -> None:
    """Load and process once; answer with Attached."""

    async def run() -> None:
        begin(connection)
        connection.recv()
        cpu, started = time.process_time(), perf_counter()
        tensors = process(load_file(checkpoint))
        finished, used = perf_counter(), time.process_time() - cpu
        connection.send(Attached(started, finished, used, touch(tensors)))
        wait(connection)

    run_child(connection, run)


def attach_processed(connection: Connection, address: str) -> None:
    """Attach to what `publish_processed` published; answer with Attached."""

    async def run() -> None:
        begin(connection)
        connection.recv()
        cpu, started = time.process_time(), perf_counter()
        async with AsyncExitStack() as stack:
            tensors = await attach_wcache(address, stack)
            finished, used = perf_counter(), time.process_time() - cpu
            connection.send(Attached(started, finished, used, touch(tensors)))
            wait(connection)

    run_child(connection, run)


def publish_processed(connection: Connection, checkpoint: str, address: str) -> None:
    """Load, process and publish once."""

    async def run() -> None:
        begin(connection)
        connection.recv()
        async with Client(address) as client:
            await client.publish(STATE_NAME, process(load_file(checkpoint)))
        connection.send("published")

    run_child(connection, run)

"""Clients that accept different backends, served the same state by one daemon at once."""

import asyncio
import logging
import threading
from collections.abc import Callable

import pytest
import torch

from tests.daemon.conftest import WriteCheckpoint
from wcache_async import Client, Daemon
from wcache_async.backends.torch_ipc import TorchIpcTransportBackend
from wcache_async.client.fetch import FetchedState
from wcache_async.errors import (
    BackendNotAccepted,
    BackendUnavailable,
    InsufficientMemory,
    StateNotFound,
    UnknownBackend,
)

BOTH = ("shm_fd", "torch_ipc")


async def tensors_of(state: FetchedState) -> dict[str, torch.Tensor]:
    return await state.import_tensors()


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


async def backends_of(daemon: Daemon) -> tuple[str, ...]:
    (state,) = daemon.status().states
    return state.backends


async def test_each_client_is_served_through_the_backend_it_accepts(
    daemon: Daemon, write_checkpoint: WriteCheckpoint, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "wcache_async.daemon")
    await daemon.load(write_checkpoint(tensors=50), name="m")
    async with (
        Client(daemon.socket_path, backends=["shm_fd"]) as one,
        Client(daemon.socket_path, backends=["torch_ipc"]) as other,
    ):
        first, second = await asyncio.gather(one.fetch_state("m"), other.fetch_state("m"))
        assert (first.transport_backend, second.transport_backend) == BOTH
        assert first.generation == second.generation
        assert first.config == second.config
        assert [e.kind for e in first.manifest.tensors] == [e.kind for e in second.manifest.tensors]
        assert same(await tensors_of(first), await tensors_of(second))
    assert await backends_of(daemon) == BOTH
    (line,) = [r.getMessage() for r in caplog.records if "once more" in r.getMessage()]
    assert "a second copy" in line
    assert "transport torch_ipc, for a client that does not accept shm_fd" in line

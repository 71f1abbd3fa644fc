"""The blocking client: the same verbs with no event loop in sight."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from wcache_async import Daemon, blocking
from wcache_async.errors import ConfigMismatch, DaemonUnavailable, NotRunning, StateNotFound, StateReleased

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def socket_path(short_tmp: Path) -> Iterator[Path]:
    """The socket of a daemon that runs in another thread."""
    path = short_tmp / "wcache.sock"
    running = threading.Event()
    ends: list[Daemon] = []

    async def serve() -> None:
        async with Daemon(path, drain_timeout=5) as daemon:
            ends.append(daemon)
            running.set()
            await daemon.serve_forever()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert running.wait(20)
    yield path
    with contextlib.suppress(DaemonUnavailable):  # A test may have stopped it.
        blocking.stop(path)
    thread.join(20)
    assert not thread.is_alive()


def test_every_verb(socket_path: Path, checkpoint: Path, tensors: Tensors) -> None:
    with blocking.Client(socket_path) as client:
        assert client.load(checkpoint, "m").phase == "ready"
        with client.fetch_state("m", expect={"source": "safetensors"}) as state:
            got = state.import_tensors()
            assert all(torch.equal(got[name], tensor) for name, tensor in tensors.items())
            assert torch.equal(state.import_tensor("scale"), tensors["scale"])
            assert client.status().states[0].leases == 1
        assert client.status().states[0].leases == 0
        with pytest.raises(StateReleased):
            state.import_tensors()
        with pytest.raises(ConfigMismatch):
            client.fetch_state("m", expect={"dtype": "float8"})
        assert client.unload("m").unloaded == ("m:0",)
        with pytest.raises(StateNotFound):
            client.fetch_state("m")


def test_one_call_fetches_over_a_connection_of_its_own(socket_path: Path, checkpoint: Path) -> None:
    blocking.load(checkpoint, "m", socket_path=socket_path)
    state = blocking.fetch_state("m", socket_path=socket_path)
    assert blocking.status(socket_path).states[0].leases == 1
    state.release()
    state.release()
    status = blocking.status(socket_path)
    assert status.states[0].leases == 0
    assert status.pid == os.getpid()
    assert blocking.unload("m", socket_path=socket_path).unloaded == ("m:0",)
    assert blocking.stop(socket_path) == os.getpid()


def test_a_failed_fetch_leaves_no_connection(socket_path: Path) -> None:
    with pytest.raises(StateNotFound):
        blocking.fetch_state("absent", socket_path=socket_path)
    assert blocking.status(socket_path).clients == 1


def test_binding_happens_in_the_callers_thread(socket_path: Path, checkpoint: Path, tensors: Tensors) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16, bias=False, dtype=torch.bfloat16)

    blocking.load(checkpoint, "m", socket_path=socket_path)
    with torch.device("meta"):
        model = Model()
    with blocking.fetch_state("m", socket_path=socket_path) as state:
        state.bind(model, strict=False)
    assert torch.equal(model.layer.weight, tensors["layer.weight"])


def test_no_daemon_is_told_at_once(short_tmp: Path) -> None:
    with pytest.raises(NotRunning):
        blocking.status(short_tmp / "nobody.sock")

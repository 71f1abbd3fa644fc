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
from wcache_async.errors import (
    BackendUnavailable,
    ConfigMismatch,
    DaemonUnavailable,
    ModuleError,
    NotRunning,
    StateNotFound,
    StateReleased,
)

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


def test_a_module_is_created_as_the_asynchronous_client_does(socket_path: Path) -> None:
    built = nn.Linear(4, 4, dtype=torch.float64)
    with blocking.Client(socket_path) as client:
        client.publish("m", built, config={"dtype": "float64"})
        with client.fetch_state("m") as state:
            module = state.create_module(lambda: nn.Linear(4, 4))
            assert repr(state) == "<State m:0 generation 1, shm_fd, 192 bytes>"
    assert torch.equal(module.weight, built.weight)


def test_a_state_that_cannot_sleep_says_so(socket_path: Path) -> None:
    with blocking.Client(socket_path) as client:
        client.publish("m", {"w": torch.ones(1)})
        with client.fetch_state("m") as state:
            with pytest.raises(BackendUnavailable):
                state.sleep()
            with pytest.raises(BackendUnavailable):
                state.wake()


# ------------------------------------------------------------------------ publishing and building
def test_what_is_published_is_attached_and_rebound(socket_path: Path) -> None:
    module = nn.Linear(4, 4, bias=False)
    values = module.weight.detach().clone()
    address = module.weight.data_ptr()
    with blocking.Client(socket_path) as client:
        status = client.publish("m", module, config={"dtype": "float32"}, rebind=True)
        assert (status.phase, status.config) == ("ready", {"dtype": "float32"})
        assert module.weight.data_ptr() != address
        assert torch.equal(module.weight, values)
        with client.fetch_state("m") as state:
            assert torch.equal(state.import_tensors()["weight"], values)
            assert not state.built_here


def test_building_happens_in_the_callers_thread_and_once(socket_path: Path) -> None:
    threads = []

    def build() -> Tensors:
        threads.append(threading.current_thread())
        return {"w": torch.arange(4)}

    with blocking.Client(socket_path) as client:
        first = client.fetch_or_publish("m", build, config={"tp": 1})
        again = client.fetch_or_publish("m", build, config={"tp": 1})
        assert threads == [threading.current_thread()]
        assert (first.built_here, again.built_here) == (True, False)
        assert torch.equal(first.import_tensors()["w"], again.import_tensors()["w"])
        automatic = client.fetch_or_publish("", lambda: {"w": torch.ones(1)}, config={"tp": 2})
        assert automatic.name.startswith("auto-")


def test_a_failed_build_passes_the_turn_on_while_its_client_lives(socket_path: Path) -> None:
    with blocking.Client(socket_path) as first, blocking.Client(socket_path) as second:
        waiting = threading.Event()
        got = []

        def wait() -> None:
            waiting.set()
            got.append(second.fetch_or_publish("m", lambda: {"w": torch.ones(1)}).built_here)

        waiter = threading.Thread(target=wait)

        def build() -> Tensors:
            waiter.start()
            assert waiting.wait(20)
            raise ArithmeticError

        with pytest.raises(ArithmeticError):
            first.fetch_or_publish("m", build)
        waiter.join(20)
        assert got == [True]


def test_what_cannot_be_published_passes_the_turn_on_too(socket_path: Path) -> None:
    with blocking.Client(socket_path) as client:
        with pytest.raises(ModuleError):
            client.fetch_or_publish("m", lambda: nn.Linear(1, 1, device="meta"))
        assert client.fetch_or_publish("m", lambda: {"w": torch.ones(1)}).built_here


def test_pinned_states_are_told(socket_path: Path) -> None:
    with blocking.Client(socket_path) as client:
        client.publish("m", {"w": torch.ones(1)})
        assert client.pin("m") == ("m:0",)
        assert client.unpin("m", rank=0) == ("m:0",)
        with pytest.raises(StateNotFound):
            client.pin("absent")


def test_no_daemon_is_told_at_once(short_tmp: Path) -> None:
    with pytest.raises(NotRunning):
        blocking.status(short_tmp / "nobody.sock")

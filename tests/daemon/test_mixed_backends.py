"""Clients that accept different backends, served the same state by one daemon at once."""

import asyncio
import gc
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.backends.procfs import arena_fds
from tests.backends.test_torch_ipc import shared_files
from tests.daemon.conftest import WriteCheckpoint
from wcache_async import Client, Daemon
from wcache_async.backends import torch_shared
from wcache_async.backends.base import StateWriter, WeightCacheTransportBackend
from wcache_async.backends.shm_fd import ShmFdTransportBackend
from wcache_async.backends.torch_ipc import TorchIpcTransportBackend
from wcache_async.errors import (
    BackendNotAccepted,
    BackendUnavailable,
    DaemonLost,
    Draining,
    InsufficientMemory,
    StateNotFound,
    UnknownBackend,
)
from wcache_async.manifest import StateSpec
from wcache_async.protocol.connection import Received
from wcache_async.protocol.messages import FetchState, FetchStateResponse
from wcache_async.testing.scripted_peer import ScriptedPeer

BOTH = ("shm_fd", "torch_ipc")

Tensors = dict[str, torch.Tensor]


def same(one: Tensors, other: Tensors) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in threads and other tasks
            await asyncio.sleep(0)


def backends_of(daemon: Daemon) -> tuple[str, ...]:
    (state,) = daemon.status().states
    return state.backends


def leases_of(daemon: Daemon) -> int:
    return sum(state.leases for state in daemon.status().states)


class Gate:
    """Holds the copying of a second export after its first storage."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.proceed = threading.Event()

    async def wait(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, 20)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    read_arena = ShmFdTransportBackend.read_arena

    def held(backend: ShmFdTransportBackend, number: int, offset: int, into: memoryview) -> None:
        read_arena(backend, number, offset, into)
        gate.reached.set()
        assert gate.proceed.wait(20)

    monkeypatch.setattr(ShmFdTransportBackend, "read_arena", held)
    yield gate
    gate.proceed.set()


# ------------------------------------------------------------------------------------ both at once
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
        assert same(await first.import_tensors(), await second.import_tensors())
        assert leases_of(daemon) == 2
    assert backends_of(daemon) == BOTH
    (line,) = [r.getMessage() for r in caplog.records if "once more" in r.getMessage()]
    assert "a second copy" in line
    assert "transport torch_ipc, for a client that does not accept shm_fd" in line


async def test_a_client_that_accepts_both_costs_no_second_copy(
    daemon: Daemon, write_checkpoint: WriteCheckpoint
) -> None:
    await daemon.load(write_checkpoint(), name="m")
    async with Client(daemon.socket_path, backends=["torch_ipc", "shm_fd"]) as client:
        assert (await client.fetch_state("m")).transport_backend == "shm_fd"
    assert backends_of(daemon) == ("shm_fd",)
    assert shared_files() == []


async def test_a_client_that_names_no_backend_is_an_older_one_and_gets_torch_ipc(
    daemon: Daemon, write_checkpoint: WriteCheckpoint
) -> None:
    await daemon.load(write_checkpoint(), name="m")
    async with ScriptedPeer.connect(daemon.socket_path) as peer:
        await peer.greet(backends=())
        await peer.say(1, FetchState(name="m"))
        answer = await peer.hear()
        assert isinstance(answer, Received)
        assert isinstance(answer.message, FetchStateResponse)
        assert answer.message.transport_backend == "torch_ipc"
        assert len(answer.fds) == 3
        for fd in answer.fds:
            fd.close()


async def test_however_many_ask_at_once_it_is_made_once(
    daemon: Daemon, write_checkpoint: WriteCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[StateSpec] = []
    begin = TorchIpcTransportBackend.begin_export

    def counting(backend: TorchIpcTransportBackend, spec: StateSpec, *, device: str = "cpu") -> StateWriter:
        made.append(spec)
        return begin(backend, spec, device=device)

    monkeypatch.setattr(TorchIpcTransportBackend, "begin_export", counting)
    await daemon.load(write_checkpoint(), name="m")
    async with Client(daemon.socket_path, backends=["torch_ipc"]) as client:
        states = await asyncio.gather(*[client.fetch_state("m") for _ in range(8)])
        assert {state.transport_backend for state in states} == {"torch_ipc"}
        assert leases_of(daemon) == 8
        await client.fetch_state("m")
    assert len(made) == 1


async def test_nobody_else_waits_while_it_is_made(
    daemon: Daemon, write_checkpoint: WriteCheckpoint, gate: Gate
) -> None:
    await daemon.load(write_checkpoint(), name="m")
    async with Client(daemon.socket_path, backends=["torch_ipc"]) as client:
        fetching = asyncio.create_task(client.fetch_state("m"))
        await gate.wait()
        await client.status()
        other = await client.fetch_state("m", backends=["shm_fd"])
        assert len(await other.import_tensors()) == 3
        assert not fetching.done()
        gate.proceed.set()
        assert (await fetching).transport_backend == "torch_ipc"


async def test_both_are_given_up_together(daemon: Daemon, write_checkpoint: WriteCheckpoint) -> None:
    await daemon.load(write_checkpoint(), name="m")
    async with Client(daemon.socket_path, backends=["torch_ipc"]) as client:
        state = await client.fetch_state("m")
        await client.unload("m")
        assert (len(arena_fds()), len(shared_files())) == (1, 6)  # three of the daemon's, three of the client's
        await state.release()
        await asyncio.sleep(0)
        await eventually(lambda: gc.collect() >= 0 and (arena_fds(), shared_files()) == ([], []))


# ------------------------------------------------------------------------------- while it is made
async def test_a_client_that_goes_meanwhile_leaves_it_for_the_next(
    daemon: Daemon, write_checkpoint: WriteCheckpoint, gate: Gate
) -> None:
    await daemon.load(write_checkpoint(), name="m")
    async with Client(daemon.socket_path, backends=["torch_ipc"]) as client:
        fetching = asyncio.create_task(client.fetch_state("m"))
        await gate.wait()
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
    gate.proceed.set()
    await eventually(lambda: leases_of(daemon) == 0)
    assert backends_of(daemon) == BOTH


async def test_an_unload_meanwhile_waits_for_who_was_promised_it(
    daemon: Daemon, write_checkpoint: WriteCheckpoint, gate: Gate
) -> None:
    await daemon.load(write_checkpoint(), name="m")
    async with Client(daemon.socket_path, backends=["torch_ipc"]) as client:
        fetching = asyncio.create_task(client.fetch_state("m"))
        await gate.wait()
        await client.unload("m")
        with pytest.raises(StateNotFound):
            await client.fetch_state("m")
        gate.proceed.set()
        state = await fetching
        assert len(await state.import_tensors()) == 3
        await state.release()
    await eventually(lambda: gc.collect() >= 0 and (arena_fds(), shared_files()) == ([], []))


async def test_nobody_left_and_unloaded_it_is_given_up_when_made(
    daemon: Daemon, write_checkpoint: WriteCheckpoint, gate: Gate
) -> None:
    await daemon.load(write_checkpoint(), name="m")
    async with Client(daemon.socket_path, backends=["torch_ipc"]) as client:
        fetching = asyncio.create_task(client.fetch_state("m"))
        await gate.wait()
        await client.unload("m")
        fetching.cancel()
        await asyncio.wait((fetching,))
    gate.proceed.set()
    await eventually(lambda: (arena_fds(), shared_files()) == ([], []))


async def test_a_daemon_that_ends_meanwhile_says_so_and_copies_no_further(
    short_tmp: Path, write_checkpoint: WriteCheckpoint, gate: Gate
) -> None:
    daemon = Daemon(short_tmp / "w.sock", drain_timeout=20)
    await daemon.start()
    await daemon.load(write_checkpoint(), name="m")
    client = Client(daemon.socket_path, backends=["torch_ipc"])
    await client.connect()
    fetching = asyncio.create_task(client.fetch_state("m"))
    await gate.wait()
    closing = asyncio.create_task(daemon.close())
    await asyncio.sleep(0)
    gate.proceed.set()
    with pytest.raises((Draining, DaemonLost)):
        await fetching
    await closing
    await client.close()
    assert (arena_fds(), shared_files()) == ([], [])


# ------------------------------------------------------------------------------- where it cannot be
async def test_memory_that_cannot_be_had_is_told_and_changes_nothing(
    daemon: Daemon, write_checkpoint: WriteCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(nbytes: int, storages: int) -> None:
        raise InsufficientMemory(needed=nbytes, available=0, limit="a test")

    await daemon.load(write_checkpoint(), name="m")
    async with Client(daemon.socket_path, backends=["torch_ipc"]) as client:
        with monkeypatch.context() as patch:
            patch.setattr("wcache_async.backends.torch_writer.check_room", full)
            with pytest.raises(InsufficientMemory):
                await client.fetch_state("m")
        assert (backends_of(daemon), leases_of(daemon)) == (("shm_fd",), 0)
        assert (await client.fetch_state("m", backends=["shm_fd"])).transport_backend == "shm_fd"
        assert (await client.fetch_state("m")).transport_backend == "torch_ipc"
    assert torch_shared.check_room is not full


async def test_a_copy_that_fails_half_way_leaves_nothing_of_itself(
    daemon: Daemon, write_checkpoint: WriteCheckpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def failing(backend: ShmFdTransportBackend, number: int, offset: int, into: memoryview) -> None:
        calls.append(number)
        if len(calls) == 2:
            raise ZeroDivisionError("a bug in a backend")

    monkeypatch.setattr(ShmFdTransportBackend, "read_arena", failing)
    await daemon.load(write_checkpoint(), name="m")
    async with Client(daemon.socket_path, backends=["torch_ipc"]) as client:
        with pytest.raises(BackendUnavailable, match="ZeroDivisionError: a bug in a backend"):
            await client.fetch_state("m")
        assert len(calls) == 2
        await client.status()
    assert (len(arena_fds()), shared_files()) == (1, [])
    assert "failed unexpectedly" in caplog.text


async def test_a_backend_that_cannot_be_read_back_is_the_only_one(
    daemon: Daemon, write_checkpoint: WriteCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ShmFdTransportBackend, "read_arena", WeightCacheTransportBackend.read_arena)
    await daemon.load(write_checkpoint(), name="m")
    async with Client(daemon.socket_path, backends=["torch_ipc"]) as client:
        with pytest.raises(BackendUnavailable, match="read back") as caught:
            await client.fetch_state("m")
        assert caught.value.name == "shm_fd"


async def test_no_backend_in_common_is_told_with_what_there_is(
    daemon: Daemon, write_checkpoint: WriteCheckpoint
) -> None:
    await daemon.load(write_checkpoint(), name="m")
    async with Client(daemon.socket_path, backends=["vmm_fd", "from_the_future"]) as client:
        with pytest.raises(BackendNotAccepted) as caught:
            await client.fetch_state("m")
        assert caught.value.accepted == ["vmm_fd", "from_the_future"]
        assert caught.value.exportable == list(BOTH)
    assert (backends_of(daemon), leases_of(daemon)) == (("shm_fd",), 0)


@pytest.mark.parametrize("backend", BOTH)
async def test_a_backend_named_by_the_user_is_the_only_one(
    short_tmp: Path, write_checkpoint: WriteCheckpoint, backend: str
) -> None:
    (other,) = set(BOTH) - {backend}
    async with Daemon(short_tmp / "w.sock", backend=backend) as daemon:
        await daemon.load(write_checkpoint(), name="m")
        async with Client(daemon.socket_path, backends=[other]) as client:
            with pytest.raises(BackendNotAccepted) as caught:
                await client.fetch_state("m")
            assert caught.value.exportable == [backend]
            assert (await client.fetch_state("m", backends=[backend])).transport_backend == backend


async def test_a_backend_named_for_one_load_is_the_only_one_of_that_state(
    daemon: Daemon, write_checkpoint: WriteCheckpoint
) -> None:
    async with Client(daemon.socket_path, backends=["shm_fd"]) as client:
        await client.load(write_checkpoint(), "m", backend="torch_ipc")
        with pytest.raises(BackendNotAccepted):
            await client.fetch_state("m")


@pytest.mark.parametrize(("backend", "error"), [("vmm_fd", BackendUnavailable), ("warp_drive", UnknownBackend)])
async def test_an_impossible_backend_is_an_error_at_the_start_and_never_a_downgrade(
    short_tmp: Path, daemon: Daemon, write_checkpoint: WriteCheckpoint, backend: str, error: type[Exception]
) -> None:
    with pytest.raises(error, match=backend) as caught:
        await Daemon(short_tmp / "w.sock", backend=backend).start()
    if isinstance(caught.value, UnknownBackend):
        assert {*BOTH, "vmm_fd"} <= set(caught.value.known)
    async with Client(daemon.socket_path) as client:
        with pytest.raises(error, match=backend):
            await client.load(write_checkpoint(), "m", backend=backend)
    assert daemon.status().states == ()

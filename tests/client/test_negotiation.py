"""What a client makes of the backend a response names, and of the fds that come with it."""

import asyncio
import os
import resource
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from tests.conformance.states import weights
from tests.conformance.wire import blank_response
from tests.processes import Forge, Peer
from wcache_async import Client, Daemon, blocking
from wcache_async.backends.torch_ipc import TorchIpcTransportBackend
from wcache_async.client.fetch import FetchedState
from wcache_async.errors import (
    BackendNotAccepted,
    BackendUnavailable,
    FdsTruncated,
    FdsUndeclared,
    InvalidMemfd,
    UnknownBackend,
    WeightCacheError,
)
from wcache_async.protocol.connection import Received, Role
from wcache_async.protocol.messages import FetchState, FetchStateResponse, Hello, Message, Release, Welcome
from wcache_async.sockets.fds import OwnedFd
from wcache_async.testing.scripted_peer import ScriptedPeer


@dataclass
class Outbox:
    """What a backend sends."""

    response: FetchStateResponse | None = None
    fds: list[OwnedFd] = field(default_factory=list)

    async def send(self, response: FetchStateResponse, fds: Sequence[OwnedFd]) -> None:
        self.response = response
        self.fds += fds


class ScriptedDaemon:
    """A listening socket at which tests play the daemon."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.bind(os.fspath(path))
        self._sock.listen()
        self._sock.setblocking(False)

    def close(self) -> None:
        self._sock.close()

    async def serve(self, response: FetchStateResponse, fds: Sequence[int] = ()) -> Message | None:
        """Greet one client, answer its fetch, and say what it sends next, if anything."""
        sock, _ = await asyncio.get_running_loop().sock_accept(self._sock)
        async with ScriptedPeer(sock, Role.DAEMON) as peer:
            hello = await peer.hear()
            assert isinstance(hello, Received)
            assert isinstance(hello.message, Hello)
            await peer.say(0, Welcome(version=1))
            fetch = await peer.hear()
            assert isinstance(fetch, Received)
            assert isinstance(fetch.message, FetchState)
            await peer.say(fetch.request_id, response, fds)
            then = await peer.hear()
            return then.message if isinstance(then, Received) else None


@pytest.fixture
async def old_daemon(short_tmp: Path) -> AsyncIterator[ScriptedDaemon]:
    daemon = ScriptedDaemon(short_tmp / "w.sock")
    yield daemon
    daemon.close()


@asynccontextmanager
async def exported() -> AsyncIterator[tuple[FetchStateResponse, list[int]]]:
    """A true response of torch_ipc for `weights`, and its fds."""
    backend = TorchIpcTransportBackend()
    manifest = await asyncio.to_thread(backend.prepare_export, weights("cpu"))
    outbox = Outbox()
    await backend.send_fetch_state_response(outbox, blank_response(manifest), [])
    assert outbox.response is not None
    try:
        yield outbox.response, [fd.fileno() for fd in outbox.fds]
    finally:
        for fd in outbox.fds:
            fd.close()
        backend.close()


async def fetch(daemon: ScriptedDaemon, backends: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
    async with Client(daemon.path, backends=backends) as client:
        state: FetchedState = await client.fetch_state("state")
        assert state.transport_backend == "torch_ipc"
        return await state.import_tensors()


async def test_a_response_that_names_no_backend_is_an_older_daemons_torch_ipc(old_daemon: ScriptedDaemon) -> None:
    async with exported() as (response, fds):
        unnamed = msgspec.structs.replace(response, transport_backend="")
        assert b"transport_backend" not in msgspec.msgpack.encode(unnamed)
        serving = asyncio.create_task(old_daemon.serve(unnamed, fds))
        tensors = await fetch(old_daemon)
        expected = weights("cpu")
        assert all(torch.equal(tensors[name], tensor) for name, (tensor, _) in expected.items())
        await serving


@pytest.mark.parametrize(
    ("named", "accepted", "error", "says"),
    [
        ("warp_drive", None, UnknownBackend, "known: vmm_fd, torch_ipc, shm_fd"),
        ("vmm_fd", None, BackendUnavailable, "'vmm_fd' cannot work here"),
        ("torch_ipc", ["shm_fd"], BackendNotAccepted, "carried by torch_ipc, the client accepts shm_fd"),
        ("", ["shm_fd"], BackendNotAccepted, "carried by torch_ipc, the client accepts shm_fd"),
    ],
)
async def test_any_other_name_is_told_and_the_lease_given_back(
    old_daemon: ScriptedDaemon, named: str, accepted: list[str] | None, error: type[WeightCacheError], says: str
) -> None:
    async with exported() as (response, fds):
        serving = asyncio.create_task(
            old_daemon.serve(msgspec.structs.replace(response, transport_backend=named, lease=77), fds)
        )
        with pytest.raises(error) as caught:
            await fetch(old_daemon, accepted)
        assert says in str(caught.value)
        assert await serving == Release(lease=77)


async def test_fds_that_are_missing_are_told_with_what_to_do(old_daemon: ScriptedDaemon) -> None:
    async with exported() as (response, fds):
        for kept in (0, len(fds) - 1):
            serving = asyncio.create_task(old_daemon.serve(response, fds[:kept]))
            with pytest.raises(FdsTruncated) as caught:
                await fetch(old_daemon)
            assert (caught.value.expected, caught.value.got) == (len(fds), kept)
            assert "`ulimit -n`" in str(caught.value)
            assert "shm_fd" in str(caught.value)
            assert isinstance(await serving, Release)


async def test_fds_that_nobody_announced_are_refused(old_daemon: ScriptedDaemon) -> None:
    async with exported() as (response, fds):
        serving = asyncio.create_task(old_daemon.serve(response, [*fds, fds[0]]))
        with pytest.raises(FdsUndeclared) as caught:
            await fetch(old_daemon)
        assert (caught.value.expected, caught.value.got) == (len(fds), len(fds) + 1)
        assert isinstance(await serving, Release)


async def test_an_fd_of_another_kind_in_the_middle_is_refused(old_daemon: ScriptedDaemon) -> None:
    read, write = os.pipe()
    async with exported() as (response, fds):
        serving = asyncio.create_task(old_daemon.serve(response, [fds[0], read, *fds[2:]]))
        with pytest.raises(InvalidMemfd, match="arena 1"):
            await fetch(old_daemon)
        assert isinstance(await serving, Release)
    os.close(read)
    os.close(write)


# ------------------------------------------------------------------------------ a thousand storages
def fetch_with_few_fds(peer: Peer, path: str, soft: int, hard: int) -> None:
    """Child: fetch 1,000 storages, and say how many tensors, or what else, came."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        with blocking.Client(path, backends=["torch_ipc"]) as client:
            peer.send(len(client.fetch_state("m").import_tensors()))
    except WeightCacheError as error:
        peer.send((error.code, str(error)))


async def test_a_thousand_storages_and_a_low_limit(daemon: Daemon, tmp_path: Path, forge: Forge) -> None:
    """The soft limit is raised; at the hard one the client is told what to do, and the next one is served."""
    path = tmp_path / "many.safetensors"
    await asyncio.to_thread(save_file, {f"t{i}": torch.full((3,), float(i)) for i in range(1000)}, path)
    await daemon.load(path, name="m")
    with forge.start(fetch_with_few_fds, daemon.socket_path, 64, 500) as starved:
        code, text = await asyncio.to_thread(starved.receive)
        assert code == "fds_truncated"
        assert "`ulimit -n`" in text
        assert "shm_fd" in text
    with forge.start(fetch_with_few_fds, daemon.socket_path, 64, 4096) as child:
        assert await asyncio.to_thread(child.receive) == 1000

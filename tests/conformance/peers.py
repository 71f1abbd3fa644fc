"""Both ends of a state in use: a backend served from this process or another, and clients in others."""

import asyncio
import os
import resource
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import torch

from tests.conformance.cases import StateBuilder, by_name
from tests.conformance.wire import connect, fetch, serve
from tests.processes import Peer
from wcache_async.backends.base import WeightCacheTransportBackend
from wcache_async.manifest import StateManifest
from wcache_async.protocol.connection import Violation
from wcache_async.protocol.messages import FetchState

__all__ = ["Served", "attached", "client", "daemon", "served", "starved_client"]

Report = Callable[[dict[str, torch.Tensor]], object]


class Served:
    """A state that this process serves to whoever holds an end of `dial`'s."""

    def __init__(self, backend: WeightCacheTransportBackend, manifest: StateManifest, tasks: asyncio.TaskGroup) -> None:
        self.backend = backend
        self.manifest = manifest
        self._tasks = tasks

    def dial(self) -> socket.socket:
        """The client's end of a new connection."""
        ours, theirs = socket.socketpair()
        self._tasks.create_task(serve(ours, self.backend, self.manifest))
        return theirs


@asynccontextmanager
async def served(case_name: str, build: StateBuilder) -> AsyncIterator[Served]:
    """Export `build`'s tensors and serve them; every client must have hung up by the end."""
    case = by_name[case_name]
    backend = case.backend()
    try:
        manifest = await asyncio.to_thread(backend.prepare_export, build(case.device))
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            yield Served(backend, manifest, tasks)
    finally:
        backend.close()


@asynccontextmanager
async def attached(
    case_name: str, build: StateBuilder
) -> AsyncIterator[tuple[WeightCacheTransportBackend, StateManifest]]:
    """Export, serve and attach, all in this process: the client's half, its arenas open."""
    async with served(case_name, build) as state:
        stream = await connect(state.dial())
        try:
            backend, manifest = await fetch(stream)
        finally:
            stream.close()
    try:
        yield backend, manifest
    finally:
        backend.close()


def client(peer: Peer, sock: socket.socket, report: Report) -> None:
    """Child: attach, send `report` of the tensors, and again at each word, until the test hangs up."""

    async def main() -> dict[str, torch.Tensor]:
        stream = await connect(sock)
        try:
            backend, _ = await fetch(stream)
            return await asyncio.to_thread(backend.import_tensors)
        finally:
            stream.close()

    tensors = asyncio.run(main())
    peer.send(report(tensors))
    while peer.receive() != "done":
        peer.send(report(tensors))


def starved_client(peer: Peer, sock: socket.socket) -> None:
    """Child: fetch with no descriptor number left to receive an fd in; sends the code of what it was told."""

    async def main() -> str:
        stream = await connect(sock)
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        stream.send(1, FetchState(name="state"))
        event = await stream.receive()
        stream.close()
        assert isinstance(event, Violation), event
        return event.error.code

    peer.send(asyncio.run(main()))


def daemon(peer: Peer, sock: socket.socket, case_name: str, build: StateBuilder) -> None:
    """Child: export and serve one connection; says when it is ready."""
    case = by_name[case_name]
    backend = case.backend()
    manifest = backend.prepare_export(build(case.device))
    peer.send("ready")
    asyncio.run(serve(sock, backend, manifest))

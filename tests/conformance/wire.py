"""A daemon and a client cut down to what carries one state: real frames on a real socketpair."""

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

from wcache_async.backends.base import ImportOptions, WeightCacheTransportBackend
from wcache_async.backends.registry import get_client_transport_backend
from wcache_async.errors import FdsTruncated
from wcache_async.manifest import StateManifest, decode_manifest, encode_manifest
from wcache_async.protocol.connection import Connection, Received, Role
from wcache_async.protocol.messages import FetchState, FetchStateResponse, Hello, Welcome
from wcache_async.sockets.fds import OwnedFd
from wcache_async.sockets.stream import FdStream

__all__ = ["ReceivedFds", "StreamSender", "blank_response", "connect", "fetch", "receive_response", "serve"]


@dataclass
class StreamSender:
    """One request's end at the daemon (a ResponseSender)."""

    stream: FdStream
    request_id: int

    async def send(self, response: FetchStateResponse, fds: Sequence[OwnedFd]) -> None:
        self.stream.send(self.request_id, response, fds)
        await self.stream.drain(30)


@dataclass
class ReceivedFds:
    """One request's end at the client (a ResponseReceiver)."""

    fds: list[OwnedFd] = field(default_factory=list)

    def take_fds(self, count: int) -> list[OwnedFd]:
        if count > len(self.fds):
            raise FdsTruncated(expected=count, got=len(self.fds))
        taken, self.fds = self.fds[:count], self.fds[count:]
        return taken

    def close(self) -> None:
        for fd in self.fds:
            fd.close()


def blank_response(manifest: StateManifest) -> FetchStateResponse:
    """A response with everything but what the backend fills in."""
    body = encode_manifest(manifest)
    return FetchStateResponse(
        name="state", rank=0, generation=1, lease=1, config={}, manifest_nbytes=len(body), manifest=body
    )


async def serve(sock: socket.socket, backend: WeightCacheTransportBackend, manifest: StateManifest) -> None:
    """Answer every fetch on `sock` until the peer hangs up."""
    stream = FdStream(sock, Connection(Role.DAEMON))
    try:
        while True:
            match await stream.receive():
                case Received(request_id, Hello()):
                    stream.send(request_id, Welcome(version=1))
                case Received(request_id, FetchState()):
                    await backend.send_fetch_state_response(
                        StreamSender(stream, request_id), blank_response(manifest), []
                    )
                case _:
                    return
    finally:
        stream.close()


async def connect(sock: socket.socket) -> FdStream:
    """The client's stream on `sock`, past the handshake."""
    stream = FdStream(sock, Connection(Role.CLIENT))
    stream.send(0, Hello(versions=(1, 1)))
    async with asyncio.timeout(30):
        await stream.receive()
    return stream


async def receive_response(stream: FdStream) -> tuple[FetchStateResponse, ReceivedFds]:
    """Fetch, up to the response and its fds."""
    stream.send(1, FetchState(name="state"))
    async with asyncio.timeout(30):
        event = await stream.receive()
    assert isinstance(event, Received), event
    assert isinstance(event.message, FetchStateResponse), event
    return event.message, ReceivedFds(list(event.fds))


async def fetch(
    stream: FdStream, options: ImportOptions | None = None
) -> tuple[WeightCacheTransportBackend, StateManifest]:
    """Fetch, and open the arenas with the backend the response names."""
    response, fds = await receive_response(stream)
    assert response.manifest is not None
    manifest = decode_manifest(response.manifest)
    backend = get_client_transport_backend(response.transport_backend, options)
    await backend.recv_fetch_state_response(fds, response, manifest)
    assert not fds.fds, "more fds came than the backend took"
    return backend, manifest

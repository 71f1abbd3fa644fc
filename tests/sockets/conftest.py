"""Two ends of a connection, and a limit on descriptors."""

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from tests.sockets.wire import DEADLINE, client, frame
from wcache_async.protocol.connection import Received
from wcache_async.protocol.messages import Welcome
from wcache_async.sockets.stream import FdStream


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two connected raw sockets, which block for ten seconds at most."""
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    a.settimeout(DEADLINE)
    b.settimeout(DEADLINE)
    with a, b:
        yield a, b


@pytest.fixture
async def pair() -> AsyncIterator[tuple[FdStream, FdStream]]:
    """Two streams past their handshake.

    Both in the client's role, as only that takes fds: so each may send them to the other.
    """
    one, other = (FdStream(sock, client()) for sock in socket.socketpair())
    for sender, receiver in ((one, other), (other, one)):
        sender.send(0, Welcome(version=1))
        async with asyncio.timeout(DEADLINE):
            assert isinstance(await receiver.receive(), Received)
    yield one, other
    one.close()
    other.close()


@pytest.fixture
async def with_raw(sockets: tuple[socket.socket, socket.socket]) -> AsyncIterator[tuple[FdStream, socket.socket]]:
    """A stream past its handshake, in the client's role, and a raw non-blocking socket as its peer."""
    ours, raw = sockets
    raw.setblocking(False)
    stream = FdStream(ours, client())
    raw.send(frame(0, Welcome(version=1)))
    async with asyncio.timeout(DEADLINE):
        assert isinstance(await stream.receive(), Received)
    yield stream, raw
    stream.close()


@pytest.fixture
def room_for_fds() -> Callable[[int], AbstractContextManager[None]]:
    """A context in which this process can open that many more descriptors."""

    @contextlib.contextmanager
    def limited(count: int) -> Iterator[None]:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        # The limit is on an fd's number: fill the gaps, so that whichever is closed can be had again.
        fillers = [os.eventfd(0)]
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        while fillers[-1] < highest:
            fillers.append(os.eventfd(0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (fillers[-1] + 1 + count, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for filler in fillers:
                os.close(filler)

    return limited

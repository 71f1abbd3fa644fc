"""What the ends of a connection under test send each other."""

import array
import asyncio
import os
import socket
from collections.abc import Callable

from wcache_async.protocol.connection import MAX_RESPONSE_NBYTES, Connection, Event, Received, Role
from wcache_async.protocol.framing import Segment, encode_frame
from wcache_async.protocol.messages import FetchStateResponse, Message, encode_message
from wcache_async.sockets.fds import OwnedFd

DEADLINE = 20.0
"""Seconds after which a test that waits has failed; none is expected to wait."""


def client() -> Connection[OwnedFd]:
    """A connection in the client's role, as only that takes fds, which may send as much as it takes."""
    return Connection(Role.CLIENT, max_request=MAX_RESPONSE_NBYTES)


def response(payload: bytes = b"") -> FetchStateResponse:
    """A message of any size that may have fds."""
    return FetchStateResponse(name="s", rank=0, generation=0, lease=0, config={}, manifest_nbytes=0, payload=payload)


def frame(request_id: int, message: Message) -> bytes:
    segments: list[Segment[OwnedFd]] = encode_frame(request_id, encode_message(message))
    return b"".join(segment.data for segment in segments)


def send_with_fds(sock: socket.socket, data: bytes, fds: list[OwnedFd]) -> None:
    """All of `data` in one message, with `fds` on it."""
    rights = array.array("i", [fd.fileno() for fd in fds])
    assert sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]) == len(data)


def numbered(count: int) -> list[OwnedFd]:
    """That many descriptors, of files that each say their place in the list."""
    fds = []
    for number in range(count):
        fd = OwnedFd(os.memfd_create("numbered", os.MFD_CLOEXEC))
        os.write(fd.fileno(), b"%d" % number)
        fds.append(fd)
    return fds


def take_numbers(event: Event[OwnedFd]) -> list[int]:
    """What the files of a received message say; closes them."""
    assert isinstance(event, Received)
    numbers = []
    for fd in event.fds:
        numbers.append(int(os.pread(fd.fileno(), 20, 0)))
        fd.close()
    return numbers


def received(event: Event[OwnedFd]) -> Received[OwnedFd]:
    assert isinstance(event, Received), event
    return event


async def until(condition: Callable[[], object]) -> None:
    """Let the loop turn until it holds."""
    async with asyncio.timeout(DEADLINE):
        while not condition():  # noqa: ASYNC110 - of callbacks that have nothing to signal with
            await asyncio.sleep(0)

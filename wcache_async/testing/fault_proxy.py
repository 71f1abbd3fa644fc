"""A proxy between client and daemon that passes everything on, but for one fault at a named place.

It works on bytes and fds and knows nothing of frames, so that it can do what no honest peer
would: cut a connection inside a header, deliver a message byte by byte, lose or double the
descriptors that belong to it.
"""

import asyncio
import contextlib
import os
import socket
from array import array
from collections.abc import Coroutine
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Self

from wcache_async.sockets.fds import OwnedFd, own_received

__all__ = ["Direction", "Fault", "FaultProxy", "Fds"]

_ANCILLARY_NBYTES = socket.CMSG_SPACE(4 * 253)


class Direction(Enum):
    TO_CLIENT = "to_client"
    TO_DAEMON = "to_daemon"


class Fds(Enum):
    """What happens to the descriptors of each message."""

    KEEP = "keep"
    STRIP = "strip"
    """They are lost."""
    DOUBLE = "double"
    """Each comes twice."""
    SWAP = "swap"
    """They come in reverse order."""
    REPLACE = "replace"
    """Each is /dev/null."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong in one direction.

    `cut_after` ends the connection once that many bytes were passed on; `split` passes single
    bytes, each in a write of its own; `fds` says what becomes of descriptors.
    """

    direction: Direction = Direction.TO_CLIENT
    cut_after: int | None = None
    split: bool = False
    fds: Fds = Fds.KEEP


class FaultProxy:
    """Listens on `path` and passes connections on to the daemon at `upstream`.  An asynchronous context manager."""

    def __init__(self, path: str | os.PathLike[str], upstream: str | os.PathLike[str], fault: Fault) -> None:
        self.path = os.fspath(path)
        self.upstream = os.fspath(upstream)
        self.fault = fault
        self.passed = dict.fromkeys(Direction, 0)
        """Bytes passed on so far, by direction."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        os.fchmod(self._listener.fileno(), 0o600)  # Clients trust no socket that others may connect to.
        self._listener.bind(self.path)
        self._listener.listen(64)
        self._listener.setblocking(False)
        self._spawn(self._accept())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        while True:
            await _readable(self._listener)
            with contextlib.suppress(BlockingIOError):
                client, _ = self._listener.accept()
                client.setblocking(False)
                self._spawn(self._serve(client))
                await asyncio.sleep(0)  # It owns the socket from its first step on.

    async def _serve(self, client: socket.socket) -> None:
        with client, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as daemon:
            daemon.setblocking(False)
            daemon.connect(self.upstream)
            pumps = [
                asyncio.create_task(self._pump(daemon, client, Direction.TO_CLIENT)),
                asyncio.create_task(self._pump(client, daemon, Direction.TO_DAEMON)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.wait(pumps)

    async def _pump(self, source: socket.socket, target: socket.socket, direction: Direction) -> None:
        fault = self.fault if self.fault.direction is direction else Fault(direction=direction)
        while True:
            await _readable(source)
            try:
                data, ancillary, _, _ = source.recvmsg(64 << 10, _ANCILLARY_NBYTES, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                continue
            except ConnectionError:
                return
            fds = _changed(own_received(ancillary), fault.fds)
            try:
                if not await self._pass_on(target, data, fds, fault):
                    return
            finally:
                for fd in fds:
                    fd.close()

    async def _pass_on(self, target: socket.socket, data: bytes, fds: list[OwnedFd], fault: Fault) -> bool:
        """False where the connection ends here."""
        ends = not data
        if fault.cut_after is not None:
            left = fault.cut_after - self.passed[fault.direction]
            ends = ends or left <= len(data)
            data = data[: max(left, 0)]
        for start in range(0, len(data), 1 if fault.split else len(data) or 1):
            piece = data[start : start + 1] if fault.split else data
            if not await _send(target, piece, fds if start == 0 else []):
                return False
            self.passed[fault.direction] += len(piece)
        return not ends


def _changed(fds: list[OwnedFd], how: Fds) -> list[OwnedFd]:
    if how is Fds.KEEP:
        return fds
    if how is Fds.DOUBLE:
        return [fd for original in fds for fd in (original, original.duplicate())]
    if how is Fds.SWAP:
        return fds[::-1]
    for fd in fds:
        fd.close()
    return [] if how is Fds.STRIP else [OwnedFd(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)) for _ in fds]


async def _send(target: socket.socket, data: bytes, fds: list[OwnedFd]) -> bool:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [fd.fileno() for fd in fds]))] if fds else []
    view = memoryview(data)
    while view:
        try:
            view = view[target.sendmsg([view], rights, socket.MSG_NOSIGNAL) :]
            rights = []  # They went with the first byte.
        except BlockingIOError:
            await _ready(target, writing=True)
        except ConnectionError:
            return False
    return True


async def _readable(sock: socket.socket) -> None:
    await _ready(sock, writing=False)


async def _ready(sock: socket.socket, *, writing: bool) -> None:
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    # By number: uvloop keeps a registered socket object's fd open past its close().
    number = sock.fileno()
    if writing:
        loop.add_writer(number, event.set)
    else:
        loop.add_reader(number, event.set)
    try:
        await event.wait()
    finally:
        if writing:
            loop.remove_writer(number)
        else:
            loop.remove_reader(number)

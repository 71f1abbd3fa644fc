"""A peer that says exactly what a test tells it to, rules or no rules, and reports what it hears."""

import asyncio
import os
import socket
from array import array
from collections import deque
from collections.abc import Sequence
from typing import Self

from wcache_async.protocol.connection import Connection, EndOfStream, Event, Role
from wcache_async.protocol.framing import MAX_FDS_PER_MESSAGE, encode_frame
from wcache_async.protocol.messages import PROTOCOL_VERSIONS, Hello, Message, encode_message
from wcache_async.sockets.fds import OwnedFd

__all__ = ["ScriptedPeer"]


class ScriptedPeer:
    """One end of a Unix socket in a test's hands.  An asynchronous context manager."""

    def __init__(self, sock: socket.socket, role: Role = Role.CLIENT) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._connection: Connection[OwnedFd] = Connection(role)
        self._heard: deque[Event[OwnedFd]] = deque()

    @classmethod
    def connect(cls, path: str | os.PathLike[str]) -> Self:
        """Connect to a daemon without saying anything."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        sock.setblocking(False)  # A Unix socket connects at once, or not at all.
        try:
            sock.connect(os.fspath(path))
        except BaseException:
            sock.close()
            raise
        return cls(sock)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up, and close every fd that came."""
        self.sock.close()
        for fd in self._connection.take_fds():
            fd.close()
        while self._heard:
            event = self._heard.popleft()
            if not isinstance(event, EndOfStream):
                for fd in event.fds:
                    fd.close()

    async def send_bytes(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send any bytes, with any fds on the first of them."""
        if fds:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))
            sent = self.sock.sendmsg([data], [rights], socket.MSG_NOSIGNAL)
            data = data[sent:]
        if data:
            await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def say(self, request_id: int, message: Message, fds: Sequence[int] = ()) -> None:
        """Send a message as the protocol wants it, whatever was said before."""
        for segment in encode_frame(request_id, encode_message(message), fds):
            await self.send_bytes(segment.data, segment.fds)

    async def greet(self, backends: Sequence[str] = ("shm_fd",)) -> Event[OwnedFd]:
        """Say hello as a well-behaved client, and return the answer."""
        await self.say(0, Hello(versions=PROTOCOL_VERSIONS, client="scripted", backends=tuple(backends)))
        return await self.hear()

    async def hear(self, timeout: float = 20.0) -> Event[OwnedFd]:
        """The next message, violation or end.  Raises TimeoutError after `timeout` seconds."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(timeout):
            while not self._heard:
                readable = asyncio.Event()
                # By number: uvloop keeps a registered socket object's fd open past its close().
                number = self.sock.fileno()
                loop.add_reader(number, readable.set)
                try:
                    await readable.wait()
                finally:
                    loop.remove_reader(number)
                self._receive()
        return self._heard.popleft()

    def _receive(self) -> None:
        try:
            data, ancillary, _, _ = self.sock.recvmsg(
                64 << 10, socket.CMSG_SPACE(4 * MAX_FDS_PER_MESSAGE), socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except ConnectionResetError:
            data, ancillary = b"", []
        fds = []
        for _, _, rights in ancillary:
            numbers = array("i", rights[: len(rights) - len(rights) % 4])
            fds += [OwnedFd(number) for number in numbers]
        if data:
            self._connection.receive_data(data, fds)
        else:
            self._connection.receive_eof()
        self._heard.extend(self._connection.events_received())

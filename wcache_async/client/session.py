"""One connection to a daemon, shared by any number of requests at once.

A reader task takes every event off the stream and leaves it with the request it answers; the
future a request waits on only signals, so that a cancelled request loses nothing: a response
that comes too late has its fds closed, and its lease given back.
"""

import asyncio
import contextlib
import copy
import logging
import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from wcache_async.errors import (
    ClientClosed,
    ClientElsewhere,
    DaemonLost,
    PeerTimeout,
    ProtocolError,
    StreamBroken,
    StreamClosed,
    StreamError,
    UnexpectedMessage,
    WeightCacheError,
)
from wcache_async.protocol.connection import Connection, EndOfStream, Received, Role, Violation
from wcache_async.protocol.messages import (
    PROTOCOL_VERSIONS,
    Abandon,
    BuildTicket,
    ErrorResponse,
    FetchStateResponse,
    Hello,
    LoadProgress,
    Message,
    Release,
    Welcome,
    check_request,
    type_of,
)
from wcache_async.sockets.fds import OwnedFd
from wcache_async.sockets.listen import connect
from wcache_async.sockets.stream import FdStream

__all__ = ["Answer", "Progress", "Session"]

logger = logging.getLogger("wcache_async.client")

M = TypeVar("M", bound=Message)

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all while a state is LOADING."""


class Answer:
    """What one request got: its response, and the fds that came with it until they are taken."""

    __slots__ = ("_wake", "error", "fds", "message", "progress")

    def __init__(self, wake: "asyncio.Future[None]", progress: Progress | None) -> None:
        self._wake = wake
        self.progress = progress
        self.message: Message | None = None
        self.fds: list[OwnedFd] = []
        self.error: Exception | None = None

    def settle(self) -> None:
        if not self._wake.done():
            self._wake.set_result(None)

    async def settled(self) -> None:
        await self._wake

    def take_fds(self) -> list[OwnedFd]:
        """The fds, now the caller's."""
        fds, self.fds = self.fds, []
        return fds

    def close(self) -> None:
        """Close the fds nobody took."""
        for fd in self.fds:
            fd.close()
        self.fds.clear()


class Session:
    """A connection after the handshake's first half: `open` it, send requests, `close` it."""

    def __init__(self, stream: FdStream, socket_path: str, backends: tuple[str, ...] = ()) -> None:
        self.socket_path = socket_path
        self.backends = backends
        """The transports accepted unless a request says otherwise."""
        self.welcome: Welcome | None = None
        """Who the daemon is; None until its first answer."""
        self._loop = loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = loop.create_future()
        """Done once the connection is gone, whoever ended it."""
        self._greeted: asyncio.Future[None] = loop.create_future()
        self._stream = stream
        self._pid = os.getpid()
        self._last_id = 0
        self._answers: dict[int, Answer] = {}
        self._error: WeightCacheError | None = None
        self._reader = loop.create_task(self._read(), name="wcache-client-reader")

    @classmethod
    async def open(cls, socket_path: str, *, backends: tuple[str, ...], client: str, timeout: float) -> "Session":
        """Connect and say hello, without waiting for the answer: the first request may follow at once.

        Raises NotRunning, PeerNotAllowed, AddressError.
        """
        sock = await connect(socket_path, timeout)
        stream = FdStream(sock, Connection(Role.CLIENT))
        try:
            hello = Hello(versions=PROTOCOL_VERSIONS, client=client, pid=os.getpid(), backends=backends)
            stream.send(0, hello)
        except BaseException:
            stream.close()
            raise
        return cls(stream, socket_path, backends)

    @property
    def inherited(self) -> bool:
        """Whether this is a forked child's copy: the connection, and every lease on it, are its parent's."""
        return self._pid != os.getpid()

    @property
    def orphaned(self) -> bool:
        """Whether nothing will ever read this connection again: its event loop is closed, or its parent process's."""
        return self.inherited or self._loop.is_closed()

    @property
    def gone(self) -> bool:
        """Whether nothing can be asked over this connection any more."""
        return self.orphaned or self.ended.done()

    def check_here(self) -> None:
        """Raises ClientElsewhere in another process or event loop than the connection's."""
        if self.inherited:
            raise ClientElsewhere(where="a forked child")
        if asyncio.get_running_loop() is not self._loop:
            raise ClientElsewhere(where="another event loop")

    async def welcomed(self, timeout: float) -> None:
        """Wait for the daemon's half of the handshake.  Raises PeerTimeout, or what ended the connection."""
        try:
            async with asyncio.timeout(timeout):
                await asyncio.shield(self._greeted)
        except TimeoutError:
            raise PeerTimeout(what="answer a hello", seconds=timeout) from None
        self._check_open()

    async def notice_end(self) -> None:
        """Take in that the daemon has hung up, where it has: a loop that was kept busy does not know yet."""
        if not self.gone and self._stream.hung_up:
            await asyncio.shield(self.ended)

    @property
    def lost(self) -> DaemonLost | None:
        """Why the daemon is gone; None while it is not, or where this side hung up."""
        error = self._error
        if error is None or isinstance(error, ClientClosed | DaemonLost):
            return error if isinstance(error, DaemonLost) else None
        return DaemonLost(socket=self.socket_path, reason=error.message)

    @property
    def daemon_pid(self) -> int:
        """The kernel's word for who is at the other end (SO_PEERCRED); 0 across PID namespaces."""
        return self._stream.peer.pid

    async def request(
        self,
        message: Message,
        expected: type[M] | tuple[type[M], ...],
        progress: Progress | None = None,
        fds: Sequence[OwnedFd] = (),
    ) -> tuple[M, Answer]:
        """Send a request, with `fds`, which it takes over, and wait for its response.

        Raises the daemon's error, InvalidRequest for what it could not even decode, DaemonLost,
        ClientClosed, ClientElsewhere, ProtocolError.  The caller closes the Answer, or takes its fds.
        """
        try:
            self.check_here()
            self._check_open()
            check_request(message)
        except BaseException:
            for fd in fds:
                fd.close()
            raise
        self._last_id += 1
        request_id = self._last_id
        answer = Answer(asyncio.get_running_loop().create_future(), progress)
        self._answers[request_id] = answer
        try:
            try:
                self._stream.send(request_id, message, fds)
            except (StreamBroken, StreamClosed):
                # The daemon has hung up; why, the reader learns from its last words.
                await asyncio.wait((self._reader,))
                self._check_open()
                raise ClientClosed from None
            await answer.settled()
            if answer.error is not None:
                raise answer.error
            if not isinstance(answer.message, expected):
                got = "nothing" if answer.message is None else type_of(answer.message)
                wanted = expected if isinstance(expected, tuple) else (expected,)
                raise UnexpectedMessage(type=got, expected=" or ".join(cls.__name__ for cls in wanted))
            return answer.message, answer
        except BaseException:
            self._answers.pop(request_id, None)
            self._dispose(answer)
            raise

    def _check_open(self) -> None:
        """Raises what ended the connection."""
        if self._error is not None:
            # A copy: raised again and again, one error would collect the frames of all who got it.
            raise copy.copy(self._error)

    async def close(self) -> None:
        """End the connection, and with it every lease; further calls do nothing.

        In a forked child it only lets go of the child's descriptor.  Raises ClientElsewhere in
        another event loop, unless the connection's own is closed.
        """
        if self.orphaned:
            self._error = self._error or ClientClosed()
            return self._stream.close()  # The reader and its loop never run again.
        if self.ended.done():
            return None
        self.check_here()
        self._end(ClientClosed())
        self._reader.cancel()
        await asyncio.wait((self._reader,))
        return None

    # ----------------------------------------------------------------------------- reading
    async def _read(self) -> None:
        try:
            while True:
                match await self._stream.receive():
                    case Received(request_id, message, fds):
                        self._take(request_id, message, list(fds))
                    case Violation(error=error, fds=fds):
                        for fd in fds:
                            fd.close()
                        return self._end(error)
                    case EndOfStream():
                        return self._end(DaemonLost(socket=self.socket_path, reason="it closed the connection"))
        except WeightCacheError as error:
            self._end(
                error if isinstance(error, ProtocolError) else DaemonLost(socket=self.socket_path, reason=error.message)
            )

    def _take(self, request_id: int, message: Message, fds: list[OwnedFd]) -> None:
        if isinstance(message, Welcome):
            self.welcome = message
            if not self._greeted.done():
                self._greeted.set_result(None)
            return None
        answer = self._answers.get(request_id)
        if isinstance(message, LoadProgress):
            if answer is not None and answer.progress is not None:
                try:
                    answer.progress(message.bytes_done, message.bytes_total)
                except Exception as error:  # The caller's own, and raised to it: other requests go on.
                    del self._answers[request_id]
                    answer.error = error
                    answer.settle()
            return None
        if isinstance(message, ErrorResponse):
            for fd in fds:
                fd.close()
            if answer is None:
                # Not about one request: the daemon says why it is about to hang up.
                return self._end(message.to_error()) if request_id == 0 else None
            answer.error = message.to_error()
        elif answer is None:
            late = Answer(asyncio.get_running_loop().create_future(), None)
            late.message, late.fds = message, fds
            return self._dispose(late)
        else:
            answer.message, answer.fds = message, fds
        del self._answers[request_id]
        answer.settle()
        return None

    def _dispose(self, answer: Answer) -> None:
        """A response nobody waits for any more."""
        answer.close()
        if isinstance(answer.message, FetchStateResponse):
            self.release(answer.message.lease)
        elif isinstance(answer.message, BuildTicket):
            self.post(Abandon(ticket=answer.message.ticket))

    def release(self, lease: int) -> None:
        """Give a lease back without waiting for the answer; does nothing once the connection is gone."""
        self.post(Release(lease=lease))

    def post(self, message: Message) -> None:
        """Send a request whose answer nobody needs; does nothing once the connection is gone.

        Raises ClientElsewhere in another event loop.
        """
        if self._error is None and not self.orphaned:
            self.check_here()
            self._last_id += 1
            with contextlib.suppress(StreamError):
                self._stream.send(self._last_id, message)

    def _end(self, error: WeightCacheError) -> None:
        if self._error is not None:
            return
        self._error = error
        self._stream.close()
        for answer in self._answers.values():
            answer.error = copy.copy(error)
            answer.settle()
        self._answers.clear()
        for future in (self._greeted, self.ended):
            if not future.done():
                future.set_result(None)

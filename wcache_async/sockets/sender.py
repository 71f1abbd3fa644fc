"""Writes what is queued for one socket, as fast as the kernel takes it, and tells when it has.

What the kernel answers to a write:

====================================  =================================================================
EAGAIN                                wait until writable
ETOOMANYREFS (too many fds of this    nothing was sent; tried again with growing pauses, as other peers
user in flight), ENOBUFS, ENOMEM      taking theirs is what ends it, and no readiness tells of that
EPIPE, ECONNRESET, anything else      sending is over: what is queued is dropped with its fds, `send`
                                      and `drain` raise StreamBroken; reading goes on, as the peer's
                                      last words (why it hung up) may still be unread
====================================  =================================================================
"""

import asyncio
import errno
import socket
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from wcache_async.errors import PeerTimeout, StreamBroken, StreamError
from wcache_async.protocol.framing import Segment
from wcache_async.sockets.fds import OwnedFd
from wcache_async.sockets.outgoing import Outgoing

__all__ = ["Sender"]

_CALLS_PER_WAKEUP: Final = 4
"""sendmsg calls before the loop gets to serve others."""
# MSG_DONTWAIT besides O_NONBLOCK, which a holder of a duplicate can clear.
_SEND_FLAGS: Final = socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT
_TRANSIENT: Final = frozenset({errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM})
_FIRST_RETRY_S: Final = 0.002
_LAST_RETRY_S: Final = 0.1


class Sender:
    """The sending half of a stream; the socket is the stream's.

    `on_progress` is called whenever something was written or sending ended.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, on_progress: Callable[[], None]) -> None:
        self._loop = loop
        self._sock = sock
        self._fd = sock.fileno()
        self._on_progress = on_progress
        self._outgoing = Outgoing()
        self._drainers: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._watching = False
        self._retry: asyncio.TimerHandle | None = None
        self._retry_s = _FIRST_RETRY_S
        self.failure: Callable[[], StreamError] | None = None
        """Makes the error of whoever wants to send any more, once sending is over."""

    @property
    def accepted(self) -> int:
        """Bytes ever queued."""
        return self._outgoing.accepted

    @property
    def written(self) -> int:
        """Bytes ever written."""
        return self._outgoing.written

    @property
    def pending(self) -> int:
        """Bytes queued and not yet written."""
        return self._outgoing.pending

    def queue(self, segments: Iterable[Segment[OwnedFd]]) -> None:
        """Take over segments and their fds, and write at once what the kernel takes."""
        self._outgoing.extend(segments)
        if not self._watching and self._retry is None:
            self._flush()

    async def drain(self, timeout: float | None) -> None:
        """Wait until all that is queued now is written.  Raises PeerTimeout, or what `failure` makes."""
        target = self.accepted
        if self.written < target and self.failure is None:
            entry = (target, self._loop.create_future())
            self._drainers.append(entry)
            try:
                async with asyncio.timeout(timeout):
                    await entry[1]
            except TimeoutError:
                why = " (too many file descriptors of this user are in flight)" if self._retry is not None else ""
                raise PeerTimeout(what=f"take {self.pending} bytes it was sent{why}", seconds=timeout or 0.0) from None
            finally:
                if entry in self._drainers:
                    self._drainers.remove(entry)
        if self.written < target and self.failure is not None:
            raise self.failure()

    def fail(self, failure: Callable[[], StreamError]) -> None:
        """Sending is over: drop what is queued, with its fds, and wake who waits for it.  Idempotent."""
        self.failure = self.failure or failure
        self._watch(False)
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        self._outgoing.drop()
        self._wake_drainers(self.accepted)
        self._on_progress()

    def forget_loop(self) -> None:
        """The loop is closed: there is nothing to unregister, and nobody to wake."""
        self._watching = False
        self._retry = None
        self._drainers.clear()

    def _flush(self) -> None:
        outgoing = self._outgoing
        self._retry = None
        try:
            for _ in range(_CALLS_PER_WAKEUP):
                if not outgoing.pending:
                    break
                buffers, fds = outgoing.batch()
                rights = array("i", [fd.fileno() for fd in fds])
                ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if fds else []
                outgoing.advance(self._sock.sendmsg(buffers, ancillary, _SEND_FLAGS))
                self._retry_s = _FIRST_RETRY_S
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno not in _TRANSIENT:
                return self.fail(partial(StreamBroken, reason=error.strerror or str(error)))
            self._retry = self._loop.call_later(self._retry_s, self._flush)
            self._retry_s = min(2 * self._retry_s, _LAST_RETRY_S)
        except ValueError:
            return self.fail(partial(StreamBroken, reason="a file descriptor was closed while it waited to be sent"))
        self._watch(bool(outgoing.pending) and self._retry is None)
        self._wake_drainers(outgoing.written)
        self._on_progress()
        return None

    def _watch(self, wanted: bool) -> None:
        if wanted and not self._watching:
            self._loop.add_writer(self._fd, self._flush)
        elif self._watching and not wanted:
            self._loop.remove_writer(self._fd)
        self._watching = wanted

    def _wake_drainers(self, written: int) -> None:
        while self._drainers and self._drainers[0][0] <= written:
            _, future = self._drainers.popleft()
            if not future.done():
                future.set_result(None)

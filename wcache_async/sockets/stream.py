"""One owner of one Unix socket: messages and their file descriptors, in and out, on any asyncio loop.

asyncio has no `sock_sendmsg` and no `sock_recvmsg`, and neither of its transports carries
fds, so the socket stays raw and non-blocking, and two callbacks drive a sans-IO Connection:

- Readable: every fd that `recvmsg` returned has an owner before anything is looked at;
  events go into a queue.  A waiter's future is only a signal and never holds an event, so a
  cancelled `receive` loses nothing.
- `send` queues a whole frame synchronously and writes what the kernel takes at once (Sender);
  only `drain` waits.  Cancelling therefore never leaves half a frame or an fd without its frame.

A peer's end shows in three ways, told apart as anyio does: an EndOfStream event, then
StreamEnded, for an orderly close between two messages; StreamBroken where it was reset, or a
rule was broken; StreamClosed once this side closed.
"""

import asyncio
import os
import select
import socket
import threading
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from wcache_async.errors import (
    FdsTruncated,
    PeerTimeout,
    SendQueueFull,
    StreamBroken,
    StreamClosed,
    StreamEnded,
    StreamError,
)
from wcache_async.protocol.connection import Connection, EndOfStream, Event, Violation
from wcache_async.protocol.framing import MAX_FDS_PER_MESSAGE
from wcache_async.protocol.messages import Message
from wcache_async.sockets.fds import OwnedFd, own_received
from wcache_async.sockets.frame_timer import FrameTimer
from wcache_async.sockets.peer import PeerCredentials, peer_credentials
from wcache_async.sockets.sender import Sender

__all__ = ["FdStream", "PeerCredentials"]

_SCRATCH_NBYTES: Final = 64 << 10
_CALLS_PER_WAKEUP: Final = 4
"""recvmsg calls before the loop gets to serve others."""
# A buffer sized for one fd lets two in, as CMSG_SPACE pads: size it for the most there can be.
_ANCILLARY_NBYTES: Final = socket.CMSG_SPACE(MAX_FDS_PER_MESSAGE * array("i").itemsize)
# MSG_DONTWAIT besides O_NONBLOCK: that flag lives on the open file description, so whoever else
# holds a duplicate can clear it, and the next call would freeze the loop.
_RECEIVE_FLAGS: Final = socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT

_per_thread = threading.local()


def _scratch() -> memoryview:
    """This thread's receive buffer: one for all streams, as no byte stays in it after a callback."""
    view: memoryview | None = getattr(_per_thread, "scratch", None)
    if view is None:
        view = _per_thread.scratch = memoryview(bytearray(_SCRATCH_NBYTES))
    return view


class FdStream:
    """Messages over one connected AF_UNIX stream socket, which it owns and closes.

    Made inside a running loop, with which it registers at once and whose thread it belongs to.
    `peer` is known before a byte is read.  At most about `max_queued_bytes` bytes wait unsent, and
    reading pauses while more than `max_queued_events` events wait unread or the peer does not take
    the answers to what it must not send.  A frame that has begun must come whole within
    `frame_timeout` seconds (None: whenever it likes).
    """

    def __init__(
        self,
        sock: socket.socket,
        connection: Connection[OwnedFd],
        *,
        max_queued_bytes: int = 8 << 20,
        max_queued_events: int = 64,
        frame_timeout: float | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self.peer: PeerCredentials = peer_credentials(sock)
        sock.setblocking(False)
        self._sock = sock
        # An int, not the socket: uvloop keeps a registered socket object's fd open past its close().
        self._fd = sock.fileno()
        self._connection = connection
        self._max_queued_bytes = max_queued_bytes
        self._max_queued_events = max_queued_events
        self._frame_timer = FrameTimer(self._loop, frame_timeout, self._on_late_frame)
        self._events: deque[Event[OwnedFd]] = deque()
        self._sender = Sender(self._loop, sock, self._on_written)
        self._answer_nbytes = 0  # of what reading queued, until all of it is written
        self._answered_at = 0
        self._end: Callable[[], StreamError] | None = None
        self._closing = False
        self._closed = False
        self._ended = asyncio.Event()
        self._receiver: asyncio.Future[None] | None = None
        self._input_over: asyncio.Future[None] | None = None
        self._more_reading: asyncio.Handle | None = None
        self._reading = True
        self._loop.add_reader(self._fd, self._on_readable)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "ended" if self._end else "open"
        return f"<FdStream fd={self._fd} {state} pid={self.peer.pid} uid={self.peer.uid}>"

    @property
    def closed(self) -> bool:
        """Whether this side has closed the socket."""
        return self._closed

    @property
    def end(self) -> StreamError | None:
        """What ended the stream first, None while the peer may still send."""
        return self._end() if self._end is not None else None

    @property
    def hung_up(self) -> bool:
        """Whether the peer sends no more, noticed or not; what it said last may be still to be read."""
        if self._closed or self._end is not None:
            return True
        poll = select.poll()
        poll.register(self._fd, select.POLLRDHUP)
        return bool(poll.poll(0))

    @property
    def queued_bytes(self) -> int:
        """Bytes queued and not yet taken by the kernel."""
        return self._sender.pending

    # ------------------------------------------------------------------------------- receiving
    async def receive(self) -> Event[OwnedFd]:
        """The next event; the caller owns its fds.

        Cancel-safe.  For one task at a time; bound it with `asyncio.timeout`, as `wait_for` in
        Python 3.11 can drop a result.  Raises StreamEnded, StreamBroken or StreamClosed once
        there is nothing more.
        """
        while not self._events:
            if self._closing:
                raise StreamClosed()
            if self._end is not None:
                raise self._end()
            if self._receiver is not None:
                raise RuntimeError("another task is already waiting in receive()")
            self._receiver = self._loop.create_future()
            try:
                await self._receiver
            finally:
                self._receiver = None
        event = self._events.popleft()
        self._balance_reading()
        return event

    async def wait_closed(self) -> None:
        """Wait until nothing more can come: the peer closed or was lost, broke a rule, or we closed."""
        await self._ended.wait()

    def _on_readable(self) -> None:
        if self._more_reading is None:  # else its turn comes anyway
            self._read()

    def _read(self) -> None:
        self._more_reading = None
        scratch = _scratch()
        try:
            for _ in range(_CALLS_PER_WAKEUP):
                nbytes, ancillary, flags, _ = self._sock.recvmsg_into([scratch], _ANCILLARY_NBYTES, _RECEIVE_FLAGS)
                fds = own_received(ancillary)
                self._take_in(scratch[:nbytes], fds, truncated=bool(flags & socket.MSG_CTRUNC))
                if not self._reading:
                    return
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(error.strerror or str(error))
            return
        except BaseException as error:
            self._lose(f"{type(error).__name__}: {error}")
            raise
        # Not left to the next readiness: libuv tells of an error once and stops watching, and a
        # reset's last words are read before its error (uv__poll_io).
        self._more_reading = self._loop.call_soon(self._read)

    def _take_in(self, data: memoryview, fds: list[OwnedFd], *, truncated: bool) -> None:
        connection = self._connection
        if data:
            connection.receive_data(data, fds)
        else:
            connection.receive_eof()
        if truncated:
            # The decoder has found it already, with the numbers of the frame's header, unless that
            # has not come whole.  The kernel does not say how many it dropped: at least one.
            connection.receive_fault(FdsTruncated(expected=len(fds) + 1, got=len(fds)))
        self._take_events()

    def _take_events(self) -> None:
        connection = self._connection
        end: Callable[[], StreamError] | None = None
        events = connection.events_received()
        for event in events:
            self._events.append(event)
            if isinstance(event, EndOfStream):
                end = StreamEnded
            elif isinstance(event, Violation) and event.fatal:
                end = partial(StreamBroken, reason=str(event.error))
        if end is not None:
            self._end_reading(end)
        else:
            self._frame_timer.expect(connection.frame_begun, another=bool(events))
        answers = connection.data_to_send()
        if answers and self._sender.failure is None:
            nbytes = sum(len(answer.data) for answer in answers)
            self._answer_nbytes += nbytes
            self._answered_at = self._sender.accepted + nbytes
            self._sender.queue(answers)
        self._wake_receiver()
        self._balance_reading()

    def _on_late_frame(self, error: PeerTimeout) -> None:
        self._connection.receive_fault(error)
        self._take_events()

    def _end_reading(self, end: Callable[[], StreamError]) -> None:
        self._end = self._end or end
        self._stop_reading()
        for fd in self._connection.take_fds():
            fd.close()
        self._ended.set()

    def _lose(self, reason: str) -> None:
        end = partial(StreamBroken, reason=reason)
        self._end_reading(end)
        self._sender.fail(end)
        self._wake_receiver()

    def _wake_receiver(self) -> None:
        if self._receiver is not None and not self._receiver.done() and (self._events or self._end or self._closing):
            self._receiver.set_result(None)

    def _balance_reading(self) -> None:
        """Read while there is room for the events, and for the answers to what broke a rule.

        What `send` queued has no part in it, or two peers that owe each other much would both
        stop reading, and stay so.
        """
        if self._end is not None or self._closing:
            return
        answers_fit = self._answer_nbytes <= self._max_queued_bytes
        if self._reading:
            if len(self._events) > self._max_queued_events or not answers_fit:
                self._stop_reading()
        elif len(self._events) <= self._max_queued_events // 2 and answers_fit:  # half, so as not to flap
            self._reading = True
            self._loop.add_reader(self._fd, self._on_readable)
            self._frame_timer.expect(self._connection.frame_begun, another=False)

    def _stop_reading(self) -> None:
        self._cancel_more_reading()
        self._frame_timer.stop()
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._fd)

    def _cancel_more_reading(self) -> None:
        if self._more_reading is not None:
            self._more_reading.cancel()
            self._more_reading = None

    # --------------------------------------------------------------------------------- sending
    def send(self, request_id: int, message: Message, fds: Sequence[OwnedFd] = ()) -> None:
        """Queue a message whole, and write at once what the kernel takes.

        Takes over `fds` whatever happens: they are closed once sent, dropped or refused.  Raises
        SendQueueFull where the message would exceed `max_queued_bytes` (one message may, while
        nothing else waits), StreamClosed, StreamBroken, MalformedMessage or FrameTooLarge for
        what the peer could not take, and ValueError for an fd already closed; nothing is queued then.
        """
        try:
            if self._closing:
                raise StreamClosed()
            if self._sender.failure is not None:
                raise self._sender.failure()
            for fd in fds:
                fd.fileno()
            self._connection.send(request_id, message, fds)
            segments = self._connection.data_to_send()
            nbytes = sum(len(segment.data) for segment in segments)
            pending = self._sender.pending
            if pending and pending + nbytes > self._max_queued_bytes:
                raise SendQueueFull(nbytes=nbytes, queued=pending, limit=self._max_queued_bytes)
        except BaseException:
            for fd in fds:
                fd.close()
            raise
        self._sender.queue(segments)

    async def drain(self, timeout: float | None = None) -> None:
        """Wait until all that is queued now is written.

        Raises PeerTimeout where bytes are still owed after `timeout` seconds, StreamBroken or
        StreamClosed where they never will be written.  Cancelling it drops nothing.
        """
        await self._sender.drain(timeout)

    def _on_written(self) -> None:
        if self._sender.written >= self._answered_at or self._sender.failure is not None:
            self._answer_nbytes = 0
        self._balance_reading()

    # --------------------------------------------------------------------------------- closing
    def close(self) -> None:
        """Close the socket and every fd queued in either direction, and wake every waiter.  Idempotent."""
        if self._closed:
            return
        self._closing = self._closed = True
        # A forked child shares its parent's epoll set, and would unregister the parent's socket (epoll(7)).
        if self._loop.is_closed() or self._pid != os.getpid():
            self._forget_loop()
        self._end_reading(StreamClosed)
        self._sender.fail(StreamClosed)
        self._end_discarding()
        # Only now: a closed number still registered would silence the next socket that gets it.
        self._sock.close()
        self._drop_events()
        self._wake_receiver()

    def _forget_loop(self) -> None:
        """Nothing is watched and nobody waits any more, and the loop would only refuse to be told."""
        self._reading = False
        self._more_reading = self._receiver = self._input_over = None
        self._ended = asyncio.Event()
        self._sender.forget_loop()
        self._frame_timer.forget_loop()

    async def close_after_flush(self, timeout: float) -> None:
        """Write what is queued, let the peer read it, then close; after `timeout` seconds close anyway.

        Takes nothing in any more.  What still arrives is read and thrown away until the peer closes
        its side: closing over unread bytes resets the connection (unix_release_sock), and a peer
        that is blocked in sending would not get to read.
        """
        if self._closed:
            return
        self._closing = True
        self._stop_reading()
        self._drop_events()
        self._wake_receiver()
        if self._input_over is None:
            self._input_over = self._loop.create_future()
            self._loop.add_reader(self._fd, self._on_discardable)
        try:
            async with asyncio.timeout(timeout):
                await self.drain()
                self._sock.shutdown(socket.SHUT_WR)
                await asyncio.shield(self._input_over)
        except (TimeoutError, OSError, StreamError):
            pass  # The peer is gone, or had its chance to listen.
        finally:
            self.close()

    def _on_discardable(self) -> None:
        if self._more_reading is None:
            self._discard()

    def _discard(self) -> None:
        self._more_reading = None
        try:
            for _ in range(_CALLS_PER_WAKEUP):
                # Without a control buffer the kernel closes the fds that come along.
                if self._sock.recv_into(_scratch(), 0, socket.MSG_DONTWAIT) == 0:
                    break
            else:
                self._more_reading = self._loop.call_soon(self._discard)
                return
        except BlockingIOError:
            return
        except OSError:
            pass  # It will not read what we have to say either.
        self._end_discarding()

    def _end_discarding(self) -> None:
        self._cancel_more_reading()
        if self._input_over is not None:
            self._loop.remove_reader(self._fd)
            if not self._input_over.done():
                self._input_over.set_result(None)

    def _drop_events(self) -> None:
        while self._events:
            event = self._events.popleft()
            for fd in () if isinstance(event, EndOfStream) else event.fds:
                fd.close()

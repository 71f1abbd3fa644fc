"""FdStream: what arrives, and in whose hands."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from tests.sockets.wire import DEADLINE, client, frame, numbered, received, response, send_with_fds, take_numbers
from wcache_async.errors import (
    BadMagic,
    FdsTruncated,
    FdsUndeclared,
    PeerTimeout,
    StreamBroken,
    StreamClosed,
    StreamEnded,
    TruncatedFrame,
)
from wcache_async.protocol.connection import Connection, EndOfStream, Role, Violation
from wcache_async.protocol.framing import Segment, encode_frame
from wcache_async.protocol.messages import ErrorResponse, Hello, Status, encode_message
from wcache_async.sockets.fds import OwnedFd
from wcache_async.sockets.stream import FdStream

Pair = tuple[FdStream, FdStream]
WithRaw = tuple[FdStream, socket.socket]


async def test_a_request_and_its_response_cross(sockets: tuple[socket.socket, socket.socket]) -> None:
    daemon, asking = FdStream(sockets[0], Connection(Role.DAEMON)), FdStream(sockets[1], client())
    asking.send(1, Hello(versions=(1, 1), client="test"))
    asking.send(2, Status())
    assert received(await daemon.receive()).message == Hello(versions=(1, 1), client="test")
    assert received(await daemon.receive()).request_id == 2
    daemon.close()
    asking.close()


async def test_the_peer_is_known_before_a_byte_is_read(with_raw: WithRaw) -> None:
    peer = with_raw[0].peer
    assert (peer.pid, peer.uid, peer.gid) == (os.getpid(), os.geteuid(), os.getegid())


async def test_the_same_message_comes_wherever_its_bytes_are_split(with_raw: WithRaw) -> None:
    stream, raw = with_raw
    data = encode_frame(7, encode_message(response()), numbered(2))[0].data
    for split in range(1, len(data)):
        fds = numbered(2)
        send_with_fds(raw, data[:split], fds)
        await asyncio.sleep(0)
        raw.send(data[split:])
        for fd in fds:
            fd.close()
        event = await stream.receive()
        assert received(event).request_id == 7
        assert take_numbers(event) == [0, 1]


async def test_fds_belong_to_their_frame_and_not_to_the_bytes_they_came_with(with_raw: WithRaw) -> None:
    """A plain frame and the one with fds after it arrive in one read."""
    stream, raw = with_raw
    fds = numbered(1)
    raw.send(frame(1, response()))
    send_with_fds(raw, encode_frame(2, encode_message(response()), fds)[0].data + frame(3, response()), fds)
    fds[0].close()
    events = [received(await stream.receive()) for _ in range(3)]
    assert [(event.request_id, len(event.fds)) for event in events] == [(1, 0), (2, 1), (3, 0)]
    assert take_numbers(events[1]) == [0]


async def test_received_fds_are_not_inherited_by_children(pair: Pair) -> None:
    pair[0].send(1, response(), numbered(1))
    event = received(await pair[1].receive())
    assert not os.get_inheritable(event.fds[0].fileno())
    event.fds[0].close()


async def test_fds_lost_at_the_limit_are_a_violation_with_the_frames_numbers_and_leave_none(
    with_raw: WithRaw, room_for_fds: Callable[[int], AbstractContextManager[None]]
) -> None:
    stream, raw = with_raw
    fds = numbered(5)
    send_with_fds(raw, frame(1, response()) + encode_frame(2, encode_message(response()), fds)[0].data, fds)
    for fd in fds:
        fd.close()
    with room_for_fds(2):
        assert received(await stream.receive()).request_id == 1
        event = await stream.receive()
    assert isinstance(event, Violation)
    assert isinstance(event.error, FdsTruncated)
    assert (event.request_id, event.error.expected, event.error.got) == (2, 5, 2)
    with pytest.raises(StreamBroken, match="5 file descriptors were expected, 2 arrived"):
        await stream.receive()


async def test_fds_lost_before_their_header_is_whole_are_a_violation_too(
    with_raw: WithRaw, room_for_fds: Callable[[int], AbstractContextManager[None]]
) -> None:
    stream, raw = with_raw
    fds = numbered(3)
    send_with_fds(raw, encode_frame(2, encode_message(response()), fds)[0].data[:5], fds)
    for fd in fds:
        fd.close()
    with room_for_fds(1):
        event = await stream.receive()
    assert isinstance(event, Violation)
    assert isinstance(event.error, FdsTruncated)
    assert event.error.got == 1


async def test_fds_nobody_declared_are_closed_and_told(sockets: tuple[socket.socket, socket.socket]) -> None:
    ours, raw = sockets
    stream = FdStream(ours, Connection(Role.DAEMON))
    reader, writer = (OwnedFd(fd) for fd in os.pipe())
    with reader:
        send_with_fds(raw, frame(0, Hello(versions=(1, 1))), [writer])
        writer.close()
        assert received(await stream.receive()).fds == ()
        event = await stream.receive()
        assert isinstance(event, Violation)
        assert isinstance(event.error, FdsUndeclared)
        assert os.read(reader.fileno(), 1) == b""  # no copy of the pipe's other end is left
    stream.close()


# ------------------------------------------------------------------------------- how it ends
async def test_an_orderly_end_is_an_event_and_then_stream_ended(with_raw: WithRaw) -> None:
    stream, raw = with_raw
    raw.send(frame(1, response()))
    raw.close()
    assert received(await stream.receive()).request_id == 1
    assert await stream.receive() == EndOfStream()
    for _ in range(2):
        with pytest.raises(StreamEnded):
            await stream.receive()
    assert isinstance(stream.end, StreamEnded)


async def test_a_reset_is_broken_with_the_systems_reason_after_what_came_before(with_raw: WithRaw) -> None:
    stream, raw = with_raw
    stream.send(1, Status())
    raw.send(frame(1, response()))
    raw.close()  # with the request unread
    assert received(await stream.receive()).request_id == 1
    with pytest.raises(StreamBroken, match="Connection reset by peer"):
        await stream.receive()
    with pytest.raises(StreamBroken):
        stream.send(2, Status())


async def test_an_end_inside_a_frame_is_a_violation(with_raw: WithRaw) -> None:
    stream, raw = with_raw
    raw.send(frame(1, response(bytes(100)))[:50])
    raw.close()
    event = await stream.receive()
    assert isinstance(event, Violation)
    assert isinstance(event.error, TruncatedFrame)
    with pytest.raises(StreamBroken, match="ended inside a frame"):
        await stream.receive()


async def test_junk_is_answered_and_nothing_after_it_is_read(sockets: tuple[socket.socket, socket.socket]) -> None:
    ours, raw = sockets
    stream = FdStream(ours, Connection(Role.DAEMON))
    raw.send(b"GET / HTTP/1.1\r\n\r\n")
    event = await stream.receive()
    assert isinstance(event, Violation)
    assert isinstance(event.error, BadMagic)
    assert frame(0, ErrorResponse.of(event.error)) == raw.recv(4096)
    await stream.wait_closed()
    stream.close()


async def test_a_defect_in_what_reads_the_bytes_breaks_that_stream_and_is_reported(
    with_raw: WithRaw, monkeypatch: pytest.MonkeyPatch, unhandled_loop_exceptions: list[str]
) -> None:
    """Rather than being called again and again over the same bytes."""
    stream, raw = with_raw

    def fail(*_: object) -> None:
        raise MemoryError("none left")

    monkeypatch.setattr(stream._connection, "receive_data", fail)
    fds = numbered(1)
    send_with_fds(raw, b"x", fds)
    fds[0].close()
    with pytest.raises(StreamBroken, match="MemoryError: none left"):
        await stream.receive()
    assert [text for text in unhandled_loop_exceptions if "none left" in text]
    unhandled_loop_exceptions.clear()


async def test_wait_closed_tells_of_a_lost_peer_with_nobody_receiving(with_raw: WithRaw) -> None:
    stream, raw = with_raw
    assert stream.end is None
    waiting = asyncio.create_task(stream.wait_closed())
    await asyncio.sleep(0)
    assert not waiting.done()
    raw.close()
    async with asyncio.timeout(DEADLINE):
        await waiting
    assert not stream.closed


async def test_only_one_task_may_wait_in_receive(with_raw: WithRaw) -> None:
    stream, raw = with_raw
    first = asyncio.create_task(stream.receive())
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="another task"):
        await stream.receive()
    raw.send(frame(1, response()))
    assert received(await first).request_id == 1


async def test_a_cancelled_receive_takes_nothing_with_it(with_raw: WithRaw) -> None:
    """Cancelled before, at, and after the moment in which the message arrives."""
    stream, raw = with_raw
    for turns in range(4):
        waiting = asyncio.create_task(stream.receive())
        await asyncio.sleep(0)
        fds = numbered(1)
        send_with_fds(raw, encode_frame(turns, encode_message(response()), fds)[0].data, fds)
        fds[0].close()
        for _ in range(turns):
            await asyncio.sleep(0)
        waiting.cancel()
        (outcome,) = await asyncio.gather(waiting, return_exceptions=True)
        event = await stream.receive() if isinstance(outcome, BaseException) else outcome
        assert received(event).request_id == turns
        assert take_numbers(event) == [0]


# ----------------------------------------------------------------------------- how much it reads
async def test_reading_pauses_while_events_wait_unread_and_nothing_is_lost(with_raw: WithRaw) -> None:
    stream, raw = with_raw
    data = frame(1, response())
    sent = 0
    idle = 0
    while idle < 10:  # until the kernel's buffer stays full, as nobody reads it any more
        try:
            assert raw.send(data, socket.MSG_DONTWAIT) == len(data)
            sent += 1
            idle = 0
        except BlockingIOError:
            idle += 1
            await asyncio.sleep(0)
        assert sent < 100_000
    for _ in range(sent):
        assert received(await stream.receive()).request_id == 1
    raw.close()
    assert await stream.receive() == EndOfStream()


async def test_a_peer_that_asks_and_never_reads_stops_being_read(sockets: tuple[socket.socket, socket.socket]) -> None:
    """Answers to what it must not send wait unsent: they are bounded like everything else."""
    ours, raw = sockets
    stream = FdStream(ours, Connection(Role.DAEMON), max_queued_bytes=100_000)
    raw.setblocking(False)
    raw.send(frame(0, Hello(versions=(1, 1))))
    assert received(await stream.receive()).request_id == 0
    segments: list[Segment[OwnedFd]] = encode_frame(1, b"\x81\xa4type\xa7unknown")
    data = segments[0].data
    idle = 0
    sent = 0
    while idle < 10:
        try:
            raw.send(data)
            idle = 0
            sent += 1
        except BlockingIOError:
            idle += 1
            await asyncio.sleep(0)
        while stream.end is None and (event := await anything(stream)):
            assert isinstance(event, Violation)
        assert stream.queued_bytes < 100_000 + 64 * 1024 * 20
        assert sent < 1_000_000
    assert stream.queued_bytes > 100_000
    raw.close()
    async with asyncio.timeout(DEADLINE):
        while stream.end is None:  # its end is seen all the same
            await anything(stream)
    stream.close()


async def anything(stream: FdStream) -> object:
    """An event that has come already; None where none has."""
    waiting = asyncio.ensure_future(stream.receive())
    await asyncio.sleep(0)
    if waiting.done():
        return waiting.result()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    return None


class CountingSocket(socket.socket):
    """Notes in which turn of the loop each read took place."""

    turn = 0
    reads: list[int]

    def recvmsg_into(self, *args: object) -> tuple[int, list[tuple[int, int, bytes]], int, object]:
        self.reads.append(self.turn)
        return super().recvmsg_into(*args)  # type: ignore[arg-type]


async def test_one_stream_with_much_to_read_leaves_the_loop_to_others_after_a_few_calls(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    ours, raw = sockets
    raw.setblocking(False)
    rest = memoryview(frame(0, response(bytes(4 << 20))))
    counting = CountingSocket(fileno=ours.detach())
    counting.reads = []
    with contextlib.closing(FdStream(counting, client())):
        while len(counting.reads) < 20:
            counting.turn += 1
            with contextlib.suppress(BlockingIOError):
                while rest:
                    rest = rest[raw.send(rest) :]
            await asyncio.sleep(0)
            assert counting.turn < 1000
        most = max(counting.reads.count(turn) for turn in set(counting.reads))
        assert 1 < most <= 4


async def test_closed_by_us_is_told_apart_even_after_an_end(with_raw: WithRaw) -> None:
    stream, raw = with_raw
    raw.close()
    assert await stream.receive() == EndOfStream()
    stream.close()
    with pytest.raises(StreamClosed):
        await stream.receive()
    assert isinstance(stream.end, StreamEnded)  # what ended it first


async def test_a_frame_begun_must_end_in_time(sockets: tuple[socket.socket, socket.socket]) -> None:
    """The peer's own end is among its fds: nobody would ever see it close."""
    ours, raw = sockets
    with contextlib.closing(FdStream(ours, Connection(Role.DAEMON), frame_timeout=0.05)) as stream:
        raw.send(frame(0, Hello(versions=(1, 1))))
        received(await stream.receive())
        send_with_fds(raw, frame(1, Status())[:1], [OwnedFd(os.dup(raw.fileno()))])
        async with asyncio.timeout(DEADLINE):
            event = await stream.receive()
        assert isinstance(event, Violation)
        assert isinstance(event.error, PeerTimeout)
        assert event.fatal
        with pytest.raises(StreamBroken, match="the rest of a message"):
            await stream.receive()
        await stream.drain()
        raw.recv(1 << 16)  # Told why.

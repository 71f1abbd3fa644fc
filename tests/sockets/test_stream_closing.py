"""FdStream: however it ends, nothing is left open, registered or waiting."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable

import pytest
import uvloop

from tests.sockets.wire import DEADLINE, client, frame, numbered, received, response, send_with_fds, until
from wcache_async.errors import StreamClosed
from wcache_async.protocol.connection import Connection, EndOfStream, Role, Violation
from wcache_async.protocol.framing import encode_frame
from wcache_async.protocol.messages import ErrorResponse, Hello, Status, encode_message
from wcache_async.sockets.fds import OwnedFd
from wcache_async.sockets.stream import FdStream

Pair = tuple[FdStream, FdStream]
WithRaw = tuple[FdStream, socket.socket]
Sockets = tuple[socket.socket, socket.socket]


def others_end_is_closed(reader: OwnedFd) -> bool:
    """Whether no copy of a pipe's writing end is open anywhere."""
    os.set_blocking(reader.fileno(), False)
    try:
        return os.read(reader.fileno(), 1) == b""
    except BlockingIOError:
        return False


# ---------------------------------------------------------------------------------------- close
async def test_closing_closes_the_fds_queued_in_both_directions(with_raw: WithRaw) -> None:
    stream, raw = with_raw
    reader, writer = (OwnedFd(fd) for fd in os.pipe())
    with reader:
        send_with_fds(raw, encode_frame(1, encode_message(response()), [writer])[0].data, [writer])
        send_with_fds(raw, encode_frame(2, encode_message(response(bytes(100))), [writer])[0].data[:50], [writer])
        writer.close()
        queued = numbered(3)
        stream.send(3, response(bytes(1 << 20)), queued[:1])
        stream.send(4, response(), queued[1:])
        await until(lambda: stream._events)  # one whole message unread, one cut, with its fd waiting for the rest
        assert not others_end_is_closed(reader)
        stream.close()
        assert others_end_is_closed(reader)
    assert all(fd.closed for fd in queued)
    assert stream.queued_bytes == 0


async def test_closing_wakes_everyone_who_waits_and_says_who_closed(with_raw: WithRaw) -> None:
    stream, _ = with_raw
    stream.send(1, response(bytes(1 << 20)))
    waiting = [asyncio.create_task(wait) for wait in (stream.receive(), stream.drain(), stream.drain())]
    ended = asyncio.create_task(stream.wait_closed())
    await asyncio.sleep(0)
    stream.close()
    async with asyncio.timeout(DEADLINE):
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        await ended
    assert [type(outcome) for outcome in outcomes] == [StreamClosed] * 3
    assert isinstance(stream.end, StreamClosed)
    assert stream.closed


async def test_closing_twice_is_closing_once(with_raw: WithRaw) -> None:
    """The number may be another's by then."""
    stream, raw = with_raw
    number = stream._fd
    stream.close()
    with OwnedFd(os.eventfd(0)) as reused:
        assert reused.fileno() == number
        stream.close()
        await stream.close_after_flush(1)
        os.fstat(number)
    assert raw.recv(1) == b""


async def test_a_closed_stream_answers_with_stream_closed(with_raw: WithRaw) -> None:
    stream, _ = with_raw
    stream.close()
    with pytest.raises(StreamClosed):
        await stream.receive()
    with pytest.raises(StreamClosed):
        stream.send(1, Status())
    await stream.drain()  # nothing is owed
    await stream.wait_closed()
    assert "closed" in repr(stream)


async def test_the_next_socket_of_the_same_number_works() -> None:
    numbers = set()
    for _ in range(5):
        ours, raw = socket.socketpair()
        stream = FdStream(ours, Connection(Role.DAEMON))
        numbers.add(stream._fd)
        with raw:
            stream.send(0, response(bytes(1 << 20)))  # watched for reading and for writing
            raw.send(frame(0, Hello(versions=(1, 1))))
            async with asyncio.timeout(DEADLINE):
                assert received(await stream.receive()).message == Hello(versions=(1, 1))
            stream.close()
    assert len(numbers) == 1


async def test_closing_with_more_to_read_leaves_no_callback_behind(with_raw: WithRaw) -> None:
    stream, raw = with_raw
    with contextlib.suppress(BlockingIOError):
        while True:
            raw.send(frame(1, response(bytes(100_000))))
    await until(lambda: stream._more_reading)
    stream.close()
    for _ in range(3):
        await asyncio.sleep(0)  # an exception in a callback would fail the test


async def test_closing_while_reading_is_paused(with_raw: WithRaw) -> None:
    stream, raw = with_raw

    def full() -> bool:
        with contextlib.suppress(BlockingIOError):
            while True:
                raw.send(frame(1, response()))
        return not stream._reading

    await until(full)
    stream.close()
    with pytest.raises(ConnectionResetError):
        raw.recv(1)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_closing_after_its_loop_has_closed(new_loop: Callable[[], asyncio.AbstractEventLoop], sockets: Sockets) -> None:
    """As finalizers do; no loop is left to tell."""
    loop = new_loop()
    ours, raw = sockets
    fds = numbered(1)

    async def leave() -> FdStream:
        stream = FdStream(ours, client())
        stream.send(1, response(bytes(1 << 20)))
        stream.send(2, response(), fds)
        waiting = [asyncio.create_task(wait) for wait in (stream.receive(), stream.drain(), stream.wait_closed())]
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        return stream

    stream = loop.run_until_complete(leave())
    loop.close()
    stream.close()
    assert ours.fileno() == -1
    assert fds[0].closed
    while raw.recv(1 << 20):
        pass


# ------------------------------------------------------------------------- telling, then closing
async def test_a_peer_that_has_more_to_say_reads_why_and_then_an_orderly_end(sockets: Sockets) -> None:
    """Not the reset that closing over unread bytes makes."""
    ours, theirs = sockets
    stream, peer = FdStream(ours, Connection(Role.DAEMON)), FdStream(theirs, client())
    peer.send(0, Hello(versions=(99, 99)))
    for _ in range(1000):
        peer.send(1, Status())
    async with asyncio.timeout(DEADLINE):
        refused = await stream.receive()
        assert isinstance(refused, Violation)
        closing = asyncio.create_task(stream.close_after_flush(DEADLINE))
        told = received(await peer.receive())
        assert told.message == ErrorResponse.of(refused.error)
        assert await peer.receive() == EndOfStream()
        assert not closing.done()  # until the peer has gone, or its time is up
        peer.close()
        await closing
    assert stream.closed


async def test_a_peer_that_sends_before_it_reads_gets_to_read(with_raw: WithRaw) -> None:
    stream, raw = with_raw
    data = frame(1, response(bytes(1000)))
    with contextlib.suppress(BlockingIOError):
        while True:
            raw.send(data)
    stream.send(7, response(bytes(1 << 20)))
    assert stream.queued_bytes
    closing = asyncio.create_task(stream.close_after_flush(DEADLINE))
    sent = 0
    got = b""
    async with asyncio.timeout(DEADLINE):
        while sent < 1 << 20:  # which only goes if somebody takes it
            try:
                sent += raw.send(data)
            except BlockingIOError:
                await asyncio.sleep(0)
        while len(got) < 1 << 20:
            try:
                got += raw.recv(1 << 20)
            except BlockingIOError:
                await asyncio.sleep(0)
        raw.close()
        await closing


async def test_fds_that_arrive_while_saying_goodbye_are_closed(with_raw: WithRaw) -> None:
    stream, raw = with_raw
    closing = asyncio.create_task(stream.close_after_flush(DEADLINE))
    await asyncio.sleep(0)
    reader, writer = (OwnedFd(fd) for fd in os.pipe())
    with reader:
        send_with_fds(raw, b"whatever", [writer])
        writer.close()
        async with asyncio.timeout(DEADLINE):
            await until(lambda: others_end_is_closed(reader))
            raw.close()
            await closing


@pytest.mark.parametrize("reads", [False, True], ids=["reads nothing", "never closes"])
async def test_a_peer_that_does_not_go_is_left_after_the_timeout(with_raw: WithRaw, reads: bool) -> None:
    stream, _ = with_raw
    fds = numbered(1)
    if not reads:
        stream.send(1, response(bytes(1 << 20)))
        stream.send(2, response(), fds)
    await stream.close_after_flush(0.02)
    assert stream.closed
    assert reads or fds[0].closed
    fds[0].close()


@pytest.mark.parametrize("unread", [False, True], ids=["closed", "reset"])
async def test_a_peer_that_has_gone_is_not_waited_for(with_raw: WithRaw, unread: bool) -> None:
    stream, raw = with_raw
    if unread:
        stream.send(1, Status())
    raw.close()
    async with asyncio.timeout(DEADLINE):
        await stream.close_after_flush(1000)
    assert stream.closed


async def test_a_peer_that_resets_while_it_is_told_goodbye_is_not_waited_for(with_raw: WithRaw) -> None:
    stream, raw = with_raw
    stream.send(1, Status())
    closing = asyncio.create_task(stream.close_after_flush(1000))
    for _ in range(3):
        await asyncio.sleep(0)
    raw.close()
    async with asyncio.timeout(DEADLINE):
        await closing


async def test_saying_goodbye_with_more_to_read_takes_nothing_more_in(with_raw: WithRaw) -> None:
    stream, raw = with_raw
    data = frame(1, response(bytes(66_000))) * 3  # four reads, which is all of one turn
    assert raw.send(data) == len(data)

    async def look_and_leave() -> int:
        for _ in range(3):
            await asyncio.sleep(0)
        taken_in = len(stream._events)
        raw.close()
        return taken_in

    await until(lambda: stream._more_reading)
    raw.send(frame(2, response()))
    looking = asyncio.create_task(look_and_leave())
    async with asyncio.timeout(DEADLINE):
        await stream.close_after_flush(DEADLINE)
    assert await looking == 0


async def test_saying_goodbye_takes_nothing_in_and_sends_nothing_new(with_raw: WithRaw) -> None:
    stream, raw = with_raw
    raw.send(frame(1, response()))
    await stream.receive()
    receiving = asyncio.create_task(stream.receive())
    await asyncio.sleep(0)
    closing = asyncio.create_task(stream.close_after_flush(DEADLINE))
    async with asyncio.timeout(DEADLINE):
        with pytest.raises(StreamClosed):
            await receiving
    fds = numbered(1)
    with pytest.raises(StreamClosed):
        stream.send(2, response(), fds)
    assert fds[0].closed
    assert not stream.closed
    raw.close()
    async with asyncio.timeout(DEADLINE):
        await closing


@pytest.mark.parametrize("turns", [0, 1, 2])
async def test_a_cancelled_goodbye_closes(with_raw: WithRaw, turns: int) -> None:
    stream, _ = with_raw
    stream.send(1, response(bytes(1 << 20)))
    closing = asyncio.create_task(stream.close_after_flush(DEADLINE))
    await asyncio.sleep(0)
    for _ in range(turns):
        await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert stream.closed


async def test_two_goodbyes_and_a_close_end_together(with_raw: WithRaw) -> None:
    stream, _ = with_raw
    closing = [asyncio.create_task(stream.close_after_flush(DEADLINE)) for _ in range(2)]
    await asyncio.sleep(0)
    stream.close()
    async with asyncio.timeout(DEADLINE):
        await asyncio.gather(*closing)
    assert stream.closed

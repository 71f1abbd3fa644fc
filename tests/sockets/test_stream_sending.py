"""FdStream: what is sent, what waits, and what is refused."""

import asyncio
import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest

from tests.sockets.wire import DEADLINE, client, frame, numbered, received, response, take_numbers, until
from wcache_async.errors import (
    FrameTooLarge,
    MalformedMessage,
    PeerTimeout,
    SendQueueFull,
    StreamBroken,
    StreamClosed,
    StreamEnded,
)
from wcache_async.protocol.connection import Connection, EndOfStream, Event, Role
from wcache_async.protocol.messages import ErrorResponse, Status, Welcome
from wcache_async.sockets.fds import OwnedFd
from wcache_async.sockets.stream import FdStream

Pair = tuple[FdStream, FdStream]
WithRaw = tuple[FdStream, socket.socket]
Sockets = tuple[socket.socket, socket.socket]


@pytest.mark.parametrize("count", [1, 253, 254, 1000])
async def test_any_number_of_fds_arrives_with_its_message_in_order(pair: Pair, count: int) -> None:
    fds = numbered(count)
    pair[0].send(1, response(), fds)
    async with asyncio.timeout(DEADLINE):
        await pair[0].drain()
        event = await pair[1].receive()
    assert all(fd.closed for fd in fds)
    assert take_numbers(event) == list(range(count))


async def test_the_fds_of_a_message_sent_in_many_parts_go_once(pair: Pair) -> None:
    pair[0].send(1, response(bytes(4 << 20)), numbered(2))
    assert pair[0].queued_bytes > 0
    async with asyncio.timeout(DEADLINE):
        event = await pair[1].receive()
    assert len(received(event).message.payload) == 4 << 20  # type: ignore[union-attr]
    assert take_numbers(event) == [0, 1]
    pair[0].close()
    assert await pair[1].receive() == EndOfStream()  # and no further fd, which would be a violation


@pytest.mark.parametrize("nbytes_read", [1, 7, 32, 4096])
async def test_a_tiny_send_buffer_and_a_reader_of_few_bytes_change_nothing(sockets: Sockets, nbytes_read: int) -> None:
    """Partial writes at whatever split the kernel makes of it, between and inside of frames with fds."""
    ours, raw = sockets
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    stream = FdStream(ours, client())
    decoder = client()
    stream.send(0, Welcome(version=1))
    for number in range(1, 20):
        stream.send(number, response(bytes(number * 97)), numbered(number % 3))
    raw.setblocking(False)
    events: list[Event[OwnedFd]] = []
    async with asyncio.timeout(DEADLINE):
        while len(events) < 20:
            try:
                data, fds, _, _ = socket.recv_fds(raw, nbytes_read, 253)
            except BlockingIOError:
                await asyncio.sleep(0)
                continue
            decoder.receive_data(data, [OwnedFd(fd) for fd in fds])
            events += decoder.events_received()
    assert [received(event).request_id for event in events] == list(range(20))
    assert [take_numbers(event) for event in events[1:]] == [list(range(n % 3)) for n in range(1, 20)]
    assert stream.queued_bytes == 0
    stream.close()


async def test_small_messages_share_system_calls(sockets: Sockets) -> None:
    """What had to wait is written many to a call, up to where one has fds."""

    class CountingSocket(socket.socket):
        calls = 0

        def sendmsg(self, *args: object) -> int:
            self.calls += 1
            return super().sendmsg(*args)  # type: ignore[arg-type]

    ours, raw = sockets
    raw.setblocking(False)
    counting = CountingSocket(fileno=ours.detach())
    with contextlib.closing(FdStream(counting, client())) as stream:
        stream.send(0, response(bytes(1 << 20)))
        for _ in range(100):
            stream.send(1, Status())
        counting.calls = 0
        async with asyncio.timeout(DEADLINE):
            while stream.queued_bytes:
                try:
                    raw.recv(1 << 20)
                except BlockingIOError:
                    await asyncio.sleep(0)
        assert counting.calls < 30


# -------------------------------------------------------------------------------- slow readers
async def test_a_peer_that_reads_nothing_holds_up_neither_its_sender_nor_others(pair: Pair, with_raw: WithRaw) -> None:
    stalled, raw = with_raw
    stalled.send(1, response(bytes(1 << 20)))
    for number in range(50):
        stalled.send(number, response(bytes(1000)))
        pair[0].send(number, Status())
        async with asyncio.timeout(DEADLINE):
            await pair[1].receive()  # which knows no requests, and says so
    assert stalled.queued_bytes > 0
    del raw


async def test_two_sides_that_owe_each_other_more_than_may_wait_both_go_on(sockets: Sockets) -> None:
    """Neither may stop reading because of what it has to send."""
    one, other = (FdStream(sock, client(), max_queued_bytes=1000, max_queued_events=2) for sock in sockets)

    async def take_all(stream: FdStream) -> list[int]:
        return [received(await stream.receive()).request_id for _ in range(11)]

    with contextlib.closing(one), contextlib.closing(other):
        for stream in (one, other):
            stream.send(0, Welcome(version=1))
            for number in range(1, 10):
                stream.send(number, response())
            stream.send(10, response(bytes(4 << 20)))
        async with asyncio.timeout(DEADLINE):
            outcomes = await asyncio.gather(take_all(one), take_all(other))
    assert list(outcomes) == [list(range(11))] * 2


async def test_a_duplicate_that_was_made_to_block_does_not_make_the_loop_block(with_raw: WithRaw) -> None:
    """O_NONBLOCK lives on the open file description, which any holder of a duplicate can change."""
    stream, raw = with_raw
    with socket.socket(fileno=os.dup(stream._fd)) as duplicate:
        duplicate.setblocking(True)
        stream.send(1, response(bytes(4 << 20)))
        assert stream.queued_bytes > 0
        raw.send(frame(1, response()))
        assert received(await stream.receive()).request_id == 1


async def test_over_the_limit_a_message_is_refused_whole_and_the_rest_arrives(pair: Pair) -> None:
    one, other = pair
    one._max_queued_bytes = 300_000
    sent = 0
    fds: list[OwnedFd] = []
    caught: SendQueueFull | None = None
    while caught is None and sent < 100:
        fds = numbered(2)
        try:
            one.send(sent, response(bytes(50_000)), fds)
            sent += 1
        except SendQueueFull as error:
            caught = error
    assert caught is not None
    assert all(fd.closed for fd in fds)
    assert caught.limit == 300_000
    assert caught.queued + caught.nbytes > 300_000
    assert one.queued_bytes == caught.queued
    async with asyncio.timeout(DEADLINE):
        for number in range(sent):
            event = await other.receive()
            assert received(event).request_id == number
            assert take_numbers(event) == [0, 1]
    one.send(sent, response())
    assert received(await other.receive()).request_id == sent


async def test_one_message_may_be_larger_than_the_limit_where_nothing_else_waits(sockets: Sockets) -> None:
    stream = FdStream(sockets[0], client(), max_queued_bytes=1000)
    stream.send(0, response(bytes(1 << 20)))
    assert stream.queued_bytes > 1000
    with pytest.raises(SendQueueFull):
        stream.send(0, Status())
    stream.close()


async def test_drain_waits_for_what_was_queued_before_it_and_for_no_more(pair: Pair) -> None:
    one, other = pair
    one.send(1, response(bytes(1 << 20)))
    draining = asyncio.create_task(one.drain())
    await asyncio.sleep(0)
    one.send(2, response(bytes(4 << 20)))
    async with asyncio.timeout(DEADLINE):
        assert received(await other.receive()).request_id == 1
        await draining
        assert one.queued_bytes > 0
        assert received(await other.receive()).request_id == 2
        await one.drain()
    assert one.queued_bytes == 0


async def test_a_drain_past_its_deadline_is_a_peer_timeout_that_drops_nothing(with_raw: WithRaw) -> None:
    stream, raw = with_raw
    stream.send(1, response(bytes(1 << 20)))
    owed = stream.queued_bytes
    with pytest.raises(PeerTimeout, match=f"take {owed} bytes"):
        await stream.drain(0.01)
    assert stream.queued_bytes == owed
    nbytes = 0
    async with asyncio.timeout(DEADLINE):
        while nbytes < 1 << 20:
            try:
                nbytes += len(raw.recv(1 << 20))
            except BlockingIOError:
                await asyncio.sleep(0)
        await stream.drain(0)


async def test_a_cancelled_drain_drops_nothing(pair: Pair) -> None:
    one, other = pair
    for number in range(20):
        one.send(number, response(bytes(100_000)), numbered(1))
        draining = asyncio.create_task(one.drain())
        for _ in range(number % 4):
            await asyncio.sleep(0)
        draining.cancel()
        await asyncio.gather(draining, return_exceptions=True)
    async with asyncio.timeout(DEADLINE):
        for number in range(20):
            event = await other.receive()
            assert received(event).request_id == number
            assert take_numbers(event) == [0]


# ------------------------------------------------------------------------------ what cannot go
async def test_what_cannot_be_encoded_queues_nothing_and_its_fds_are_closed(pair: Pair) -> None:
    fds = numbered(1)
    with pytest.raises(MalformedMessage):
        pair[0].send(1, ErrorResponse(code="\ud800", message=""), fds)
    assert fds[0].closed
    pair[0].send(2, response())
    assert received(await pair[1].receive()).request_id == 2


async def test_what_the_peer_would_not_take_queues_nothing_and_its_fds_are_closed(sockets: Sockets) -> None:
    fds = numbered(1)
    with contextlib.closing(FdStream(sockets[0], Connection(Role.CLIENT))) as stream:
        with pytest.raises(FrameTooLarge):
            stream.send(1, response(bytes(1 << 20)), fds)
        assert stream.queued_bytes == 0
    assert fds[0].closed


async def test_a_closed_fd_refuses_the_message_and_closes_the_others(pair: Pair) -> None:
    fds = numbered(3)
    fds[1].close()
    with pytest.raises(ValueError, match="closed"):
        pair[0].send(1, response(), fds)
    assert all(fd.closed for fd in fds)
    pair[0].send(2, response())
    assert received(await pair[1].receive()).request_id == 2


async def test_an_fd_closed_by_whoever_gave_it_away_breaks_the_stream(with_raw: WithRaw) -> None:
    """Its frame can neither go without it nor be taken back."""
    stream, raw = with_raw
    stream.send(1, response(bytes(1 << 20)))
    fds = numbered(2)
    stream.send(2, response(), fds)
    fds[0].close()
    draining = asyncio.create_task(stream.drain())

    def drained() -> bool:
        with contextlib.suppress(BlockingIOError):
            raw.recv(1 << 20)
        return draining.done()

    await until(drained)
    with pytest.raises(StreamBroken, match="closed while it waited"):
        await draining
    assert fds[1].closed


async def test_sending_on_a_closed_stream_closes_the_fds(pair: Pair) -> None:
    fds = numbered(1)
    pair[0].close()
    with pytest.raises(StreamClosed):
        pair[0].send(1, response(), fds)
    assert fds[0].closed


async def test_when_the_peer_is_gone_its_last_words_are_still_heard(sockets: Sockets) -> None:
    """A daemon refuses and hangs up while the client is sending: the client must learn why."""
    ours, raw = sockets
    stream = FdStream(ours, client())
    raw.send(frame(0, ErrorResponse(code="draining", message="")))
    raw.close()
    fds = numbered(1)
    stream.send(1, response(), fds)  # EPIPE shows here, and is told by what waits for the result
    assert fds[0].closed
    with pytest.raises(StreamBroken, match="Broken pipe"):
        await stream.drain()
    with pytest.raises(StreamBroken, match="Broken pipe"):
        stream.send(2, Status())
    event = received(await stream.receive())
    assert event.message == ErrorResponse(code="draining", message="")
    assert await stream.receive() == EndOfStream()
    with pytest.raises(StreamEnded):
        await stream.receive()
    stream.close()


async def test_a_peer_that_dies_with_bytes_owed_wakes_drain_and_closes_what_was_queued(with_raw: WithRaw) -> None:
    stream, raw = with_raw
    fds = numbered(2)
    stream.send(1, response(bytes(1 << 20)))
    stream.send(2, response(), fds)
    assert not fds[0].closed
    draining = asyncio.create_task(stream.drain())
    await asyncio.sleep(0)
    raw.close()
    async with asyncio.timeout(DEADLINE):
        with pytest.raises(StreamBroken):
            await draining
    assert all(fd.closed for fd in fds)
    assert stream.queued_bytes == 0


class FailingSocket(socket.socket):
    """A socket whose next sends fail with the given errors."""

    failures: list[int]
    attempts = 0

    def sendmsg(self, buffers: Sequence[bytes], *args: object) -> int:  # type: ignore[override]
        self.attempts += 1
        if self.failures:
            number = self.failures.pop(0)
            raise OSError(number, os.strerror(number))
        return super().sendmsg(buffers, *args)  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM])
async def test_a_passing_shortage_is_tried_again_and_nothing_is_lost(sockets: Sockets, number: int) -> None:
    ours, raw = sockets
    failing = FailingSocket(fileno=ours.detach())
    failing.failures = [number] * 3
    with (
        contextlib.closing(FdStream(failing, client())) as stream,
        contextlib.closing(FdStream(raw, client())) as other,
    ):
        fds = numbered(1)
        stream.send(0, Welcome(version=1))
        stream.send(1, response(), fds)
        assert not fds[0].closed
        with pytest.raises(PeerTimeout, match="in flight"):
            await stream.drain(0)
        async with asyncio.timeout(DEADLINE):
            await stream.drain()
            await other.receive()
            assert take_numbers(await other.receive()) == [0]
        assert failing.attempts == 3 + 2  # no busy loop


async def test_closing_during_a_shortage_closes_what_is_queued_and_ends_the_trying(sockets: Sockets) -> None:
    failing = FailingSocket(fileno=sockets[0].detach())
    failing.failures = [errno.ETOOMANYREFS] * 100
    stream = FdStream(failing, client())
    fds = numbered(1)
    stream.send(1, response(), fds)
    stream.close()
    assert fds[0].closed
    attempts = failing.attempts
    await asyncio.sleep(0.02)  # past the first retries
    assert failing.attempts == attempts


async def test_any_other_refusal_of_the_kernel_breaks_sending_with_its_reason(sockets: Sockets) -> None:
    failing = FailingSocket(fileno=sockets[0].detach())
    failing.failures = [errno.EPERM]
    with contextlib.closing(FdStream(failing, client())) as stream:
        fds = numbered(1)
        stream.send(1, response(), fds)
        assert fds[0].closed
        with pytest.raises(StreamBroken, match="not permitted"):
            await stream.drain()


IN_FLIGHT_LIMIT = """
import asyncio, json, os, resource, socket, sys
from tests.sockets.wire import client, numbered, response, take_numbers, until
from wcache_async.errors import PeerTimeout
from wcache_async.protocol.messages import Welcome
from wcache_async.sockets.stream import FdStream
import uvloop

async def main():
    ours, theirs = socket.socketpair()
    one = FdStream(ours, client())
    one.send(0, Welcome(version=1))
    for number in range(8):  # the eighth comes when 70 are in flight
        one.send(number, response(), numbered(10))
    try:
        await one.drain(0.1)
        outcome = "sent"
    except PeerTimeout as error:
        outcome = str(error)
    other = FdStream(theirs, client(), max_queued_events=1)
    await other.receive()
    arrived = []
    for number in range(8):
        event = await other.receive()
        arrived.append([event.request_id, take_numbers(event)])
    await one.drain(10)
    one.close()
    other.close()
    print(json.dumps([outcome, arrived]))

if os.geteuid() == 0:
    os.setgid(54321)
    os.setuid(int(sys.argv[2]))  # and with it go the capabilities that exempt from the limit
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
if sys.argv[1] == "uvloop":
    uvloop.run(main())
else:
    asyncio.run(main())
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_too_many_fds_in_flight_wait_until_others_are_taken(loop: str) -> None:
    """The kernel's own ETOOMANYREFS, which counts what a user's processes have sent and nobody received."""
    uid = 50_000 + os.getpid() % 10_000
    command = [sys.executable, "-c", IN_FLIGHT_LIMIT, loop, str(uid)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    outcome, arrived = json.loads(done.stdout)
    assert "too many file descriptors of this user are in flight" in outcome
    assert arrived == [[number, list(range(10))] for number in range(8)]


def test_a_stream_needs_a_running_loop_and_leaves_the_socket_alone_without(sockets: Sockets) -> None:
    make: Callable[[], FdStream] = lambda: FdStream(sockets[0], client())  # noqa: E731
    with pytest.raises(RuntimeError, match="no running event loop"):
        make()
    sockets[1].send(b"x")
    assert sockets[0].recv(1) == b"x"

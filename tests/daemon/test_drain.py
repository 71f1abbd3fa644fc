"""Shutting down: who is still answered, who is told Draining, and that nothing keeps a daemon from ending."""

import asyncio
import contextlib
import fcntl
import os
import sys
import termios
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from tests.daemon.test_exporter import Memory, begin
from tests.daemon.test_server import HELLO, eventually, frame
from wcache_async import Client, Daemon
from wcache_async.daemon.exporter import Exporter
from wcache_async.daemon.threads import Threads
from wcache_async.errors import Draining, NotRunning
from wcache_async.protocol.connection import EndOfStream, Received
from wcache_async.protocol.messages import Status, StatusResponse
from wcache_async.testing.scripted_peer import ScriptedPeer


class Hanging(Memory):
    """A source on a file server that is gone: a read never returns, and nothing can interrupt it."""

    def __init__(self) -> None:
        super().__init__(storages=1)
        self._nothing, self._never = os.pipe()
        self.left = threading.Event()

    def read(self, storage: int, into: memoryview, advance: object) -> None:
        self.reading.set()
        os.read(self._nothing, 1)
        self.left.set()

    def come_back(self) -> None:
        os.close(self._never)
        assert self.left.wait(20)
        os.close(self._nothing)


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    source = Hanging()
    yield source
    source.come_back()


def unread(peer: ScriptedPeer) -> int:
    """Bytes that have come and nobody has read yet (tty_ioctl(4))."""
    return int.from_bytes(fcntl.ioctl(peer.sock, termios.FIONREAD, bytes(4)), sys.byteorder)


@contextlib.asynccontextmanager
async def slow_reader(daemon: Daemon) -> AsyncIterator[ScriptedPeer]:
    """A client that asks more than it reads: the daemon is busy with its answer."""
    async with ScriptedPeer.connect(daemon.socket_path) as slow:
        talk = frame(0, HELLO) + b"".join(frame(number, Status()) for number in range(1, 3000))
        asking = asyncio.create_task(slow.send_bytes(talk))
        await eventually(lambda: unread(slow) > 32 << 10)
        yield slow
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError, OSError):
            await asking


async def test_while_it_drains_running_requests_end_and_new_ones_are_told_so(
    short_tmp: Path, write_checkpoint: Callable[..., Path]
) -> None:
    async with Daemon(short_tmp / "s.sock", drain_timeout=60) as daemon:
        await daemon.load(write_checkpoint(), name="m")
        async with Client(daemon.socket_path) as holder:
            state = await holder.fetch_state("m")
            running = daemon._running()[0]
            running.request_begun()  # As a request that takes its time.
            draining = asyncio.create_task(daemon.close())
            await eventually(lambda: running.draining)
            with pytest.raises(Draining):
                await holder.fetch_state("m")
            async with Client(daemon.socket_path) as newcomer:
                with pytest.raises(Draining):
                    await newcomer.fetch_state("m")
                with pytest.raises(Draining):
                    await newcomer.load("/some/where", "other")
                assert (await newcomer.status()).draining
            assert not draining.done()
            running.request_ended()
            await asyncio.wait_for(draining, 20)
            tensors = await state.import_tensors()
            assert bytes(tensors["layer.0.weight"].numpy().tobytes()) == bytes(range(64))
    with pytest.raises(NotRunning):
        await Client(short_tmp / "s.sock").connect()


async def test_an_answer_under_way_is_brought_to_its_end(short_tmp: Path) -> None:
    async with Daemon(short_tmp / "s.sock", drain_timeout=60) as daemon, slow_reader(daemon) as slow:
        draining = asyncio.create_task(daemon.close())
        answers = 0
        while not isinstance(event := await slow.hear(), EndOfStream):
            assert isinstance(event, Received)
            answers += isinstance(event.message, StatusResponse)
        assert answers
        await asyncio.wait_for(draining, 20)


async def test_a_request_that_does_not_end_is_cut_off_by_the_drain_timeout(
    short_tmp: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Daemon(short_tmp / "s.sock", drain_timeout=0.05) as daemon:
        daemon._running()[0].request_begun()
        await asyncio.wait_for(daemon.close(), 20)
    assert "1 requests were still running" in caplog.text
    assert list(short_tmp.iterdir()) == []


async def test_a_load_that_hangs_is_not_waited_for_beyond_the_timeout(
    hanging: Hanging, caplog: pytest.LogCaptureFixture
) -> None:
    exporter = Exporter()
    begin(exporter, hanging)
    assert await asyncio.to_thread(hanging.reading.wait, 20)
    begin(exporter, Memory(), "behind it")
    await asyncio.wait_for(exporter.close(0.05), 20)
    assert not hanging.left.is_set()
    assert not exporter.busy
    assert "not waiting any longer for the load of m:0" in caplog.text


async def test_whatever_hurries_a_close_ends_its_wait(hanging: Hanging) -> None:
    exporter = Exporter()
    begin(exporter, hanging)
    assert await asyncio.to_thread(hanging.reading.wait, 20)
    closing = asyncio.create_task(exporter.close())
    await eventually(lambda: exporter.closing)
    exporter.hurry()
    await asyncio.wait_for(closing, 20)


async def test_a_load_that_comes_back_after_all_gives_everything_back(
    hanging: Hanging, open_fds: Callable[[], int]
) -> None:
    before = open_fds()
    exporter = Exporter()
    begin(exporter, hanging)
    assert await asyncio.to_thread(hanging.reading.wait, 20)
    await exporter.close(0)
    assert open_fds() > before  # Its arena.
    os.write(hanging._never, b"x")
    await eventually(lambda: open_fds() == before and hanging.closed.is_set())


@pytest.fixture
def open_fds() -> Callable[[], int]:
    return lambda: len(os.listdir("/proc/self/fd"))


# ------------------------------------------------------------------------------------- threads
def test_threads_do_what_they_are_given_and_end_with_their_shutdown() -> None:
    threads = Threads(2, "some")
    both = threading.Barrier(2)
    futures = [threads.submit(both.wait, 20) for _ in range(2)]
    assert sorted(future.result(20) for future in futures) == [0, 1]
    assert threads.submit(divmod, 7, 2).result(20) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        threads.submit(divmod, 1, 0).result(20)
    mine = [thread for thread in threading.enumerate() if thread.name.startswith("some-")]
    assert 1 <= len(mine) <= 2
    threads.shutdown()
    for thread in mine:
        thread.join(20)
        assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="some: no more work"):
        threads.submit(print)


def test_who_stops_waiting_does_not_undo_what_was_asked_for() -> None:
    threads = Threads(1, "one")
    gate, done = threading.Event(), threading.Event()
    threads.submit(gate.wait, 20)
    assert not threads.submit(done.set).cancel()
    gate.set()
    assert done.wait(20)
    threads.shutdown()

"""Hostile bytes: every way to end a sentence early, to garble it, or never to listen."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.faults.wire import ask, eventually, publication
from wcache_async import Client, Daemon
from wcache_async.backends.memfd import sealed_memfd
from wcache_async.daemon.server import ServerLimits
from wcache_async.errors import DaemonLost, NotRunning, WeightCacheError
from wcache_async.protocol.framing import Segment, encode_frame
from wcache_async.protocol.messages import (
    PROTOCOL_VERSIONS,
    Abandon,
    Claim,
    FetchDigests,
    FetchState,
    Hello,
    Load,
    Message,
    Pin,
    Release,
    Status,
    StatusResponse,
    Unload,
    encode_message,
)
from wcache_async.testing.scripted_peer import ScriptedPeer


def frame(request_id: int, message: Message) -> bytes:
    segments: list[Segment[int]] = encode_frame(request_id, encode_message(message), ())
    return b"".join(segment.data for segment in segments)


HELLO = frame(0, Hello(versions=PROTOCOL_VERSIONS, backends=("shm_fd",)))
_REQUESTS: tuple[Message, ...] = (
    FetchState(name="m", timeout=0),
    FetchDigests(lease=1),
    Claim(name="n", timeout=0),
    Abandon(ticket=1),
    publication("o"),
    Pin(name="m"),
    Status(),
    Load(path="/nonexistent", name="p"),
    Unload(name="n"),
    Release(lease=1),
)
TALK = b"".join(frame(number, message) for number, message in enumerate(_REQUESTS, start=1))


def dial(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    sock.connect(path)
    return sock


async def still_serves(daemon: Daemon) -> None:
    async with Client(daemon.socket_path) as client, asyncio.timeout(20):
        assert torch.equal((await (await client.fetch_state("m")).import_tensors())["w"], torch.ones(3))
    await eventually(lambda: daemon.status().clients == 0)
    assert all(state.leases == 0 for state in daemon.status().states)


@asynccontextmanager
async def serving(daemon: Daemon) -> AsyncIterator[None]:
    async with Client(daemon.socket_path) as client:
        await client.publish("m", {"w": torch.ones(3)})
    yield
    await still_serves(daemon)


async def test_hanging_up_after_any_byte(daemon: Daemon) -> None:
    said = HELLO + TALK
    async with serving(daemon):
        for end in range(0, len(said), 3):
            with dial(daemon.socket_path) as sock:
                sock.send(said[:end])
                if end % 2:
                    sock.shutdown(socket.SHUT_WR)
            if not end % 30:
                await asyncio.sleep(0)


async def test_garbled_traffic(daemon: Daemon) -> None:
    said = HELLO + TALK

    @settings(max_examples=150, suppress_health_check=list(HealthCheck))
    @given(
        st.lists(st.tuples(st.integers(0, len(said) - 1), st.binary(min_size=1, max_size=9)), min_size=1, max_size=4),
        st.booleans(),
    )
    def garble(changes: list[tuple[int, bytes]], greeted: bool) -> None:
        garbled = bytearray(said)
        for place, put in changes:
            place = max(place, len(HELLO)) if greeted else place
            garbled[place : place + len(put)] = put
        with dial(daemon.socket_path) as sock:
            sock.send(garbled)

    async with serving(daemon):
        task = asyncio.create_task(asyncio.to_thread(garble))
        await task
    assert all(state.name in ("m", "n", "o", "p") or state.phase == "failed" for state in daemon.status().states)


@pytest.mark.parametrize(
    "phase", [b"", HELLO[:7], HELLO, HELLO + TALK[:33]], ids=["first", "in hello", "greeted", "in talk"]
)
@pytest.mark.parametrize("fds", [1, 253])
async def test_fds_that_belong_to_nothing(daemon: Daemon, phase: bytes, fds: int) -> None:
    async with serving(daemon):
        before = len(os.listdir("/proc/self/fd"))
        with sealed_memfd("x", b"x") as fd:
            for _ in range(20):
                async with ScriptedPeer.connect(daemon.socket_path) as peer:
                    if phase:
                        await peer.send_bytes(phase)
                    await peer.send_bytes(b"W", [fd.fileno()] * fds)
        await eventually(lambda: len(os.listdir("/proc/self/fd")) <= before)


async def test_ten_thousand_questions_and_no_ear_for_the_answers(daemon: Daemon) -> None:
    async with serving(daemon):
        with dial(daemon.socket_path) as deaf:
            left = memoryview(HELLO + frame(1, Status()) * 5000 + frame(2, FetchState(name="m")) * 5000)
            for _ in range(2000):
                try:
                    left = left[deaf.send(left) :]
                except BlockingIOError:
                    await asyncio.sleep(0)
                if not left:
                    break
            async with ScriptedPeer.connect(daemon.socket_path) as peer:
                await peer.greet()
                assert isinstance(await ask(peer, Status()), StatusResponse)


async def test_more_connections_than_are_served(daemon: Daemon) -> None:
    async with serving(daemon):
        crowd = []
        for number in range(1200):
            try:
                crowd.append(dial(daemon.socket_path))
            except BlockingIOError:
                await asyncio.sleep(0)
            if not number % 100:
                await asyncio.sleep(0)
        for sock in crowd:
            sock.close()
        await eventually(lambda: daemon.status().clients == 0)


# ------------------------------------------------------------------------------ a daemon of its own
async def test_a_daemon_flooded_with_fds_beyond_its_limit_serves_on(short_tmp: Path) -> None:
    path = str(short_tmp / "d.sock")
    command = f"ulimit -n 128; exec {sys.executable} -m wcache_async serve --socket {path}"
    process = await asyncio.to_thread(subprocess.Popen, ["bash", "-c", command], stderr=subprocess.DEVNULL)
    try:
        await listening(path, process)
        async with Client(path) as client:
            await client.publish("m", {"w": torch.ones(3)})
            for _ in range(3):
                async with ScriptedPeer.connect(path) as peer:
                    await peer.greet()
                    with sealed_memfd("x", bytes(64)) as fd:
                        for number in range(20):
                            with suppress(ConnectionError):
                                await peer.say(number, publication(f"x{number}"), [fd.fileno()] * 100)
                        crowd = [dial(path) for _ in range(100)]
                    with suppress(WeightCacheError):
                        await client.fetch_state("m")
                for sock in crowd:
                    sock.close()
        async with asyncio.timeout(30):
            while True:
                with suppress(WeightCacheError):
                    async with Client(path) as client:
                        state = await client.fetch_state("m")
                        assert torch.equal((await state.import_tensors())["w"], torch.ones(3))
                        break
                await asyncio.sleep(0)
        assert process.poll() is None
    finally:
        process.kill()
        await asyncio.to_thread(process.wait)


async def listening(path: str, process: subprocess.Popen[bytes]) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                async with Client(path) as client:
                    await client.status()
                return
            except NotRunning:
                assert process.poll() is None
                await asyncio.sleep(0)


async def test_whoever_waits_is_told_that_the_daemon_was_killed(short_tmp: Path) -> None:
    path = str(short_tmp / "d.sock")
    process = await asyncio.to_thread(
        subprocess.Popen, [sys.executable, "-m", "wcache_async", "serve", "--socket", path], stderr=subprocess.DEVNULL
    )
    try:
        await listening(path, process)
        async with Client(path) as builder, Client(path) as second, Client(path) as third:
            turn = await builder.claim("m")
            waiting = [
                asyncio.create_task(second.claim("m")),
                asyncio.create_task(third.fetch_state("m")),
                asyncio.create_task(third.fetch_state("m", timeout=60)),
            ]
            await third.status()
            await second.status()
            process.send_signal(signal.SIGKILL)
            for result in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(result, DaemonLost), result
            with pytest.raises(DaemonLost):
                await turn.publish({"w": torch.ones(1)})  # type: ignore[union-attr]
    finally:
        process.kill()
        await asyncio.to_thread(process.wait)


async def test_half_a_message_with_the_peers_own_end_in_it_is_dropped(short_tmp: Path) -> None:
    """The peer is gone, and nobody would be told: its end lives on in the daemon's own hands."""
    limits = ServerLimits(frame_timeout=0.05)
    async with Daemon(short_tmp / "wcache.sock", limits=limits, drain_timeout=5) as daemon, serving(daemon):
        with dial(daemon.socket_path) as sock:
            sock.send(HELLO)
            rights = array("i", [sock.fileno()] * 253)
            sock.sendmsg([TALK[:1]], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])

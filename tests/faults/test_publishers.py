"""Publishers that lie, change their mind, or do everything twice."""

import asyncio
import os

import msgspec
import pytest

from tests.faults.wire import answer, ask, code_of, eventually, manifest_of, publication
from wcache_async import Client, Daemon
from wcache_async.backends.memfd import create_memfd, seal_memfd, sealed_memfd
from wcache_async.errors import DaemonLost, Draining
from wcache_async.manifest import Arena, StateManifest, TensorEntry
from wcache_async.protocol.messages import (
    Abandon,
    AbandonResponse,
    BuildTicket,
    Claim,
    ErrorResponse,
    FetchState,
    FetchStateResponse,
    PublishResponse,
    Status,
    StatusResponse,
)
from wcache_async.testing.scripted_peer import ScriptedPeer


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_a_payload_nested_beyond_every_limit_is_answered(daemon: Daemon) -> None:
    depth = 30_000
    payload = b"\x82\xa1x" + b"\x91" * depth + b"\x00" + b"\xa6arenas\x91\x40"
    async with ScriptedPeer.connect(daemon.socket_path) as peer:
        await peer.greet()
        with sealed_memfd("arena", bytes(64)) as fd:
            refused = await ask(peer, publication(payload=payload), [fd.fileno()])
        assert code_of(refused) == "malformed_message"
        assert isinstance(await ask(peer, Status()), StatusResponse)
    assert daemon.status().states == ()


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_PATH])
async def test_an_arena_that_nobody_can_read_is_refused(daemon: Daemon, flags: int) -> None:
    with create_memfd("arena", 64) as memfd:
        fd = os.open(f"/proc/self/fd/{memfd.fileno()}", flags | os.O_CLOEXEC)
        os.pwrite(memfd.fileno(), bytes(64), 0)
        seal_memfd(memfd)
        try:
            async with ScriptedPeer.connect(daemon.socket_path) as peer:
                await peer.greet()
                assert code_of(await ask(peer, publication(), [fd])) == "invalid_memfd"
        finally:
            os.close(fd)
    assert daemon.status().states == ()


async def test_an_arena_without_memory_is_refused(daemon: Daemon) -> None:
    """Whoever touched it first would have to pay for it, and the daemon would read for hours."""
    nbytes = 1 << 40
    with create_memfd("arena", nbytes) as fd:
        seal_memfd(fd)
        async with ScriptedPeer.connect(daemon.socket_path) as peer:
            await peer.greet()
            refused = await ask(peer, publication(manifest=manifest_of(nbytes)), [fd.fileno()])
            assert code_of(refused) == "invalid_memfd"
    assert daemon.status().states == ()


async def test_an_arena_is_where_its_backend_has_it(daemon: Daemon) -> None:
    plain = manifest_of()
    elsewhere = msgspec.structs.replace(plain, arenas=(Arena(64, "cuda:7"),))
    async with ScriptedPeer.connect(daemon.socket_path) as peer:
        await peer.greet()
        with sealed_memfd("arena", bytes(64)) as fd:
            assert code_of(await ask(peer, publication(manifest=elsewhere), [fd.fileno()])) == "invalid_manifest"


@pytest.mark.parametrize(
    "broken",
    [
        StateManifest(
            ("uint8",),
            (Arena(64), Arena(64)),
            (TensorEntry("a", 0, (64,), 0, 0, 0), TensorEntry("b", 0, (64,), 0, 0, 1)),
        ),
        StateManifest(("uint8",), (Arena(64),), ()),
        StateManifest(("uint8",), (Arena(64),), (TensorEntry("a", 0, (2**40, 2**18), 0, 0, 0, (0, 0)),)),
        StateManifest(
            ("uint8",),
            (Arena(64),),
            tuple(TensorEntry(f"{i}", 0, (32, 2), 0, 2**62 + i, 0, (1, 32)) for i in range(300)),
        ),
    ],
    ids=["one storage in two arenas", "nothing", "expanded to 2**58", "columns"],
)
async def test_every_odd_manifest_is_answered(daemon: Daemon, broken: StateManifest) -> None:
    async with ScriptedPeer.connect(daemon.socket_path) as peer:
        await peer.greet()
        with sealed_memfd("arena", bytes(64)) as fd:
            said = await ask(peer, publication(manifest=broken), [fd.fileno()] * len(broken.arenas))
        assert isinstance(said, PublishResponse | ErrorResponse)
        assert isinstance(await ask(peer, Status()), StatusResponse)


# ------------------------------------------------------------------------------- one ticket, once
async def ticket_of(peer: ScriptedPeer) -> int:
    granted = await ask(peer, Claim(name="m"))
    assert isinstance(granted, BuildTicket)
    return granted.ticket


async def test_of_two_publications_with_one_ticket_one_is_taken(daemon: Daemon) -> None:
    async with ScriptedPeer.connect(daemon.socket_path) as peer:
        await peer.greet()
        request = publication(ticket=await ticket_of(peer))
        with sealed_memfd("one", b"\x01" * 64) as one, sealed_memfd("two", b"\x02" * 64) as two:
            await peer.say(2, request, [one.fileno()])
            await peer.say(3, request, [two.fileno()])
        said = [await answer(peer), await answer(peer)]
        assert sorted(type(message).__name__ for message in said) == ["ErrorResponse", "PublishResponse"]
    (state,) = daemon.status().states
    assert state.phase == "ready"


@pytest.mark.parametrize("turns", [0, 2, 4, 8])
async def test_a_ticket_given_back_while_its_publication_is_checked_makes_no_second_builder(
    daemon: Daemon, turns: int
) -> None:
    """Either the state is adopted or the next one builds it: never both."""
    async with ScriptedPeer.connect(daemon.socket_path) as first, ScriptedPeer.connect(daemon.socket_path) as second:
        await first.greet()
        await second.greet()
        ticket = await ticket_of(first)
        await second.say(1, Claim(name="m"))
        nbytes = 8 << 20  # Takes a moment to digest.
        with sealed_memfd("arena", bytes(nbytes)) as fd:
            await first.say(2, publication(manifest=manifest_of(nbytes), ticket=ticket), [fd.fileno()])
            for _ in range(turns):
                await asyncio.sleep(0)
            await first.say(3, Abandon(ticket=ticket))
        said = [await answer(first), await answer(first)]
        then = await answer(second)
        if any(isinstance(message, PublishResponse) for message in said):
            assert isinstance(then, FetchStateResponse)
        else:
            assert isinstance(then, BuildTicket)
            assert any(isinstance(message, AbandonResponse) for message in said)


async def test_a_refused_publication_whose_ticket_was_given_back_passes_the_turn(daemon: Daemon) -> None:
    async with ScriptedPeer.connect(daemon.socket_path) as first, ScriptedPeer.connect(daemon.socket_path) as second:
        await first.greet()
        await second.greet()
        ticket = await ticket_of(first)
        await second.say(1, Claim(name="m"))
        with create_memfd("unsealed", 64) as fd:
            await first.say(2, publication(ticket=ticket), [fd.fileno()])
            await first.say(3, Abandon(ticket=ticket))
        said = [await answer(first), await answer(first)]
        assert {type(message) for message in said} == {ErrorResponse, AbandonResponse}
        assert isinstance(await answer(second), BuildTicket)


async def test_a_ticket_refused_once_is_good_for_another_try(daemon: Daemon) -> None:
    async with ScriptedPeer.connect(daemon.socket_path) as peer:
        await peer.greet()
        request = publication(ticket=await ticket_of(peer))
        with create_memfd("unsealed", 64) as fd:
            assert code_of(await ask(peer, request, [fd.fileno()])) == "invalid_memfd"
        with sealed_memfd("arena", bytes(64)) as fd:
            assert isinstance(await ask(peer, request, [fd.fileno()]), PublishResponse)


@pytest.mark.parametrize("turns", range(6))
async def test_no_state_waits_for_a_builder_that_nobody_is(daemon: Daemon, turns: int) -> None:
    """The builder and the next in line hang up in the same moment, more or less."""
    first, second = ScriptedPeer.connect(daemon.socket_path), ScriptedPeer.connect(daemon.socket_path)
    async with first, second, ScriptedPeer.connect(daemon.socket_path) as third:
        for peer in (first, second, third):
            await peer.greet()
        await ticket_of(first)
        await second.say(1, Claim(name="m"))
        await ask(second, Status())
        await third.say(1, FetchState(name="m"))
        await ask(third, Status())
        first.sock.close()
        for _ in range(turns):
            await asyncio.sleep(0)
        second.sock.close()
        said = await answer(third)
        assert code_of(said) in ("state_unloaded", "state_not_found")
    assert daemon.status().states == ()


async def test_a_refused_publication_leaves_the_failed_state_it_would_have_replaced(daemon: Daemon) -> None:
    async with Client(daemon.socket_path) as client:
        with pytest.raises(Exception, match="nonexistent"):
            await client.load("/nonexistent/model.safetensors", "m")
    async with ScriptedPeer.connect(daemon.socket_path) as peer:
        await peer.greet()
        with create_memfd("unsealed", 64) as fd:
            assert code_of(await ask(peer, publication(), [fd.fileno()])) == "invalid_memfd"
    (state,) = daemon.status().states
    assert state.phase == "failed"


# ----------------------------------------------------------------------------------- floods of fds
async def test_a_flood_of_publications_leaves_no_fd_behind(daemon: Daemon) -> None:
    async with ScriptedPeer.connect(daemon.socket_path) as peer:
        await peer.greet()
        await ask(peer, Status())
        before = open_fds()
        with sealed_memfd("arena", bytes(64)) as fd:
            for number in range(30):
                await peer.say(number + 10, publication(f"m{number}"), [fd.fileno()] * 253)
        for _ in range(30):
            assert code_of(await answer(peer)) in ("fds_undeclared", "too_many_requests")
        await eventually(lambda: open_fds() <= before)
    assert daemon.status().states == ()


async def test_a_timeout_that_is_no_number_is_refused(daemon: Daemon) -> None:
    """Compared with anything it is false, so that a wait for it would never end, or never wait."""
    async with ScriptedPeer.connect(daemon.socket_path) as builder, ScriptedPeer.connect(daemon.socket_path) as peer:
        await builder.greet()
        await peer.greet()
        await ticket_of(builder)
        await peer.say(1, FetchState(name="m", timeout=float("nan")))
        event = await peer.hear()
        assert "timeout" in str(event)


@pytest.mark.parametrize("timeout", [1e300, float("inf")])
async def test_a_timeout_beyond_every_clock_waits(daemon: Daemon, timeout: float) -> None:
    async with ScriptedPeer.connect(daemon.socket_path) as builder, ScriptedPeer.connect(daemon.socket_path) as peer:
        await builder.greet()
        await peer.greet()
        request = publication(ticket=await ticket_of(builder))
        await peer.say(1, FetchState(name="m", timeout=timeout))
        await ask(peer, Status())
        with sealed_memfd("arena", bytes(64)) as fd:
            assert isinstance(await ask(builder, request, [fd.fileno()]), PublishResponse)
        assert isinstance(await answer(peer), FetchStateResponse)


async def test_a_daemon_that_ends_tells_every_waiting_claim(daemon: Daemon) -> None:
    async with Client(daemon.socket_path) as first, Client(daemon.socket_path) as second:
        await first.claim("m")
        waiting = asyncio.create_task(second.claim("m"))
        await second.status()
        await daemon.close()
        with pytest.raises((Draining, DaemonLost)):
            await waiting

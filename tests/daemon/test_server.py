"""Sessions against well-behaved, silent, slow, junk-sending and dying peers."""

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from wcache_async import Client, Daemon
from wcache_async.daemon.server import ServerLimits
from wcache_async.errors import (
    BackendNotAccepted,
    BadMagic,
    FdsUndeclared,
    FrameTooLarge,
    InvalidRequest,
    LeaseNotFound,
    MalformedMessage,
    PeerTimeout,
    ProtocolError,
    RequestRefused,
    StateNotFound,
    TooManyClients,
    TooManyRequests,
    UnexpectedMessage,
    UnknownMessage,
    VersionMismatch,
    WeightCacheError,
)
from wcache_async.protocol.connection import EndOfStream, Received
from wcache_async.protocol.framing import Segment, encode_frame
from wcache_async.protocol.messages import (
    ErrorResponse,
    FetchState,
    FetchStateResponse,
    Hello,
    Load,
    Message,
    Release,
    ReleaseResponse,
    Status,
    StatusResponse,
    Welcome,
    encode_message,
)
from wcache_async.testing.scripted_peer import ScriptedPeer

HELLO = Hello(versions=(1, 1), backends=("shm_fd",))


def frame(request_id: int, message: Message) -> bytes:
    segments: list[Segment[int]] = encode_frame(request_id, encode_message(message))
    return b"".join(segment.data for segment in segments)


async def message_of(peer: ScriptedPeer) -> tuple[int, Message]:
    event = await peer.hear()
    assert isinstance(event, Received), event
    for fd in event.fds:
        fd.close()
    return event.request_id, event.message


async def error_of(peer: ScriptedPeer) -> WeightCacheError:
    _, message = await message_of(peer)
    assert isinstance(message, ErrorResponse), message
    return message.to_error()


async def assert_serves(daemon: Daemon) -> None:
    async with Client(daemon.socket_path) as client:
        assert (await client.status()).pid == os.getpid()


async def eventually(condition: Callable[[], bool]) -> None:
    """Give the loop turns until `condition` holds; a deadline ends it."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what is waited for is another process's doing, or the kernel's
            await asyncio.sleep(0)


async def test_hello_and_first_fetch_may_come_in_one_write(
    daemon: Daemon, write_checkpoint: Callable[..., Path]
) -> None:
    await daemon.load(write_checkpoint(), name="m")
    async with ScriptedPeer.connect(daemon.socket_path) as peer:
        await peer.send_bytes(frame(0, HELLO) + frame(1, FetchState(name="m")))
        assert isinstance((await message_of(peer))[1], Welcome)
        request_id, response = await message_of(peer)
        assert request_id == 1
        assert isinstance(response, FetchStateResponse)
        assert response.transport_backend == "shm_fd"
        assert daemon.status().states[0].leases == 1


@pytest.mark.parametrize(
    ("junk", "expected"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", BadMagic),
        (frame(0, HELLO)[:4] + b"\x09" + frame(0, HELLO)[5:], VersionMismatch),
        (frame(0, HELLO)[:8] + b"\xff\xff\xff\x7f" + frame(0, HELLO)[12:], FrameTooLarge),
        (frame(0, HELLO)[:6] + b"\x01\x00" + frame(0, HELLO)[8:], MalformedMessage),
        (frame(0, Hello(versions=(7, 9))), VersionMismatch),
        (frame(1, Status()), UnexpectedMessage),
        (encode_frame(0, b"\x93" * 64)[0].data, MalformedMessage),
        (encode_frame(0, b"\x81\xa4type\xa3new")[0].data, UnknownMessage),
    ],
    ids=["magic", "frame-version", "length", "fds", "versions", "no-hello", "not-msgpack", "unknown-first"],
)
async def test_a_peer_that_breaks_the_rules_is_told_and_dropped(
    daemon: Daemon, junk: bytes, expected: type[ProtocolError]
) -> None:
    async with ScriptedPeer.connect(daemon.socket_path) as peer:
        await peer.send_bytes(junk)
        assert isinstance(await error_of(peer), expected)
        assert isinstance(await peer.hear(), EndOfStream)
    await assert_serves(daemon)


async def test_an_unknown_message_costs_only_its_own_request(daemon: Daemon) -> None:
    async with ScriptedPeer.connect(daemon.socket_path) as peer:
        await peer.greet()
        await peer.send_bytes(encode_frame(5, b"\x81\xa4type\xa3new")[0].data)
        request_id, message = await message_of(peer)
        assert request_id == 5
        assert isinstance(message, ErrorResponse)
        assert message.to_error().details() == {"type": "new"}
        await peer.say(6, Status())
        assert isinstance((await message_of(peer))[1], StatusResponse)


@pytest.mark.parametrize("declared", [0, 1])
async def test_fds_a_request_may_not_carry_are_refused_and_closed(daemon: Daemon, declared: int) -> None:
    async with ScriptedPeer.connect(daemon.socket_path) as peer:
        await peer.greet()
        data = frame(1, Status())
        await peer.send_bytes(data[:6] + bytes([declared, 0]) + data[8:], [peer.sock.fileno()])
        errors = []
        while not isinstance(event := await peer.hear(), EndOfStream):
            assert isinstance(event, Received)
            if isinstance(event.message, ErrorResponse):
                errors.append(event.message.to_error())
        assert [type(error) for error in errors] == [MalformedMessage if declared else FdsUndeclared]
    await assert_serves(daemon)


async def test_a_second_hello_ends_the_connection(daemon: Daemon) -> None:
    async with ScriptedPeer.connect(daemon.socket_path) as peer:
        await peer.greet()
        await peer.say(1, HELLO)
        assert isinstance(await error_of(peer), UnexpectedMessage)
        assert isinstance(await peer.hear(), EndOfStream)


@pytest.mark.parametrize("limits", [ServerLimits(handshake_timeout=0.05)])
async def test_a_silent_peer_is_told_and_dropped(daemon: Daemon) -> None:
    async with ScriptedPeer.connect(daemon.socket_path) as silent:
        error = await error_of(silent)
        assert isinstance(error, PeerTimeout)
        assert isinstance(await silent.hear(), EndOfStream)
    await eventually(lambda: not daemon.status().clients)


@pytest.mark.parametrize("limits", [ServerLimits(handshake_timeout=0.05)])
async def test_a_half_said_hello_is_no_hello(daemon: Daemon) -> None:
    async with ScriptedPeer.connect(daemon.socket_path) as peer:
        await peer.send_bytes(frame(0, HELLO)[:10])
        assert isinstance(await error_of(peer), PeerTimeout)


@pytest.mark.parametrize("limits", [ServerLimits(handshake_timeout=0.05)])
async def test_after_the_handshake_a_client_may_be_idle_for_ever(
    daemon: Daemon, write_checkpoint: Callable[..., Path]
) -> None:
    await daemon.load(write_checkpoint(), name="m")
    async with Client(daemon.socket_path) as idle, ScriptedPeer.connect(daemon.socket_path) as silent:
        await idle.fetch_state("m")
        assert isinstance(await error_of(silent), PeerTimeout)  # So the time has passed for both.
        assert daemon.status().states[0].leases == 1


@pytest.mark.parametrize("limits", [ServerLimits(write_timeout=0.05, max_request_bytes=64 << 10)])
async def test_a_peer_that_reads_nothing_is_dropped_with_its_leases(
    daemon: Daemon, write_checkpoint: Callable[..., Path]
) -> None:
    await daemon.load(write_checkpoint(), name="m")
    async with ScriptedPeer.connect(daemon.socket_path) as deaf:
        await deaf.greet()
        data = frame(1, FetchState(name="m")) + b"".join(frame(i, Status()) for i in range(2, 10_000))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            await deaf.send_bytes(data)
        await eventually(lambda: not daemon.status().clients)
    assert daemon.status().states[0].leases == 0
    await assert_serves(daemon)


@pytest.mark.parametrize("limits", [ServerLimits(max_clients=2)])
async def test_one_client_too_many_is_told_so_and_the_others_stay(daemon: Daemon) -> None:
    async with Client(daemon.socket_path) as first, Client(daemon.socket_path) as second:
        await first.status()
        await second.status()
        async with Client(daemon.socket_path) as third:
            with pytest.raises(TooManyClients) as caught:
                await third.status()
            assert caught.value.limit == 2
        await first.status()
    await eventually(lambda: not daemon.status().clients)
    await assert_serves(daemon)


@pytest.mark.parametrize("limits", [ServerLimits(max_requests_in_flight=2)])
async def test_requests_in_flight_are_bounded(daemon: Daemon, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "never.safetensors")  # A source that nobody can finish opening.
    async with Client(daemon.socket_path) as client:
        waiting = [asyncio.create_task(client.load(tmp_path / "absent", f"m{i}", wait=True)) for i in range(40)]
        results = await asyncio.gather(*waiting, return_exceptions=True)
    assert any(isinstance(result, TooManyRequests) for result in results)
    assert all(isinstance(result, WeightCacheError) for result in results)


async def test_each_refusal_has_its_own_error_and_the_connection_goes_on(
    daemon: Daemon, write_checkpoint: Callable[..., Path]
) -> None:
    await daemon.load(write_checkpoint(), name="m", rank=3)
    requests: list[tuple[Message, type[RequestRefused]]] = [
        (FetchState(name="m"), StateNotFound),
        (FetchState(name="m", rank=3, backends=("carrier_pigeon",)), BackendNotAccepted),
        (FetchState(name="m", rank=3, backends=()), BackendNotAccepted),
        (Release(lease=77), LeaseNotFound),
        (Load(path="relative/path", name="n"), InvalidRequest),
        (Load(path="/absolute", name=""), InvalidRequest),
    ]
    async with ScriptedPeer.connect(daemon.socket_path) as peer:
        await peer.greet()
        for number, (request, expected) in enumerate(requests, 1):
            await peer.say(number, request)
            request_id, message = await message_of(peer)
            assert request_id == number
            assert isinstance(message, ErrorResponse)
            assert isinstance(message.to_error(), expected)
    assert daemon.status().states[0].leases == 0


async def test_leases_end_with_release_and_with_the_connection(
    daemon: Daemon, write_checkpoint: Callable[..., Path]
) -> None:
    await daemon.load(write_checkpoint(), name="m")
    async with ScriptedPeer.connect(daemon.socket_path) as peer:
        await peer.greet()
        leases = []
        for number in (1, 2):
            await peer.say(number, FetchState(name="m"))
            _, response = await message_of(peer)
            assert isinstance(response, FetchStateResponse)
            leases.append(response.lease)
        assert daemon.status().states[0].leases == 2
        await peer.say(3, Release(lease=leases[0]))
        assert isinstance((await message_of(peer))[1], ReleaseResponse)
        assert daemon.status().states[0].leases == 1
    await eventually(lambda: daemon.status().states[0].leases == 0)


async def test_a_peer_that_dies_at_any_byte_of_its_request_leaves_nothing(
    daemon: Daemon, write_checkpoint: Callable[..., Path]
) -> None:
    await daemon.load(write_checkpoint(), name="m")
    said = frame(0, HELLO) + frame(1, FetchState(name="m"))
    for length in range(len(said) + 1):
        async with ScriptedPeer.connect(daemon.socket_path) as peer:
            await peer.send_bytes(said[:length])
    await eventually(lambda: not daemon.status().clients)
    assert daemon.status().states[0].leases == 0
    await assert_serves(daemon)

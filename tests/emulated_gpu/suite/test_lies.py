"""Responses that are not what they say: refused with a typed error, nothing mapped, nothing kept."""

import os
import socket
from collections.abc import Callable

import msgspec
import pytest

from tests.emulated_gpu.suite.rig import GRANULARITY, Emulator, Wire, exported, send, settle
from wcache_async.backends.vmm_fd import VmmFdTransportBackend
from wcache_async.errors import (
    BackendUnavailable,
    CudaDriverError,
    FdsTruncated,
    InvalidManifest,
    MalformedMessage,
    WeightCacheError,
)
from wcache_async.manifest import Arena, Kind, StateManifest, TensorEntry
from wcache_async.sockets.fds import OwnedFd

UUID = "GPU-46414b45-4355-4441-0000-000000000000"


async def refuse(wire: Wire, manifest: StateManifest, emulator: Emulator, expected: type[WeightCacheError]) -> str:
    """Receive what must be refused as `expected`; its text."""
    before = emulator.held()
    fds = list(wire.fds)
    client = VmmFdTransportBackend()
    assert wire.response is not None
    with pytest.raises(expected) as caught:
        await client.recv_fetch_state_response(wire, wire.response, manifest)
    settle()
    assert emulator.held() == before
    assert all(fd.closed or fd in wire.fds for fd in fds), "an fd that was taken is open still"
    wire.close()
    assert client.resident_bytes == 0
    return str(caught.value)


# ------------------------------------------------------------------------------------- the fds
def memfd() -> OwnedFd:
    fd = os.memfd_create("no device memory")
    os.ftruncate(fd, GRANULARITY)
    return OwnedFd(fd)


def end_of_a_socket() -> OwnedFd:
    ours, theirs = socket.socketpair()
    theirs.close()
    return OwnedFd(ours.detach())


@pytest.mark.parametrize("position", [0, 2, 3])
@pytest.mark.parametrize(
    "impostor",
    [memfd, end_of_a_socket, lambda: OwnedFd(os.open("/dev/null", os.O_RDWR))],
    ids=["memfd", "socket", "/dev/null"],
)
async def test_an_fd_of_another_kind(impostor: Callable[[], OwnedFd], position: int, emulator: Emulator) -> None:
    async with exported() as (backend, manifest):
        wire = await send(backend, manifest)
        wire.fds[position].close()
        wire.fds[position] = impostor()
        assert "cuMemImportFromShareableHandle" in await refuse(wire, manifest, emulator, CudaDriverError)


async def test_a_smaller_arena_than_announced(emulator: Emulator) -> None:
    async with exported() as (backend, manifest):
        wire = await send(backend, manifest)
        wire.fds[2].close()
        wire.fds[2] = wire.fds[0].duplicate()
        assert "cuMemMap" in await refuse(wire, manifest, emulator, CudaDriverError)


async def test_arenas_in_another_order(emulator: Emulator) -> None:
    async with exported() as (backend, manifest):
        wire = await send(backend, manifest)
        wire.fds.reverse()
        assert "cuMemMap" in await refuse(wire, manifest, emulator, CudaDriverError)


async def test_fewer_fds_than_announced(emulator: Emulator) -> None:
    async with exported() as (backend, manifest):
        wire = await send(backend, manifest)
        wire.fds.pop().close()
        assert "3" in await refuse(wire, manifest, emulator, FdsTruncated)


async def test_more_fds_than_announced_are_left_alone() -> None:
    async with exported() as (backend, manifest):
        wire = await send(backend, manifest)
        extra = OwnedFd(os.open("/dev/null", os.O_RDWR))
        wire.fds.append(extra)
        client = VmmFdTransportBackend()
        assert wire.response is not None
        await client.recv_fetch_state_response(wire, wire.response, manifest)
        assert wire.fds == [extra]
        assert not extra.closed
        wire.close()
        client.close()


# ------------------------------------------------------------------------- the announcement
NESTED = b"\x81\xa1x" + b"\x91" * 100_000 + b"\xc0"
"""A field that nobody knows, so deep that skipping it takes more frames than there are."""


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x80", b"\x81\xa6arenas\x01", b"\x81\xa6arenas\x91\xff", NESTED])
async def test_an_announcement_that_does_not_decode(payload: bytes, emulator: Emulator) -> None:
    async with exported() as (backend, manifest):
        wire = await send(backend, manifest)
        assert wire.response is not None
        wire.response = msgspec.structs.replace(wire.response, payload=payload)
        assert "vmm_fd" in await refuse(wire, manifest, emulator, MalformedMessage)


async def test_the_announcement_says_the_size_of_every_arena() -> None:
    async with exported() as (backend, manifest):
        wire = await send(backend, manifest)
        assert wire.response is not None
        said = msgspec.msgpack.decode(wire.response.payload)
        assert said == {"arenas": [arena.nbytes for arena in manifest.arenas]}
        assert said["arenas"] == [GRANULARITY, GRANULARITY, 2 * GRANULARITY, GRANULARITY]
        wire.close()


@pytest.mark.parametrize("change", [lambda sizes: sizes[:-1], lambda sizes: [*sizes, 1], lambda sizes: sizes[::-1]])
async def test_an_announcement_that_contradicts_the_manifest(
    change: Callable[[list[int]], list[int]], emulator: Emulator
) -> None:
    async with exported() as (backend, manifest):
        wire = await send(backend, manifest)
        assert wire.response is not None
        sizes = change([arena.nbytes for arena in manifest.arenas])
        wire.response = msgspec.structs.replace(wire.response, payload=msgspec.msgpack.encode({"arenas": sizes}))
        assert "announced" in await refuse(wire, manifest, emulator, InvalidManifest)


# ------------------------------------------------------------------------------- the manifest
@pytest.mark.parametrize(
    ("arenas", "expected", "text"),
    [
        ([], InvalidManifest, "UUID"),
        ([Arena(GRANULARITY + 512, UUID)], InvalidManifest, "multiple"),
        ([Arena(0, UUID)], InvalidManifest, "multiple"),
        ([Arena(1 << 62, UUID)], InvalidManifest, "on a device of"),
        ([Arena(6 << 30, UUID)] * 2, InvalidManifest, "on a device of"),
        ([Arena(GRANULARITY, "cpu")], InvalidManifest, "UUID"),
        ([Arena(GRANULARITY, "cuda:0")], InvalidManifest, "UUID"),
        ([Arena(GRANULARITY, UUID[:-1] + "7")], BackendUnavailable, UUID),
        ([Arena(GRANULARITY, "GPU-")], BackendUnavailable, "MIG"),
        ([Arena(GRANULARITY, UUID), Arena(GRANULARITY, UUID[:-1] + "1")], BackendUnavailable, "rank"),
    ],
)
async def test_arenas_that_cannot_be(
    arenas: list[Arena], expected: type[WeightCacheError], text: str, emulator: Emulator
) -> None:
    await refuse_manifest(StateManifest(dtypes=(), arenas=tuple(arenas), tensors=()), emulator, expected, text)


async def test_buffers_that_overlap_to_more_than_there_is(emulator: Emulator) -> None:
    """Their private copies would take any amount of memory that a manifest asks for."""
    entries = tuple(TensorEntry(f"b{i}", 0, (GRANULARITY,), offset=0, storage=i, kind=Kind.BUFFER) for i in range(1000))
    manifest = StateManifest(("uint8",), (Arena(GRANULARITY, UUID),), entries)
    await refuse_manifest(manifest, emulator, InvalidManifest, "overlap")


async def refuse_manifest(
    manifest: StateManifest, emulator: Emulator, expected: type[WeightCacheError], text: str
) -> None:
    """A manifest that must be refused before anything is imported, whatever fds come with it."""
    async with exported() as (backend, true):
        wire = await send(backend, true)
        assert wire.response is not None
        sizes = [arena.nbytes for arena in manifest.arenas]
        wire.response = msgspec.structs.replace(wire.response, payload=msgspec.msgpack.encode({"arenas": sizes}))
        imported = emulator.count("cuMemImportFromShareableHandle")
        assert text in await refuse(wire, manifest, emulator, expected)
        assert imported() == 0


# ------------------------------------------------------------------------------ to the daemon
async def refuse_to_adopt(
    wire: Wire, manifest: StateManifest, emulator: Emulator, expected: type[WeightCacheError]
) -> str:
    before = emulator.held()
    fds = list(wire.fds)
    backend = VmmFdTransportBackend()
    assert wire.response is not None
    with pytest.raises(expected) as caught:
        await backend.adopt(wire, wire.response.payload, manifest)
    settle()
    assert emulator.held() == before
    assert all(fd.closed or fd in wire.fds for fd in fds), "an fd that was taken is open still"
    wire.close()
    assert backend.resident_bytes == 0
    return str(caught.value)


async def test_adopting_an_fd_of_another_kind(emulator: Emulator) -> None:
    async with exported() as (backend, manifest):
        wire = await send(backend, manifest)
        wire.fds[3].close()
        wire.fds[3] = memfd()
        assert "cuMemImportFromShareableHandle" in await refuse_to_adopt(wire, manifest, emulator, CudaDriverError)


async def test_adopting_a_smaller_arena_than_announced(emulator: Emulator) -> None:
    async with exported() as (backend, manifest):
        wire = await send(backend, manifest)
        wire.fds[2].close()
        wire.fds[2] = wire.fds[0].duplicate()
        assert "cuMemMap" in await refuse_to_adopt(wire, manifest, emulator, CudaDriverError)


async def test_adopting_fewer_fds_than_announced(emulator: Emulator) -> None:
    async with exported() as (backend, manifest):
        wire = await send(backend, manifest)
        wire.fds.pop().close()
        await refuse_to_adopt(wire, manifest, emulator, FdsTruncated)


async def test_adopting_arenas_that_cannot_be(emulator: Emulator) -> None:
    async with exported() as (backend, true):
        wire = await send(backend, true)
        arenas = tuple(msgspec.structs.replace(arena, device=UUID[:-1] + "7") for arena in true.arenas)
        lying = msgspec.structs.replace(true, arenas=arenas)
        assert "CUDA_VISIBLE_DEVICES" in await refuse_to_adopt(wire, lying, emulator, BackendUnavailable)

"""Sleep and wake: arenas unmapped and mapped again where they were, so that no pointer changes."""

import asyncio

import msgspec
import pytest

from tests.emulated_gpu.suite.rig import (
    GRANULARITY,
    Emulator,
    attach,
    contents,
    expected,
    exported,
    send,
    settle,
)
from wcache_async.backends.vmm_fd import VmmFdTransportBackend
from wcache_async.errors import CudaDriverError, InsufficientMemory, InvalidManifest, StateReleased
from wcache_async.manifest import StateManifest
from wcache_async.sockets.fds import OwnedFd


async def fresh_fds(
    client: VmmFdTransportBackend, backend: VmmFdTransportBackend, manifest: StateManifest
) -> list[OwnedFd]:
    wire = await send(backend, manifest)
    assert wire.response is not None
    fds = client.take_arena_fds(wire, wire.response)
    assert not wire.fds
    return fds


async def test_tensors_are_where_they_were_with_what_was_in_them(emulator: Emulator) -> None:
    async with exported() as (backend, manifest):
        client = await attach(backend, manifest)
        awake = emulator.held()
        tensors = client.import_tensors()
        addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        await asyncio.to_thread(client.prepare_unmap)
        asleep = emulator.held()
        assert asleep.mappings == awake.mappings - len(manifest.arenas)
        assert asleep.reservations == awake.reservations
        await asyncio.to_thread(client.prepare_unmap)
        fds = await fresh_fds(client, backend, manifest)
        await asyncio.to_thread(client.remap, fds)
        assert all(fd.closed for fd in fds)
        assert emulator.held() == awake
        assert {name: tensor.data_ptr() for name, tensor in client.import_tensors().items()} == addresses
        assert contents(tensors) == expected()
        client.close()


async def test_memory_is_free_while_everybody_sleeps(emulator: Emulator) -> None:
    async with exported() as (backend, manifest):
        client = await attach(backend, manifest)
        tensors = client.import_tensors()
        before = emulator.used(0)
        await asyncio.to_thread(backend.close)
        assert emulator.used(0) == before
        await asyncio.to_thread(client.prepare_unmap)
        assert emulator.used(0) == before - 5 * GRANULARITY
        client.close()
        del tensors


async def test_private_copies_keep_what_was_written_over_a_sleep() -> None:
    async with exported() as (backend, manifest):
        client = await attach(backend, manifest)
        buffer = client.import_tensors()["running_mean"]
        buffer.fill_(3)
        await asyncio.to_thread(client.prepare_unmap)
        await asyncio.to_thread(client.remap, await fresh_fds(client, backend, manifest))
        assert bool((buffer == 3).all())
        client.close()


async def test_what_sleeps_can_be_given_up(emulator: Emulator) -> None:
    async with exported() as (backend, manifest):
        before = emulator.held()
        client = await attach(backend, manifest)
        tensors = client.import_tensors()
        await asyncio.to_thread(client.prepare_unmap)
        client.close()
        del tensors
        await asyncio.to_thread(settle)
        assert emulator.held() == before


@pytest.mark.parametrize("place", [1, 3, 4])
@pytest.mark.parametrize("call", ["cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess", "cuMemRelease"])
async def test_waking_that_fails_half_way_sleeps_on_and_can_be_tried_again(
    call: str, place: int, emulator: Emulator
) -> None:
    async with exported() as (backend, manifest):
        client = await attach(backend, manifest)
        tensors = client.import_tensors()
        await asyncio.to_thread(client.prepare_unmap)
        asleep = emulator.held()
        fds = await fresh_fds(client, backend, manifest)
        emulator.fail(f"{call}:{place}:999")
        with pytest.raises(CudaDriverError, match=call):
            await asyncio.to_thread(client.remap, fds)
        emulator.fail("")
        await asyncio.to_thread(settle)
        assert emulator.held() == asleep
        assert all(fd.closed for fd in fds)
        await asyncio.to_thread(client.remap, await fresh_fds(client, backend, manifest))
        assert contents(tensors) == expected()
        client.close()


async def test_waking_without_memory_is_tried_again_while_it_is_wanted(emulator: Emulator) -> None:
    async with exported() as (backend, manifest):
        client = await attach(backend, manifest)
        await asyncio.to_thread(client.prepare_unmap)
        emulator.fail("cuMemMap:3+:OUT_OF_MEMORY")
        with pytest.raises(InsufficientMemory):
            await asyncio.to_thread(client.remap, await fresh_fds(client, backend, manifest))
        emulator.fail("cuMemMap:3:OUT_OF_MEMORY")
        client.keep_trying = lambda: True
        await asyncio.to_thread(client.remap, await fresh_fds(client, backend, manifest))
        assert contents(client.import_tensors()) == expected()
        client.close()


async def test_other_arenas_are_refused(emulator: Emulator) -> None:
    async with exported() as (backend, manifest), exported(arena_nbytes=8 * GRANULARITY) as (other, other_manifest):
        client = await attach(backend, manifest)
        await asyncio.to_thread(client.prepare_unmap)
        wire = await send(other, other_manifest)
        assert wire.response is not None
        with pytest.raises(InvalidManifest, match="announced"):
            client.take_arena_fds(wire, wire.response)
        wire.close()
        client.close()


async def test_a_released_state_neither_sleeps_nor_wakes() -> None:
    async with exported() as (backend, manifest):
        client = await attach(backend, manifest)
        wire = await send(backend, manifest)
        fds = wire.take_fds(len(manifest.arenas))
        client.close()
        with pytest.raises(StateReleased):
            client.prepare_unmap()
        with pytest.raises(StateReleased):
            client.remap(fds)
        assert all(fd.closed for fd in fds)
        assert wire.response is not None
        with pytest.raises(StateReleased):
            client.take_arena_fds(wire, msgspec.structs.replace(wire.response))

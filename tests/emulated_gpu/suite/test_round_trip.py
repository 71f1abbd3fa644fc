"""What arrives, where it lies, and who may write it."""

import asyncio
import copy
import gc
import weakref
from collections import Counter
from types import MappingProxyType

import pytest
import torch

from tests.conformance.cases import CASES
from tests.emulated_gpu.suite.rig import (
    GRANULARITY,
    Emulator,
    State,
    attach,
    bytes_of,
    contents,
    expected,
    export,
    exported,
    mixed_state,
    send,
    settle,
)
from wcache_async.backends.base import ImportOptions
from wcache_async.backends.cuda_device import device_by_name
from wcache_async.backends.vmm_fd import VmmFdTransportBackend
from wcache_async.errors import ExportError
from wcache_async.manifest import StateManifest, StateSpec


def access(address: int) -> int:
    """CUmemAccess_flags of the device at an address: 1 read, 3 read and write."""
    import cuda.bindings.driver as driver

    location = driver.CUmemLocation()
    location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = 0
    result, flags = driver.cuMemGetAccess(location, address)
    assert result == 0, result
    return int(flags)


def is_device_memory(tensor: torch.Tensor) -> bool:
    import cuda.bindings.driver as driver

    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MAPPED
    return bool(driver.cuPointerGetAttribute(attribute, tensor.data_ptr())[1])


def buffers(manifest: StateManifest) -> set[str]:
    return {"running_mean", "steps"} & {entry.name for entry in manifest.tensors}


async def test_every_byte_arrives() -> None:
    async with exported() as (backend, manifest):
        client = await attach(backend, manifest)
        tensors = await asyncio.to_thread(client.import_tensors)
        assert contents(tensors) == expected()
        assert list(tensors) == [*(e.name for e in manifest.tensors), "large.tied"]
        assert tensors["large.tied"] is tensors["large"]
        assert tensors["first.half"].data_ptr() == tensors["first"].data_ptr() + (1 << 20)
        client.close()


async def test_arenas_are_whole_granules_first_fit_and_a_larger_storage_alone() -> None:
    async with exported() as (backend, manifest):
        assert [arena.nbytes // GRANULARITY for arena in manifest.arenas] == [1, 1, 2, 1]
        assert len({arena.device for arena in manifest.arenas}) == 1
        place = {entry.name: (entry.arena, entry.offset) for entry in manifest.tensors}
        assert place["first"] == (0, 0)
        assert place["running_mean"] == (0, 3 << 19)
        assert place["steps"][0] == 0, "an arena before the last still had room"
        assert place["large"] == (2, 0)
        starts = {entry.storage: entry.offset for entry in manifest.tensors if entry.name != "first.half"}
        assert all(offset % 512 == 0 for offset in starts.values())
        assert backend.resident_bytes == 5 * GRANULARITY


async def test_memory_is_of_the_device_and_in_the_amount_the_manifest_says(emulator: Emulator) -> None:
    before = emulator.used(0), emulator.used(1)
    backend = VmmFdTransportBackend()
    device = device_by_name("cuda:1")
    writer = await asyncio.to_thread(backend.begin_export, StateSpec(storages=(1,), tensors=()), device="cuda:1")
    with writer.storage(0) as view:
        view[:] = b"x"
    manifest = await asyncio.to_thread(writer.finish)
    assert manifest.arenas[0].device == device.uuid
    assert (emulator.used(0), emulator.used(1)) == (before[0], before[1] + GRANULARITY)
    await asyncio.to_thread(backend.close)
    assert (emulator.used(0), emulator.used(1)) == before


async def test_parameters_are_read_only_and_buffers_private() -> None:
    async with exported() as (backend, manifest):
        client = await attach(backend, manifest)
        other = await attach(backend, manifest)
        ours, theirs = client.import_tensors(), other.import_tensors()
        for entry in manifest.tensors:
            if entry.name in buffers(manifest):
                assert not is_device_memory(ours[entry.name])  # torch's, which is the host's here
                assert ours[entry.name].data_ptr() != theirs[entry.name].data_ptr()
            elif 0 not in entry.shape:
                assert access(ours[entry.name].data_ptr()) == 1
        ours["running_mean"].fill_(7)
        assert bytes_of(theirs["running_mean"]) == expected()["running_mean"]
        third = await attach(backend, manifest)
        assert bytes_of(third.import_tensors()["running_mean"]) == expected()["running_mean"]
        assert client.resident_bytes > backend.resident_bytes
        for half in (client, other, third):
            half.close()


async def test_buffers_are_left_in_the_arenas_on_request() -> None:
    async with exported() as (backend, manifest):
        client = await attach(backend, manifest, ImportOptions(buffers="shared"))
        tensors = client.import_tensors()
        assert contents(tensors) == expected()
        for name in buffers(manifest):
            assert access(tensors[name].data_ptr()) == 1
        assert client.resident_bytes == backend.resident_bytes
        client.close()


async def test_a_storage_with_a_buffer_on_it_is_copied_whole() -> None:
    def build() -> State:
        block = torch.arange(1000, dtype=torch.float32)
        return {"weight": (block[:600], True), "running": (block[500:], False), "alone": (torch.ones(9), True)}

    async with exported(build) as (backend, manifest):
        client = await attach(backend, manifest)
        tensors = client.import_tensors()
        assert contents(tensors) == {name: bytes_of(tensor) for name, (tensor, _) in build().items()}
        assert not is_device_memory(tensors["weight"])
        assert tensors["running"].data_ptr() == tensors["weight"].data_ptr() + 2000
        assert is_device_memory(tensors["alone"])
        one = client.import_tensor(manifest.tensors[1])
        assert one.data_ptr() == tensors["running"].data_ptr()
        client.close()


# --------------------------------------------------------------------------------- who owns what
async def test_the_last_view_of_an_arena_unmaps_it(emulator: Emulator) -> None:
    async with exported() as (backend, manifest):
        before = emulator.held()
        client = await attach(backend, manifest)
        tensors = client.import_tensors()
        assert emulator.held().mappings == before.mappings + 4
        client.close()
        views = {name: tensors[name].view(-1)[1:] for name in ("second", "large")}
        del tensors, client
        gc.collect()
        settle()
        assert emulator.held().mappings == before.mappings + 2
        assert bytes_of(views["large"]) == expected()["large"][4:]
        held = views.pop("large").untyped_storage()
        settle()
        assert emulator.held().mappings == before.mappings + 2
        del held
        views.clear()
        settle()
        assert emulator.held() == before


async def test_private_copies_are_made_when_the_state_is_there(emulator: Emulator) -> None:
    async with exported() as (backend, manifest):
        waited = emulator.count("cuCtxSynchronize")
        client = await attach(backend, manifest)
        assert waited() == 1
        client.close()


async def test_an_importer_keeps_no_handle_and_no_fd(emulator: Emulator) -> None:
    async with exported() as (backend, manifest):
        before = emulator.held()
        wire = await send(backend, manifest)
        fds = list(wire.fds)
        assert len(fds) == len(manifest.arenas)
        client = VmmFdTransportBackend()
        assert wire.response is not None
        await client.recv_fetch_state_response(wire, wire.response, manifest)
        assert all(fd.closed for fd in fds)
        assert emulator.held().handles == before.handles
        client.close()


async def test_an_exporter_keeps_one_handle_an_arena_and_no_mapping(emulator: Emulator) -> None:
    before = emulator.held()
    async with exported() as (_, manifest):
        during = emulator.held()
        assert during.handles == before.handles + len(manifest.arenas)
        assert (during.mappings, during.reservations) == (before.mappings, before.reservations)
    assert emulator.held() == before


async def test_every_response_has_fds_of_its_own() -> None:
    async with exported() as (backend, manifest):
        wires = [await send(backend, manifest) for _ in range(3)]
        numbers = Counter(fd.fileno() for wire in wires for fd in wire.fds)
        assert len(numbers) == 3 * len(manifest.arenas)
        for wire in wires:
            wire.close()


async def test_tensors_outlive_both_backends() -> None:
    async with exported() as (backend, manifest):
        client = await attach(backend, manifest)
        tensors = client.import_tensors()
        client.close()
    del client, backend
    gc.collect()
    settle()
    assert contents(tensors) == expected()


# ------------------------------------------------------------------------------------ exporting
async def test_moved_parameters_leave_their_memory_arena_by_arena(emulator: Emulator) -> None:
    state = copy.deepcopy(mixed_state())
    storages = {name: weakref.ref(tensor.untyped_storage()) for name, (tensor, _) in state.items()}
    backend = VmmFdTransportBackend()
    backend.arena_nbytes = GRANULARITY
    manifest = await asyncio.to_thread(backend.prepare_export, state, move=True)
    gone = {name for name, storage in storages.items() if storage() is None}
    assert gone == {"first", "first.half", "second", "large", "large.tied", "third", "empty"}
    assert contents({name: tensor for name, (tensor, _) in state.items()}) == expected()
    assert state["large.tied"][0] is state["large"][0]
    for name in ("first", "second", "large", "third"):
        assert access(state[name][0].data_ptr()) == 1
    client = await attach(backend, manifest)
    assert contents(client.import_tensors()) == expected()
    client.close()
    await asyncio.to_thread(backend.close)


async def test_moving_that_fails_half_way_leaves_every_tensor_valid(emulator: Emulator) -> None:
    state = mixed_state()
    backend = VmmFdTransportBackend()
    backend.arena_nbytes = GRANULARITY
    emulator.fail("cuMemCreate:3:999")
    with pytest.raises(Exception, match="cuMemCreate"):
        await asyncio.to_thread(backend.prepare_export, state, move=True)
    assert is_device_memory(state["first"][0])
    assert not is_device_memory(state["third"][0])
    assert contents({name: tensor for name, (tensor, _) in state.items()}) == expected()
    assert backend.resident_bytes == 0


async def test_tensors_are_not_moved_out_of_what_cannot_change() -> None:
    with pytest.raises(TypeError, match="mutable"):
        await asyncio.to_thread(VmmFdTransportBackend().prepare_export, MappingProxyType(mixed_state()), move=True)


def test_tensors_on_two_devices_are_refused_by_name() -> None:
    # Which devices they are on is all that is asked of them; these two any torch has.
    state: State = {"here": (torch.empty(2), True), "there": (torch.empty(2, device="meta"), True)}
    with pytest.raises(ExportError) as caught:
        VmmFdTransportBackend._device_of(state)
    assert caught.value.tensor == "there"
    assert "cpu" in str(caught.value)
    assert "rank" in str(caught.value)


def test_an_empty_state_has_no_device_to_be_on() -> None:
    assert not VmmFdTransportBackend.can_export_state({})
    assert VmmFdTransportBackend.can_export_state(mixed_state())


def test_export_keeps_the_tensors_it_was_given() -> None:
    state = mixed_state()
    backend, _ = export(state)
    assert contents({name: tensor for name, (tensor, _) in state.items()}) == expected()
    backend.close()


async def test_an_export_can_be_read_back(emulator: Emulator) -> None:
    """Which is how the daemon makes a second export of a state, for another backend."""
    async with exported() as (backend, manifest):
        before = emulator.held()
        maps = emulator.count("cuMemMap")
        for entry in (*manifest.tensors, manifest.tensors[0]):
            whole = expected()[entry.name]
            into = bytearray(len(whole))
            await asyncio.to_thread(backend.read_arena, entry.arena, entry.offset, memoryview(into))
            assert into == whole, entry.name
        assert emulator.held().mappings == before.mappings + 1
        assert maps() <= 8, "an arena was mapped anew for each of its storages"
        client = await attach(backend, manifest)
        assert contents(client.import_tensors()) == expected()
        client.close()
    with pytest.raises(ValueError, match="closed"):
        backend.read_arena(0, 0, memoryview(bytearray(1)))


# ------------------------------------------------------------------------------------- adopting
async def test_a_state_another_process_made_is_adopted_and_served(emulator: Emulator) -> None:
    async with exported() as (made, manifest):
        wire = await send(made, manifest)
        fds = list(wire.fds)
        assert wire.response is not None
        adopted = VmmFdTransportBackend()
        await adopted.adopt(wire, wire.response.payload, manifest)
        await asyncio.to_thread(settle)
        assert all(fd.closed for fd in fds)
    held = emulator.held()
    assert held.mappings == 0
    assert adopted.resident_bytes == manifest.tensor_bytes
    client = await attach(adopted, manifest)
    assert contents(client.import_tensors()) == expected()
    client.close()
    await asyncio.to_thread(adopted.close)
    assert adopted.resident_bytes == 0


# ------------------------------------------------------------------------------ what can be had
def test_it_is_what_the_conformance_suite_tries_here() -> None:
    assert [case.name for case in CASES] == ["vmm_fd"]


def test_what_it_can_hold() -> None:
    assert VmmFdTransportBackend.unavailable_reason() is None
    assert VmmFdTransportBackend.device_refusal("cuda") is None
    assert VmmFdTransportBackend.device_refusal("cuda:1") is None
    assert VmmFdTransportBackend.device_refusal(device_by_name("cuda:1").uuid) is None
    assert "cuda tensors, not cpu" in (VmmFdTransportBackend.device_refusal("cpu") or "")
    assert "sees GPU-" in (VmmFdTransportBackend.device_refusal("cuda:7") or "")

"""Every driver call failing at every place it is made: typed errors, nothing left, and the next one works."""

import asyncio
import gc

import pytest

from tests.emulated_gpu.suite.rig import Emulator, Wire, attach, contents, expected, exported, send, settle, until
from wcache_async.backends.vmm_fd import VmmFdTransportBackend
from wcache_async.errors import BackendUnavailable, CudaDriverError, InsufficientMemory
from wcache_async.manifest import StateManifest, StateSpec

CALLS = (
    "cuCtxPushCurrent",
    "cuCtxPopCurrent",
    "cuCtxSynchronize",
    "cuMemGetInfo",
    "cuMemCreate",
    "cuMemRelease",
    "cuMemExportToShareableHandle",
    "cuMemImportFromShareableHandle",
    "cuMemAddressReserve",
    "cuMemAddressFree",
    "cuMemMap",
    "cuMemUnmap",
    "cuMemSetAccess",
    "cuMemcpy",
)
EXPORTING = {call for call in CALLS if call != "cuMemImportFromShareableHandle"}
IMPORTING = set(CALLS) - {"cuMemCreate", "cuMemExportToShareableHandle", "cuMemAddressFree", "cuMemUnmap"}
"""What attaching calls; unmapping comes later, when the tensors go."""

SYSTEM_NOT_READY = 802
"""An error that nothing here is prepared for in particular."""


def places(count: int) -> list[int]:
    """First, middle and last of so many calls."""
    return sorted({1, (count + 1) // 2, count}) if count else []


async def export_once() -> None:
    """Export, send one response, close."""
    async with exported() as (backend, manifest):
        wire = await send(backend, manifest)
        wire.close()


async def receive(wire: Wire, manifest: StateManifest) -> VmmFdTransportBackend:
    client = VmmFdTransportBackend()
    assert wire.response is not None
    await client.recv_fetch_state_response(wire, wire.response, manifest)
    return client


async def forget_errors() -> None:
    """Have nothing left that an exception's traceback keeps alive."""
    await asyncio.sleep(0)  # The loop's present step holds the future that the exception came by.
    gc.collect()
    settle()


def assert_names(error: CudaDriverError | BackendUnavailable, call: str) -> None:
    if isinstance(error, CudaDriverError):
        assert (error.call.removesuffix("_v2"), error.result) == (call, SYSTEM_NOT_READY)
        assert error.name == "CUDA_ERROR_SYSTEM_NOT_READY"
    else:
        assert call in error.reason


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_a_call_that_fails_while_exporting(
    call: str, emulator: Emulator, caplog: pytest.LogCaptureFixture
) -> None:
    await export_once()
    before = emulator.held()
    counted = emulator.count(call)
    await export_once()
    count = counted()
    assert (count > 0) == (call in EXPORTING)
    for place in places(count):
        emulator.fail(f"{call}:{place}:{SYSTEM_NOT_READY}")
        caplog.clear()
        try:
            await export_once()
        except (CudaDriverError, BackendUnavailable) as error:
            assert_names(error, call)
        else:
            assert caplog.records, f"{call} failed at call {place}, and nobody was told"
        emulator.fail("")
        await forget_errors()
        assert emulator.held() == before, f"after {call} failed at call {place}"
    await export_once()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_a_call_that_fails_while_importing(
    call: str, emulator: Emulator, caplog: pytest.LogCaptureFixture
) -> None:
    async with exported() as (backend, manifest):
        (await attach(backend, manifest)).close()
        settle()
        before = emulator.held()
        wire = await send(backend, manifest)
        counted = emulator.count(call)
        client = await receive(wire, manifest)
        count = counted()
        client.close()
        assert (count > 0) == (call in IMPORTING)
        settle()
        for place in places(count):
            wire = await send(backend, manifest)
            fds = list(wire.fds)
            emulator.fail(f"{call}:{place}:{SYSTEM_NOT_READY}")
            caplog.clear()
            try:
                await receive(wire, manifest)
            except (CudaDriverError, BackendUnavailable) as error:
                assert_names(error, call)
            else:
                pytest.fail(f"{call} failed at call {place}, and nobody was told")
            emulator.fail("")
            await forget_errors()
            assert emulator.held() == before, f"after {call} failed at call {place}"
            assert all(fd.closed for fd in fds)
        client = await attach(backend, manifest)
        assert contents(client.import_tensors()) == expected()
        client.close()


# ------------------------------------------------------------------------------ giving back fails
@pytest.mark.parametrize("call", ["cuMemUnmap", "cuMemAddressFree"])
async def test_an_arena_that_cannot_be_given_back_is_logged_and_keeps_no_other(
    call: str, emulator: Emulator, caplog: pytest.LogCaptureFixture
) -> None:
    import cuda.bindings.driver as driver

    async with exported() as (backend, manifest):
        before = emulator.held()
        client = await attach(backend, manifest)
        starts = [client.import_tensor(entry).data_ptr() for entry in manifest.tensors if not entry.offset]
        emulator.fail(f"{call}:2:{SYSTEM_NOT_READY}")
        client.close()
        settle()
        emulator.fail("")
        assert "SYSTEM_NOT_READY" in caplog.text
        left = emulator.held()
        assert left.reservations == before.reservations + 1
        assert left.mappings == before.mappings + (call == "cuMemUnmap")
        # Give it back by hand, so that the next test finds what this one found.
        for arena in manifest.arenas:
            for start in starts:
                driver.cuMemUnmap(start, arena.nbytes)
                driver.cuMemAddressFree(start, arena.nbytes)
        assert emulator.held() == before


async def test_a_device_that_cannot_be_waited_for_is_unmapped_all_the_same(
    emulator: Emulator, caplog: pytest.LogCaptureFixture
) -> None:
    async with exported() as (backend, manifest):
        before = emulator.held()
        client = await attach(backend, manifest)
        emulator.fail(f"cuCtxSynchronize:*:{SYSTEM_NOT_READY}")
        client.close()
        settle()
        assert emulator.held() == before
        assert "without waiting" in caplog.text
        emulator.fail("")


# ------------------------------------------------------------------------------ out of memory
async def test_a_state_larger_than_the_device_is_refused_before_any_memory_is_taken(emulator: Emulator) -> None:
    before = emulator.held(), emulator.used(0)
    made = emulator.count("cuMemCreate")
    with pytest.raises(InsufficientMemory) as caught:
        await asyncio.to_thread(
            VmmFdTransportBackend().begin_export, StateSpec(storages=(1 << 44,), tensors=()), device="cuda:0"
        )
    assert caught.value.needed == 1 << 44
    assert 0 < caught.value.available <= 8 << 30
    assert "GPU-" in caught.value.limit
    assert made() == 0
    assert (emulator.held(), emulator.used(0)) == before


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemAddressReserve", "cuMemMap"])
async def test_no_memory_for_one_arena_gives_back_the_others(call: str, emulator: Emulator) -> None:
    before = emulator.held()
    emulator.fail(f"{call}:3:OUT_OF_MEMORY")
    with pytest.raises(InsufficientMemory) as caught:
        async with exported():
            pass
    assert caught.value.needed == 4 << 20
    assert emulator.held() == before


async def test_exporting_asks_again_for_memory_while_it_is_wanted(emulator: Emulator) -> None:
    asked = []

    def keep_trying() -> bool:
        asked.append(True)
        if len(asked) == 2:
            emulator.fail("")
        return True

    backend = VmmFdTransportBackend()
    backend.keep_trying = keep_trying
    emulator.fail("cuMemCreate:1+:OUT_OF_MEMORY")
    spec = StateSpec(storages=(0,), tensors=())
    writer = await asyncio.to_thread(backend.begin_export, spec, device="cuda:0")
    assert len(asked) == 2
    writer.abort()


async def test_exporting_stops_asking_when_nobody_wants_it_any_more(emulator: Emulator) -> None:
    answers = iter([True, False])
    backend = VmmFdTransportBackend()
    backend.keep_trying = lambda: next(answers)
    emulator.fail("cuMemCreate:*:OUT_OF_MEMORY")
    spec = StateSpec(storages=(0,), tensors=())
    with pytest.raises(InsufficientMemory):
        await asyncio.to_thread(backend.begin_export, spec, device="cuda:0")
    assert next(answers, None) is None


async def test_exporting_asks_no_longer_than_its_patience(emulator: Emulator) -> None:
    backend = VmmFdTransportBackend()
    backend.keep_trying = lambda: True
    backend.patience_s = 0
    emulator.fail("cuMemCreate:*:OUT_OF_MEMORY")
    spec = StateSpec(storages=(0,), tensors=())
    with pytest.raises(InsufficientMemory):
        await asyncio.to_thread(backend.begin_export, spec, device="cuda:0")


@pytest.mark.parametrize("call", ["cuMemAddressReserve", "cuMemMap"])
async def test_importing_goes_on_where_memory_was_short(call: str, emulator: Emulator) -> None:
    async with exported() as (backend, manifest):
        wire = await send(backend, manifest)
        emulator.fail(f"{call}:3:OUT_OF_MEMORY,cuMemSetAccess:1000000:0")
        client = await receive(wire, manifest)
        assert emulator.seen(1) == len(manifest.arenas), "an arena that was open was opened again"
        assert contents(client.import_tensors()) == expected()
        client.close()


async def test_importing_waits_no_longer_than_its_patience(emulator: Emulator) -> None:
    async with exported() as (backend, manifest):
        before = emulator.held()
        wire = await send(backend, manifest)
        fds = list(wire.fds)
        client = VmmFdTransportBackend()
        client.patience_s = 0
        emulator.fail("cuMemMap:3:OUT_OF_MEMORY")
        assert wire.response is not None
        with pytest.raises(InsufficientMemory) as caught:
            await client.recv_fetch_state_response(wire, wire.response, manifest)
        assert caught.value.needed == manifest.arenas[2].nbytes
        settle()
        assert emulator.held() == before
        assert all(fd.closed for fd in fds)


async def test_importing_stops_waiting_for_memory_when_it_is_cancelled(emulator: Emulator) -> None:
    async with exported() as (backend, manifest):
        before = emulator.held()
        wire = await send(backend, manifest)
        fds = list(wire.fds)
        emulator.fail("cuMemMap:3+:OUT_OF_MEMORY")
        task = asyncio.create_task(receive(wire, manifest))
        await until(lambda: emulator.seen() > 3)  # Three arenas were tried, and one of them again.
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        settle()
        assert emulator.held() == before
        assert all(fd.closed for fd in fds)

"""Loading into arenas: what a writer takes, gives back, and refuses."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.emulated_gpu.suite.rig import GRANULARITY, Emulator, attach, contents
from wcache_async.backends.vmm_export import ArenaWriter
from wcache_async.backends.vmm_fd import VmmFdTransportBackend
from wcache_async.manifest import StateSpec, TensorSpec

SIZES = (3 << 20, 100, 0, 1 << 20, 5)
SPEC = StateSpec(
    storages=SIZES,
    tensors=tuple(
        TensorSpec(name=str(number), dtype="uint8", shape=(size,), storage=number) for number, size in enumerate(SIZES)
    ),
)


def body(number: int) -> bytes:
    return bytes([number + 1]) * SIZES[number]


def begin() -> tuple[VmmFdTransportBackend, ArenaWriter]:
    backend = VmmFdTransportBackend()
    backend.arena_nbytes = GRANULARITY
    return backend, backend.begin_export(SPEC, device="cuda:0")


def write(writer: ArenaWriter, number: int) -> None:
    with writer.storage(number) as view:
        assert len(view) == SIZES[number]
        view[:] = body(number)


async def test_storages_filled_by_several_threads_arrive() -> None:
    backend, writer = begin()
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(write, writer, number) for number in range(len(SIZES))]:
            done.result()
    manifest = writer.finish()
    client = await attach(backend, manifest)
    assert contents(client.import_tensors()) == {str(number): body(number) for number in range(len(SIZES))}
    client.close()
    await asyncio.to_thread(backend.close)


def test_memory_is_taken_at_the_start_and_no_more_later(emulator: Emulator) -> None:
    before = emulator.used(0)
    backend, writer = begin()
    taken = emulator.used(0)
    assert taken == before + 3 * GRANULARITY
    made = emulator.count("cuMemCreate")
    for number in range(len(SIZES)):
        write(writer, number)
    writer.finish()
    assert made() == 0
    assert emulator.used(0) == taken == before + backend.resident_bytes
    backend.close()
    assert backend.resident_bytes == 0
    assert emulator.used(0) == before


def test_a_storage_is_copied_once_and_not_before_it_is_filled(emulator: Emulator) -> None:
    backend, writer = begin()
    copies = emulator.count("cuMemcpy")
    with writer.storage(0) as view:
        view[:] = body(0)
        assert copies() == 0
    assert copies() == 1
    writer.abort()
    del backend


def test_a_state_is_finished_when_the_device_has_it(emulator: Emulator) -> None:
    """Copies from pageable memory return earlier; the emulator's do not, so the waiting itself is looked for."""
    backend, writer = begin()
    for number in range(len(SIZES)):
        write(writer, number)
    waited = emulator.count("cuCtxSynchronize")
    writer.finish()
    assert waited() == 1
    backend.close()


def test_memory_is_unmapped_when_the_device_has_done_with_it(emulator: Emulator) -> None:
    _, writer = begin()
    write(writer, 0)
    waited = emulator.count("cuCtxSynchronize")
    writer.abort()
    assert waited() == 1


def test_what_a_reader_could_not_fill_is_not_copied(emulator: Emulator) -> None:
    _, writer = begin()
    copies = emulator.count("cuMemcpy")
    with pytest.raises(OSError, match="the disk"), writer.storage(0):
        raise OSError("the disk is gone")
    assert copies() == 0
    with pytest.raises(ValueError, match="never written"):
        writer.finish()
    writer.abort()


def test_a_state_that_is_not_all_written_is_not_finished(emulator: Emulator) -> None:
    _, writer = begin()
    write(writer, 0)
    with pytest.raises(ValueError, match=r"4 storages were never written, number 1"):
        writer.finish()
    writer.abort()


def test_giving_up_gives_everything_back(emulator: Emulator) -> None:
    before = emulator.held(), emulator.used(0)
    backend, writer = begin()
    write(writer, 0)
    writer.abort()
    writer.abort()
    assert (emulator.held(), emulator.used(0)) == before
    with pytest.raises(ValueError, match="given up"):
        write(writer, 1)
    with pytest.raises(ValueError, match="given up"):
        writer.finish()
    assert backend.resident_bytes == 0


def test_giving_up_what_is_finished_does_nothing(emulator: Emulator) -> None:
    backend, writer = begin()
    for number in range(len(SIZES)):
        write(writer, number)
    writer.finish()
    finished = emulator.held()
    writer.abort()
    assert emulator.held() == finished
    with pytest.raises(ValueError, match="finished"):
        writer.finish()
    backend.close()


def test_a_writer_that_is_forgotten_gives_everything_back() -> None:
    """The fixture `emulator` looks."""
    _, writer = begin()
    write(writer, 0)
    del writer


def test_an_export_that_is_forgotten_gives_everything_back() -> None:
    backend, writer = begin()
    for number in range(len(SIZES)):
        write(writer, number)
    writer.finish()
    del writer, backend

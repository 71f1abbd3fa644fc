"""Loads: what failing ones leave behind, in which order they run, and when memory is given back."""

import asyncio
import gc
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from wcache_async.backends.shm_fd import ShmFdTransportBackend
from wcache_async.daemon.exporter import Exporter
from wcache_async.daemon.states import Generation, Phase, StateKey
from wcache_async.errors import Draining, SourceError, StateUnloaded
from wcache_async.manifest import Config, StateSpec, TensorSpec
from wcache_async.sources.base import Advance, Source


class Memory(Source):
    """A source whose storages are made up, and whose reads a test can hold or fail."""

    def __init__(self, storages: int = 4, nbytes: int = 256) -> None:
        self.path = "/made/up"
        self.storages = storages
        self.nbytes = nbytes
        self.closed = threading.Event()
        self.reading = threading.Event()
        self.proceed = threading.Event()
        self.proceed.set()
        self.fail: BaseException | None = None

    def open(self) -> StateSpec:
        tensors = [
            TensorSpec(name=f"t{i}", dtype="uint8", shape=(self.nbytes,), storage=i) for i in range(self.storages)
        ]
        return StateSpec(storages=(self.nbytes,) * self.storages, tensors=tuple(tensors))

    def config(self) -> Config:
        return {"source": "memory", "dtype": "uint8"}

    def read(self, storage: int, into: memoryview, advance: Advance) -> None:
        self.reading.set()
        while not self.proceed.wait(0.01):
            advance(0)
        if self.fail is not None:
            raise self.fail
        into[:] = bytes([storage % 256]) * self.nbytes
        advance(self.nbytes)

    def close(self) -> None:
        self.closed.set()


@pytest.fixture
async def exporter() -> Exporter:
    return Exporter(reader_threads=2)


@contextmanager
def nothing_left_open() -> Iterator[None]:
    before = os.listdir("/proc/self/fd")
    yield
    gc.collect()
    assert os.listdir("/proc/self/fd") == before


def begin(exporter: Exporter, source: Memory, name: str = "m", config: Config | None = None) -> Generation:
    return exporter.begin_load(StateKey(name, 0), path=source.path, open_source=lambda: source, config=config or {})


async def test_a_load_ends_ready_with_its_figures_and_both_configs(
    exporter: Exporter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "wcache_async.daemon")
    source = Memory()
    generation = begin(exporter, source, config={"dtype": "mine"})
    await exporter.loaded(generation)
    assert generation.phase is Phase.READY
    assert (generation.tensors, generation.bytes_done, generation.bytes_total) == (4, 1024, 1024)
    assert generation.config == {"source": "memory", "dtype": "mine"}
    assert source.closed.is_set()
    lines = [r.getMessage() for r in caplog.records if "exported" in r.getMessage()]
    assert len(lines) == 1
    assert "4 tensors, 0 non-persistent buffers, transport shm_fd, manifest" in lines[0]
    await exporter.close()


@pytest.mark.parametrize(
    "fault",
    [
        SourceError(path="/made/up", reason="bad shard"),
        OSError(28, "No space left on device"),
        MemoryError(),
        ZeroDivisionError("a bug in a source"),
    ],
    ids=lambda fault: type(fault).__name__,
)
async def test_whatever_a_source_raises_fails_the_state_alone(exporter: Exporter, fault: BaseException) -> None:
    source = Memory()
    source.fail = fault
    with nothing_left_open():
        generation = begin(exporter, source)
        with pytest.raises(SourceError) as caught:
            await exporter.loaded(generation)
        assert caught.value.path == "/made/up"
        assert generation.phase is Phase.FAILED
        assert source.closed.is_set()
        del caught
    other = begin(exporter, Memory(), "other")
    await exporter.loaded(other)
    await exporter.close()


async def test_loads_run_one_at_a_time_so_that_each_memory_check_sees_the_last(exporter: Exporter) -> None:
    first, second = Memory(), Memory()
    first.proceed.clear()
    one, two = begin(exporter, first, "one"), begin(exporter, second, "two")
    assert await asyncio.to_thread(first.reading.wait, 20)
    assert not second.reading.is_set()
    assert two.phase is Phase.LOADING
    first.proceed.set()
    await exporter.loaded(one)
    await exporter.loaded(two)
    await exporter.close()


async def test_unloading_a_loading_state_stops_its_read(exporter: Exporter) -> None:
    source = Memory()
    source.proceed.clear()
    with nothing_left_open():
        generation = begin(exporter, source)
        waiting = asyncio.create_task(exporter.loaded(generation))
        assert await asyncio.to_thread(source.reading.wait, 20)
        await exporter.unload("m", None)
        with pytest.raises(StateUnloaded):
            await waiting
        assert await asyncio.to_thread(source.closed.wait, 20)
        await exporter.close()


async def test_closing_stops_loads_and_refuses_new_ones(exporter: Exporter) -> None:
    source = Memory()
    source.proceed.clear()
    generation = begin(exporter, source)
    waiting = asyncio.create_task(exporter.loaded(generation))
    assert await asyncio.to_thread(source.reading.wait, 20)
    await exporter.close()
    assert source.closed.is_set()
    with pytest.raises(Draining):
        await waiting
    with pytest.raises(Draining):
        begin(exporter, Memory())


async def test_memory_is_given_back_with_the_last_lease(exporter: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[ShmFdTransportBackend] = []
    close = ShmFdTransportBackend.close

    def noting(backend: ShmFdTransportBackend) -> None:
        closed.append(backend)
        close(backend)

    monkeypatch.setattr(ShmFdTransportBackend, "close", noting)
    generation = begin(exporter, Memory())
    await exporter.loaded(generation)
    _, lease = await exporter.grant(7, generation, ["shm_fd"])
    await exporter.grant(8, generation, ["shm_fd"])
    await exporter.unload("m", None)
    assert closed == []
    await exporter.release(7, lease)
    assert closed == []
    exporter.drop(8)
    await exporter.close()
    assert len(closed) == 1


async def test_a_large_manifest_travels_as_a_memfd(exporter: Exporter) -> None:
    small, large = begin(exporter, Memory(), "small"), begin(exporter, Memory(storages=3000, nbytes=1), "large")
    await exporter.loaded(small)
    await exporter.loaded(large)
    inline, _ = await exporter.grant(1, small, ["shm_fd"])
    memfd, _ = await exporter.grant(1, large, ["shm_fd"])
    assert inline.manifest is not None
    assert inline.manifest_fd is None
    assert memfd.manifest is None
    assert memfd.manifest_fd is not None
    assert os.fstat(memfd.manifest_fd.fileno()).st_size == memfd.manifest_nbytes
    await exporter.close()

"""What the daemon tells of itself: the stalls that were made, and what it holds until it gives it back."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.faults.wire import eventually
from wcache_async import Client, Daemon
from wcache_async.backends.memfd import sealed_memfd
from wcache_async.client.fetch import FetchedState
from wcache_async.daemon import health
from wcache_async.daemon.health import LoopWatch, read_footprint
from wcache_async.protocol.messages import Health

STALL_S = 0.05
SEEN_S = STALL_S - health.INTERVAL_S - 0.002
"""What of it is seen at least; uvloop's timers are of whole milliseconds."""


def compute(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


async def test_a_loop_that_computes_is_told_and_that_it_was_its_own_doing() -> None:
    watch = LoopWatch(lambda: True)
    watch.attend()
    await asyncio.sleep(0)
    compute(STALL_S)
    await eventually(lambda: watch.worst_stall_s >= SEEN_S)
    assert watch.stalls_beyond[0.02] >= 1
    assert sorted(watch.stalls_beyond.values(), reverse=True) == list(watch.stalls_beyond.values())
    assert 0 < watch.worst_stall_computing_s <= watch.worst_stall_s
    watch.close()


async def test_a_loop_that_is_kept_waiting_is_told_and_that_it_computed_nothing() -> None:
    watch = LoopWatch(lambda: True)
    watch.attend()
    await asyncio.sleep(0)
    time.sleep(STALL_S)  # noqa: ASYNC251
    await eventually(lambda: watch.worst_stall_s >= SEEN_S)
    assert watch.worst_stall_computing_s < watch.worst_stall_s
    watch.close()


async def test_a_loop_with_nothing_to_do_is_left_to_sleep_and_watched_again_when_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health, "LINGER_S", 0.0)
    answers = [True] * 5 + [False] * 2

    def busy() -> bool:
        return answers.pop(0)

    watch = LoopWatch(busy)
    assert not watching(watch)
    watch.attend()
    await eventually(lambda: not watch.watching)
    assert answers == [False]
    watch.attend()
    assert watching(watch)
    await eventually(lambda: not watch.watching)
    assert answers == []
    watch.attend()
    watch.close()
    assert not watching(watch)


def watching(watch: LoopWatch) -> bool:
    return watch.watching


def test_a_footprint_counts_what_is_open_and_what_is_mapped() -> None:
    before = read_footprint()
    with sealed_memfd("test", bytes(8 << 20)) as fd:
        assert read_footprint().fds == before.fds + 1
        mapped = torch.from_file(f"/proc/self/fd/{fd.fileno()}", shared=False, size=8 << 20, dtype=torch.uint8)
        total = int(mapped.sum())  # Touched, and so resident.
        during = read_footprint()
    assert total == 0
    assert during.mappings == before.mappings + 1
    assert during.memory_bytes > before.memory_bytes
    del mapped
    assert read_footprint().mappings == before.mappings
    assert read_footprint().fds == before.fds


async def health_of(client: Client) -> Health:
    told = (await client.status()).health
    assert told is not None
    return told


async def test_the_daemon_tells_what_it_holds_also_what_only_a_lease_keeps(
    daemon: Daemon, write_checkpoint: Callable[..., Path]
) -> None:
    async with Client(daemon.socket_path) as client:
        empty = await health_of(client)
        assert (empty.leases, empty.generations) == (0, 0)
        await daemon.load(write_checkpoint(), name="m")
        held: list[FetchedState] = [await client.fetch_state("m") for _ in range(2)]
        await client.unload("m")
        told = await health_of(client)
        assert (told.leases, told.generations) == (2, 1)
        assert told.fds > empty.fds
        async with Client(daemon.socket_path) as other:
            assert (await health_of(other)).tasks > told.tasks
        for state in held:
            await state.release()
        gone = await health_of(client)
        assert (gone.leases, gone.generations) == (0, 0)


async def test_the_daemons_stalls_are_told_and_an_idle_daemon_sleeps(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "LINGER_S", 0.02)
    watch = daemon._running()[0].watch
    async with Client(daemon.socket_path) as client:
        await client.status()
        time.sleep(STALL_S)  # noqa: ASYNC251 - the daemon's loop is this one
        await eventually(lambda: watch.worst_stall_s >= SEEN_S)
        assert (await health_of(client)).worst_loop_stall_s >= SEEN_S
        await eventually(lambda: not watch.watching)

"""Loads sources into exports, keeps them, and performs what the state table decides.

Loading runs in threads, one state at a time, so that each memory check sees what the last
load took.  Freeing runs in a thread as well: giving back a large state takes the kernel long.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from wcache_async.backends.base import WeightCacheTransportBackend
from wcache_async.backends.registry import choose_for_device
from wcache_async.daemon.leases import LeaseTable
from wcache_async.daemon.loading import Export, Load, LoadCancelled, Loaded, run_load
from wcache_async.daemon.states import Cancel, Discard, Effect, Generation, Phase, StateKey, StateTable, Wake
from wcache_async.errors import (
    BackendNotAccepted,
    ConfigMismatch,
    Draining,
    LoadingTimeout,
    StateNotFound,
    StateUnloaded,
    WeightCacheError,
)
from wcache_async.manifest import Config, Kind, compare_config
from wcache_async.sources.base import Source

__all__ = ["Exporter", "Progress"]

T = TypeVar("T")

logger = logging.getLogger("wcache_async.daemon")

PROGRESS_INTERVAL_S = 0.25

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


class Exporter:
    """Every state of one daemon.  Belongs to one event loop."""

    def __init__(self, *, backend: str = "auto", device: str = "cpu", reader_threads: int | None = None) -> None:
        self.backend = backend
        self.device = device
        self.table = StateTable()
        self._leases = LeaseTable()
        self._exports: dict[Generation, Export] = {}
        self._loads: dict[Generation, Load] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiters: dict[StateKey, set[asyncio.Future[None]]] = {}
        self._one_load = asyncio.Lock()
        self._reader_threads = reader_threads or min(4, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="wcache-export")
        self._closing = False

    # ---------------------------------------------------------------------------- loading
    def begin_load(
        self,
        key: StateKey,
        *,
        path: str,
        open_source: Callable[[], Source],
        config: Config,
        backend: str = "auto",
        replace: bool = False,
    ) -> Generation:
        """Start loading a state; it is LOADING at once, and `open_source` is called in a thread.

        Raises StateExists, UnknownBackend, BackendUnavailable, Draining.
        """
        if self._closing:
            raise Draining
        wanted = self.backend if backend == "auto" else backend
        chosen = choose_for_device(self.device, wanted)
        generation = self.table.begin(key, source=path, config=config, replace=replace)
        load = self._loads[generation] = Load(generation, open_source)
        self._spawn(self._run_load(load, chosen))
        return generation

    async def _run_load(self, load: Load, backend: WeightCacheTransportBackend) -> None:
        generation = load.generation
        try:
            async with self._one_load:
                loaded = await self._in_thread(partial(run_load, load, backend, self.device, self._reader_threads))
            generation.config = loaded.config | generation.config
            generation.tensors = len(loaded.manifest.tensors)
            generation.nbytes = loaded.manifest.tensor_bytes
            generation.backends = (backend.name,)
            self._exports[generation] = loaded.export
            self._log_export(load, loaded)
            effects = self.table.ready(generation)
        except LoadCancelled:
            effects = []
        except WeightCacheError as error:
            logger.error("loading %s from %s failed: %s", generation.key, generation.source, error)
            # It is kept as long as the state is FAILED; its frames would keep the arenas.
            error.__traceback__ = error.__cause__ = error.__context__ = None
            effects = self.table.fail(generation, error)
        finally:
            del self._loads[generation]
        await self.perform(effects)

    def _log_export(self, load: Load, loaded: Loaded) -> None:
        manifest = loaded.manifest
        hidden = sum(1 for entry in manifest.tensors if entry.kind is Kind.NON_PERSISTENT_BUFFER)
        logger.info(
            "exported %s generation %d: %d tensors, %d non-persistent buffers, transport %s, manifest %d bytes, "
            "%.3f GiB in %.2f s",
            load.generation.key,
            load.generation.number,
            len(manifest.tensors),
            hidden,
            loaded.export.backend.name,
            loaded.export.manifest_nbytes,
            manifest.tensor_bytes / 2**30,
            time.monotonic() - load.started,
        )

    async def loaded(self, generation: Generation, progress: Progress | None = None) -> None:
        """Wait until the load has ended.  Raises what it failed with, StateUnloaded or Draining."""
        while generation.phase is Phase.LOADING and generation.held and not self._closing:
            await self._wait(generation.key, PROGRESS_INTERVAL_S if progress else None)
            if progress:
                progress(generation.bytes_done, generation.bytes_total)
        if generation.phase is Phase.FAILED and generation.error is not None:
            raise generation.error
        if generation.phase is Phase.LOADING:
            raise Draining if self._closing else StateUnloaded(name=generation.key.name, rank=generation.key.rank)

    # ------------------------------------------------------------------- serving a request
    async def ready(
        self, key: StateKey, *, expect: Config, timeout: float | None, progress: Progress | None = None
    ) -> Generation:
        """The READY generation of that key, waiting for it while it is LOADING.

        Raises StateNotFound, StateFailed, StateUnloaded, ConfigMismatch, LoadingTimeout, Draining.
        """
        started = time.monotonic()
        waited = False
        while True:
            if self._closing:
                raise Draining
            try:
                generation = self.table.lookup(key)
            except StateNotFound:
                if waited:
                    raise StateUnloaded(name=key.name, rank=key.rank) from None
                raise
            if generation.phase is Phase.READY:
                break
            left = None if timeout is None else started + timeout - time.monotonic()
            if left is not None and left <= 0:
                raise LoadingTimeout(
                    name=key.name,
                    rank=key.rank,
                    waited_s=float(timeout or 0),
                    bytes_done=generation.bytes_done,
                    bytes_total=generation.bytes_total,
                )
            interval = PROGRESS_INTERVAL_S if progress else None
            await self._wait(key, min((t for t in (left, interval) if t is not None), default=None))
            waited = True
            if progress:
                progress(generation.bytes_done, generation.bytes_total)
        differences = compare_config(expect, generation.config)
        if differences:
            raise ConfigMismatch(name=key.name, rank=key.rank, differences=differences)
        return generation

    def grant(self, connection: int, generation: Generation, accepted: Iterable[str]) -> tuple[Export, int]:
        """The export that the client can take, and a lease on it.  Raises BackendNotAccepted."""
        export = self._exports[generation]
        accepted = list(accepted)
        if export.backend.name not in accepted:
            raise BackendNotAccepted(accepted=accepted, exportable=[export.backend.name])
        self.table.lease_granted(generation)
        return export, self._leases.grant(connection, generation)

    async def release(self, connection: int, lease: int) -> None:
        """End one lease.  Raises LeaseNotFound."""
        await self.perform(self.table.lease_ended(self._leases.release(connection, lease)))

    def drop(self, connection: int) -> None:
        """End every lease of a connection that is gone."""
        effects = [e for generation in self._leases.drop(connection) for e in self.table.lease_ended(generation)]
        if effects:
            self._spawn(self.perform(effects))

    async def unload(self, name: str, rank: int | None) -> list[Generation]:
        """Forget states; holders keep their memory.  Raises StateNotFound."""
        gone, effects = self.table.unload(name, rank)
        await self.perform(effects)
        return gone

    # -------------------------------------------------------------------------- performing
    async def perform(self, effects: Iterable[Effect]) -> None:
        """Do what the state table decided."""
        for effect in effects:
            match effect:
                case Wake(key):
                    self._wake(key)
                case Cancel(generation):
                    self._loads[generation].cancelled = True
                case Discard(generation):
                    export = self._exports.pop(generation)
                    await self._in_thread(export.close)

    def stop_loading(self) -> None:
        """Load nothing more; whoever waits for a load is told Draining."""
        self._closing = True
        for load in self._loads.values():
            load.cancelled = True
        for key in list(self._waiters):
            self._wake(key)

    async def close(self) -> None:
        """Give up every state; holders keep their memory."""
        self.stop_loading()
        while self._tasks:
            await asyncio.wait(self._tasks)
        exports = list(self._exports.values())
        self._exports.clear()
        for export in exports:
            await self._in_thread(export.close)
        self._threads.shutdown(wait=False)

    async def _wait(self, key: StateKey, timeout: float | None) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiters = self._waiters.setdefault(key, set())
        waiters.add(future)
        try:
            await asyncio.wait((future,), timeout=timeout)
        finally:
            waiters.discard(future)
            if not waiters and self._waiters.get(key) is waiters:
                del self._waiters[key]

    def _wake(self, key: StateKey) -> None:
        for future in self._waiters.pop(key, set()):
            if not future.done():
                future.set_result(None)

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        # Shielded: a thread cannot be cancelled, and what it made must not be lost with the waiter.
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._threads, work))

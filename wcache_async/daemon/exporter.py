"""Loads sources into exports, keeps them, and performs what the state table decides.

A state is exported through one backend when it is loaded, and once more, a second copy, when
a client comes that does not accept that one; unless the daemon's user named it, which means it
alone.

Loading runs in threads, one state at a time, so that each memory check sees what the last
load took.  Freeing runs in a thread as well: giving back a large state takes the kernel long.
"""

import asyncio
import copy
import logging
import os
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from wcache_async.backends.base import WeightCacheTransportBackend
from wcache_async.backends.registry import choose_accepted, choose_for_device
from wcache_async.daemon.budget import plan_eviction
from wcache_async.daemon.leases import LeaseTable
from wcache_async.daemon.loading import Export, Load, LoadCancelled, copy_export, run_load
from wcache_async.daemon.states import Cancel, Discard, Effect, Generation, Phase, StateKey, StateTable, Wake
from wcache_async.daemon.threads import Threads
from wcache_async.errors import (
    BackendNotAccepted,
    BackendUnavailable,
    ConfigMismatch,
    Draining,
    LoadingTimeout,
    StateNotFound,
    StateUnloaded,
    WeightCacheError,
)
from wcache_async.manifest import Config, Kind, StateManifest, compare_config
from wcache_async.sources.base import Source

__all__ = ["Exporter", "Progress"]

T = TypeVar("T")

logger = logging.getLogger("wcache_async.daemon")

PROGRESS_INTERVAL_S = 0.25

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


@dataclass(slots=True)
class _Exports:
    """One generation in every form it is served in, by backend; the first is the one it was loaded into."""

    made: dict[str, Export]
    fixed: bool
    """No others are to be made."""
    making: "dict[str, asyncio.Task[Export | WeightCacheError]]" = field(default_factory=dict)

    @property
    def first(self) -> Export:
        return next(iter(self.made.values()))

    def find(self, accepted: Iterable[str]) -> Export | None:
        return next((export for name, export in self.made.items() if name in accepted), None)

    def close(self) -> None:
        for export in self.made.values():
            export.close()


class Exporter:
    """Every state of one daemon.  Belongs to one event loop."""

    def __init__(
        self,
        *,
        backend: str = "auto",
        device: str = "cpu",
        reader_threads: int | None = None,
        max_bytes: int | None = None,
    ) -> None:
        self.backend = backend
        self.max_bytes = max_bytes
        self.device = device
        self.table = StateTable()
        self._leases = LeaseTable()
        self._exports: dict[Generation, _Exports] = {}
        self._loads: dict[Generation, Load] = {}
        self._tasks: set[asyncio.Task[object]] = set()
        self._waiters: dict[StateKey, set[asyncio.Future[None]]] = {}
        self._one_load = asyncio.Lock()
        self._promised: dict[Generation, int] = {}
        self._reader_threads = reader_threads or min(4, os.cpu_count() or 1)
        self._threads = Threads(4, "wcache-export")
        self._jobs: set[asyncio.Future[Any]] = set()
        self._hurried = asyncio.Event()
        self.closing = False

    @property
    def busy(self) -> bool:
        """Whether anything is being loaded, exported or freed."""
        return bool(self._tasks)

    @property
    def leases(self) -> int:
        """How many stand, also on generations no longer held."""
        return len(self._leases)

    @property
    def generations(self) -> int:
        """How many are in memory, also those that only their leases keep."""
        return len(self._exports)

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

        A backend asked for by name, here or of the whole daemon, is the only one it is served through.
        Raises StateExists, UnknownBackend, BackendUnavailable, Draining.
        """
        if self.closing:
            raise Draining
        wanted = self.backend if backend == "auto" else backend
        chosen = choose_for_device(self.device, wanted)
        generation = self.table.begin(key, source=path, config=config, replace=replace)
        admit = partial(self._admit_from_thread, asyncio.get_running_loop(), generation)
        load = self._loads[generation] = Load(generation, open_source, admit)
        self.spawn(self._run_load(load, chosen, fixed=wanted != "auto"))
        return generation

    async def _run_load(self, load: Load, backend: WeightCacheTransportBackend, *, fixed: bool) -> None:
        generation = load.generation
        try:
            async with self._one_load:
                loaded = await self.in_thread(partial(run_load, load, backend, self.device, self._reader_threads))
            generation.config = loaded.config | generation.config
            generation.origin = loaded.origin
            generation.digest, generation.tensor_digests = loaded.digests.state, loaded.digests.tensors
            effects = self._hold(generation, loaded.manifest, loaded.export, load.started, fixed=fixed)
        except LoadCancelled:
            effects = []
        except WeightCacheError as error:
            logger.error("loading %s from %s failed: %s", generation.key, generation.source, error)
            # It is kept as long as the state is FAILED; its frames would keep the arenas.
            error.__traceback__ = error.__cause__ = error.__context__ = None
            effects = self.table.fail(generation, error)
        finally:
            del self._loads[generation]
            self._promised.pop(generation, None)
        await self.perform(effects)

    async def adopt(self, generation: Generation, manifest: StateManifest, export: Export) -> None:
        """Hold a state that a client has made: READY."""
        self._promised.pop(generation, None)
        started = time.monotonic()
        await self.perform(self._hold(generation, manifest, export, started, fixed=self.backend != "auto"))

    def _hold(
        self, generation: Generation, manifest: StateManifest, export: Export, started: float, *, fixed: bool
    ) -> list[Effect]:
        generation.tensors = len(manifest.tensors)
        generation.nbytes = manifest.tensor_bytes
        # A load's total stays what it was counted in, without padding: whoever watches it end sees one figure.
        generation.bytes_done = generation.bytes_total = generation.bytes_total or manifest.tensor_bytes
        generation.backends = (export.backend.name,)
        generation.last_used = time.monotonic()
        self._exports[generation] = _Exports({export.backend.name: export}, fixed)
        self._log_export(generation, manifest, export, started)
        return self.table.ready(generation)

    async def admit(self, generation: Generation, nbytes: int) -> None:
        """Promise `nbytes` to a generation, evicting what may be evicted.  Raises BudgetExceeded."""
        if self.max_bytes is None:
            return
        ready = self.table.ready_states()
        leaving = sum(g.nbytes for g in self._exports if not g.held)
        taken = leaving + sum(self._promised.values())
        evicted = plan_eviction(ready, nbytes, self.max_bytes, taken=taken)
        self._promised[generation] = nbytes
        effects: list[Effect] = []
        for other in evicted:  # All at once, so that none is leased, pinned or replaced in between.
            logger.info("evicting %s, %.3f GiB, for %s", other.key, other.nbytes / 2**30, generation.key)
            effects += self.table.evict(other)
        await self.perform(effects)

    def _admit_from_thread(self, loop: asyncio.AbstractEventLoop, generation: Generation, nbytes: int) -> None:
        asyncio.run_coroutine_threadsafe(self.admit(generation, nbytes), loop).result()

    def withdraw_promise(self, generation: Generation) -> None:
        """Give back what was promised to a generation that will not be."""
        self._promised.pop(generation, None)

    def pin(self, name: str, rank: int | None, *, pinned: bool) -> list[Generation]:
        """Keep states from being evicted, or no longer.  Raises StateNotFound."""
        found = [g for g in self.table if g.key.name == name and rank in (None, g.key.rank)]
        if not found:
            self.table.lookup(StateKey(name, rank or 0))
        for generation in found:
            generation.pinned = pinned
        return found

    def _log_export(self, generation: Generation, manifest: StateManifest, export: Export, started: float) -> None:
        hidden = sum(1 for entry in manifest.tensors if entry.kind is Kind.NON_PERSISTENT_BUFFER)
        logger.info(
            "exported %s generation %d: %d tensors, %d non-persistent buffers, transport %s, manifest %d bytes, "
            "%.3f GiB in %.2f s",
            generation.key,
            generation.number,
            len(manifest.tensors),
            hidden,
            export.backend.name,
            export.manifest_nbytes,
            manifest.tensor_bytes / 2**30,
            time.monotonic() - started,
        )

    async def loaded(self, generation: Generation, progress: Progress | None = None) -> None:
        """Wait until the load has ended.  Raises what it failed with, StateUnloaded or Draining."""
        while generation.phase is Phase.LOADING and generation.held and not self.closing:
            await self.wait(generation.key, PROGRESS_INTERVAL_S if progress else None)
            if progress:
                progress(generation.bytes_done, generation.bytes_total)
        if generation.phase is Phase.FAILED and generation.error is not None:
            raise copy.copy(generation.error)  # It is kept, and would keep the frames of all who were told.
        if generation.phase is Phase.LOADING:
            raise Draining if self.closing else StateUnloaded(name=generation.key.name, rank=generation.key.rank)

    # ------------------------------------------------------------------- serving a request
    async def ready(
        self, key: StateKey, *, expect: Config, timeout: float | None, progress: Progress | None = None
    ) -> Generation:
        """The READY generation of that key, waiting for it while it is LOADING.

        Besides the config's fields, `expect` may have ``digest``, the state's.

        Raises StateNotFound, StateFailed, StateUnloaded, ConfigMismatch, LoadingTimeout, Draining.
        """
        started = time.monotonic()
        waited = False
        while True:
            if self.closing:
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
            await self.wait(key, min((t for t in (left, interval) if t is not None), default=None))
            waited = True
            if progress:
                progress(generation.bytes_done, generation.bytes_total)
        differences = compare_config(expect, {"digest": generation.digest} | generation.config)
        if differences:
            raise ConfigMismatch(name=key.name, rank=key.rank, differences=differences)
        return generation

    def serves_at_once(self, key: StateKey, accepted: Iterable[str]) -> bool:
        """Whether a fetch need not wait: neither for a load nor for an export through another backend."""
        try:
            generation = self.table.lookup(key)
        except WeightCacheError:
            return True
        if generation.phase is not Phase.READY:
            return False
        exports = self._exports[generation]
        return exports.fixed or exports.find(accepted) is not None

    async def grant(self, connection: int, generation: Generation, accepted: Iterable[str]) -> tuple[Export, int]:
        """The export that the client can take, made now if need be, and a lease on it.

        Raises BackendNotAccepted, and what making another export meets: InsufficientMemory,
        BackendUnavailable, Draining.
        """
        self.table.lease_granted(generation)
        generation.last_used = time.monotonic()
        lease = self._leases.grant(connection, generation)
        try:
            return await self._provide(generation, tuple(accepted)), lease
        except BaseException:
            await self.release(connection, lease)
            raise

    async def _provide(self, generation: Generation, accepted: tuple[str, ...]) -> Export:
        exports = self._exports[generation]
        export = exports.find(accepted)
        if export is not None:
            return export
        if exports.fixed:
            raise BackendNotAccepted(accepted=list(accepted), exportable=list(exports.made))
        backend = await self.in_thread(partial(choose_accepted, exports.first.device, accepted))
        task = exports.making.get(backend.name)
        if task is None:
            export = exports.find((backend.name,))
            if export is not None:
                return export
            # Held on its own account, so that it ends in order when whoever asked for it has gone.
            self.table.lease_granted(generation)
            task = exports.making[backend.name] = self.spawn(self._make_export(generation, exports, backend()))
        made = await asyncio.shield(task)
        if isinstance(made, WeightCacheError):
            raise made
        return made

    async def _make_export(
        self, generation: Generation, exports: _Exports, backend: WeightCacheTransportBackend
    ) -> Export | WeightCacheError:
        """Export through one more backend; an error is returned to all who wait, and may be tried again."""
        started = time.monotonic()
        name = backend.name
        try:
            export = await self.in_thread(partial(copy_export, exports.first, backend, self.check_open))
            exports.made[name] = export
            generation.backends = (*generation.backends, name)
            logger.info(
                "exported %s generation %d once more, a second copy of %.3f GiB in %.2f s: transport %s, for a client "
                "that does not accept %s",
                generation.key,
                generation.number,
                backend.resident_bytes / 2**30,
                time.monotonic() - started,
                name,
                exports.first.backend.name,
            )
        except WeightCacheError as error:
            logger.warning("%s cannot be exported through %s too: %s", generation.key, name, error)
            return error
        except Exception as error:
            # Whatever somebody else's backend raises, the daemon stays up.
            logger.exception("exporting %s through %s failed unexpectedly", generation.key, name)
            return BackendUnavailable(name=name, reason=f"{type(error).__name__}: {error}")
        else:
            return export
        finally:
            del exports.making[name]
            await self.perform(self.table.lease_ended(generation))

    def check_open(self) -> None:
        """Raises Draining once nothing more is loaded, made or adopted.  Callable from threads."""
        if self.closing:
            raise Draining

    def tensor_digests(self, connection: int, lease: int) -> bytes:
        """Those of the state that the lease holds; none where they are not known.  Raises LeaseNotFound."""
        return self._leases.find(connection, lease).tensor_digests

    async def release(self, connection: int, lease: int) -> None:
        """End one lease.  Raises LeaseNotFound."""
        await self.perform(self.table.lease_ended(self._leases.release(connection, lease)))

    def drop(self, connection: int) -> None:
        """End every lease of a connection that is gone."""
        effects = [e for generation in self._leases.drop(connection) for e in self.table.lease_ended(generation)]
        if effects:
            self.spawn(self.perform(effects))

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
                    self.wake(key)
                case Cancel(generation):
                    self._loads[generation].cancelled = True
                case Discard(generation):
                    await self.in_thread(self._exports.pop(generation).close)

    def stop_loading(self) -> None:
        """Load nothing more; whoever waits for a load is told Draining."""
        self.closing = True
        for load in self._loads.values():
            load.cancelled = True
        for key in list(self._waiters):
            self.wake(key)

    async def settle(self, timeout: float | None = None) -> None:
        """Let what is under way, after `stop_loading`, end within `timeout` seconds (None: whenever it does).

        What has not ended then is left to its threads, which nothing waits for any more: a read may hang in
        a file server.
        """
        await self._unless_hurried(self._tasks_ended(), timeout)

    async def close(self, timeout: float | None = None) -> None:
        """Give up every state, and all that `settle` would; holders keep their memory."""
        self.stop_loading()
        await self._unless_hurried(self._free(), timeout)
        self._threads.shutdown()

    async def _unless_hurried(self, ends: Coroutine[None, None, None], timeout: float | None) -> None:
        ending = asyncio.create_task(ends)
        hurried = asyncio.create_task(self._hurried.wait())
        await asyncio.wait({ending, hurried}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        if ending.done():
            return
        unfinished = ", ".join(str(load.generation.key) for load in self._loads.values())
        if unfinished:
            logger.warning("not waiting any longer for the load of %s", unfinished)
        self._hurried.set()
        for job in list(self._jobs):
            job.cancel()
        ending.cancel()
        await asyncio.wait({ending, *self._tasks})

    async def _tasks_ended(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _free(self) -> None:
        await self._tasks_ended()
        held = list(self._exports.values())
        self._exports.clear()
        await asyncio.gather(*(self.in_thread(exports.close) for exports in held))

    def hurry(self) -> None:
        """Have `close` wait for nothing any more."""
        self._hurried.set()

    async def wait(self, key: StateKey, timeout: float | None) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiters = self._waiters.setdefault(key, set())
        waiters.add(future)
        try:
            await asyncio.wait((future,), timeout=timeout)
        finally:
            waiters.discard(future)
            if not waiters and self._waiters.get(key) is waiters:
                del self._waiters[key]

    def wake(self, key: StateKey) -> None:
        for future in self._waiters.pop(key, set()):
            if not future.done():
                future.set_result(None)

    def spawn(self, coroutine: Coroutine[None, None, T]) -> "asyncio.Task[T]":
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def in_thread(self, work: Callable[[], T]) -> T:
        """What `work` returns, done in a thread that `close` waits for, for as long as it waits at all."""
        job = asyncio.get_running_loop().run_in_executor(self._threads, work)
        if self._hurried.is_set():
            job.cancel()  # Nobody waits; the work is done all the same.
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        # Shielded: a thread cannot be cancelled, and what it made must not be lost with the waiter.
        return await asyncio.shield(job)

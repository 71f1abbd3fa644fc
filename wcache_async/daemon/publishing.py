"""States that clients build: who builds which, and what the daemon takes over from them.

A state being built is LOADING, as one being loaded is, so that fetches wait for either alike.
Exactly one connection builds a state at a time.  When it ends without having published, the
next client that claims the state builds it; where none does, the state is withdrawn.
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

from wcache_async.backends.base import WeightCacheTransportBackend
from wcache_async.backends.carried import CarriedFds, receive_manifest
from wcache_async.backends.registry import get_transport_backend_class
from wcache_async.daemon.exporter import PROGRESS_INTERVAL_S, Exporter, Progress
from wcache_async.daemon.loading import Export, digest_export
from wcache_async.daemon.states import Generation, Phase, StateKey
from wcache_async.errors import (
    BackendNotAccepted,
    BackendUnavailable,
    BuildNotGranted,
    ConfigMismatch,
    Draining,
    LoadingTimeout,
    StateUnloaded,
)
from wcache_async.identity.digests import StateDigests
from wcache_async.manifest import Config, StateManifest, compare_config
from wcache_async.protocol.messages import Publish

__all__ = ["Publishing"]

logger = logging.getLogger("wcache_async.daemon")


class Publishing:
    """Builds under way and their tickets, for one daemon.  Belongs to its event loop."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter
        self._tickets: dict[int, Generation] = {}
        self._publishing: set[int] = set()  # tickets of which a publication is being checked
        self._given_back: set[int] = set()  # and those among them that were abandoned meanwhile
        self._last = 0
        self._candidates: Counter[StateKey] = Counter()

    async def claim(
        self,
        connection: int,
        key: StateKey,
        *,
        config: Config,
        timeout: float | None,
        progress: Progress | None = None,
    ) -> tuple[Generation, int]:
        """The state, READY, with ticket 0; or one that `connection` is to build, with its ticket.

        Raises ConfigMismatch, LoadingTimeout, Draining.
        """
        exporter = self._exporter
        deadline = None if timeout is None else time.monotonic() + timeout
        self._candidates[key] += 1
        try:
            while True:
                if exporter.closing:
                    raise Draining
                generation = exporter.table.find(key)
                if generation is None or generation.phase is Phase.FAILED:
                    generation = exporter.table.begin(key, source=f"client {connection}", config=config)
                    generation.is_build = True
                elif generation.phase is Phase.READY:
                    _check_config(generation, config)
                    return generation, 0
                elif generation.is_build:
                    _check_config(generation, config)
                if generation.is_build and generation.builder is None:
                    return generation, self._grant(connection, generation)
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise LoadingTimeout(
                        name=key.name,
                        rank=key.rank,
                        waited_s=float(timeout or 0),
                        bytes_done=generation.bytes_done,
                        bytes_total=generation.bytes_total,
                    )
                interval = PROGRESS_INTERVAL_S if progress else None
                await exporter.wait(key, min((t for t in (left, interval) if t is not None), default=None))
                if progress:
                    progress(generation.bytes_done, generation.bytes_total)
        finally:
            self._candidates[key] -= 1
            if not self._candidates[key]:
                del self._candidates[key]
                self._withdraw_orphan(key)

    def _withdraw_orphan(self, key: StateKey) -> None:
        """A build whose turn fell to a client that was leaving just then is nobody's."""
        generation = self._exporter.table.find(key)
        if generation is None or generation.phase is not Phase.LOADING:
            return
        if generation.is_build and generation.builder is None:
            self._exporter.spawn(self._exporter.perform(self._exporter.table.withdraw(generation)))

    def _grant(self, connection: int, generation: Generation) -> int:
        self._last += 1
        self._tickets[self._last] = generation
        generation.builder = connection
        generation.source = f"client {connection}"
        return self._last

    async def abandon(self, connection: int, ticket: int) -> None:
        """Give a ticket back.  Raises BuildNotGranted."""
        generation = self._tickets.get(ticket)
        if generation is None or generation.builder != connection:
            raise BuildNotGranted(name="", rank=0)
        if ticket in self._publishing:
            self._given_back.add(ticket)  # The turn passes once it is known that nothing came of it.
        else:
            await self._end_build(ticket, generation)

    def drop(self, connection: int) -> None:
        """The builds of a connection that is gone go to whoever claims them next."""
        for ticket, generation in list(self._tickets.items()):
            if generation.builder == connection:
                self._exporter.spawn(self._end_build(ticket, generation))

    async def _end_build(self, ticket: int, generation: Generation) -> None:
        if self._tickets.pop(ticket, None) is None or not generation.held:
            return
        generation.builder = None
        logger.warning("%s was not built after all by %s", generation.key, generation.source)
        if self._candidates[generation.key]:
            self._exporter.wake(generation.key)
        else:
            await self._exporter.perform(self._exporter.table.withdraw(generation))

    async def publish(self, connection: int, request: Publish, carried: CarriedFds) -> Generation:
        """Check a state a client has made, and adopt it: READY.  A refused one changes nothing.

        Raises StateExists, StateUnloaded, BuildNotGranted, BudgetExceeded, BackendNotAccepted,
        BackendUnavailable, UnknownBackend, and a ProtocolError for what contradicts itself.
        """
        generation = self._generation_for(connection, request)
        self._publishing.add(request.ticket)
        try:
            export, manifest = await self._receive(request, carried)
            try:
                digests = await self._exporter.in_thread(partial(_digests, export, manifest, self._exporter.check_open))
                await self._exporter.admit(generation, manifest.tensor_bytes)
                self._check_still_wanted(generation)
            except BaseException:
                export.close()
                raise
        except BaseException:
            self._exporter.withdraw_promise(generation)
            self._publishing.discard(request.ticket)
            if not request.ticket:
                await self._exporter.perform(self._exporter.table.withdraw(generation))
            elif request.ticket in self._given_back:
                self._given_back.discard(request.ticket)
                await self._end_build(request.ticket, generation)
            raise
        for tickets in (self._publishing, self._given_back):
            tickets.discard(request.ticket)
        self._tickets.pop(request.ticket, None)
        generation.builder = None
        generation.config = request.config
        generation.digest, generation.tensor_digests = digests.state, digests.tensors
        await self._exporter.adopt(generation, manifest, export)
        return generation

    def _generation_for(self, connection: int, request: Publish) -> Generation:
        key = StateKey(request.name, request.rank)
        if not request.ticket:
            source = request.source or f"client {connection}"
            generation = self._exporter.table.begin(key, source=source, config=request.config, replace=request.replace)
            generation.is_build = True
            generation.builder = connection
            return generation
        granted = self._tickets.get(request.ticket)
        mine = granted is not None and granted.builder == connection and granted.key == key
        if granted is None or not mine or request.ticket in self._publishing:
            raise BuildNotGranted(name=key.name, rank=key.rank)
        self._check_still_wanted(granted)
        return granted

    def _check_still_wanted(self, generation: Generation) -> None:
        if self._exporter.closing:
            raise Draining
        if not generation.held:
            raise StateUnloaded(name=generation.key.name, rank=generation.key.rank)

    async def _receive(self, request: Publish, carried: CarriedFds) -> tuple[Export, StateManifest]:
        backend = await self._exporter.in_thread(partial(self._backend_for, request.transport_backend))
        try:
            manifest = await receive_manifest(request.manifest, request.manifest_nbytes, carried)
            await backend.adopt(carried, request.payload, manifest)
            carried.finish()
            return await self._exporter.in_thread(partial(Export.of, backend, manifest)), manifest
        except BaseException:
            backend.close()
            raise

    def _backend_for(self, name: str) -> WeightCacheTransportBackend:
        wanted = self._exporter.backend
        if wanted not in ("auto", name):
            raise BackendNotAccepted(accepted=[wanted], exportable=[name])
        return get_transport_backend_class(name)()


def _digests(export: Export, manifest: StateManifest, check: Callable[[], None]) -> StateDigests:
    try:
        return digest_export(export, manifest, threads=min(4, os.cpu_count() or 1), check=check)
    except BackendUnavailable as error:
        logger.warning("a published state has no digest: %s", error)
        return StateDigests(state="", tensors=b"")


def _check_config(generation: Generation, config: Config) -> None:
    differences = compare_config(config, generation.config)
    if differences:
        raise ConfigMismatch(name=generation.key.name, rank=generation.key.rank, differences=differences)

"""Reads one source into one backend's arenas, and what comes of it: an export.  Runs in threads.

The storages of a state are read by several threads, each taking the next one.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass, field
from typing import Self

from wcache_async.backends.base import ResponseSender, StateWriter, WeightCacheTransportBackend
from wcache_async.backends.carried import pack_manifest
from wcache_async.backends.memfd import read_memfd
from wcache_async.daemon.states import Generation
from wcache_async.daemon.threads import Threads
from wcache_async.errors import SourceError, WeightCacheError
from wcache_async.identity.digests import StateDigester, StateDigests
from wcache_async.identity.files import origin_of
from wcache_async.manifest import Config, Origin, StateManifest, StateSpec, decode_manifest, spec_of
from wcache_async.protocol.messages import FetchStateResponse
from wcache_async.sockets.fds import OwnedFd
from wcache_async.sources.base import Source

__all__ = ["Export", "Load", "LoadCancelled", "Loaded", "copy_export", "digest_export", "run_load"]

logger = logging.getLogger("wcache_async.daemon")


@dataclass(slots=True)
class Export:
    """One generation ready to be sent: its backend, and its manifest encoded once."""

    backend: WeightCacheTransportBackend
    manifest: bytes | None
    manifest_fd: OwnedFd | None
    manifest_nbytes: int
    device: str
    """Where the state is, as in the manifest; empty where it is on several devices."""

    @classmethod
    def of(cls, backend: WeightCacheTransportBackend, manifest: StateManifest) -> Self:
        """The export of what `backend` holds."""
        inline, fd, nbytes = pack_manifest(manifest)
        devices = {arena.device for arena in manifest.arenas}
        return cls(
            backend=backend,
            manifest=inline,
            manifest_fd=fd,
            manifest_nbytes=nbytes,
            device=devices.pop() if len(devices) == 1 else "",
        )

    def decode_manifest(self) -> StateManifest:
        """What is sent, as it was before it was encoded.  Blocks."""
        if self.manifest_fd is None:
            return decode_manifest(self.manifest or b"")
        return decode_manifest(read_memfd(self.manifest_fd, self.manifest_nbytes, "the manifest"))

    async def send(self, sender: ResponseSender, generation: Generation, lease: int) -> None:
        """Send the state, and count on `sender` to close every fd given to it."""
        response = FetchStateResponse(
            name=generation.key.name,
            rank=generation.key.rank,
            generation=generation.number,
            lease=lease,
            config=generation.config,
            manifest=self.manifest,
            manifest_nbytes=self.manifest_nbytes,
            digest=generation.digest,
            origin=generation.origin,
        )
        fds = [] if self.manifest_fd is None else [self.manifest_fd.duplicate()]
        await self.backend.send_fetch_state_response(sender, response, fds)

    def close(self) -> None:
        """Give up everything; blocks while the kernel frees it."""
        self.backend.close()
        if self.manifest_fd is not None:
            self.manifest_fd.close()


class LoadCancelled(Exception):
    """Raised out of a read when its load is no longer wanted."""


@dataclass(slots=True, eq=False)
class Load:
    """One load under way; threads write its counters, the loop reads them."""

    generation: Generation
    open_source: Callable[[], Source]
    admit: Callable[[int], None]
    """Makes room for that many bytes, or raises BudgetExceeded; blocks."""
    cancelled: bool = False
    started: float = field(default_factory=time.monotonic)

    def advance(self, nbytes: int) -> None:
        if self.cancelled:
            raise LoadCancelled
        # Several threads add here; a lost update would only dent a progress bar, and
        # `ready` sets the final figure.
        self.generation.bytes_done += nbytes


@dataclass(frozen=True, slots=True)
class Loaded:
    """A load that ended well."""

    export: Export
    manifest: StateManifest
    config: Config
    digests: StateDigests
    origin: Origin | None


def run_load(load: Load, backend: WeightCacheTransportBackend, device: str, threads: int) -> Loaded:
    """Load it all.

    Raises SourceError, InsufficientMemory, BudgetExceeded, LoadCancelled, with everything given back.
    """
    path = load.generation.source
    try:
        load.advance(0)
        with load.open_source() as source:
            spec = source.open()
            load.generation.bytes_total = spec.nbytes
            load.advance(0)
            load.admit(spec.nbytes)
            backend.keep_trying = lambda: not load.cancelled
            writer = backend.begin_export(spec, device=device)
            backend.keep_trying = None  # The export outlives the load, and must not keep its source.
            try:
                digests = _fill(spec, source, load, threads, writer)
                load.advance(0)
                manifest = writer.finish()
            finally:
                writer.abort()
            config = source.config()
            origin = origin_of(source.files())
            export = Export.of(backend, manifest)
            if load.cancelled:  # Whoever would take it may have stopped waiting.
                export.close()
                raise LoadCancelled
    except (WeightCacheError, LoadCancelled):
        backend.close()
        raise
    except Exception as error:
        # Whatever a checkpoint makes a reader do, the state FAILS with it and the daemon stays up.
        backend.close()
        if not isinstance(error, OSError | MemoryError):
            logger.exception("loading %s failed unexpectedly", path)
        raise SourceError(path=path, reason=f"{type(error).__name__}: {error}") from error
    load.generation.bytes_done = spec.nbytes
    return Loaded(export, manifest, config, digests, origin)


def copy_export(export: Export, backend: WeightCacheTransportBackend, check: Callable[[], None]) -> Export:
    """The same state once more, through `backend`.  Blocks.

    Peaks at the copy's size plus one storage.  `check` is called before each storage, and ends it all by
    raising.  Raises InsufficientMemory, BackendUnavailable, with everything given back.
    """
    spec, starts = spec_of(export.decode_manifest())
    try:
        writer = backend.begin_export(spec, device=export.device)
        try:
            for number, (arena, offset) in enumerate(starts):
                check()
                with writer.storage(number) as into:
                    export.backend.read_arena(arena, offset, into)
            check()
            manifest = writer.finish()
        finally:
            writer.abort()
        return Export.of(backend, manifest)
    except BaseException:
        backend.close()
        raise


def digest_export(
    export: Export, manifest: StateManifest, *, threads: int, check: Callable[[], None] = lambda: None
) -> StateDigests:
    """The digests of what somebody else has written.  Blocks.

    Each thread takes 8 MiB, or as much as the storage that it reads where a tensor is scattered over
    it.  `check` is called before each piece, and ends it all by raising.  Raises BackendUnavailable
    from a backend that cannot look into its own arenas.
    """
    spec, starts = spec_of(manifest)
    digester = StateDigester(spec)

    def digest(number: int) -> None:
        arena, offset = starts[number]
        nbytes = spec.storages[number]
        taken = digester.storage(number)
        step = nbytes if taken.needs_whole else min(nbytes, _CHUNK_NBYTES)
        with memoryview(bytearray(step)) as buffer:
            for start in range(0, nbytes, step or 1):
                check()
                with buffer[: min(step, nbytes - start)] as piece:
                    export.backend.read_arena(arena, offset + start, piece)
                    taken.feed(piece)
            taken.finish(buffer)

    _for_every_storage(len(spec.storages), threads, digest)
    return digester.finish()


_CHUNK_NBYTES = 8 << 20


def _fill(spec: StateSpec, source: Source, load: Load, threads: int, writer: StateWriter) -> StateDigests:
    digester = StateDigester(spec)

    def fill(number: int) -> None:
        taken = digester.storage(number)
        with writer.storage(number) as into:
            source.read(number, into, taken.watch(into, load.advance))
            taken.finish(into)

    _for_every_storage(len(spec.storages), threads, fill)
    return digester.finish()


def _for_every_storage(count: int, threads: int, work: Callable[[int], None]) -> None:
    """Do it by several threads that each take the next storage; the first error stops all."""
    numbers = iter(range(count))
    failed = False

    def worker() -> None:
        nonlocal failed
        # next() on a shared iterator is atomic under the GIL.
        for number in numbers:
            if failed:
                return
            try:
                work(number)
            except BaseException:
                failed = True
                raise

    threads = min(threads, count) or 1
    pool = Threads(threads, "wcache-read")
    futures = [pool.submit(worker) for _ in range(threads)]
    pool.shutdown()
    wait(futures)  # All of them, also where one has failed: they write into memory that is given back then.
    for future in futures:
        future.result()

"""`shm_fd`: CPU tensors in sealed memfd arenas, mapped by every client and copied by none.

The daemon keeps only fds: its writable mapping must be gone before the kernel seals, and it
has nothing to read.  A client maps them privately, so that reads share the daemon's pages and a
write copies its page for the writer alone; or read-only, on request.
"""

import asyncio
import ctypes
import errno
import functools
import mmap
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct

from wcache_async.backends.base import (
    SHM_FD_BACKEND,
    Capabilities,
    MappingMode,
    ResponseReceiver,
    ResponseSender,
    StateTensors,
    StateWriter,
    WeightCacheTransportBackend,
)
from wcache_async.backends.mapping import Access, Pages, map_pages, populate
from wcache_async.backends.memfd import check_memfd, create_memfd, read_memfd_into, seal_memfd, write_memfd
from wcache_async.backends.memory import Reservation, available_memory
from wcache_async.backends.storages import describe_tensors, refusal
from wcache_async.backends.views import ArenaViews
from wcache_async.errors import (
    BackendUnavailable,
    InsufficientMemory,
    InvalidManifest,
    InvalidMemfd,
    MalformedMessage,
    StateReleased,
    StateUnloaded,
)
from wcache_async.manifest import (
    Layout,
    NonNegative,
    StateManifest,
    StateSpec,
    TensorEntry,
    build_manifest,
    plan_layout,
)
from wcache_async.protocol.messages import FetchStateResponse
from wcache_async.sockets.fds import OwnedFd

if TYPE_CHECKING:
    import torch

__all__ = ["ShmFdTransportBackend"]

_DEVICES = frozenset({"cpu"})

_AT_ONCE: Final = 16
"""Arenas opened without an executor: mapping one touches no page and takes 10 µs, where a thread's start and
two switches took 300 to 800 of the 3,500 µs of a process's first attach."""


_BLOCK_NBYTES: Final = 512
"""st_blocks counts in these (inode(7))."""


class _Payload(Struct, frozen=True):
    """What `FetchStateResponse.payload` says of this backend's fds: bytes of each arena, in order."""

    arenas: tuple[NonNegative, ...]


_encode_payload = msgspec.msgpack.Encoder().encode
_decode_payload = msgspec.msgpack.Decoder(_Payload).decode


class ShmFdTransportBackend(WeightCacheTransportBackend):
    """One state in sealed memfds; see the module."""

    name = SHM_FD_BACKEND
    capabilities = Capabilities(
        survives_daemon_exit=True, read_only=True, needs_shared_pid_namespace=False, devices=_DEVICES
    )
    import_waits = False

    _arenas: tuple[OwnedFd, ...] = ()
    _payload = b""
    _resident_bytes = 0
    _views: ArenaViews | None = None
    _received: tuple[str, int] | None = None

    # ------------------------------------------------------------------------- both sides
    @classmethod
    def unavailable_reason(cls) -> str | None:
        if sys.platform != "linux" or not hasattr(os, "memfd_create"):
            return "memfds and sealing are Linux's alone"
        return None

    @property
    def resident_bytes(self) -> int:
        return self._resident_bytes

    def close(self) -> None:
        arenas, self._arenas = self._arenas, ()
        self._views = None
        self._resident_bytes = 0
        for arena in arenas:
            arena.close()

    # ----------------------------------------------------------------------------- daemon
    @classmethod
    def can_export_state(cls, state_tensors: StateTensors) -> bool:
        return all(refusal(tensor, _DEVICES) is None for tensor, _ in state_tensors.values())

    def prepare_export(
        self, state_tensors: StateTensors, *, non_persistent: AbstractSet[str] = frozenset()
    ) -> StateManifest:
        spec, regions = describe_tensors(
            state_tensors, backend=self.name, devices=_DEVICES, non_persistent=non_persistent
        )
        writer = self.begin_export(spec)
        try:
            for number, region in enumerate(regions):
                writer.copy_from(number, region.address)
            return writer.finish()
        except BaseException:
            writer.abort()
            raise

    def begin_export(self, spec: StateSpec, *, device: str = "cpu") -> "_ShmFdWriter":
        if device != "cpu":
            raise BackendUnavailable(name=self.name, reason=f"it holds CPU memory, and {device} was asked for")
        return _ShmFdWriter(self, spec)

    def _adopt(self, arenas: Sequence[OwnedFd], layout: Layout) -> None:
        self._arenas = tuple(arenas)
        self._payload = _encode_payload(_Payload(layout.arena_nbytes))
        self._resident_bytes = sum(layout.arena_nbytes)

    async def send_fetch_state_response(
        self, stream: ResponseSender, response: FetchStateResponse, fds: Sequence[OwnedFd]
    ) -> None:
        with ExitStack() as owned:
            for fd in fds:
                owned.callback(fd.close)
            if not self._arenas:
                raise StateUnloaded(name=response.name, rank=response.rank)
            # Duplicates: a frame may wait long for a slow reader, and an unload meanwhile must
            # not let its fds' numbers come to mean other files.
            try:
                duplicates = [owned.enter_context(arena.duplicate()) for arena in self._arenas]
            except OSError as error:
                raise BackendUnavailable(
                    name=self.name,
                    reason=f"the daemon has no descriptor left to send ({error.strerror}); raise ulimit -n",
                ) from error
            completed = msgspec.structs.replace(
                response, transport_backend=self.name, payload=self._payload, resident_bytes=self._resident_bytes
            )
            owned.pop_all()
            await stream.send(completed, [*fds, *duplicates])

    async def adopt(self, stream: ResponseReceiver, payload: bytes, manifest: StateManifest) -> None:
        announced = _announced(self.name, payload)
        fds = stream.take_fds(len(announced))
        check = functools.partial(_check_adopted, fds, announced, manifest)
        await asyncio.get_running_loop().run_in_executor(None, check)
        self._adopt(fds, Layout(places=(), arena_nbytes=announced))

    def read_arena(self, number: int, offset: int, into: memoryview) -> None:
        if not self._arenas:
            raise ValueError(_CLOSED)
        read_memfd_into(self._arenas[number], into, offset)

    # ----------------------------------------------------------------------------- client
    async def recv_fetch_state_response(
        self, stream: ResponseReceiver, response: FetchStateResponse, manifest: StateManifest
    ) -> None:
        announced = _announced(self.name, response.payload)
        fds = stream.take_fds(len(announced))
        opening = functools.partial(_open_arenas, fds, announced, manifest, self.options.mapping)
        del fds
        if len(announced) <= _AT_ONCE and "torch" in sys.modules:  # Importing it takes seconds.
            self._views = opening()
        else:
            # What is handed to the executor owns itself, so that a cancellation, before or while
            # it runs, frees it all by dropping it.
            job = asyncio.get_running_loop().run_in_executor(None, opening)
            del opening
            self._views = await job
        self._resident_bytes = sum(announced)
        self._received = (response.name, response.rank)

    def import_tensor(self, entry: TensorEntry) -> "torch.Tensor":
        return self._opened().tensor(entry)

    def import_tensors(self) -> "dict[str, torch.Tensor]":
        return self._opened().tensors()

    def _opened(self) -> ArenaViews:
        views = self._views
        if views is None:
            if self._received is None:
                raise ValueError("no state was received yet")
            raise StateReleased(name=self._received[0], rank=self._received[1])
        return views


class _ShmFdWriter(StateWriter):
    """Fills the arenas of one state and gives them, sealed, to its backend."""

    def __init__(self, backend: ShmFdTransportBackend, spec: StateSpec) -> None:
        self._backend = backend
        self._spec = spec
        self._layout = plan_layout(spec.storages)
        self._lock = threading.Lock()
        self._pages: dict[int, Pages] = {}
        self._arenas: list[OwnedFd] = []
        self._reservation = Reservation(sum(self._layout.arena_nbytes))
        try:
            for number, nbytes in enumerate(self._layout.arena_nbytes):
                self._arenas.append(create_memfd(f"wcache-arena-{number}", nbytes))
        except OSError as error:
            self.abort()
            raise BackendUnavailable(name=backend.name, reason=f"no memfd could be made: {error}") from error

    @contextmanager
    def storage(self, number: int) -> Iterator[memoryview]:
        arena, offset = self._layout.places[number]
        nbytes = self._spec.storages[number]
        fd = self._arena(arena)
        pages = self._map(arena, fd)
        self._reservation.take(nbytes)
        try:
            _allocate(fd, pages, offset, nbytes)
        except OSError as error:
            raise _no_memory(nbytes, error) from error
        with memoryview(pages) as words, words.cast("B") as whole, whole[offset : offset + nbytes] as view:
            yield view

    def copy_from(self, number: int, address: int) -> None:
        """Fill one storage with this process's memory at `address`; needs no mapping.  Blocks."""
        arena, offset = self._layout.places[number]
        nbytes = self._spec.storages[number]
        fd = self._arena(arena)
        self._reservation.take(nbytes)
        source = (ctypes.c_uint8 * nbytes).from_address(address) if nbytes else b""
        try:
            write_memfd(fd, memoryview(source), offset)
        except OSError as error:
            raise _no_memory(nbytes, error) from error

    def finish(self) -> StateManifest:
        if not self._arenas:
            raise ValueError(_WRITER_DONE)
        self._pages.clear()  # F_SEAL_WRITE is EBUSY while a writable shared mapping is left.
        try:
            for number, fd in enumerate(self._arenas):
                seal_memfd(fd)
                check_memfd(fd, self._layout.arena_nbytes[number], f"arena {number}")
        except OSError as error:
            held = " (a view of a storage is still held)" if error.errno == errno.EBUSY else ""
            raise BackendUnavailable(
                name=self._backend.name, reason=f"an arena cannot be sealed: {error.strerror}{held}"
            ) from error
        manifest = build_manifest(self._spec, self._layout)
        self._reservation.release()
        arenas, self._arenas = self._arenas, []
        self._backend._adopt(arenas, self._layout)
        return manifest

    def abort(self) -> None:
        self._pages.clear()
        self._reservation.release()
        arenas, self._arenas = self._arenas, []
        for arena in arenas:
            arena.close()

    def _arena(self, number: int) -> OwnedFd:
        if not self._arenas:
            raise ValueError(_WRITER_DONE)
        return self._arenas[number]

    def _map(self, arena: int, fd: OwnedFd) -> Pages:
        with self._lock:
            pages = self._pages.get(arena)
            if pages is None:
                try:
                    pages = map_pages(fd.fileno(), self._layout.arena_nbytes[arena], Access.SHARED_WRITE)
                except OSError as error:
                    raise _no_memory(self._layout.arena_nbytes[arena], error) from error
                self._pages[arena] = pages
            return pages


_WRITER_DONE = "the state is finished or was given up"
_CLOSED = "the export is closed"


def _allocate(fd: OwnedFd, pages: Pages, offset: int, nbytes: int) -> None:
    """Have memory behind these bytes, so that lack of it is an error here and no SIGBUS later.

    Only now and only these, so that a source which frees as it goes never peaks at two copies.
    """
    if not nbytes:
        return  # Which fallocate(2) would refuse.
    try:
        populate(pages, offset, nbytes)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        os.posix_fallocate(fd.fileno(), offset, nbytes)


def _no_memory(nbytes: int, error: OSError) -> InsufficientMemory:
    available, limit = available_memory()
    return InsufficientMemory(needed=nbytes, available=available, limit=f"{limit}; the kernel says: {error.strerror}")


def _announced(backend: str, payload: bytes) -> tuple[int, ...]:
    try:
        return _decode_payload(payload).arenas
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise MalformedMessage(reason=f"the payload of {backend}: {error}") from error


def _check_adopted(fds: Sequence[OwnedFd], announced: Sequence[int], manifest: StateManifest) -> None:
    """As `_check_arenas`, of arenas that a client has made: they must also have memory already.

    What is missing would be charged to whoever touches it first, or be SIGBUS there, and it takes nothing
    to announce terabytes that the daemon would then read.
    """
    _check_arenas(fds, announced, manifest)
    for number, (fd, arena) in enumerate(zip(fds, manifest.arenas, strict=True)):
        if arena.device not in _DEVICES:
            raise InvalidManifest(tensor="", reason=f"arena {number} on {arena.device} as a memfd")
        if arena.nbytes >= mmap.PAGESIZE:  # A state without elements has a byte or two, and never writes them.
            allocated = os.fstat(fd.fileno()).st_blocks * _BLOCK_NBYTES
            if allocated < arena.nbytes - arena.nbytes % mmap.PAGESIZE:
                raise InvalidMemfd(
                    what=f"arena {number}",
                    reason=f"of its {arena.nbytes} bytes {allocated} have memory; write them all",
                )


def _check_arenas(fds: Sequence[OwnedFd], announced: Sequence[int], manifest: StateManifest) -> None:
    """Raises InvalidManifest or InvalidMemfd for arenas that are not what the manifest says, sealed and whole."""
    expected = tuple(arena.nbytes for arena in manifest.arenas)
    if expected != tuple(announced):
        raise InvalidManifest(tensor="", reason=f"arenas of {expected} bytes, announced were {tuple(announced)}")
    for number, (fd, nbytes) in enumerate(zip(fds, expected, strict=True)):
        if not nbytes:
            raise InvalidManifest(tensor="", reason=f"arena {number} is empty")
        check_memfd(fd, nbytes, f"arena {number}")


def _open_arenas(
    fds: Sequence[OwnedFd], announced: Sequence[int], manifest: StateManifest, mapping: MappingMode
) -> ArenaViews:
    """Check every fd, then map them all; closes them in any case."""
    try:
        _check_arenas(fds, announced, manifest)
        arenas = [_map_arena(fd, nbytes, mapping) for fd, nbytes in zip(fds, announced, strict=True)]
    finally:
        for fd in fds:
            fd.close()
    return ArenaViews(manifest, arenas)


def _map_arena(fd: OwnedFd, nbytes: int, mapping: MappingMode) -> "torch.Tensor":
    import torch

    number = fd.fileno()
    try:
        if mapping == "private":
            pages = map_pages(number, nbytes, Access.PRIVATE_WRITE)
        else:
            try:
                pages = map_pages(number, nbytes, Access.SHARED_READ)
            except PermissionError:  # Kernels before 6.7 take any shared mapping of a sealed memfd for a writer.
                pages = map_pages(number, nbytes, Access.PRIVATE_READ)
    except OSError as error:
        available, limit = available_memory()
        raise InsufficientMemory(
            needed=nbytes, available=available, limit=f"{limit}; mmap: {error.strerror}"
        ) from error
    return torch.frombuffer(pages, dtype=torch.uint8)

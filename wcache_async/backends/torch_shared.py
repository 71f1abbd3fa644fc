"""CPU memory that torch itself can share: one file of /dev/shm, and one fd, per storage.

torch allocates such a file whole (posix_fallocate), unlinks it at once, and keeps its fd for as
long as the storage lives, at the exporter and at every importer.  Whoever maps it can write to
it, and truncate it: torch seals nothing.
"""

import ctypes
import fcntl
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from wcache_async.backends.base import TORCH_IPC_BACKEND
from wcache_async.backends.memory import available_memory
from wcache_async.errors import BackendUnavailable, InsufficientMemory, InvalidMemfd
from wcache_async.sockets.fds import OwnedFd
from wcache_async.sockets.limits import fd_room

if TYPE_CHECKING:
    import torch

__all__ = ["SharedArena", "bytes_of", "check_room", "open_shared_arenas"]

_SHM: Final = "/dev/shm"
_SPARE_FDS: Final = 32
"""Left for everything else a process does."""


class SharedArena:
    """One shared storage of `nbytes` bytes that this process exports; allocated when first written to."""

    device = "cpu"

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._lock = threading.Lock()
        self._storage: torch.UntypedStorage | None = None
        self._fd = -1
        self._closed = False

    @contextmanager
    def write(self, offset: int, nbytes: int) -> Iterator[memoryview]:
        """Writable bytes of it.  Raises InsufficientMemory, BackendUnavailable."""
        storage = self._allocated()
        with bytes_of(storage) as whole, whole[offset : offset + nbytes] as part:
            yield part

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into` with its bytes from `offset` on."""
        if into:
            target = ctypes.c_uint8.from_buffer(into)
            ctypes.memmove(ctypes.addressof(target), self._allocated().data_ptr() + offset, len(into))

    def copy_from(self, offset: int, source: "torch.Tensor") -> None:
        """Fill a part with one-dimensional uint8 of this process's memory."""
        ctypes.memmove(self._allocated().data_ptr() + offset, source.data_ptr(), source.numel())

    def finish(self) -> None:
        """Have memory even if nothing was written."""
        self._allocated()

    def lend(self) -> OwnedFd:
        """torch's own fd, in order while whoever holds the result holds it, whatever becomes of this arena."""
        storage = self._allocated()
        return _LentFd(self._fd, storage)

    def close(self) -> None:
        """Give it up; the memory goes with its last holder in any process."""
        with self._lock:
            self._storage, self._closed = None, True

    def _allocated(self) -> "torch.UntypedStorage":
        import torch

        with self._lock:
            if self._closed:
                raise ValueError("the arena is closed")
            if self._storage is None:
                try:
                    self._storage = torch.UntypedStorage._new_using_fd_cpu(self.nbytes)
                except RuntimeError as error:
                    raise _refusal(error, self.nbytes) from error
                self._fd = self._storage._share_fd_cpu_()[0]
            return self._storage


class _LentFd(OwnedFd):
    """A storage's fd for others to send: closing it lets go of the storage, whose fd it remains.

    So that a state of 1,000 storages is sent without 1,000 duplicates.
    """

    __slots__ = ("_storage",)

    def __init__(self, fd: int, storage: "torch.UntypedStorage") -> None:
        super().__init__(fd)
        self._storage: torch.UntypedStorage | None = storage

    def take(self) -> int:
        with self:
            return os.dup(self.fileno())

    def close(self) -> None:
        self._fd = -1
        self._storage = None


def check_room(nbytes: int, storages: int) -> None:
    """Refuse what torch could not share here, before anything is allocated.

    Raises InsufficientMemory where /dev/shm is too small, which containers often have at 64 MiB,
    and BackendUnavailable where there are too few fds.
    """
    try:
        info = os.statvfs(_SHM)
    except OSError as error:
        raise BackendUnavailable(
            name=TORCH_IPC_BACKEND, reason=f"torch shares memory through {_SHM}: {error.strerror}"
        ) from error
    free = info.f_bavail * info.f_frsize
    if info.f_blocks and nbytes > free:  # No blocks at all: a tmpfs without a limit.
        raise InsufficientMemory(needed=nbytes, available=free, limit=f"{_SHM}; shm_fd does not need it")
    room = fd_room()
    if storages + _SPARE_FDS > room.left:
        raise _too_few_fds(f"the state has {storages} storages, and {room.used} fds are open of at most {room.limit}")


def open_shared_arenas(fds: Sequence[OwnedFd], sizes: Sequence[int]) -> "list[torch.Tensor]":
    """Each fd's storage as uint8 of exactly the size given; fds are closed as they are opened.

    All are checked before any is mapped; after an error those still open are the caller's to close.
    Raises InvalidMemfd, BackendUnavailable, InsufficientMemory.
    """
    import torch

    for number, (fd, nbytes) in enumerate(zip(fds, sizes, strict=True)):
        _check(fd, nbytes, f"arena {number}")
    arenas = []
    with torch.inference_mode(False):
        for fd, nbytes in zip(fds, sizes, strict=True):
            try:
                storage = torch.UntypedStorage._new_shared_fd_cpu(fd.fileno(), nbytes)  # type: ignore[attr-defined]
            except RuntimeError as error:
                raise _refusal(error, nbytes) from error
            # torch's duplicate would go to every program this process starts.
            os.set_inheritable(storage._get_shared_fd(), False)
            fd.close()  # As it goes, so that one fd more than there are storages is enough.
            arenas.append(torch.empty(0, dtype=torch.uint8).set_(storage))
    return arenas


def _check(fd: OwnedFd, nbytes: int, what: str) -> None:
    info = os.fstat(fd.fileno())
    if not stat.S_ISREG(info.st_mode):
        raise InvalidMemfd(what=what, reason="it is no shared memory")
    # torch would fail to map it, and never close the duplicate it made.
    if fcntl.fcntl(fd.fileno(), fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
        raise InvalidMemfd(what=what, reason="it is not open for reading and writing")
    # torch maps what is missing by enlarging the file, for everyone; and a smaller mapping than the
    # manifest's is a crash at the first touch.
    if info.st_size != nbytes:
        raise InvalidMemfd(what=what, reason=f"it has {info.st_size} bytes where {nbytes} were announced")


def bytes_of(storage: "torch.UntypedStorage") -> memoryview:
    """The bytes of a storage in host memory, writable; the view keeps it."""
    pages = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    pages._owner = storage  # type: ignore[attr-defined]  # whatever holds the view holds the memory
    return memoryview(pages).cast("B")


def _refusal(error: RuntimeError, nbytes: int) -> BackendUnavailable | InsufficientMemory:
    """What torch's RuntimeError means; it quotes errno in parentheses."""
    text = str(error)
    if "Too many open files" in text or "duplicate a shared memory file descriptor" in text:
        room = fd_room()
        return _too_few_fds(f"{room.used} fds are open of at most {room.limit}")
    if "No space left" in text or "Cannot allocate memory" in text:
        available, limit = available_memory()
        return InsufficientMemory(needed=nbytes, available=available, limit=f"{limit}; torch says: {text}")
    return BackendUnavailable(name=TORCH_IPC_BACKEND, reason=text)


def _too_few_fds(reason: str) -> BackendUnavailable:
    return BackendUnavailable(
        name=TORCH_IPC_BACKEND,
        reason=f"it takes an fd for every storage: {reason}. Raise the limit with `ulimit -n`, or use shm_fd, "
        "which takes one fd for a whole state",
    )

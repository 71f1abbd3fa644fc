"""One state's memory on one GPU: a single torch allocation, exported once, opened once per process.

torch counts one consumer per export.  Exporting afresh for every delivery would keep to that, and
was weighed: each export of a storage wraps it in one more layer that only its own consumer can
take off, so that a client that is killed, or never opens what it got, holds the memory for good;
what is on its way must be bounded; and a response would wait for CUDA.  So there is one export,
sent to everyone, and the count is not torch's but the daemon's: a lease per connection, which a
client's death ends too.  Importers touch no counter, and the exporter takes back the one consumer
that torch counted when the state is given up.  The price is that a client must keep its lease
for as long as it uses a tensor.
"""

import ctypes
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from wcache_async.backends.base import TORCH_IPC_BACKEND
from wcache_async.backends.torch_cuda import CudaExport, CudaIpc, CudaOutOfMemory
from wcache_async.backends.torch_shared import bytes_of
from wcache_async.errors import BackendUnavailable, InsufficientMemory

if TYPE_CHECKING:
    import torch

__all__ = ["EXPANDABLE_SEGMENTS", "CudaArena", "find_device", "open_cuda_arena"]

_Known = weakref.WeakValueDictionary[tuple[int, CudaExport], "torch.UntypedStorage"]

# CUDA lets a process open an allocation once, and not at all where it is its own.  By process id, as
# what a forked child inherits of these is of no use to it.
_lock = threading.Lock()
_exported: _Known = weakref.WeakValueDictionary()
_opened: _Known = weakref.WeakValueDictionary()


EXPANDABLE_SEGMENTS: Final = (
    "torch allocates expandable segments, which other processes cannot open. Take expandable_segments:True "
    "out of PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF, or use vmm_fd"
)


class CudaArena:
    """`nbytes` of one device, allocated at once, for several storages."""

    def __init__(self, cuda: CudaIpc, ordinal: int, uuid: str, nbytes: int) -> None:
        """Raises InsufficientMemory, BackendUnavailable."""
        self.device = uuid
        self.nbytes = nbytes
        self._cuda = cuda
        self._ordinal = ordinal
        try:
            self._memory: torch.Tensor | None = cuda.allocate(ordinal, nbytes)
        except CudaOutOfMemory as error:
            raise InsufficientMemory(
                needed=nbytes, available=error.available, limit=f"free memory of {uuid}"
            ) from error
        self.export: CudaExport | None = None
        if cuda.is_expandable(self._memory):
            self.close()
            raise BackendUnavailable(name=TORCH_IPC_BACKEND, reason=EXPANDABLE_SEGMENTS)

    @contextmanager
    def write(self, offset: int, nbytes: int) -> Iterator[memoryview]:
        """Host memory that is copied to the device when the context is left in order."""
        import torch

        memory = self._allocated()
        staging = torch.empty(nbytes, dtype=torch.uint8)
        with bytes_of(staging.untyped_storage()) as view:
            yield view
        memory[offset : offset + nbytes].copy_(staging)

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into` with its bytes from `offset` on."""
        if into:
            host = self._allocated()[offset : offset + len(into)].cpu()
            target = ctypes.c_uint8.from_buffer(into)
            ctypes.memmove(ctypes.addressof(target), host.data_ptr(), len(into))

    def copy_from(self, offset: int, source: "torch.Tensor") -> None:
        """Fill a part with one-dimensional uint8 of the same device."""
        self._allocated()[offset : offset + source.numel()].copy_(source)

    def finish(self) -> None:
        """Export it."""
        memory = self._allocated()
        self.export = self._cuda.share(memory, self.device)
        with _lock:
            _exported[os.getpid(), self.export] = memory.untyped_storage()

    def close(self) -> None:
        """Give the memory back to the device, unless this process itself still uses it.  Idempotent."""
        memory, self._memory = self._memory, None
        if memory is None:
            return
        if self.export is not None:
            # Or torch would keep the memory for the consumer it still counts.
            self._cuda.release_consumer(self.export)
        del memory
        self._cuda.empty_cache(self._ordinal)

    def _allocated(self) -> "torch.Tensor":
        if self._memory is None:
            raise ValueError("the arena is closed")
        return self._memory


def open_cuda_arena(cuda: CudaIpc, export: CudaExport) -> "tuple[torch.Tensor, bool]":
    """The exported memory as uint8, and whether it is this process's own.  Blocks.

    Opened at most once per process, and not at all where this process exported it.  Raises
    BackendUnavailable where its device is not visible here, or CUDA refuses.
    """
    ordinal = find_device(cuda, export.device)
    key = (os.getpid(), export)
    with _lock:
        storage = _exported.get(key)
        if storage is not None:
            return _whole(storage), True
        storage = _opened.get(key)
        if storage is not None:
            return _whole(storage), False
        memory = cuda.open(ordinal, export)
        _opened[key] = memory.untyped_storage()
        return memory, False


def _whole(storage: "torch.UntypedStorage") -> "torch.Tensor":
    import torch

    with torch.inference_mode(False):
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def find_device(cuda: CudaIpc, uuid: str) -> int:
    """The number here of the device with that UUID, whatever CUDA_VISIBLE_DEVICES says.  Raises BackendUnavailable."""
    reason = cuda.missing_reason()
    if reason is not None:
        raise BackendUnavailable(name=TORCH_IPC_BACKEND, reason=f"the state is on {uuid}, and {reason}")
    uuids = cuda.uuids()
    if uuid not in uuids:
        raise BackendUnavailable(
            name=TORCH_IPC_BACKEND,
            reason=f"the state is on {uuid}, and this process sees {', '.join(uuids) or 'no device'}; add it to "
            "CUDA_VISIBLE_DEVICES",
        )
    return uuids.index(uuid)

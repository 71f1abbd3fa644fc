"""GPUs made of files, at the border where torch's CUDA IPC would begin: one folder is their memory.

Keeps CUDA's rules and torch's: an allocation is opened at most once per process and never by its
own, a handle means nothing once its memory is freed, and memory whose consumers are still counted
is not freed at all.  What is freed is overwritten, so that using it shows.
"""

import os
import struct
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch

from wcache_async.backends.torch_cuda import CudaExport, CudaOutOfMemory
from wcache_async.errors import BackendUnavailable

__all__ = ["FREED", "FakeCudaIpc"]

FREED = 0xDD


class FakeCudaIpc:
    """What one process sees of the GPUs in `folder`; `uuids` in the order of its CUDA_VISIBLE_DEVICES."""

    def __init__(self, folder: Path, uuids: Sequence[str] = ("GPU-a", "GPU-b")) -> None:
        self.folder = folder
        self.visible = list(uuids)
        self.missing: str | None = None
        self.configured_expandable = False
        self.allocates_expandable = False
        self.free_bytes = 1 << 30
        self.failing_open: str | None = None
        self.on_gpu: dict[int, int] = {}
        """Ordinal by address of a storage's memory, of tensors that are to count as a GPU's."""
        self.shared: list[CudaExport] = []
        self.opened: list[CudaExport] = []
        self.limbo: list[str] = []
        """Allocations torch would keep for a consumer it still counts."""
        self._paths: dict[int, Path] = {}
        self._open: weakref.WeakValueDictionary[bytes, torch.UntypedStorage] = weakref.WeakValueDictionary()

    def allocations(self) -> list[str]:
        """What is allocated on the GPUs, by whatever process."""
        return sorted(path.name for path in self.folder.glob("gpu-*"))

    def consumers(self, export: CudaExport) -> int:
        """What torch counts."""
        counters = Path(os.fsdecode(export.ref_counter)).read_bytes()
        return int(struct.unpack_from("<q", counters, 8 * export.ref_counter_offset)[0])

    # ------------------------------------------------------------------------ the CudaIpc protocol
    def missing_reason(self) -> str | None:
        return self.missing

    def expandable_segments(self) -> bool:
        return self.configured_expandable

    def uuids(self) -> list[str]:
        return list(self.visible)

    def ordinal_of(self, tensor: torch.Tensor) -> int | None:
        return self.on_gpu.get(tensor.untyped_storage().data_ptr())

    def allocate(self, ordinal: int, nbytes: int) -> torch.Tensor:
        if nbytes > self.free_bytes:
            raise CudaOutOfMemory(self.free_bytes)
        path = self.folder / f"gpu-{self.visible[ordinal]}-{os.getpid()}-{len(self._paths)}"
        path.write_bytes(b"")
        os.truncate(path, nbytes)
        memory = self._map(path, nbytes)
        self._paths[memory.data_ptr()] = path
        self.on_gpu[memory.data_ptr()] = ordinal
        weakref.finalize(memory.untyped_storage(), self._freed, path, os.getpid()).atexit = False
        return memory

    def is_expandable(self, memory: torch.Tensor) -> bool:
        return self.allocates_expandable

    def share(self, memory: torch.Tensor, uuid: str) -> CudaExport:
        path = self._paths[memory.data_ptr()]
        counter = path.with_name(f"counter-{path.name}")
        counter.write_bytes(struct.pack("<2q", 0, 1))
        export = CudaExport(
            device=uuid,
            handle=os.fsencode(path),
            nbytes=memory.numel(),
            offset=0,
            ref_counter=os.fsencode(counter),
            ref_counter_offset=1,
            event=b"event",
            event_sync=False,
        )
        self.shared.append(export)
        return export

    def release_consumer(self, export: CudaExport) -> None:
        path = Path(os.fsdecode(export.ref_counter))
        path.write_bytes(struct.pack("<2q", 0, self.consumers(export) - 1))

    def open(self, ordinal: int, export: CudaExport) -> torch.Tensor:
        path = Path(os.fsdecode(export.handle))
        if self.failing_open is not None:
            raise _refused(self.failing_open)
        if path in self._paths.values():
            raise _refused("CUDA error: invalid device context")
        if export.handle in self._open:
            raise _refused("CUDA error: the memory is mapped already")
        if self.visible[ordinal] != export.device or not path.exists():
            raise _refused("CUDA error: invalid resource handle")
        self.opened.append(export)
        memory = self._map(path, export.nbytes)
        self._open[export.handle] = memory.untyped_storage()
        return memory

    def empty_cache(self, ordinal: int) -> None:
        pass

    @staticmethod
    def _map(path: Path, nbytes: int) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)

    def _freed(self, path: Path, pid: int) -> None:
        if os.getpid() != pid:
            return
        counter = path.with_name(f"counter-{path.name}")
        if counter.exists() and struct.unpack_from("<q", counter.read_bytes(), 8)[0] > 0:
            self.limbo.append(path.name)
            return
        with path.open("r+b") as memory:
            memory.write(bytes([FREED]) * path.stat().st_size)
        path.unlink()


def _refused(text: str) -> BackendUnavailable:
    return BackendUnavailable(name="torch_ipc", reason=f"opening the daemon's memory failed: {text}")

"""torch's CUDA IPC behind one seam: all that `torch_ipc` asks of CUDA, and nothing decided.

A test puts a fake in place of `TorchCudaIpc`, at the border that the driver would be behind.
"""

import contextlib
import ctypes
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from msgspec import Struct

from wcache_async.backends.base import TORCH_IPC_BACKEND
from wcache_async.errors import BackendUnavailable
from wcache_async.manifest import NonNegative

if TYPE_CHECKING:
    import torch

__all__ = ["CudaExport", "CudaIpc", "CudaOutOfMemory", "TorchCudaIpc"]


class CudaExport(Struct, frozen=True, gc=False):
    """The eight values of torch's `UntypedStorage._share_cuda_()`, and the GPU by its UUID.

    `handle` is opaque and names an allocation, in which the storage's `nbytes` start at `offset`.
    `event`, a CUDA event's handle, is to be waited for where `event_sync` says so.
    `ref_counter` and `ref_counter_offset` name the slot in which torch counts consumers: it is
    the exporter's alone here, and no importer writes to it.
    """

    device: str
    handle: bytes
    nbytes: NonNegative
    offset: NonNegative
    ref_counter: bytes
    ref_counter_offset: NonNegative
    event: bytes
    event_sync: bool


class CudaOutOfMemory(Exception):
    """An allocation failed; `available` bytes are free on the device."""

    def __init__(self, available: int) -> None:
        super().__init__(f"{available} bytes are free")
        self.available = available


class CudaIpc(Protocol):
    """What `torch_ipc` needs of CUDA.  All of it blocks; devices are numbered as in this process.

    Raises BackendUnavailable, with what CUDA said, where a call fails.
    """

    def missing_reason(self) -> str | None:
        """Why there is no CUDA here, or None if there may be; initialises nothing."""

    def expandable_segments(self) -> bool:
        """Whether torch is configured to allocate expandable segments; initialises nothing."""

    def uuids(self) -> list[str]:
        """The UUID, ``GPU-…``, of each device this process sees, by its number."""

    def ordinal_of(self, tensor: "torch.Tensor") -> int | None:
        """The number of the device a tensor is on; None for the CPU's."""

    def allocate(self, ordinal: int, nbytes: int) -> "torch.Tensor":
        """uint8 memory of a device.  Raises CudaOutOfMemory."""

    def is_expandable(self, memory: "torch.Tensor") -> bool:
        """Whether allocated memory lies in an expandable segment."""

    def share(self, memory: "torch.Tensor", uuid: str) -> CudaExport:
        """Export allocated memory once all work on its device is done; torch then counts one consumer of it."""

    def release_consumer(self, export: CudaExport) -> None:
        """Have torch count one consumer less of what this process exported."""

    def open(self, ordinal: int, export: CudaExport) -> "torch.Tensor":
        """Memory that another process exported, as uint8; nothing is counted when it is dropped."""

    def empty_cache(self, ordinal: int) -> None:
        """Give memory that nothing uses back to the device."""


_NO_COUNTER: Final = b"/wcache-async-no-counter"


class TorchCudaIpc:
    """The real one."""

    def missing_reason(self) -> str | None:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return "torch is not installed"
        # Importing torch would say the same, seconds later.
        if not (Path(spec.origin).parent / "lib/libtorch_cuda.so").exists():
            return "this torch is built without CUDA"
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            return f"there is no CUDA driver: {error}"
        return None

    def expandable_segments(self) -> bool:
        settings = [os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")]
        return any("expandable_segments:True" in setting.replace(" ", "") for setting in settings)

    def uuids(self) -> list[str]:
        import torch

        with _told("looking for devices"):
            count = torch.cuda.device_count()
            return [f"GPU-{torch.cuda.get_device_properties(ordinal).uuid}" for ordinal in range(count)]

    def ordinal_of(self, tensor: "torch.Tensor") -> int | None:
        return tensor.device.index if tensor.device.type == "cuda" else None

    def allocate(self, ordinal: int, nbytes: int) -> "torch.Tensor":
        import torch

        with _told(f"allocating {nbytes} bytes"), torch.inference_mode(False):
            try:
                return torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", ordinal))
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                raise CudaOutOfMemory(torch.cuda.mem_get_info(ordinal)[0]) from None

    def is_expandable(self, memory: "torch.Tensor") -> bool:
        import torch

        address = memory.data_ptr()
        return any(
            segment["address"] <= address < segment["address"] + segment["total_size"]
            and segment.get("is_expandable", False)
            for segment in torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        )

    def share(self, memory: "torch.Tensor", uuid: str) -> CudaExport:
        import torch

        with _told("exporting"):
            torch.cuda.synchronize(memory.device)
            shared = memory.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
            _, handle, nbytes, offset, counter, counter_offset, event, _ = shared
        return CudaExport(
            device=uuid,
            handle=bytes(handle),
            nbytes=nbytes,
            offset=offset,
            ref_counter=bytes(counter),
            ref_counter_offset=counter_offset,
            event=bytes(event),
            # The device has been waited for: importers need not, and torch would leak an event in each.
            event_sync=False,
        )

    def release_consumer(self, export: CudaExport) -> None:
        import torch

        with _told("releasing an export"):
            torch.UntypedStorage._release_ipc_counter_cuda(export.ref_counter, export.ref_counter_offset)

    def open(self, ordinal: int, export: CudaExport) -> "torch.Tensor":
        import torch

        with _told("opening the daemon's memory", _NAMESPACES), torch.inference_mode(False):
            storage = torch.UntypedStorage._new_shared_cuda(
                ordinal,
                export.handle,
                export.nbytes,
                export.offset,
                # When the storage goes torch decrements this counter, and passes over one that does not
                # exist, as it must where the exporter is gone (StorageSharing.cpp, the deleter).
                _NO_COUNTER,
                0,
                export.event,
                export.event_sync,
            )
            return torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", ordinal)).set_(storage)

    def empty_cache(self, ordinal: int) -> None:
        import torch

        with torch.cuda.device(ordinal):
            torch.cuda.empty_cache()


_NAMESPACES: Final = "; CUDA IPC needs daemon and client in the same IPC and PID namespaces, and on the same GPU"


@contextlib.contextmanager
def _told(what: str, remedy: str = "") -> Iterator[None]:
    """CUDA's failures as BackendUnavailable: RuntimeErrors in torch, AssertionErrors where it has no CUDA."""
    try:
        yield
    except (RuntimeError, AssertionError) as error:
        text = str(error).partition("\n")[0]  # What follows is torch's advice on asynchronous kernel errors.
        raise BackendUnavailable(name=TORCH_IPC_BACKEND, reason=f"{what} failed: {text}{remedy}") from error

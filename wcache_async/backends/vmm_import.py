"""A state's arenas in an importing process: mapped, copied where they will be written, put to sleep and woken."""

import logging
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from wcache_async.backends import cuda_driver
from wcache_async.backends.cuda_device import FINDER, Device
from wcache_async.backends.device_memory import torch_device
from wcache_async.backends.views import ArenaViews
from wcache_async.backends.vmm_arena import (
    ALIGNMENT,
    Mapping,
    device_of,
    insufficient_memory,
    map_arena,
    memory_of,
    wait_before_unmapping,
)
from wcache_async.errors import CudaDriverError, InvalidManifest
from wcache_async.manifest import (
    DTYPE_ITEMSIZE,
    Arena,
    Kind,
    StateManifest,
    TensorEntry,
    plan_layout,
    tensor_extent,
)
from wcache_async.sockets.fds import OwnedFd

if TYPE_CHECKING:
    import torch

__all__ = ["ArenaImport"]

logger = logging.getLogger("wcache_async.backends")


class ArenaImport:
    """The arenas of one state.

    Everything blocks: `prepare` runs in the finder's thread, what comes after it in the device's.
    """

    device: Device
    """Where the arenas are; known once prepared."""

    def __init__(
        self, fds: Sequence[OwnedFd], manifest: StateManifest, *, shared_buffers: bool, torch_device_type: str
    ) -> None:
        """`fds`, one an arena, are taken over."""
        self.manifest = manifest
        self._fds = deque(fds)
        self._mappings: list[Mapping] = []
        self._shared_buffers = shared_buffers
        self._torch_device_type = torch_device_type
        self._thread = FINDER

    def prepare(self) -> None:
        """Check everything that can be checked, and find the device; maps nothing yet.

        Raises InvalidManifest, BackendUnavailable, CudaDriverError.
        """
        self.device = device_of(self.manifest)
        self._torch_device = torch_device(self._torch_device_type, self.device.ordinal)
        self._copies = _Copies(self.manifest, keep=self._shared_buffers)
        self._thread = self.device.thread

    @property
    def nbytes(self) -> int:
        """Bytes of the arenas and of the private copies."""
        return self.manifest.tensor_bytes + self._copies.nbytes

    def own_entry(self, entry: TensorEntry) -> TensorEntry:
        """The entry as it lies in this process: in an arena, or in the private copies."""
        return self._copies.moved.get(entry.name, entry)

    def open(self) -> ArenaViews:
        """Map every arena and make the private copies; each fd is closed once it is imported.

        Raises InsufficientMemory, keeping what is done so that it may be called again to go on.
        """
        while self._fds:
            self._open_next()
        return self._views()

    def undo_later(self) -> None:
        """Have `undo` run after whatever of this object's runs now.  Does not block."""
        self._thread.post(self.undo)

    def undo(self) -> None:
        """Close the fds that are left and unmap what is mapped; does nothing a second time."""
        while self._fds:
            self._fds.popleft().close()
        if self._mappings:
            wait_before_unmapping()  # Private copies may be under way.
        while self._mappings:
            mapping = self._mappings.pop()
            try:
                mapping.close()
            except CudaDriverError as error:
                logger.warning("unmapping an arena of %s failed, and is tried again: %s", self.device.uuid, error)

    def unmap(self) -> None:
        """Unmap every arena once the device has finished with it; the addresses stay taken."""
        cuda_driver.synchronize()
        for mapping in self._mappings:
            mapping.unmap()

    def remap(self, fds: Sequence[OwnedFd]) -> None:
        """Map the same arenas, exported anew, where they were; `fds` stay the caller's.

        Raises InsufficientMemory, CudaDriverError, with everything unmapped.
        """
        try:
            for mapping, fd in zip(self._mappings, fds, strict=True):
                if not mapping.mapped:
                    with memory_of(self.device, mapping.nbytes):
                        map_arena(fd, mapping)
        except BaseException:
            self.unmap()
            raise

    def _open_next(self) -> None:
        nbytes = self.manifest.arenas[len(self._mappings)].nbytes
        with memory_of(self.device, nbytes), ExitStack() as undo:
            mapping = Mapping(self.device, nbytes)
            undo.callback(mapping.close)
            map_arena(self._fds[0], mapping)
            undo.pop_all()
        self._mappings.append(mapping)
        self._fds.popleft().close()

    def _views(self) -> ArenaViews:
        arenas = [mapping.tensor(self._torch_device) for mapping in self._mappings]
        if self._copies.nbytes:
            arenas.append(self._copy())
        return ArenaViews(self._copies.manifest, arenas)

    def _copy(self) -> "torch.Tensor":
        import torch

        try:
            own = torch.empty(self._copies.nbytes, dtype=torch.uint8, device=self._torch_device)
        except torch.OutOfMemoryError as error:
            raise insufficient_memory(self.device, self._copies.nbytes) from error
        for span in self._copies.spans:
            source = self._mappings[span.arena].address + span.offset
            cuda_driver.copy(own.data_ptr() + span.target, source, span.nbytes)
        cuda_driver.synchronize()
        return own


@dataclass(frozen=True, slots=True)
class _Span:
    """`nbytes` at `offset` of an arena, copied to `target` in the private memory."""

    arena: int
    offset: int
    nbytes: int
    target: int


class _Copies:
    """Which storages a process copies for itself: each that a buffer lies on, whole.

    A parameter on such a storage is copied along, so that tensors which shared memory still do.
    The copies form one more arena, and `manifest` has the moved entries there.
    """

    def __init__(self, manifest: StateManifest, *, keep: bool) -> None:
        """With `keep` nothing is copied.  Raises InvalidManifest where storages overlap that may not."""
        self.manifest = manifest
        self.moved: dict[str, TensorEntry] = {}
        self.spans: list[_Span] = []
        self.nbytes = 0
        private = {e.storage for e in manifest.tensors if e.kind is not Kind.PARAMETER}
        if keep or not private:
            return
        entries: dict[int, list[TensorEntry]] = {}
        for entry in manifest.tensors:
            if entry.storage in private and 0 not in entry.shape:
                entries.setdefault(entry.storage, []).append(entry)
        reaches = [self._reach(on_it) for on_it in entries.values()]
        # Storages lie side by side: copies larger than what there is would be of a lying manifest.
        if sum(high - low for low, high in reaches) > manifest.tensor_bytes:
            raise InvalidManifest(tensor="", reason="storages of buffers overlap")
        layout = plan_layout([high - low for low, high in reaches], alignment=ALIGNMENT, granularity=ALIGNMENT)
        if not reaches:
            return
        self.nbytes = sum(layout.arena_nbytes)
        own_arena = len(manifest.arenas)
        for on_it, (low, high), (_, target) in zip(entries.values(), reaches, layout.places, strict=True):
            self.spans.append(_Span(on_it[0].arena, low, high - low, target))
            for entry in on_it:
                offset = target + entry.offset - low
                self.moved[entry.name] = msgspec.structs.replace(entry, arena=own_arena, offset=offset)
        self.manifest = msgspec.structs.replace(
            manifest,
            arenas=(*manifest.arenas, Arena(self.nbytes, manifest.arenas[0].device)),
            tensors=tuple(self.moved.get(entry.name, entry) for entry in manifest.tensors),
        )

    def _reach(self, entries: Sequence[TensorEntry]) -> tuple[int, int]:
        """First byte, at its storage's alignment, and one past the last that the entries reach in their arena."""
        low = min(entry.offset for entry in entries)
        high = max(
            entry.offset + tensor_extent(entry) * DTYPE_ITEMSIZE[self.manifest.dtype_of(entry)] for entry in entries
        )
        return low - low % ALIGNMENT, high

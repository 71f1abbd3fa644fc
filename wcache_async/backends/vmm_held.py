"""The arenas of a state in the process that holds it: exported for each response, read back, released."""

import ctypes
import threading
from collections.abc import Sequence
from contextlib import ExitStack, closing

from wcache_async.backends import cuda_driver
from wcache_async.backends.cuda_device import Device
from wcache_async.backends.vmm_arena import Allocation, Mapping, device_of, memory_of
from wcache_async.manifest import StateManifest
from wcache_async.sockets.fds import OwnedFd

__all__ = ["HeldArenas", "adopt_arenas"]


class HeldArenas:
    """One handle an arena, and no mapping.  Everything blocks."""

    def __init__(self, device: Device, allocations: Sequence[Allocation], nbytes: Sequence[int]) -> None:
        """`nbytes` are the arenas' sizes."""
        self.device = device
        self.nbytes = tuple(nbytes)
        self._allocations = tuple(allocations)
        self._lock = threading.Lock()
        self._window: tuple[int, Mapping] | None = None

    def export(self) -> list[OwnedFd] | None:
        """A new fd an arena; None once released.  In the device's thread.  Raises CudaDriverError."""
        if any(allocation.released for allocation in self._allocations):
            return None
        with ExitStack() as undo:
            fds = [undo.enter_context(allocation.export()) for allocation in self._allocations]
            undo.pop_all()
        return fds

    def read(self, number: int, offset: int, into: memoryview) -> None:
        """Fill `into` from one arena, which stays mapped until another one is read or all are released.

        Raises ValueError once released, InsufficientMemory, CudaDriverError.
        """
        with self._lock, self.device.context():
            mapping = self._look_at(number)
            host = (ctypes.c_uint8 * len(into)).from_buffer(into)
            cuda_driver.copy(ctypes.addressof(host), mapping.address + offset, len(into))
            cuda_driver.synchronize()

    def _look_at(self, number: int) -> Mapping:
        handle = self._allocations[number].handle
        if self._window is not None:
            mapped, mapping = self._window
            if mapped == number:
                return mapping
            self._window = None
            mapping.close()
        mapping = Mapping(self.device, self.nbytes[number])
        with memory_of(self.device, mapping.nbytes):
            mapping.map(handle, writable=False)
        self._window = (number, mapping)
        return mapping

    def release(self) -> None:
        """Give up every handle; does nothing a second time.  In the device's thread.  Raises CudaDriverError."""
        with self._lock, ExitStack() as every:
            for allocation in self._allocations:
                every.callback(allocation.release)
            if self._window is not None:
                every.callback(self._window[1].close)
                self._window = None


def adopt_arenas(fds: Sequence[OwnedFd], manifest: StateManifest) -> HeldArenas:
    """The arenas that another process made and exported, each seen to be as large as the manifest says.

    Blocks.  Raises InvalidManifest, BackendUnavailable, and CudaDriverError where one is no memory
    of this kind or smaller.
    """
    device = device_of(manifest)
    nbytes = [arena.nbytes for arena in manifest.arenas]
    with device.context(), ExitStack() as undo:
        allocations = []
        for fd, size in zip(fds, nbytes, strict=True):
            allocation = Allocation.imported(device, fd)
            undo.callback(allocation.release)
            allocations.append(allocation)
            # Nothing tells an allocation's size, but more than it has cannot be mapped.
            with closing(Mapping(device, size)) as mapping:
                mapping.map(allocation.handle, writable=False)
        undo.pop_all()
    return HeldArenas(device, allocations, nbytes)

"""Device memory that other processes can map: allocations, and mappings of them in this process.

Physical memory lives until every handle on it, every mapping of it and every fd exported from it
is gone, in any process (CUDA driver API, "Virtual Memory Management").  So an importer needs no
handle once it has mapped, and outlives the exporter.
"""

import contextlib
import functools
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from wcache_async.backends import cuda_driver
from wcache_async.backends.base import VMM_FD_BACKEND
from wcache_async.backends.cuda_device import Device, device_by_name
from wcache_async.backends.device_memory import tensor_at
from wcache_async.errors import BackendUnavailable, CudaDriverError, InsufficientMemory, InvalidManifest
from wcache_async.manifest import StateManifest
from wcache_async.sockets.fds import OwnedFd

if TYPE_CHECKING:
    import torch

__all__ = [
    "ALIGNMENT",
    "Allocation",
    "Mapping",
    "device_of",
    "insufficient_memory",
    "map_arena",
    "memory_of",
    "wait_before_unmapping",
]

logger = logging.getLogger("wcache_async.backends")

ALIGNMENT: Final = 512
"""Bytes every storage is aligned to: what torch's own CUDA allocator gives, so that kernels which
choose their loads by alignment choose the same ones."""


class Allocation:
    """A handle on physical memory of a device, held until `release` or until it is collected."""

    def __init__(self, device: Device, handle: int) -> None:
        self.device = device
        self._handle = handle

    @classmethod
    def create(cls, device: Device, nbytes: int) -> "Allocation":
        """Take `nbytes`, a multiple of the device's granularity.  Blocks.  Raises CudaDriverError."""
        return cls(device, cuda_driver.create_allocation(device.ordinal, nbytes))

    @classmethod
    def imported(cls, device: Device, fd: OwnedFd) -> "Allocation":
        """The memory behind `fd`, which remains the caller's to close.  Blocks.  Raises CudaDriverError."""
        return cls(device, cuda_driver.import_allocation(fd.fileno()))

    @property
    def released(self) -> bool:
        return not self._handle

    @property
    def handle(self) -> int:
        """Raises ValueError once released."""
        if not self._handle:
            raise ValueError("the allocation is released")
        return self._handle

    def export(self) -> OwnedFd:
        """A new fd that another process imports.  Blocks.  Raises CudaDriverError, ValueError."""
        return OwnedFd(cuda_driver.export_allocation(self.handle))

    def release(self) -> None:
        """Give up the handle; does nothing a second time.

        Blocks.  Raises CudaDriverError, and leaves another try to the device's thread then.
        """
        try:
            if self._handle:
                cuda_driver.release_allocation(self._handle)
                self._handle = 0
        except CudaDriverError:
            self._leave()
            raise

    def _leave(self) -> None:
        handle, self._handle = self._handle, 0
        if handle:
            self.device.thread.post(functools.partial(cuda_driver.release_allocation, handle))

    def __del__(self) -> None:
        self._leave()


class Mapping:
    """A range of device addresses, with an allocation mapped there or not.

    Unmapped and given back by `close`, or some time after it was collected, in the device's thread.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        """Reserve addresses.  Blocks.  Raises CudaDriverError."""
        self.address = 0
        self._mapped = False
        self.device = device
        self.nbytes = nbytes
        self.address = cuda_driver.reserve_addresses(nbytes)

    @property
    def mapped(self) -> bool:
        return self._mapped

    def map(self, handle: int, *, writable: bool) -> None:
        """Map an allocation.  Blocks.  Raises CudaDriverError, with nothing mapped then."""
        cuda_driver.add_mapping(self.address, self.nbytes, handle)
        self._mapped = True
        try:
            cuda_driver.set_access(self.address, self.nbytes, self.device.ordinal, writable=writable)
        except BaseException:
            with contextlib.suppress(CudaDriverError):  # Tried again by `close`.
                self.unmap()
            raise

    def make_read_only(self) -> None:
        """Take the right to write away.  Blocks.  Raises CudaDriverError."""
        cuda_driver.set_access(self.address, self.nbytes, self.device.ordinal, writable=False)

    def unmap(self) -> None:
        """Unmap and keep the addresses; does nothing where nothing is mapped.

        Blocks.  Work on the device must not use it any more.  Raises CudaDriverError.
        """
        if self._mapped:
            cuda_driver.remove_mapping(self.address, self.nbytes)
            self._mapped = False

    def close(self) -> None:
        """Unmap and give the addresses back; does nothing a second time.

        Blocks, like `unmap`.  Raises CudaDriverError, and leaves another try to the device's thread then.
        """
        try:
            self.unmap()
            if self.address:
                cuda_driver.free_addresses(self.address, self.nbytes)
                self.address = 0
        except CudaDriverError:
            self._leave()
            raise

    def tensor(self, torch_device: "torch.device") -> "torch.Tensor":
        """All of it as a uint8 tensor that keeps this object, and with it the mapping."""
        return tensor_at(self.address, self.nbytes, torch_device, self)

    def _leave(self) -> None:
        address, self.address = self.address, 0
        mapped, self._mapped = self._mapped, False
        if address:
            self.device.thread.post(functools.partial(_give_back, address, self.nbytes, mapped))

    def __del__(self) -> None:
        self._leave()


def wait_before_unmapping() -> None:
    """Wait for the device, as unmapping does not; where that fails nothing is under way any more.

    Kernels and copies may be running on memory that Python has already dropped.  Blocks.
    """
    try:
        cuda_driver.synchronize()
    except CudaDriverError as error:
        logger.warning("unmapping without waiting for the device: %s", error)


def _give_back(address: int, nbytes: int, mapped: bool) -> None:
    """What a Mapping leaves to the device's thread."""
    if mapped:
        wait_before_unmapping()
        cuda_driver.remove_mapping(address, nbytes)
    cuda_driver.free_addresses(address, nbytes)


def map_arena(fd: OwnedFd, mapping: Mapping) -> None:
    """Map the arena behind `fd`, read-only.  Blocks.

    Neither the fd nor a handle is needed afterwards; the fd remains the caller's to close.  Raises
    CudaDriverError where it is no memory of this kind, or less than announced; nothing is mapped then.
    """
    allocation = Allocation.imported(mapping.device, fd)
    try:
        mapping.map(allocation.handle, writable=False)
    finally:
        allocation.release()


@contextlib.contextmanager
def memory_of(device: Device, needed: int) -> Iterator[None]:
    """Turns the driver's want of memory into InsufficientMemory for `needed` bytes."""
    try:
        yield
    except CudaDriverError as error:
        if error.result != cuda_driver.OUT_OF_MEMORY:
            raise
        raise insufficient_memory(device, needed) from error


def insufficient_memory(device: Device, needed: int) -> InsufficientMemory:
    """The error for `needed` bytes the device could not give.  Blocks."""
    available, _ = device.memory_info()
    return InsufficientMemory(needed=needed, available=available, limit=f"free memory of {device.uuid}")


def device_of(manifest: StateManifest) -> Device:
    """The device a manifest's arenas are on, all being such as it can have.

    Blocks.  Raises InvalidManifest, BackendUnavailable, CudaDriverError.
    """
    device = device_by_name(_only_device(manifest))
    _check_arenas(manifest, device)
    return device


def _only_device(manifest: StateManifest) -> str:
    devices = sorted({arena.device for arena in manifest.arenas})
    if len(devices) > 1:
        raise BackendUnavailable(
            name=VMM_FD_BACKEND,
            reason=f"the state is on {len(devices)} devices ({', '.join(devices)}) and only states on one are "
            "carried: give each GPU's tensors a rank of their own",
        )
    # A number would mean another GPU in each process.
    if not devices or not devices[0].startswith("GPU-"):
        raise InvalidManifest(tensor="", reason=f"arenas on {devices}, where one GPU's UUID was expected")
    return devices[0]


def _check_arenas(manifest: StateManifest, device: Device) -> None:
    for number, arena in enumerate(manifest.arenas):
        if not arena.nbytes or arena.nbytes % device.granularity:
            raise InvalidManifest(
                tensor="",
                reason=f"arena {number} has {arena.nbytes} bytes, no multiple of the {device.granularity} that "
                f"{device.uuid} allocates by",
            )
    _, total = device.memory_info()
    if manifest.tensor_bytes > total:
        raise InvalidManifest(tensor="", reason=f"arenas of {manifest.tensor_bytes} bytes on a device of {total}")

"""The calls of the CUDA driver that sharing memory takes: typed, by plain integers, raising CudaDriverError.

Everything goes through cuda-python's `cuda.bindings.driver`, imported at the first call.  Where
there is no driver each of its functions raises RuntimeError (of a subclass in newer releases),
which becomes BackendUnavailable here.  Device pointers and handles are ints throughout: the
wrapper objects cuda-python returns are turned into them at once.
"""

import ctypes
import enum
import importlib
import importlib.util
import os
import uuid
from types import ModuleType
from typing import Final

from wcache_async.backends.base import VMM_FD_BACKEND
from wcache_async.errors import BackendUnavailable, CudaDriverError

__all__ = [
    "OUT_OF_MEMORY",
    "Attribute",
    "add_mapping",
    "copy",
    "create_allocation",
    "device_attribute",
    "device_count",
    "device_uuid",
    "export_allocation",
    "free_addresses",
    "granularity",
    "import_allocation",
    "initialize",
    "memory_info",
    "missing_reason",
    "pop_context",
    "push_context",
    "release_allocation",
    "release_primary_context",
    "remove_mapping",
    "reserve_addresses",
    "retain_primary_context",
    "set_access",
    "synchronize",
]

OUT_OF_MEMORY: Final = 2
"""CUDA_ERROR_OUT_OF_MEMORY, as `CudaDriverError.result` carries it."""


class Attribute(enum.IntEnum):
    """CUdevice_attribute (cuda.h)."""

    VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102
    HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103


def missing_reason() -> str | None:
    """Why no CUDA driver can be called from here, or None.

    `cuInit` is not tried: it takes long with many GPUs, and a process that has called it can no
    longer fork children that use CUDA.
    """
    return _missing


def _look_for_driver() -> str | None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"there is no CUDA driver: {error}"
    # `cuda` is a namespace that several distributions share; looking deeper would import some of it.
    namespace = importlib.util.find_spec("cuda")
    places = namespace.submodule_search_locations if namespace is not None else None
    if any(os.path.isdir(os.path.join(place, "bindings")) for place in places or ()):
        return None
    return "the package cuda-python is not installed"


# With the import, once: opening a library is nothing to do on an event loop at every question.
_missing: Final = _look_for_driver()


# ------------------------------------------------------------------------- process and devices
def initialize() -> None:
    """Initialise the driver in this process; costs next to nothing once it is."""
    _call("cuInit", 0)


def device_count() -> int:
    """How many devices CUDA_VISIBLE_DEVICES lets this process see."""
    return _int("cuDeviceGetCount")


def device_attribute(ordinal: int, attribute: Attribute) -> int:
    """One attribute of a device; 0 where it lacks what the attribute names."""
    return _int("cuDeviceGetAttribute", _driver().CUdevice_attribute(int(attribute)), ordinal)


def device_uuid(ordinal: int) -> str:
    """The device's UUID as nvidia-smi prints it, ``GPU-…``; of a MIG instance its own, not its GPU's."""
    # cuda-python 12 has the call that knows MIG instances beside the one that does not; in 13
    # the latter is gone, and its name means the former (cuda.h).
    name = "cuDeviceGetUuid_v2" if hasattr(_driver(), "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
    return f"GPU-{uuid.UUID(bytes=bytes(_value(name, ordinal).bytes))}"  # type: ignore[attr-defined]


def retain_primary_context(ordinal: int) -> int:
    """The context that torch and the CUDA runtime use on the device too."""
    return _int("cuDevicePrimaryCtxRetain", ordinal)


def release_primary_context(ordinal: int) -> None:
    """Undo one `retain_primary_context`."""
    _call("cuDevicePrimaryCtxRelease", ordinal)


def push_context(context: int) -> None:
    """Make it the calling thread's."""
    _call("cuCtxPushCurrent", context)


def pop_context() -> None:
    """Undo the thread's last `push_context`."""
    _call("cuCtxPopCurrent")


def synchronize() -> None:
    """Wait for all work in the current context."""
    _call("cuCtxSynchronize")


def memory_info() -> tuple[int, int]:
    """Bytes free and in all on the current context's device."""
    free, total = _call("cuMemGetInfo")
    return int(free), int(total)  # type: ignore[call-overload]


# --------------------------------------------------------------------------- physical memory
def granularity(ordinal: int) -> int:
    """What sizes of allocations on the device must be multiples of, in bytes."""
    minimum = _driver().CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return _int("cuMemGetAllocationGranularity", _allocation_properties(ordinal), minimum)


def create_allocation(ordinal: int, nbytes: int) -> int:
    """A handle on `nbytes` of the device's memory that can be exported as an fd."""
    return _int("cuMemCreate", nbytes, _allocation_properties(ordinal), 0)


def release_allocation(handle: int) -> None:
    """Give up one handle; its memory lives on while it is mapped, or held elsewhere."""
    _call("cuMemRelease", handle)


def export_allocation(handle: int) -> int:
    """A new fd for the allocation, the caller's to close."""
    return _int("cuMemExportToShareableHandle", handle, _posix_fd(), 0)


def import_allocation(fd: int) -> int:
    """A handle on the allocation behind `fd`, which remains the caller's to close."""
    return _int("cuMemImportFromShareableHandle", fd, _posix_fd())


# --------------------------------------------------------------------------- virtual addresses
def reserve_addresses(nbytes: int) -> int:
    """The start of `nbytes` of addresses nothing is mapped at."""
    return _int("cuMemAddressReserve", nbytes, 0, 0, 0)


def free_addresses(address: int, nbytes: int) -> None:
    """Give back exactly what `reserve_addresses` gave, nothing being mapped there."""
    _call("cuMemAddressFree", address, nbytes)


def add_mapping(address: int, nbytes: int, handle: int) -> None:
    """Put an allocation's first `nbytes` at reserved addresses; no device may touch them yet."""
    _call("cuMemMap", address, nbytes, 0, handle, 0)


def remove_mapping(address: int, nbytes: int) -> None:
    """Undo `add_mapping`, whole.  Does not wait for work that still uses it."""
    _call("cuMemUnmap", address, nbytes)


def set_access(address: int, nbytes: int, ordinal: int, *, writable: bool) -> None:
    """Let a device read, and also write if `writable`, what is mapped there."""
    driver = _driver()
    flags = driver.CUmemAccess_flags
    access = driver.CUmemAccessDesc()
    access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = ordinal
    access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if writable else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
    _call("cuMemSetAccess", address, nbytes, [access], 1)


def copy(destination: int, source: int, nbytes: int) -> None:
    """Copy between addresses of device or host memory; lengths are not checked by anything.

    Asynchronous between two device addresses, and on the device's side from pageable host
    memory: `synchronize` before somebody else reads (CUDA driver API, "API synchronization
    behavior").
    """
    _call("cuMemcpy", destination, source, nbytes)


# --------------------------------------------------------------------------------- the binding
def _driver() -> ModuleType:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise BackendUnavailable(name=VMM_FD_BACKEND, reason=f"cuda-python cannot be imported: {error}") from error


def _call(name: str, *arguments: object) -> tuple[object, ...]:
    """What the driver returned beside its result code."""
    try:
        result, *values = getattr(_driver(), name)(*arguments)
    except RuntimeError as error:
        # No driver, or one too old to have the function.
        raise BackendUnavailable(name=VMM_FD_BACKEND, reason=f"{name} cannot be called: {error}") from error
    if result != 0:
        raise CudaDriverError(call=name, result=int(result), name=result.name)
    return tuple(values)


def _value(name: str, *arguments: object) -> object:
    (value,) = _call(name, *arguments)
    return value


def _int(name: str, *arguments: object) -> int:
    return int(_value(name, *arguments))  # type: ignore[call-overload, no-any-return]


def _posix_fd() -> object:
    return _driver().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _allocation_properties(ordinal: int) -> object:
    driver = _driver()
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = ordinal
    # Fixed at creation: an allocation made without it can never be exported.
    properties.requestedHandleTypes = _posix_fd()
    return properties

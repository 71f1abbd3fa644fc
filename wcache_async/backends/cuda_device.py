"""One GPU as this process sees it: found by UUID, checked for what sharing needs, with a thread of its own.

The thread is where exports, imports and unmapping happen, one after the other.  Finalisers hand
their driver calls to it too: they run in whatever thread drops the last tensor, the event loop's
among them, and unmapping has to wait for the GPU.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from wcache_async.backends import cuda_driver
from wcache_async.backends.base import VMM_FD_BACKEND
from wcache_async.backends.cuda_driver import Attribute
from wcache_async.backends.worker import Worker
from wcache_async.errors import BackendUnavailable, CudaDriverError

__all__ = ["FINDER", "Device", "check_device", "device_by_name"]

FINDER: Final = Worker("wcache-cuda")
"""Where to look for devices off an event loop: the first look initialises CUDA and makes a context."""


class Device:
    """A GPU of this process; get one from `device_by_name`."""

    def __init__(self, ordinal: int, uuid: str) -> None:
        self.ordinal = ordinal
        self.uuid = uuid
        self._context = cuda_driver.retain_primary_context(ordinal)
        try:
            with self.context():
                self.granularity = cuda_driver.granularity(ordinal)
                """What arenas' sizes are multiples of, in bytes."""
        except BaseException:
            cuda_driver.release_primary_context(ordinal)
            raise
        self.thread = Worker(f"wcache-cuda-{ordinal}", self.context)
        """Does its jobs with the device's context current."""
        self.thread.start()  # Finalisers cannot.

    @contextmanager
    def context(self) -> Iterator[None]:
        """Make the device the calling thread's while entered."""
        cuda_driver.push_context(self._context)
        try:
            yield
        finally:
            cuda_driver.pop_context()

    def memory_info(self) -> tuple[int, int]:
        """Bytes free and in all."""
        with self.context():
            return cuda_driver.memory_info()

    def synchronize(self) -> None:
        """Wait for all work on the device that this process has queued."""
        with self.context():
            cuda_driver.synchronize()


def check_device(name: str) -> None:
    """Whether there is such a device, and it can do what sharing takes; makes no context on it.

    Blocks.  Raises BackendUnavailable, CudaDriverError.
    """
    _check(*_resolve(name))


def device_by_name(name: str) -> Device:
    """The device that torch calls ``cuda:N``, or by ``GPU-…`` UUID; ``cuda`` is the first.

    Blocks.  Raises BackendUnavailable, CudaDriverError.
    """
    ordinal, uuid = _resolve(name)
    with _lock:
        key = (os.getpid(), ordinal)
        device = _devices.get(key)
        if device is None:
            _check(ordinal, uuid)
            device = _devices[key] = Device(ordinal, uuid)
        return device


_lock = threading.Lock()
_devices: dict[tuple[int, int], Device] = {}
_uuids: dict[int, list[str]] = {}
"""By process id, as a forked process has no CUDA; what a process sees never changes."""


def _resolve(name: str) -> tuple[int, str]:
    """Ordinal and UUID of a device."""
    uuids = _visible_uuids()
    if name.startswith("GPU-"):
        if name not in uuids:
            raise _unavailable(
                f"the state is on {name}, and {_seen(uuids)}; add it to CUDA_VISIBLE_DEVICES (an instance of a "
                "GPU in MIG mode is a device of its own, and can be shared only by processes on that very instance)"
            )
        return uuids.index(name), name
    kind, _, number = name.partition(":")
    if kind != "cuda" or not (name == "cuda" or (number.isascii() and number.isdigit())):
        raise _unavailable(f"it holds memory of CUDA devices, and {name!r} was asked for")
    ordinal = int(number or 0)
    if ordinal >= len(uuids):
        raise _unavailable(f"{name} was asked for, and {_seen(uuids)}")
    return ordinal, uuids[ordinal]


def _check(ordinal: int, uuid: str) -> None:
    required = {
        Attribute.VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: "virtual memory management (cuMemCreate)",
        Attribute.HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: "memory handles that are file descriptors",
    }
    for attribute, what in required.items():
        if not cuda_driver.device_attribute(ordinal, attribute):
            raise _unavailable(f"{uuid} (cuda:{ordinal}) does not support {what}")


def _visible_uuids() -> list[str]:
    known = _uuids.get(os.getpid())
    if known is not None:
        return known
    try:
        cuda_driver.initialize()
        found = [cuda_driver.device_uuid(ordinal) for ordinal in range(cuda_driver.device_count())]
    except CudaDriverError as error:
        forked = (
            "; a process forked from one that used CUDA cannot use it: start it with the spawn method"
            if error.name == "CUDA_ERROR_NOT_INITIALIZED"
            else ""
        )
        raise _unavailable(f"CUDA cannot be used: {error}{forked}") from error
    _uuids[os.getpid()] = found
    return found


def _seen(uuids: list[str]) -> str:
    return f"this process sees {', '.join(uuids)}" if uuids else "this process sees no CUDA device"


def _unavailable(reason: str) -> BackendUnavailable:
    return BackendUnavailable(name=VMM_FD_BACKEND, reason=reason)

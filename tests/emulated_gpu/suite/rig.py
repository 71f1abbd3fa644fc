"""A state of several arenas, both halves of the backend in one process, and the emulator's own side."""

import asyncio
import ctypes
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

import torch

from tests.conformance.cases import tensor_of
from tests.conformance.wire import blank_response
from wcache_async.backends import cuda_device, cuda_driver
from wcache_async.backends.base import ImportOptions
from wcache_async.backends.vmm_fd import VmmFdTransportBackend
from wcache_async.errors import FdsTruncated
from wcache_async.manifest import StateManifest
from wcache_async.protocol.messages import FetchStateResponse
from wcache_async.sockets.fds import OwnedFd

__all__ = [
    "GRANULARITY",
    "Emulator",
    "Held",
    "State",
    "Wire",
    "attach",
    "bytes_of",
    "contents",
    "expected",
    "export",
    "exported",
    "mixed_state",
    "send",
    "settle",
    "until",
]

GRANULARITY = 2 << 20
State = dict[str, tuple[torch.Tensor, bool]]


class Held(NamedTuple):
    """What the driver holds for this process."""

    handles: int
    allocations: int
    reservations: int
    mappings: int
    mapped_bytes: int
    streams: int
    events: int


class Emulator:
    """The controls of `fakecuda.c` in this process."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._library.fakecuda_used.restype = ctypes.c_ulonglong
        self._library.fakecuda_seen.restype = ctypes.c_long

    def held(self) -> Held:
        return Held(*self._statistics()[:7])

    def contexts(self) -> int:
        """References on primary contexts."""
        return self._statistics()[7]

    def _statistics(self) -> list[int]:
        numbers = (ctypes.c_ulonglong * 8)()
        self._library.fakecuda_stats(numbers)
        return list(numbers)

    def fail(self, faults: str) -> None:
        """Have calls fail from now on: ``name:n:act,…`` as in `fakecuda.c`; empty: none."""
        self._library.fakecuda_set_fail(faults.encode())

    def seen(self, fault: int = 0) -> int:
        """How often the call of a fault was made since `fail`."""
        return int(self._library.fakecuda_seen(fault))

    def count(self, call: str) -> Callable[[], int]:
        """Count a call from now on; the result tells how often it was made."""
        self.fail(f"{call}:1000000:0")
        return self.seen

    def used(self, device: int) -> int:
        """Bytes allocated on a device, by its physical number, in all processes of the tests."""
        return int(self._library.fakecuda_used(device))


class Wire:
    """One response on its way: both a ResponseSender and a ResponseReceiver."""

    def __init__(self) -> None:
        self.response: FetchStateResponse | None = None
        self.fds: list[OwnedFd] = []

    async def send(self, response: FetchStateResponse, fds: Sequence[OwnedFd]) -> None:
        self.response = response
        self.fds = list(fds)

    def take_fds(self, count: int) -> list[OwnedFd]:
        if count > len(self.fds):
            raise FdsTruncated(expected=count, got=len(self.fds))
        taken, self.fds = self.fds[:count], self.fds[count:]
        return taken

    def close(self) -> None:
        for fd in self.fds:
            fd.close()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what the emulator has no event for."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def settle() -> None:
    """Wait for what finalisers have left to the devices' threads."""
    # Twice: a thread may be the last to drop what it has just made, and leave itself a job.
    for worker in 2 * [cuda_device.FINDER, *(device.thread for device in cuda_device._devices.values())]:
        worker.run_blocking(lambda: None)


def mixed_state() -> State:
    """Parameters and buffers that fill three arenas of one granule, and one arena of two."""
    return dict(_mixed_tensors())


@functools.cache
def _mixed_tensors() -> State:
    mebi = 1 << 18  # elements of four bytes
    large = tensor_of("float32", 3 * mebi, "cpu", seed=1)
    first = tensor_of("float32", 3 * mebi // 2, "cpu", seed=2)
    return {
        "first": (first, True),
        "first.half": (first[mebi:], True),
        "running_mean": (tensor_of("float32", 300, "cpu", seed=3), False),
        "second": (tensor_of("bfloat16", 3 * mebi, "cpu", seed=4), True),
        "large": (large, True),
        "large.tied": (large, True),
        "steps": (tensor_of("int64", 1, "cpu", seed=5).reshape(()), False),
        "third": (tensor_of("uint8", 7 * mebi, "cpu", seed=6), True),
        "empty": (torch.empty(0, 4), True),
    }


def export(state: State, arena_nbytes: int = GRANULARITY) -> tuple[VmmFdTransportBackend, StateManifest]:
    backend = VmmFdTransportBackend()
    backend.arena_nbytes = arena_nbytes
    return backend, backend.prepare_export(state)


@asynccontextmanager
async def exported(
    build: Callable[[], State] = mixed_state, arena_nbytes: int = GRANULARITY
) -> AsyncIterator[tuple[VmmFdTransportBackend, StateManifest]]:
    backend, manifest = await asyncio.to_thread(export, build(), arena_nbytes)
    try:
        yield backend, manifest
    finally:
        await asyncio.to_thread(backend.close)


async def send(backend: VmmFdTransportBackend, manifest: StateManifest) -> Wire:
    """One response, with its fds, as it arrives."""
    wire = Wire()
    await backend.send_fetch_state_response(wire, blank_response(manifest), [])
    return wire


async def attach(
    backend: VmmFdTransportBackend, manifest: StateManifest, options: ImportOptions | None = None
) -> VmmFdTransportBackend:
    """The client's half of an exported state."""
    wire = await send(backend, manifest)
    client = VmmFdTransportBackend(options)
    assert wire.response is not None
    try:
        await client.recv_fetch_state_response(wire, wire.response, manifest)
    finally:
        wire.close()
    return client


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The bytes of a contiguous tensor by the driver's word: the host may be unable to touch them."""
    host = ctypes.create_string_buffer(tensor.nbytes or 1)
    if tensor.nbytes:
        with cuda_device.device_by_name(f"cuda:{_ordinal_of(tensor)}").context():
            cuda_driver.copy(ctypes.addressof(host), tensor.data_ptr(), tensor.nbytes)
    return host.raw[: tensor.nbytes]


def _ordinal_of(tensor: torch.Tensor) -> int:
    import cuda.bindings.driver as driver

    driver.cuInit(0)
    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    result, ordinal = driver.cuPointerGetAttribute(attribute, tensor.data_ptr())
    return 0 if result else int(ordinal)  # The host's memory has none.


def contents(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: bytes_of(tensor) for name, tensor in tensors.items()}


@functools.cache
def expected(build: Callable[[], State] = mixed_state) -> dict[str, bytes]:
    """What a state of `build` contains."""
    return {name: bytes_of(tensor) for name, (tensor, _) in build().items()}

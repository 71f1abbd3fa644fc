"""`torch_ipc`: tensors in memory that torch shares by itself, without a pickle.

CPU storages are torch's shared storages, one file and one fd each.  CUDA storages lie in one
allocation per device that travels as a handle: the daemon must outlive its use, and a client
keeps its lease until its last tensor is gone.  Clients map either as it is, writable, for torch
gives nothing else: a client's write reaches everyone.
"""

import asyncio
import itertools
import weakref
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from typing import TYPE_CHECKING, ClassVar

import msgspec
from msgspec import Struct

from wcache_async.backends.base import (
    TORCH_IPC_BACKEND,
    Capabilities,
    ImportOptions,
    ResponseReceiver,
    ResponseSender,
    StateTensors,
    WeightCacheTransportBackend,
    device_type_of,
)
from wcache_async.backends.storages import StorageRegion, describe_tensors, refusal
from wcache_async.backends.torch_cuda import CudaExport, CudaIpc, TorchCudaIpc
from wcache_async.backends.torch_cuda_arena import EXPANDABLE_SEGMENTS, CudaArena, find_device, open_cuda_arena
from wcache_async.backends.torch_shared import SharedArena, open_shared_arenas
from wcache_async.backends.torch_writer import TorchArena, TorchWriter
from wcache_async.backends.views import ArenaViews
from wcache_async.errors import (
    BackendUnavailable,
    InvalidManifest,
    MalformedMessage,
    StateReleased,
    StateUnloaded,
)
from wcache_async.manifest import (
    NonNegative,
    StateManifest,
    StateSpec,
    TensorEntry,
)
from wcache_async.protocol.messages import FetchStateResponse
from wcache_async.sockets.fds import OwnedFd

if TYPE_CHECKING:
    import torch

__all__ = ["TorchIpcTransportBackend"]

_CPU = "cpu"
_DEVICES = frozenset({_CPU, "cuda"})


class _Payload(Struct, frozen=True):
    """What `FetchStateResponse.payload` says of this backend's arenas.

    Bytes of each in order, and in the same order how those on a GPU are opened; the others have an
    fd each.
    """

    arenas: tuple[NonNegative, ...]
    cuda: tuple[CudaExport, ...] = ()


_encode_payload = msgspec.msgpack.Encoder().encode
_decode_payload = msgspec.msgpack.Decoder(_Payload).decode


class TorchIpcTransportBackend(WeightCacheTransportBackend):
    """One state in memory that torch shares; see the module."""

    name = TORCH_IPC_BACKEND
    capabilities = Capabilities(
        survives_daemon_exit=False, read_only=False, needs_shared_pid_namespace=True, devices=_DEVICES
    )
    cuda: ClassVar[CudaIpc] = TorchCudaIpc()

    def __init__(self, options: ImportOptions | None = None) -> None:
        """Raises BackendUnavailable where `options` ask for read-only memory."""
        super().__init__(options)
        if self.options.mapping == "read_only":
            raise BackendUnavailable(name=self.name, reason="torch maps shared memory writable, and no other way")
        self._arenas: tuple[TorchArena, ...] = ()
        self._payload = b""
        self._resident_bytes = 0
        self._views: ArenaViews | None = None
        self._received: tuple[str, int] | None = None
        self._foreign: tuple[weakref.ref[torch.UntypedStorage], ...] = ()
        self._on_cpu = False

    # ------------------------------------------------------------------------- both sides
    @classmethod
    def unavailable_reason(cls) -> str | None:
        return None

    @classmethod
    def device_refusal(cls, device: str) -> str | None:
        if device_type_of(device) == "cuda":
            return cls.cuda.missing_reason() or (EXPANDABLE_SEGMENTS if cls.cuda.expandable_segments() else None)
        return super().device_refusal(device)

    @classmethod
    def capabilities_on(cls, device_type: str) -> Capabilities:
        if device_type == _CPU:
            return Capabilities(
                survives_daemon_exit=True,
                read_only=False,
                needs_shared_pid_namespace=False,
                devices=frozenset({_CPU}),
            )
        return cls.capabilities

    @property
    def survives_daemon_exit(self) -> bool:
        return self._on_cpu

    def when_unused(self, callback: Callable[[], None]) -> bool:
        foreign = [storage for reference in self._foreign if (storage := reference()) is not None]
        last = len(foreign)
        gone = itertools.count(1)

        def one_gone() -> None:
            if next(gone) == last:
                callback()

        for storage in foreign:
            weakref.finalize(storage, one_gone).atexit = False
        return not foreign

    @property
    def resident_bytes(self) -> int:
        return self._resident_bytes

    def close(self) -> None:
        arenas, self._arenas = self._arenas, ()
        self._views = None
        self._resident_bytes = 0
        for arena in arenas:
            arena.close()

    # ----------------------------------------------------------------------------- daemon
    @classmethod
    def can_export_state(cls, state_tensors: StateTensors) -> bool:
        return all(refusal(tensor, _DEVICES) is None for tensor, _ in state_tensors.values())

    def prepare_export(
        self, state_tensors: StateTensors, *, non_persistent: AbstractSet[str] = frozenset()
    ) -> StateManifest:
        spec, regions = describe_tensors(
            state_tensors, backend=self.name, devices=_DEVICES, non_persistent=non_persistent
        )
        ordinals = [self.cuda.ordinal_of(region.tensors[0]) for region in regions]
        writer = TorchWriter(self.cuda, spec, ordinals or [None], self._adopt)
        try:
            for number, region in enumerate(regions):
                if region.nbytes:
                    writer.copy_from(number, _bytes_of_region(region))
            return writer.finish()
        except BaseException:
            writer.abort()
            raise

    def begin_export(self, spec: StateSpec, *, device: str = _CPU) -> TorchWriter:
        """`device` is torch's name, ``cpu`` or ``cuda:1``, or a ``GPU-…`` UUID."""
        reason = self.device_refusal(device)
        if reason is not None:
            raise BackendUnavailable(name=self.name, reason=reason)
        ordinal = None if device == _CPU else self._ordinal(device)
        return TorchWriter(self.cuda, spec, [ordinal] * max(len(spec.storages), 1), self._adopt)

    def _ordinal(self, device: str) -> int:
        if device.startswith("GPU-"):
            return find_device(self.cuda, device)
        _, _, number = device.partition(":")
        ordinal = int(number) if number.isdecimal() else 0 if device == "cuda" else -1
        count = len(self.cuda.uuids())
        if not 0 <= ordinal < count:
            raise BackendUnavailable(name=self.name, reason=f"{device} was asked for, and this process sees {count}")
        return ordinal

    def _adopt(self, arenas: Sequence[TorchArena]) -> None:
        self._arenas = tuple(arenas)
        sizes = tuple(arena.nbytes for arena in arenas)
        exports = (arena.export for arena in arenas if isinstance(arena, CudaArena))
        self._payload = _encode_payload(_Payload(sizes, tuple(export for export in exports if export is not None)))
        self._resident_bytes = sum(sizes)
        self._on_cpu = all(arena.device == _CPU for arena in arenas)

    async def send_fetch_state_response(
        self, stream: ResponseSender, response: FetchStateResponse, fds: Sequence[OwnedFd]
    ) -> None:
        with ExitStack() as owned:
            for fd in fds:
                owned.callback(fd.close)
            if not self._arenas:
                raise StateUnloaded(name=response.name, rank=response.rank)
            lent = [arena.lend() for arena in self._arenas if isinstance(arena, SharedArena)]
            completed = msgspec.structs.replace(
                response, transport_backend=self.name, payload=self._payload, resident_bytes=self._resident_bytes
            )
            owned.pop_all()
            await stream.send(completed, [*fds, *lent])

    def read_arena(self, number: int, offset: int, into: memoryview) -> None:
        if not self._arenas:
            raise ValueError("the export is closed")
        self._arenas[number].read(offset, into)

    # ----------------------------------------------------------------------------- client
    async def recv_fetch_state_response(
        self, stream: ResponseReceiver, response: FetchStateResponse, manifest: StateManifest
    ) -> None:
        try:
            payload = _decode_payload(response.payload)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise MalformedMessage(reason=f"the payload of {self.name}: {error}") from error
        fds = stream.take_fds(sum(1 for arena in manifest.arenas if arena.device == _CPU))
        # Everything handed to the executor owns itself, so that a cancellation, before or while
        # it runs, frees it all by dropping it.
        job = asyncio.get_running_loop().run_in_executor(None, _open_arenas, self.cuda, fds, payload, manifest)
        del fds
        self._views, foreign = await job
        self._foreign = tuple(weakref.ref(storage) for storage in foreign)
        self._on_cpu = all(arena.device == _CPU for arena in manifest.arenas)
        self._resident_bytes = sum(payload.arenas)
        self._received = (response.name, response.rank)

    def import_tensor(self, entry: TensorEntry) -> "torch.Tensor":
        return self._opened().tensor(entry)

    def import_tensors(self) -> "dict[str, torch.Tensor]":
        return self._opened().tensors()

    def _opened(self) -> ArenaViews:
        views = self._views
        if views is None:
            if self._received is None:
                raise ValueError("no state was received yet")
            raise StateReleased(name=self._received[0], rank=self._received[1])
        return views


def _bytes_of_region(region: StorageRegion) -> "torch.Tensor":
    import torch

    storage = region.tensors[0].untyped_storage()
    with torch.inference_mode(False):
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        start = region.address - storage.data_ptr()
        return whole[start : start + region.nbytes]


def _open_arenas(
    cuda: CudaIpc, fds: Sequence[OwnedFd], payload: _Payload, manifest: StateManifest
) -> "tuple[ArenaViews, list[torch.UntypedStorage]]":
    """Check everything, then open everything; closes the fds in any case.

    Besides the views, the storages that are another process's device memory.
    """
    try:
        expected = tuple(arena.nbytes for arena in manifest.arenas)
        if expected != payload.arenas:
            raise InvalidManifest(tensor="", reason=f"arenas of {expected} bytes, announced were {payload.arenas}")
        announced = [(export.device, export.nbytes) for export in payload.cuda]
        on_gpus = [(arena.device, arena.nbytes) for arena in manifest.arenas if arena.device != _CPU]
        if announced != on_gpus:
            raise InvalidManifest(tensor="", reason=f"arenas {on_gpus} on GPUs, announced were {announced}")
        shared = iter(open_shared_arenas(fds, [arena.nbytes for arena in manifest.arenas if arena.device == _CPU]))
    finally:
        for fd in fds:
            fd.close()
    opened = iter([open_cuda_arena(cuda, export) for export in payload.cuda])
    arenas: list[torch.Tensor] = []
    foreign: list[torch.UntypedStorage] = []
    for arena in manifest.arenas:
        if arena.device == _CPU:
            arenas.append(next(shared))
            continue
        memory, own = next(opened)
        arenas.append(memory)
        if not own:
            foreign.append(memory.untyped_storage())
    return ArenaViews(manifest, arenas), foreign

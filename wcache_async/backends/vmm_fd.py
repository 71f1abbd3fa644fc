"""`vmm_fd`: CUDA tensors in arenas of the driver's virtual memory management, exported as fds.

The daemon keeps one handle an arena and exports fds anew for each response: fds kept for long
were seen to break when a process was restored from a checkpoint.  A client maps every arena
read-only and copies what an engine writes, its buffers; both go on when the daemon is gone.
"""

import asyncio
import functools
import sys
import time
from collections.abc import Callable, MutableMapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from typing import TYPE_CHECKING, ClassVar, Final

import msgspec
from msgspec import Struct

from wcache_async.backends import cuda_driver
from wcache_async.backends.base import (
    VMM_FD_BACKEND,
    Capabilities,
    ResponseReceiver,
    ResponseSender,
    StateTensors,
    WeightCacheTransportBackend,
)
from wcache_async.backends.cuda_device import FINDER, Device, check_device, device_by_name
from wcache_async.backends.device_memory import empty_torch_cache
from wcache_async.backends.storages import describe_tensors, refusal
from wcache_async.backends.views import ArenaViews
from wcache_async.backends.vmm_export import ArenaWriter
from wcache_async.backends.vmm_held import HeldArenas, adopt_arenas
from wcache_async.backends.vmm_import import ArenaImport
from wcache_async.errors import (
    BackendUnavailable,
    CudaDriverError,
    ExportError,
    InsufficientMemory,
    InvalidManifest,
    MalformedMessage,
    StateReleased,
    StateUnloaded,
)
from wcache_async.manifest import NonNegative, StateManifest, StateSpec, TensorEntry
from wcache_async.protocol.messages import FetchStateResponse
from wcache_async.sockets.fds import OwnedFd

if TYPE_CHECKING:
    import torch

__all__ = ["VmmFdTransportBackend"]

ARENA_NBYTES: Final = 1 << 30
"""Bytes an arena is filled up to.  One allocation of everything would have to be found at once,
and one a storage would cost an fd and the mapping calls for each."""

PATIENCE_S: Final = 30.0
"""Seconds after which memory that is still not free is an error."""

RETRY_INTERVAL_S: Final = 0.1
"""Nothing tells when another process frees device memory, so it is asked for again this often."""


class _Payload(Struct, frozen=True):
    """What `FetchStateResponse.payload` says of this backend's fds: bytes of each arena, in order.

    Said here because an fd of device memory must not be asked: neither fstat nor mmap knows it.
    """

    arenas: tuple[NonNegative, ...]


_encode_payload = msgspec.msgpack.Encoder().encode
_decode_payload = msgspec.msgpack.Decoder(_Payload).decode


class VmmFdTransportBackend(WeightCacheTransportBackend):
    """One state in the memory of one GPU; see the module."""

    name = VMM_FD_BACKEND
    capabilities = Capabilities(
        survives_daemon_exit=True, read_only=True, needs_shared_pid_namespace=False, devices=frozenset({"cuda"})
    )

    import_waits = False

    torch_device_type: ClassVar[str] = "cuda"
    """What torch calls the devices of the driver.  An emulated driver's memory is the host's."""

    arena_nbytes: int = ARENA_NBYTES
    """Bytes an arena is filled up to; a larger storage has one of its own.  Set before exporting."""
    patience_s: float = PATIENCE_S
    keep_trying: Callable[[], bool] | None = None
    """Asked whether to go on waiting when exporting, or `remap`, finds no memory; None: fail at once."""

    _held: HeldArenas | None = None
    _payload = b""
    _resident_bytes = 0
    _arenas: ArenaImport | None = None
    _views: ArenaViews | None = None
    _received: tuple[str, int] | None = None

    # ------------------------------------------------------------------------- both sides
    @classmethod
    def unavailable_reason(cls) -> str | None:
        """Whether there is a driver at all: what its devices can do is checked when one is used."""
        return "this torch is built without CUDA" if cls._torch_lacks_cuda() else cuda_driver.missing_reason()

    @classmethod
    def availability_waits(cls) -> bool:
        return not cls._torch_lacks_cuda()

    @classmethod
    def _torch_lacks_cuda(cls) -> bool:
        """Whether a torch is imported that has no devices of the driver's: nothing has to be loaded to know."""
        version = getattr(sys.modules.get("torch"), "version", None)  # Half imported it has none.
        return cls.torch_device_type == "cuda" and version is not None and version.cuda is None

    @classmethod
    def device_refusal(cls, device: str) -> str | None:
        """Blocks the first time: CUDA is initialised."""
        refused = super().device_refusal(device)
        if refused is not None:
            return refused
        try:
            check_device(device)
        except BackendUnavailable as error:
            return error.reason
        return None

    @property
    def resident_bytes(self) -> int:
        """Bytes of the arenas, and in a client of its private copies too."""
        return self._resident_bytes

    def close(self) -> None:
        """In the daemon blocks until the handles are released; in a client only drops its references.

        An imported arena is unmapped in its device's thread, once its last tensor is gone.  Raises
        CudaDriverError; what could not be released is tried again later.
        """
        self._resident_bytes = 0
        self._arenas = self._views = None
        held, self._held = self._held, None
        if held is not None:
            # In the device's thread: an export that runs there is finished by then.
            try:
                held.device.thread.run_blocking(held.release)
            except CudaDriverError:
                held.device.thread.post(held.release)
                raise

    # ----------------------------------------------------------------------------- daemon
    @classmethod
    def can_export_state(cls, state_tensors: StateTensors) -> bool:
        if not state_tensors or any(refusal(t, {cls.torch_device_type}) for t, _ in state_tensors.values()):
            return False
        try:
            check_device(cls._device_of(state_tensors))
        except (ExportError, BackendUnavailable):
            return False
        return True

    def prepare_export(
        self, state_tensors: StateTensors, *, non_persistent: AbstractSet[str] = frozenset(), move: bool = False
    ) -> StateManifest:
        """Copy the tensors into arenas, arena by arena.

        With `move`, `state_tensors` must be mutable, and every parameter in it is replaced by its
        twin on an arena as soon as that is filled: what nobody else refers to is then freed, so
        that device memory peaks at the state's size plus one arena.  The twins are read-only, and
        valid even where this raises.  Parameters that share a storage with a buffer stay.
        """
        spec, regions = describe_tensors(
            state_tensors, backend=self.name, devices={self.torch_device_type}, non_persistent=non_persistent
        )
        device = device_by_name(self._device_of(state_tensors))
        writer = self._writer(device, spec)
        addresses = [region.address for region in regions]
        if move:
            del regions  # They keep the tensors, which are to go as they are moved.
        try:
            device.synchronize()  # torch's streams may still be writing the tensors.
            if move:
                self._move(state_tensors, writer, addresses)
            else:
                self._retry(writer.open_all)
                for number, address in enumerate(addresses):
                    writer.copy_from(number, address)
            return writer.finish()
        finally:
            writer.abort()

    def begin_export(self, spec: StateSpec, *, device: str = "cuda") -> ArenaWriter:
        """`device` is torch's name, ``cuda:1``, or a ``GPU-…`` UUID."""
        writer = self._writer(device_by_name(device), spec)
        self._retry(writer.open_all)
        return writer

    async def send_fetch_state_response(
        self, stream: ResponseSender, response: FetchStateResponse, fds: Sequence[OwnedFd]
    ) -> None:
        with ExitStack() as owned:
            for fd in fds:
                owned.callback(fd.close)
            completed = msgspec.structs.replace(
                response, transport_backend=self.name, payload=self._payload, resident_bytes=self._resident_bytes
            )
            held = self._held
            # None also where it was closed while this waited for its turn.
            exported = None if held is None else await held.device.thread.run(held.export)
            if exported is None:
                raise StateUnloaded(name=response.name, rank=response.rank)
            owned.pop_all()
            await stream.send(completed, [*fds, *exported])

    def read_arena(self, number: int, offset: int, into: memoryview) -> None:
        """Raises InsufficientMemory and CudaDriverError too."""
        held = self._held
        if held is None:
            raise ValueError("the export is closed")
        held.read(number, offset, into)

    async def adopt(self, stream: ResponseReceiver, payload: bytes, manifest: StateManifest) -> None:
        """What a client publishes stays writable for that client: device memory cannot be sealed."""
        fds = self._take_fds(stream, payload, manifest)
        try:
            held = await FINDER.run(functools.partial(adopt_arenas, fds, manifest))
        finally:
            FINDER.post(functools.partial(_close, fds))
        self._hold(held)

    def _writer(self, device: Device, spec: StateSpec) -> ArenaWriter:
        max_arena = max(self.arena_nbytes - self.arena_nbytes % device.granularity, device.granularity)
        return ArenaWriter(device, spec, max_arena, self._hold)

    def _hold(self, held: HeldArenas) -> None:
        self._held = held
        self._payload = _encode_payload(_Payload(held.nbytes))
        self._resident_bytes = sum(held.nbytes)

    @classmethod
    def _device_of(cls, state_tensors: StateTensors) -> str:
        """torch's name of the device that the tensors are on.  Raises ExportError where they are on several."""
        found: torch.device | None = None
        for name, (tensor, _) in state_tensors.items():
            if found is not None and tensor.device != found:
                raise ExportError(
                    backend=cls.name,
                    tensor=name,
                    reason=f"it is on {tensor.device} and others on {found}: give each GPU's tensors a rank of "
                    "their own",
                )
            found = tensor.device
        return f"cuda:{(found and found.index) or 0}"

    def _move(self, state_tensors: StateTensors, writer: ArenaWriter, addresses: Sequence[int]) -> None:
        if not isinstance(state_tensors, MutableMapping):
            raise TypeError("tensors can be moved out of a mutable mapping only")
        for arena, storages in enumerate(writer.storages_by_arena()):
            self._retry(functools.partial(writer.open, arena))
            for number in storages:
                writer.copy_from(number, addresses[number])
            state_tensors.update(writer.hand_out(arena, self.torch_device_type))

    def _retry(self, attempt: Callable[[], None]) -> None:
        """Raises InsufficientMemory when memory stays short for too long, or nobody waits any more."""
        deadline = time.monotonic() + self.patience_s
        cached = True
        while True:
            try:
                return attempt()
            except InsufficientMemory:
                if cached:
                    # What torch has freed it keeps for itself, out of the driver's reach.
                    cached = False
                    if empty_torch_cache():
                        continue
                if self.keep_trying is None or time.monotonic() >= deadline or not self.keep_trying():
                    raise
            time.sleep(RETRY_INTERVAL_S)

    # ----------------------------------------------------------------------------- client
    async def recv_fetch_state_response(
        self, stream: ResponseReceiver, response: FetchStateResponse, manifest: StateManifest
    ) -> None:
        """Waits for device memory while there is none, `patience_s` at most.

        Raises InvalidManifest, MalformedMessage, FdsTruncated, BackendUnavailable,
        InsufficientMemory, CudaDriverError.
        """
        arenas = ArenaImport(
            self._take_fds(stream, response.payload, manifest),
            manifest,
            shared_buffers=self.options.buffers == "shared",
            torch_device_type=self.torch_device_type,
        )
        deadline = time.monotonic() + self.patience_s
        try:
            await FINDER.run(arenas.prepare)
            while True:
                try:
                    views = await arenas.device.thread.run(arenas.open)
                    break
                except InsufficientMemory:
                    if time.monotonic() >= deadline:
                        raise
                await asyncio.sleep(RETRY_INTERVAL_S)
        except BaseException:
            arenas.undo_later()
            raise
        self._arenas, self._views = arenas, views
        self._resident_bytes = arenas.nbytes
        self._received = (response.name, response.rank)

    def import_tensor(self, entry: TensorEntry) -> "torch.Tensor":
        arenas, views = self._opened()
        return views.tensor(arenas.own_entry(entry))

    def import_tensors(self) -> "dict[str, torch.Tensor]":
        _, views = self._opened()
        return views.tensors()

    def prepare_unmap(self) -> None:
        """Let an engine sleep: unmap every arena, once the device has finished, and keep its addresses.

        Tensors stay as they are and must not be touched by the device until `remap`; private
        copies are not unmapped.  Blocks.  Raises StateReleased, CudaDriverError.
        """
        arenas, _ = self._opened()
        arenas.device.thread.run_blocking(arenas.unmap)

    def take_arena_fds(self, stream: ResponseReceiver, response: FetchStateResponse) -> list[OwnedFd]:
        """The fds for `remap` from a further response for the same generation.

        Raises StateReleased, MalformedMessage, FdsTruncated, and InvalidManifest where the arenas
        are not those that were unmapped.
        """
        arenas, _ = self._opened()
        return self._take_fds(stream, response.payload, arenas.manifest)

    def remap(self, fds: Sequence[OwnedFd]) -> None:
        """Map the arenas where they were, from `fds`, which are closed in any case.  Blocks.

        Raises StateReleased, InsufficientMemory, CudaDriverError, with everything unmapped still.
        """
        try:
            arenas, _ = self._opened()
            self._retry(lambda: arenas.device.thread.run_blocking(functools.partial(arenas.remap, fds)))
        finally:
            _close(fds)

    def _take_fds(self, stream: ResponseReceiver, payload: bytes, manifest: StateManifest) -> list[OwnedFd]:
        try:
            announced = _decode_payload(payload).arenas
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise MalformedMessage(reason=f"the payload of {self.name}: {error}") from error
        expected = tuple(arena.nbytes for arena in manifest.arenas)
        if expected != announced:
            raise InvalidManifest(tensor="", reason=f"arenas of {expected} bytes, announced were {announced}")
        return stream.take_fds(len(announced))

    def _opened(self) -> tuple[ArenaImport, ArenaViews]:
        if self._arenas is None or self._views is None:
            if self._received is None:
                raise ValueError("no state was received yet")
            raise StateReleased(name=self._received[0], rank=self._received[1])
        return self._arenas, self._views


def _close(fds: Sequence[OwnedFd]) -> None:
    for fd in fds:
        fd.close()

"""`torch_ipc`: tensors in memory that torch shares by itself, without a pickle.

CPU storages are torch's shared storages, one file and one fd each, that every client maps as they
are: writable, for torch gives nothing else, so that a client's write reaches everyone.
"""

import asyncio
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from wcache_async.backends.base import (
    TORCH_IPC_BACKEND,
    Capabilities,
    ImportOptions,
    ResponseReceiver,
    ResponseSender,
    StateTensors,
    StateWriter,
    WeightCacheTransportBackend,
)
from wcache_async.backends.memory import Reservation
from wcache_async.backends.storages import describe_tensors, refusal
from wcache_async.backends.torch_shared import SharedArena, check_room, open_shared_arenas
from wcache_async.backends.views import ArenaViews
from wcache_async.errors import (
    BackendUnavailable,
    InvalidManifest,
    MalformedMessage,
    StateReleased,
    StateUnloaded,
)
from wcache_async.manifest import NonNegative, StateManifest, StateSpec, TensorEntry, build_manifest, plan_layout
from wcache_async.protocol.framing import MAX_FDS_PER_FRAME
from wcache_async.protocol.messages import FetchStateResponse
from wcache_async.sockets.fds import OwnedFd

if TYPE_CHECKING:
    import torch

__all__ = ["TorchIpcTransportBackend"]

_DEVICES = frozenset({"cpu"})
_MAX_STORAGES = MAX_FDS_PER_FRAME - 1  # One is the manifest's.


class _Payload(Struct, frozen=True):
    """What `FetchStateResponse.payload` says of this backend's arenas: bytes of each, in order."""

    arenas: tuple[NonNegative, ...]


_encode_payload = msgspec.msgpack.Encoder().encode
_decode_payload = msgspec.msgpack.Decoder(_Payload).decode


class TorchIpcTransportBackend(WeightCacheTransportBackend):
    """One state in memory that torch shares; see the module."""

    name = TORCH_IPC_BACKEND
    capabilities = Capabilities(
        survives_daemon_exit=True, read_only=False, needs_shared_pid_namespace=False, devices=_DEVICES
    )

    def __init__(self, options: ImportOptions | None = None) -> None:
        """Raises BackendUnavailable where `options` ask for read-only memory."""
        super().__init__(options)
        if self.options.mapping == "read_only":
            raise BackendUnavailable(name=self.name, reason="torch maps shared memory writable, and no other way")
        self._arenas: tuple[SharedArena, ...] = ()
        self._payload = b""
        self._resident_bytes = 0
        self._views: ArenaViews | None = None
        self._received: tuple[str, int] | None = None

    # ------------------------------------------------------------------------- both sides
    @classmethod
    def unavailable_reason(cls) -> str | None:
        return None

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
        writer = self.begin_export(spec)
        try:
            for number, region in enumerate(regions):
                if region.nbytes:
                    writer.copy_from(number, region.address)
            return writer.finish()
        except BaseException:
            writer.abort()
            raise

    def begin_export(self, spec: StateSpec, *, device: str = "cpu") -> "_TorchIpcWriter":
        if device != "cpu":
            raise BackendUnavailable(name=self.name, reason=f"it holds CPU memory, and {device} was asked for")
        return _TorchIpcWriter(self, spec)

    def _adopt(self, arenas: Sequence[SharedArena]) -> None:
        self._arenas = tuple(arenas)
        sizes = tuple(arena.nbytes for arena in arenas)
        self._payload = _encode_payload(_Payload(sizes))
        self._resident_bytes = sum(sizes)

    async def send_fetch_state_response(
        self, stream: ResponseSender, response: FetchStateResponse, fds: Sequence[OwnedFd]
    ) -> None:
        with ExitStack() as owned:
            for fd in fds:
                owned.callback(fd.close)
            if not self._arenas:
                raise StateUnloaded(name=response.name, rank=response.rank)
            lent = [arena.lend() for arena in self._arenas]
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
            announced = _decode_payload(response.payload).arenas
        except msgspec.DecodeError as error:
            raise MalformedMessage(reason=f"the payload of {self.name}: {error}") from error
        fds = stream.take_fds(len(announced))
        # Everything handed to the executor owns itself, so that a cancellation, before or while
        # it runs, frees it all by dropping it.
        job = asyncio.get_running_loop().run_in_executor(None, _open_arenas, fds, announced, manifest)
        del fds
        self._views = await job
        self._resident_bytes = sum(announced)
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


class _TorchIpcWriter(StateWriter):
    """Fills the arenas of one state and gives them to its backend."""

    def __init__(self, backend: TorchIpcTransportBackend, spec: StateSpec) -> None:
        self._backend = backend
        self._spec = spec
        self._layout = plan_layout(spec.storages, max_arena=1)  # A storage each.
        sizes = self._layout.arena_nbytes
        if len(sizes) > _MAX_STORAGES:
            raise BackendUnavailable(
                name=backend.name,
                reason=f"it takes an fd for every storage, and a response carries {_MAX_STORAGES} of the state's "
                f"{len(sizes)}; shm_fd takes one for them all",
            )
        check_room(sum(sizes), len(sizes))
        self._reservation = Reservation(sum(sizes))
        self._arenas = [SharedArena(nbytes) for nbytes in sizes]

    @contextmanager
    def storage(self, number: int) -> Iterator[memoryview]:
        arena, offset = self._layout.places[number]
        nbytes = self._spec.storages[number]
        self._reservation.take(nbytes)
        with self._arena(arena).write(offset, nbytes) as view:
            yield view

    def copy_from(self, number: int, address: int) -> None:
        """Fill one storage with this process's memory at `address`.  Blocks."""
        arena, offset = self._layout.places[number]
        nbytes = self._spec.storages[number]
        self._reservation.take(nbytes)
        self._arena(arena).copy_from(offset, address, nbytes)

    def finish(self) -> StateManifest:
        if not self._arenas:
            raise ValueError(_WRITER_DONE)
        manifest = build_manifest(self._spec, self._layout)
        for arena in self._arenas:
            arena.finish()
        self._reservation.release()
        arenas, self._arenas = self._arenas, []
        self._backend._adopt(arenas)
        return manifest

    def abort(self) -> None:
        self._reservation.release()
        arenas, self._arenas = self._arenas, []
        for arena in arenas:
            arena.close()

    def _arena(self, number: int) -> SharedArena:
        if not self._arenas:
            raise ValueError(_WRITER_DONE)
        return self._arenas[number]


_WRITER_DONE = "the state is finished or was given up"


def _open_arenas(fds: Sequence[OwnedFd], announced: Sequence[int], manifest: StateManifest) -> ArenaViews:
    """Check everything, then open everything; closes the fds in any case."""
    try:
        expected = tuple(arena.nbytes for arena in manifest.arenas)
        if expected != tuple(announced):
            raise InvalidManifest(tensor="", reason=f"arenas of {expected} bytes, announced were {tuple(announced)}")
        return ArenaViews(manifest, open_shared_arenas(fds, expected))
    finally:
        for fd in fds:
            fd.close()

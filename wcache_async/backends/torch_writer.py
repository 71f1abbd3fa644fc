"""Fills arenas of memory that torch shares: one per storage on the CPU, one per device on GPUs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from wcache_async.backends.base import TORCH_IPC_BACKEND, StateWriter
from wcache_async.backends.memory import Reservation
from wcache_async.backends.torch_cuda import CudaIpc
from wcache_async.backends.torch_cuda_arena import CudaArena
from wcache_async.backends.torch_shared import SharedArena, check_room
from wcache_async.errors import BackendUnavailable
from wcache_async.manifest import Layout, StateManifest, StateSpec, build_manifest, plan_layout
from wcache_async.protocol.framing import MAX_FDS_PER_FRAME

if TYPE_CHECKING:
    import torch

__all__ = ["TorchArena", "TorchWriter"]

TorchArena = SharedArena | CudaArena

_MAX_STORAGES: Final = MAX_FDS_PER_FRAME - 1  # One is the manifest's.
_CUDA_ALIGNMENT: Final = 512
"""Bytes; what torch's own allocator aligns to, and kernels may count on."""


class TorchWriter(StateWriter):
    """Fills the arenas of one state, and has `adopt` take them when they are finished."""

    def __init__(
        self, cuda: CudaIpc, spec: StateSpec, ordinals: Sequence[int | None], adopt: Callable[[list[TorchArena]], None]
    ) -> None:
        """`ordinals` numbers each storage's device; None is the CPU.

        Raises InsufficientMemory, BackendUnavailable, with nothing taken.
        """
        self._spec = spec
        self._adopt = adopt
        self._layout, on = _plan(spec.storages, ordinals)
        shared = [nbytes for nbytes, ordinal in zip(self._layout.arena_nbytes, on, strict=True) if ordinal is None]
        if len(shared) > _MAX_STORAGES:
            raise BackendUnavailable(
                name=TORCH_IPC_BACKEND,
                reason=f"it takes an fd for every storage, and a response carries {_MAX_STORAGES} of the state's "
                f"{len(shared)}; shm_fd takes one for them all",
            )
        if shared:
            check_room(sum(shared), len(shared))
        uuids = cuda.uuids() if len(shared) < len(on) else []
        self._arenas: list[TorchArena] = []
        self._reservation = Reservation(sum(shared))
        try:
            for nbytes, ordinal in zip(self._layout.arena_nbytes, on, strict=True):
                self._arenas.append(
                    SharedArena(nbytes) if ordinal is None else CudaArena(cuda, ordinal, uuids[ordinal], nbytes)
                )
        except BaseException:
            self.abort()
            raise

    @contextmanager
    def storage(self, number: int) -> Iterator[memoryview]:
        arena, offset = self._place(number)
        with arena.write(offset, self._spec.storages[number]) as view:
            yield view

    def copy_from(self, number: int, source: "torch.Tensor") -> None:
        """Fill one storage with one-dimensional uint8 memory of the device it is on.  Blocks."""
        arena, offset = self._place(number)
        arena.copy_from(offset, source)

    def finish(self) -> StateManifest:
        if not self._arenas:
            raise ValueError(_WRITER_DONE)
        manifest = build_manifest(self._spec, self._layout, [arena.device for arena in self._arenas])
        for arena in self._arenas:
            arena.finish()
        self._reservation.release()
        arenas, self._arenas = self._arenas, []
        self._adopt(arenas)
        return manifest

    def abort(self) -> None:
        self._reservation.release()
        arenas, self._arenas = self._arenas, []
        for arena in arenas:
            arena.close()

    def _place(self, number: int) -> tuple[TorchArena, int]:
        if not self._arenas:
            raise ValueError(_WRITER_DONE)
        arena_number, offset = self._layout.places[number]
        arena = self._arenas[arena_number]
        if isinstance(arena, SharedArena):
            self._reservation.take(self._spec.storages[number])
        return arena, offset


_WRITER_DONE = "the state is finished or was given up"


def _plan(storages: Sequence[int], ordinals: Sequence[int | None]) -> tuple[Layout, list[int | None]]:
    """The layout, an arena per CPU storage and one per GPU, and each arena's device."""
    places = [(0, 0)] * len(storages)
    sizes: list[int] = []
    on: list[int | None] = []
    for ordinal in dict.fromkeys(ordinals):
        members = [number for number in range(len(storages)) if ordinals[number] == ordinal]
        nbytes = [storages[number] for number in members]
        if ordinal is None:
            part = plan_layout(nbytes, max_arena=1)
        else:
            part = plan_layout(nbytes, alignment=_CUDA_ALIGNMENT, granularity=_CUDA_ALIGNMENT)
        for number, (arena, offset) in zip(members, part.places, strict=True):
            places[number] = (len(sizes) + arena, offset)
        sizes += part.arena_nbytes
        on += [ordinal] * len(part.arena_nbytes)
    return Layout(places=tuple(places), arena_nbytes=tuple(sizes)), on

"""Fills the arenas of one state in a GPU's memory, from host memory or from the device's own."""

import ctypes
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final

import msgspec

from wcache_async.backends import cuda_driver
from wcache_async.backends.base import StateWriter
from wcache_async.backends.cuda_device import Device
from wcache_async.backends.device_memory import torch_device
from wcache_async.backends.mapping import Access, map_pages
from wcache_async.backends.views import ArenaViews
from wcache_async.backends.vmm_arena import (
    ALIGNMENT,
    Allocation,
    Mapping,
    insufficient_memory,
    memory_of,
    wait_before_unmapping,
)
from wcache_async.backends.vmm_held import HeldArenas
from wcache_async.errors import CudaDriverError
from wcache_async.manifest import Kind, StateManifest, StateSpec, build_manifest, plan_layout

if TYPE_CHECKING:
    import torch

__all__ = ["ArenaWriter"]

logger = logging.getLogger("wcache_async.backends")

_DONE: Final = "the state is finished or was given up"


class ArenaWriter(StateWriter):
    """Arenas of one state; `hold` gets them once they are filled."""

    def __init__(self, device: Device, spec: StateSpec, max_arena: int, hold: Callable[[HeldArenas], None]) -> None:
        """Plan the arenas; no memory is taken before `open`."""
        self._device = device
        self._nbytes = spec.storages
        self._hold = hold
        self._layout = plan_layout(
            spec.storages, alignment=ALIGNMENT, granularity=device.granularity, max_arena=max_arena
        )
        self.manifest: StateManifest = build_manifest(
            spec, self._layout, [device.uuid] * len(self._layout.arena_nbytes)
        )
        self._arenas: dict[int, tuple[Allocation, Mapping | None]] = {}
        self._written: set[int] = set()
        self._done = False

    def storages_by_arena(self) -> list[list[int]]:
        """The numbers of the storages that lie in each arena."""
        numbers: list[list[int]] = [[] for _ in self._layout.arena_nbytes]
        for storage, (arena, _) in enumerate(self._layout.places):
            numbers[arena].append(storage)
        return numbers

    def open_all(self) -> None:
        """Take the memory of every arena.  Blocks.  Raises InsufficientMemory, CudaDriverError, with none taken."""
        needed = sum(self._layout.arena_nbytes)
        available, _ = self._device.memory_info()
        if needed > available:
            raise insufficient_memory(self._device, needed)
        try:
            for number in range(len(self._layout.arena_nbytes)):
                self.open(number)
        except BaseException:
            self._give_back()
            raise

    def open(self, number: int) -> None:
        """Take the memory of one arena.  Blocks.  Raises InsufficientMemory, CudaDriverError."""
        nbytes = self._layout.arena_nbytes[number]
        with self._device.context(), memory_of(self._device, nbytes), ExitStack() as undo:
            allocation = Allocation.create(self._device, nbytes)
            undo.callback(allocation.release)
            mapping = Mapping(self._device, nbytes)
            undo.callback(mapping.close)
            mapping.map(allocation.handle, writable=True)
            undo.pop_all()
        self._arenas[number] = (allocation, mapping)

    @contextmanager
    def storage(self, number: int) -> Iterator[memoryview]:
        nbytes = self._nbytes[number]
        if not nbytes:
            yield memoryview(bytearray())
            self._written.add(number)
            return
        # Not Python's mmap: unmapping gigabytes would hold the GIL.
        pages = map_pages(-1, nbytes, Access.ANONYMOUS)
        with memoryview(pages) as words, words.cast("B") as view:
            yield view
        self.copy_from(number, ctypes.addressof(pages))

    def copy_from(self, number: int, address: int) -> None:
        """Fill one storage with the host's or the device's memory at `address`.  Blocks."""
        arena, offset = self._layout.places[number]
        if self._nbytes[number]:
            mapping = self._arenas[arena][1] if arena in self._arenas else None
            if mapping is None:
                raise ValueError(_DONE)
            with self._device.context():
                cuda_driver.copy(mapping.address + offset, address, self._nbytes[number])
        self._written.add(number)

    def hand_out(self, number: int, torch_device_type: str) -> "dict[str, tuple[torch.Tensor, bool]]":
        """The parameters of an arena that is filled, as read-only tensors on it; aliases included.

        Left out are parameters on a storage that a buffer lies on too.  The tensors keep the arena
        mapped from now on, even if the state is given up.  Blocks.
        """
        allocation, mapping = self._arenas[number]
        if mapping is None:
            raise ValueError(_DONE)
        manifest = self.manifest
        written = {e.storage for e in manifest.tensors if e.kind is not Kind.PARAMETER}
        entries = [e for e in manifest.tensors if e.arena == number and e.storage not in written]
        if not entries:
            return {}
        with self._device.context():
            cuda_driver.synchronize()
            mapping.make_read_only()
        memory = mapping.tensor(torch_device(torch_device_type, self._device.ordinal))
        self._arenas[number] = (allocation, None)
        names = {e.name for e in entries}
        views = ArenaViews(
            StateManifest(
                manifest.dtypes,
                (manifest.arenas[number],),
                tuple(msgspec.structs.replace(e, arena=0) for e in entries),
                {alias: target for alias, target in manifest.aliases.items() if target in names},
            ),
            [memory],
        )
        tensors = views.tensors()
        for entry in entries:
            tensors[entry.name].requires_grad_(entry.requires_grad)
        return {name: (tensor, True) for name, tensor in tensors.items()}

    def finish(self) -> StateManifest:
        """Raises ValueError where a storage was never written: GPU memory is not cleared beforehand."""
        if self._done:
            raise ValueError(_DONE)
        missing = set(range(len(self._nbytes))) - self._written
        if missing:
            raise ValueError(f"{len(missing)} storages were never written, number {min(missing)} the first")
        with self._device.context():
            cuda_driver.synchronize()  # A copy from pageable memory returns before the device has it all.
            for _, mapping in self._arenas.values():
                if mapping is not None:
                    mapping.close()
        allocations = [self._arenas[number][0] for number in range(len(self._layout.arena_nbytes))]
        self._arenas.clear()
        self._done = True
        self._hold(HeldArenas(self._device, allocations, self._layout.arena_nbytes))
        return self.manifest

    def abort(self) -> None:
        self._done = True
        self._give_back()

    def _give_back(self) -> None:
        arenas = list(self._arenas.values())
        self._arenas.clear()
        if not arenas:
            return
        try:
            with self._device.context():
                _free(arenas)
        except CudaDriverError as error:
            logger.warning("freeing arenas of %s failed, and is tried again: %s", self._device.uuid, error)
            self._device.thread.post(functools.partial(_free, arenas))


def _free(arenas: Sequence[tuple[Allocation, Mapping | None]]) -> None:
    wait_before_unmapping()  # A copy from pageable memory returns before the device has it all.
    with ExitStack() as every:
        for allocation, mapping in arenas:
            every.callback(allocation.release)
            if mapping is not None:
                every.callback(mapping.close)

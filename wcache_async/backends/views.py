"""Tensors on arenas: one typed base per arena and dtype, and one view of it per manifest entry.

A view made the ordinary way is tracked by autograd: all weights of an arena would share one
version counter, so that updating one in place (a BatchNorm's running mean) would make autograd
refuse the others as modified.  Views made below autograd are plain tensors with a counter of
their own, and cheaper: 1.0 to 1.5 µs against 1.7 to 2.2 where this was measured.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from wcache_async.backends.collector import collector_held
from wcache_async.errors import InvalidManifest
from wcache_async.manifest import DTYPE_ITEMSIZE, StateManifest, TensorEntry, contiguous_stride

if TYPE_CHECKING:
    import torch

    MakeView = Callable[[tuple[int, ...], tuple[int, ...], int], torch.Tensor]
    """Shape, stride and offset, all in elements, to a tensor."""

__all__ = ["ArenaViews", "prepare_views"]


_REFUSALS = (RuntimeError, OverflowError, TypeError, IndexError)
"""What torch raises for sizes it cannot have: out of the arena, beyond 64 bits, of unlike lengths."""


class ArenaViews:
    """Makes the tensors of one validated manifest; each keeps its arena's memory alive.

    Tensors are ordinary ones whatever the calling thread's autograd mode is: not inference
    tensors, no views, and they require no grad.
    """

    def __init__(self, manifest: StateManifest, arenas: "Sequence[torch.Tensor]") -> None:
        """`arenas` are one-dimensional uint8 tensors, in the manifest's order."""
        self.manifest = manifest
        self._arenas = tuple(arenas)
        self._itemsizes = [DTYPE_ITEMSIZE[dtype] for dtype in manifest.dtypes]
        self._makers: list[list[MakeView | None]] = [[None] * len(manifest.dtypes) for _ in manifest.arenas]

    def tensor(self, entry: TensorEntry) -> "torch.Tensor":
        """A new tensor for `entry`.  Raises InvalidManifest where torch refuses its geometry."""
        import torch

        with torch.inference_mode(False), _below_autograd():
            try:
                make = self._makers[entry.arena][entry.dtype] or self._maker(entry)
                stride = entry.stride or contiguous_stride(entry.shape)
                return make(entry.shape, stride, entry.offset // self._itemsizes[entry.dtype])
            except _REFUSALS as error:
                raise InvalidManifest(tensor=entry.name, reason=str(error)) from error

    def tensors(self) -> "dict[str, torch.Tensor]":
        """Every tensor in the manifest's order, then every alias.  Raises InvalidManifest."""
        import torch

        built: dict[str, torch.Tensor] = {}
        makers, itemsizes = self._makers, self._itemsizes
        strides: dict[tuple[int, ...], tuple[int, ...]] = {}  # Models repeat few shapes.
        with collector_held(), torch.inference_mode(False), _below_autograd():
            entry = None
            try:
                for entry in self.manifest.tensors:
                    number = entry.dtype
                    shape = entry.shape
                    make = makers[entry.arena][number] or self._maker(entry)
                    stride = entry.stride or strides.get(shape)
                    if stride is None:
                        stride = strides[shape] = contiguous_stride(shape)
                    built[entry.name] = make(shape, stride, entry.offset // itemsizes[number])
            except _REFUSALS as error:
                raise InvalidManifest(tensor=entry.name if entry else "", reason=str(error)) from error
        for alias, target in self.manifest.aliases.items():
            built[alias] = built[target]
        return built

    def _maker(self, entry: TensorEntry) -> "MakeView":
        import torch

        arena = self._arenas[entry.arena]
        itemsize = self._itemsizes[entry.dtype]
        dtype: torch.dtype = getattr(torch, self.manifest.dtypes[entry.dtype])
        odd = arena.numel() % itemsize
        base = (arena[:-odd] if odd else arena).view(dtype)
        make: MakeView = base.as_strided if _skips_autograd() else functools.partial(_untracked_view, base)
        self._makers[entry.arena][entry.dtype] = make
        return make


def prepare_views() -> None:
    """Find out now what the first tensors of a process need to know, where torch is imported; takes 0.4 ms once."""
    if "torch" in sys.modules:
        _skips_autograd()


def _untracked_view(
    base: "torch.Tensor", shape: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> "torch.Tensor":
    """The same tensor through public API alone, at twice the time: `data` is no view and counts for itself."""
    return base.as_strided(shape, stride, offset).data


def _below_autograd() -> AbstractContextManager[object]:
    """While entered, this thread's operators skip autograd and its view tracking, where torch can."""
    import torch

    return torch._C._ExcludeDispatchKeyGuard(_autograd_keys()) if _skips_autograd() else nullcontext()


@functools.cache
def _autograd_keys() -> "torch._C.DispatchKeySet":
    import torch

    key = torch._C.DispatchKey
    keys = torch._C.DispatchKeySet(key.ADInplaceOrView)
    return keys | torch._C.DispatchKeySet(key.AutogradCPU) | torch._C.DispatchKeySet(key.AutogradCUDA)


@functools.cache
def _skips_autograd() -> bool:
    """Whether this torch's private dispatch guard exists and does what is wanted of it."""
    import torch

    try:
        # Nothing the caller's thread is set to may decide this once and for all.
        with torch.inference_mode(False):
            base = torch.frombuffer(bytearray(8), dtype=torch.float32)
            with torch._C._ExcludeDispatchKeyGuard(_autograd_keys()):
                view = base.as_strided((1,), (1,), 1)
            before = view._version
            # What an in-place operator does to it, without one: a process's first kernel takes 1 to 5 ms.
            torch.autograd.graph.increment_version(base)
            moved = view.data_ptr() - base.data_ptr()
            return not view._is_view() and view._version == before and moved == base.itemsize
    except (AttributeError, TypeError, RuntimeError):
        return False

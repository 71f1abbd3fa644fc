"""Compares tensors with a checkpoint: names, shapes, dtypes and every byte.

The checkpoint is read beside the tensors and let go chunk by chunk, so that comparing takes no
second copy of anything that is contiguous.
"""

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from wcache_async.identity.digests import StateDigester
from wcache_async.manifest import DTYPE_ITEMSIZE, StateSpec, TensorSpec, contiguous_stride
from wcache_async.sources.base import Source

if TYPE_CHECKING:
    import torch

__all__ = ["Comparison", "Difference", "What", "compare_with_source", "compare_with_spec"]

What = Literal[
    "missing",
    "unexpected",
    "shape",
    "dtype",
    "bytes",
    # Found by `cli.parity`:
    "stride",
    "kind",
    "persistence",
    "requires_grad",
    "ties",
    "storage",
    "wrapped",
    "digest",
]
"""In what a tensor can differ."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How one tensor differs: `checkpoint` and `client` are what each side has, as text.

    ``missing``: the checkpoint has it, the client does not; ``unexpected``: the other way
    round.  For ``bytes``, `offset` is that of the first that differs, counted as if the tensor
    were contiguous.
    """

    tensor: str
    what: What
    checkpoint: str
    client: str
    offset: int | None = None

    @property
    def where(self) -> str:
        """In what it differs, and where."""
        return self.what if self.offset is None else f"{self.what} at byte {self.offset}"

    def __str__(self) -> str:
        return f"{self.tensor}: {self.where}: checkpoint {self.checkpoint}, client {self.client}"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What was compared, `nbytes` of the checkpoint's storages among it, and every difference by tensor name."""

    tensors: int
    nbytes: int
    differences: Sequence[Difference]


def compare_with_source(
    source: Source,
    tensors: "Mapping[str, torch.Tensor]",
    progress: Callable[[int, int], None],
    *,
    threads: int | None = None,
) -> Comparison:
    """Compare `tensors` with what `source` reads.  Blocks.

    `progress` is called with bytes compared and in all.  Raises SourceError.
    """
    return compare_with_spec(source, source.open(), tensors, progress, threads=threads)


def compare_with_spec(
    source: Source,
    spec: StateSpec,
    tensors: "Mapping[str, torch.Tensor]",
    progress: Callable[[int, int], None],
    *,
    threads: int | None = None,
    digester: StateDigester | None = None,
) -> Comparison:
    """The same for a source that is open, and has told `spec`.

    `digester` is given the source's storages on which there is a tensor to compare.
    """
    specs = {tensor.name: tensor for tensor in spec.tensors}
    expected = specs | {alias: specs[target] for alias, target in spec.aliases.items()}
    differences = list(_structural(expected, tensors))
    unlike = {difference.tensor for difference in differences}
    pairs: dict[int, list[_Pair]] = {}
    for name, tensor in expected.items():
        if name not in unlike:
            pairs.setdefault(tensor.storage, []).append(_Pair(name, tensor, tensors[name]))

    lock = threading.Lock()
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            progress(done, spec.nbytes)

    def compare(storage: int) -> list[Difference]:
        nbytes = spec.storages[storage]
        if nbytes and storage in pairs:
            return _compare_storage(source, storage, nbytes, pairs[storage], advance, digester)
        if nbytes:
            advance(nbytes)
        elif digester is not None:
            digester.storage(storage).finish(memoryview(b""))
        return []

    with ThreadPoolExecutor(max_workers=threads or min(4, os.cpu_count() or 1)) as pool:
        for found in pool.map(compare, range(len(spec.storages))):
            differences += found
    differences.sort(key=lambda difference: difference.tensor)
    return Comparison(tensors=len(expected), nbytes=spec.nbytes, differences=differences)


@dataclass(slots=True)
class _Pair:
    """One tensor on both sides, of the same shape and dtype."""

    name: str
    spec: TensorSpec
    tensor: "torch.Tensor"
    difference: Difference | None = None

    @property
    def contiguous(self) -> bool:
        spec = self.spec
        stride = spec.stride or contiguous_stride(spec.shape)
        theirs = tuple(self.tensor.stride())
        wanted = contiguous_stride(spec.shape)
        # What is the stride of a dimension of size 1 makes no difference.
        return all(
            size <= 1 or (a == c and b == c) for size, a, b, c in zip(spec.shape, stride, theirs, wanted, strict=True)
        )

    def note(self, offset: int, checkpoint: int, client: int) -> None:
        self.difference = Difference(
            tensor=self.name,
            what="bytes",
            checkpoint=f"0x{checkpoint:02x}",
            client=f"0x{client:02x}",
            offset=offset,
        )


def _structural(expected: Mapping[str, TensorSpec], tensors: "Mapping[str, torch.Tensor]") -> Iterator[Difference]:
    for name, spec in expected.items():
        tensor = tensors.get(name)
        if tensor is None:
            yield Difference(tensor=name, what="missing", checkpoint=_text(spec.dtype, spec.shape), client="none")
            continue
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        if dtype != spec.dtype:
            yield Difference(tensor=name, what="dtype", checkpoint=spec.dtype, client=dtype)
        elif shape != spec.shape:
            yield Difference(tensor=name, what="shape", checkpoint=str(list(spec.shape)), client=str(list(shape)))
    for name in tensors.keys() - expected.keys():
        tensor = tensors[name]
        text = _text(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        yield Difference(tensor=name, what="unexpected", checkpoint="none", client=text)


def _text(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}{list(shape)}"


def _compare_storage(
    source: Source,
    storage: int,
    nbytes: int,
    pairs: Sequence[_Pair],
    advance: Callable[[int], None],
    digester: StateDigester | None,
) -> list[Difference]:
    """Read one storage and compare the tensors on it."""
    import torch

    # Private, or MADV_DONTNEED would give nothing back (madvise(2) on shared memory).
    buffer = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    read = torch.frombuffer(buffer, dtype=torch.uint8)
    flat = [pair for pair in pairs if pair.contiguous]
    rest = [pair for pair in pairs if not pair.contiguous]
    windows = [_Window(pair) for pair in flat if pair.tensor.numel()]
    digests = None if digester is None else digester.storage(storage)
    kept = bool(rest) or (digests is not None and digests.needs_whole)
    filled = 0

    def compare(count: int) -> None:
        nonlocal filled
        for window in windows:
            window.compare(read, filled, filled + count)
        start = filled - filled % mmap.PAGESIZE
        filled += count
        if not kept:
            # The last page may be half filled, and is given back with the next chunk.
            end = filled - filled % mmap.PAGESIZE
            if end > start:
                buffer.madvise(mmap.MADV_DONTNEED, start, end - start)
        advance(count)

    with memoryview(buffer) as into:
        source.read(storage, into, compare if digests is None else digests.watch(into, compare))
        if digests is not None:
            digests.finish(into)
    for pair in rest:
        _compare_strided(pair, read)
    return [pair.difference for pair in pairs if pair.difference is not None]


class _Window:
    """Where a contiguous tensor lies in its storage, and the client's bytes of it."""

    def __init__(self, pair: _Pair) -> None:
        self._pair = pair
        itemsize = DTYPE_ITEMSIZE[pair.spec.dtype]
        nbytes = pair.tensor.numel() * itemsize
        self._start = pair.spec.offset
        self._end = self._start + nbytes
        self._client = _bytes_of_storage(pair.tensor).narrow(0, pair.tensor.storage_offset() * itemsize, nbytes)

    def compare(self, read: "torch.Tensor", start: int, end: int) -> None:
        """Compare as far as bytes `start` to `end` of the storage, which `read` holds, reach into the tensor."""
        start, end = max(start, self._start), min(end, self._end)
        if start >= end or self._pair.difference is not None:
            return
        _compare_bytes(
            self._pair, start - self._start, read[start:end], self._client[start - self._start : end - self._start]
        )


def _bytes_of_storage(tensor: "torch.Tensor") -> "torch.Tensor":
    import torch

    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _compare_strided(pair: _Pair, read: "torch.Tensor") -> None:
    """Compare element by element, some rows of the first dimension at a time."""
    import torch

    itemsize = DTYPE_ITEMSIZE[pair.spec.dtype]
    # Bits, not values: NaN is equal to itself here, and a type that torch cannot copy is copied.
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[itemsize]
    shape = pair.spec.shape
    stride = pair.spec.stride or contiguous_stride(shape)
    ours = torch.empty(0, dtype=bits).set_(read.untyped_storage(), pair.spec.offset // itemsize, shape, stride)
    theirs = torch.empty(0, dtype=bits, device=pair.tensor.device).set_(
        pair.tensor.untyped_storage(), pair.tensor.storage_offset(), shape, tuple(pair.tensor.stride())
    )
    row_nbytes = ours[0].numel() * itemsize if ours.numel() else 0
    rows = max(_BLOCK // row_nbytes, 1) if row_nbytes else 1
    for first in range(0, shape[0] if row_nbytes else 0, rows):
        a, b = (side[first : first + rows].contiguous().view(-1).view(torch.uint8) for side in (ours, theirs))
        _compare_bytes(pair, first * row_nbytes, a, b)
        if pair.difference is not None:
            return


_BLOCK = 8 << 20


def _compare_bytes(pair: _Pair, offset: int, ours: "torch.Tensor", theirs: "torch.Tensor") -> None:
    """Note the first byte that differs, if any; `offset` is the first one's in the tensor."""
    theirs = theirs.cpu()
    at = _first_difference(ours.data_ptr(), theirs.data_ptr(), ours.numel())
    if at is not None:
        pair.note(offset + at, int(ours[at]), int(theirs[at]))


# Ten times as fast as torch.equal of uint8 (1.6 against 17 ms for 8 MiB), and without the GIL.
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.restype = ctypes.c_int
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def _first_difference(a: int, b: int, nbytes: int) -> int | None:
    """Index of the first byte that differs between two addresses; memcmp does not tell, so by halves."""
    if not _memcmp(a, b, nbytes):
        return None
    low, high = 0, nbytes
    while high - low > 1:
        middle = (low + high) // 2
        if _memcmp(a + low, b + low, middle - low):
            high = middle
        else:
            low = middle
    return low

"""Safetensors checkpoints: one file or shards, headers decoded typed, bytes read straight into place.

The format is an 8-byte little-endian header length, a JSON header, and the tensors' bytes
end to end: https://github.com/huggingface/safetensors#format.  Dtype names are those of
safetensors 0.8.
"""

import json
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from wcache_async.errors import SourceError
from wcache_async.manifest import DTYPE_ITEMSIZE, MAX_INT, StateSpec, TensorSpec
from wcache_async.sources.cast import cast_dtype
from wcache_async.sources.files import CheckpointFile, FileSource, StorageRange
from wcache_async.sources.locate import SAFETENSORS, Checkpoint, check_against_index

__all__ = ["DTYPES", "SafetensorsSource"]

DTYPES: dict[str, str] = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
}
"""torch's dtype by safetensors' name.  F6_E2M3 and F6_E3M2 have none."""

MAX_HEADER = 100_000_000
"""Bytes of the longest header safetensors itself reads or writes."""

_METADATA = "__metadata__"

_Size = Annotated[int, Meta(ge=0, le=MAX_INT)]


class _Entry(Struct, gc=False):
    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


class _Tensor(Struct, gc=False, frozen=True):
    """A checked entry: torch's dtype and shape, and the bytes it takes of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


_header_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_entry_decoder = msgspec.json.Decoder(_Entry)
_metadata_decoder = msgspec.json.Decoder(dict[str, str])


class SafetensorsSource(FileSource):
    """A safetensors file, or a set of shards; every tensor has a storage of its own.

    Neither opening nor reading needs torch, unless a cast changes something.
    """

    kind = SAFETENSORS

    def __init__(self, path: str, checkpoint: Checkpoint, dtype: str = "") -> None:
        super().__init__(path, dtype=dtype)
        self._checkpoint = checkpoint

    def _scan(self) -> tuple[StateSpec, Sequence[StorageRange]]:
        found: dict[str, str] = {}
        tensors: list[TensorSpec] = []
        ranges: list[StorageRange] = []
        for number, path in enumerate(self._checkpoint.files):
            for tensor in read_header(self._open_file(path)):
                if tensor.name in found:
                    raise SourceError(
                        path=path, tensor=tensor.name, reason=f"it stands twice: {found[tensor.name]} has it too"
                    )
                found[tensor.name] = path
                dtype = cast_dtype(tensor.dtype, self._dtype)
                tensors.append(TensorSpec(name=tensor.name, dtype=dtype, shape=tensor.shape, storage=len(ranges)))
                cast = dtype != tensor.dtype
                ranges.append(
                    StorageRange(
                        file=number,
                        offset=tensor.offset,
                        nbytes=tensor.nbytes,
                        tensor=tensor.name,
                        dtype=tensor.dtype if cast else "",
                        cast_to=dtype if cast else "",
                    )
                )
        check_against_index(self._checkpoint, found)
        if self._checkpoint.index:
            self._open_file(self._checkpoint.index)  # Part of the checkpoint: a new one means other shards.
        if not tensors:
            raise SourceError(path=self.path, reason="it holds no tensor")
        return StateSpec(storages=tuple(r.filled_nbytes for r in ranges), tensors=tuple(tensors)), ranges


def read_header(file: CheckpointFile) -> list[_Tensor]:
    """The file's tensors in the order of their bytes.  Raises SourceError for all that is wrong with it."""
    head = file.head(8)
    if len(head) < 8:
        raise SourceError(path=file.path, reason=f"it has {file.nbytes} bytes, too few for a safetensors header")
    length = int.from_bytes(head, "little")
    if length > MAX_HEADER:
        raise SourceError(
            path=file.path, reason=f"its header would be {length} bytes long, more than {MAX_HEADER}: not safetensors"
        )
    data_start = 8 + length
    if data_start > file.nbytes:
        raise SourceError(
            path=file.path, reason=f"its header is {length} bytes long, and the file ends after {file.nbytes}"
        )
    body = file.head(length, 8)
    try:
        header = _header_decoder.decode(body)
        if (metadata := header.pop(_METADATA, None)) is not None:
            _metadata_decoder.decode(metadata)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SourceError(path=file.path, reason=f"its header is no safetensors JSON: {error}") from error
    tensors = [_check_entry(file, name, raw, data_start) for name, raw in header.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    _check_duplicates(file, body, len(tensors))
    _check_coverage(file, tensors, data_start)
    return tensors


def _check_entry(file: CheckpointFile, name: str, raw: msgspec.Raw, data_start: int) -> _Tensor:
    try:
        entry = _entry_decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SourceError(path=file.path, tensor=name, reason=f"its header entry does not decode: {error}") from error
    dtype = DTYPES.get(entry.dtype)
    if dtype is None:
        raise SourceError(
            path=file.path,
            tensor=name,
            reason=f"torch has no dtype for {entry.dtype!r}; known are {', '.join(DTYPES)}",
        )
    shape = entry.shape
    if entry.dtype == "F4":
        # safetensors counts 4-bit elements, torch pairs of them.
        if not shape or shape[-1] % 2:
            raise SourceError(path=file.path, tensor=name, reason=f"shape {list(shape)} of F4 has no pairs to pack")
        shape = (*shape[:-1], shape[-1] // 2)
    begin, end = entry.data_offsets
    expected = _count(shape) * DTYPE_ITEMSIZE[dtype]
    if expected > MAX_INT:
        raise SourceError(path=file.path, tensor=name, reason=f"shape {_short(entry.shape)} overflows")
    if 0 in shape:
        expected = 0
    if end - begin != expected:
        raise SourceError(
            path=file.path,
            tensor=name,
            reason=f"{entry.dtype} of shape {_short(entry.shape)} takes {expected} bytes, its offsets "
            f"[{begin}, {end}] span {end - begin}",
        )
    return _Tensor(name, dtype, shape, data_start + begin, expected)


def _count(shape: Sequence[int]) -> int:
    """Elements, sizes of 0 taken for 1, or something beyond MAX_INT: strides multiply that way.

    Stops there, as a hostile header's product of a million sizes takes minutes.
    """
    count = 1
    for size in shape:
        count *= max(size, 1)
        if count > MAX_INT:
            break
    return count


def _short(shape: tuple[int, ...]) -> str:
    return str(list(shape)) if len(shape) <= 16 else f"[{', '.join(map(str, shape[:16]))}, … {len(shape)} sizes]"


def _check_duplicates(file: CheckpointFile, body: bytes, tensors: int) -> None:
    """Raises SourceError where a name stands twice: decoding kept the last and dropped the others."""
    # Exactly one per tensor, unless somebody has a tensor or metadata called so: only then look closer.
    if body.count(b'"data_offsets"') == tensors:
        return
    names: list[str] = []

    def note(pairs: list[tuple[str, object]]) -> None:
        names[:] = [key for key, _ in pairs]

    try:
        json.loads(body, object_pairs_hook=note)
    except (ValueError, RecursionError) as error:  # It reads what the typed decoder skipped unread.
        raise SourceError(path=file.path, reason=f"its header is no safetensors JSON: {error}") from error
    seen: set[str] = set()
    for name in names:  # The outermost object ends last.
        if name in seen:
            raise SourceError(path=file.path, tensor=name, reason="its name stands twice in the header")
        seen.add(name)


def _check_coverage(file: CheckpointFile, tensors: Sequence[_Tensor], data_start: int) -> None:
    """Raises SourceError unless the tensors' bytes follow one another to the file's very end."""
    position, previous = data_start, ""
    for tensor in tensors:
        if tensor.offset < position:
            raise SourceError(
                path=file.path,
                tensor=tensor.name,
                reason=f"its bytes from {tensor.offset - data_start} on overlap those of {previous!r}, "
                f"which end at {position - data_start}",
            )
        if tensor.offset > position:
            raise SourceError(
                path=file.path,
                tensor=tensor.name,
                reason=f"bytes {position - data_start} to {tensor.offset - data_start} before it belong to no tensor",
            )
        position, previous = tensor.offset + tensor.nbytes, tensor.name
        if position > file.nbytes:
            raise SourceError(
                path=file.path,
                tensor=tensor.name,
                reason=f"its bytes end at {position} and the file at {file.nbytes}: the file is truncated",
            )
    if position != file.nbytes:
        raise SourceError(
            path=file.path, tensor=previous, reason=f"{file.nbytes - position} bytes after it belong to no tensor"
        )

"""What a state is: its tensors, where they lie in its arenas, and the configuration it was built with.

Pure: no torch, no asyncio, no socket.  A state's tensors are views of *storages*; a storage is
shared by every tensor that points into it, and is laid into an *arena*, one contiguous
shareable allocation.  `TensorSpec` and `StateSpec` say what is to be laid out, `plan_layout`
decides where, and `StateManifest` records the result: what a client needs to build every
tensor from its arenas.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import IntEnum
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from wcache_async.errors import InvalidManifest, Scalar

__all__ = [
    "ALIGNMENT",
    "DTYPE_ITEMSIZE",
    "Arena",
    "Config",
    "Cut",
    "FileStamp",
    "Kind",
    "Layout",
    "ModuleRecord",
    "Origin",
    "StateManifest",
    "StateSpec",
    "TensorEntry",
    "TensorSpec",
    "WrappedTensor",
    "build_manifest",
    "compare_config",
    "contiguous_stride",
    "decode_manifest",
    "encode_manifest",
    "plan_layout",
    "spec_of",
    "tensor_extent",
    "validate_manifest",
]

Config = dict[str, Scalar]

ALIGNMENT = 64
"""Bytes every storage is aligned to in an arena: a cache line, and more than any dtype needs."""

MAX_INT = 2**63 - 1
MAX_DIMENSIONS = 64
"""Dimensions a tensor may have: what torch's iterators take (TensorIterator, at::DimVector)."""

NonNegative = Annotated[int, Meta(ge=0, le=MAX_INT)]
Unsigned = Annotated[int, Meta(ge=0)]
"""Up to 64 bits, as an inode's number may have."""

DTYPE_ITEMSIZE: dict[str, int] = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("float8_e8m0fnu", "float4_e2m1fn_x2", "bits8", "bits1x8", "bits2x4", "bits4x2"), 1),
    **{f"{sign}int{bits}": 1 for sign in ("", "u") for bits in range(1, 8)},
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16", "bits16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32", "complex32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 8),
    "complex128": 16,
}
"""Bytes of one element, by torch's dtype name: every dtype torch can view from bytes.

Sub-byte dtypes are packed, and count in elements of one byte, as in torch.  torch's quantized
dtypes (qint8, …) are left out: their tensors carry a quantizer beside their bytes.
"""

MAX_ITEMSIZE = max(DTYPE_ITEMSIZE.values())


class Kind(IntEnum):
    """What a tensor is to its module."""

    PARAMETER = 0
    BUFFER = 1
    """A persistent buffer: part of the state dict."""
    NON_PERSISTENT_BUFFER = 2
    """A buffer left out of the state dict."""
    ATTRIBUTE = 3
    """A tensor held as a plain attribute: neither parameter nor buffer."""
    INNER = 4
    """A part of a wrapping tensor (a tensor subclass), see `WrappedTensor`."""


class WrappedTensor(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tensor subclass that was taken apart: what wraps the `INNER` tensors named after it.

    `type` is its class's qualified name, `inner` its attributes that are tensors: attribute
    ``scale`` of ``layer.weight`` is the tensor, or again the wrapped tensor, ``layer.weight.scale``.
    `context` is the rest of it as text, to be compared with the receiver's own, and `scalars` what
    a registered pair of functions keeps of it.  A further name of the same object has the first
    name in `alias_of` and no parts.
    """

    type: str
    kind: Kind
    inner: tuple[str, ...] = ()
    context: str = ""
    scalars: Config = {}
    shape: tuple[NonNegative, ...] = ()
    stride: tuple[NonNegative, ...] = ()
    requires_grad: bool = False
    alias_of: str = ""


class ModuleRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a module is beside its tensors; a state with one is bound exactly or not at all.

    `training` is the mode of its root, `other_mode` names the submodules in the other one;
    `scalars` are the plain attributes its classes list for export, by full name;
    `alias_kinds` holds the kind of each alias that differs from its target's.  `documents` are
    texts by name that whoever builds the module again needs, such as its ``config.json``.
    """

    training: bool = False
    other_mode: tuple[str, ...] = ()
    scalars: Config = {}
    wrapped: dict[str, WrappedTensor] = {}
    alias_kinds: dict[str, Kind] = {}
    documents: dict[str, str] = {}


class Cut(Struct, array_like=True, frozen=True, gc=False):
    """Which part of a larger tensor a state's tensor is: the share that one of `ranks` has under tensor parallelism.

    The whole consists of `parts`, sizes in elements along dimension `dim`.  Of each part rank
    number `rank` has an equal slice, and these stand one after the other in its tensor.
    """

    dim: NonNegative
    parts: tuple[NonNegative, ...]
    rank: NonNegative
    ranks: NonNegative

    def __str__(self) -> str:
        return f"part {self.rank} of {self.ranks} along dimension {self.dim} of {'+'.join(map(str, self.parts))}"


class TensorSpec(Struct, frozen=True, gc=False, kw_only=True):
    """One tensor of a state before it is laid out.

    `shape` and `stride` count elements; an empty `stride` means contiguous.  `offset` is where
    the first element stands in `storage`, in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    storage: int
    offset: int = 0
    stride: tuple[int, ...] = ()
    kind: Kind = Kind.PARAMETER
    requires_grad: bool = False


class StateSpec(Struct, frozen=True, kw_only=True):
    """A whole state before it is laid out: bytes of each storage, and the tensors on them.

    `aliases` maps a further name to the name of the tensor it is another name of (the same
    object: a tied weight).  Two tensors with different views of one storage are two
    `TensorSpec`s on it, and no aliases.  `cuts` has the tensors that are parts of larger ones.
    """

    storages: tuple[int, ...]
    tensors: tuple[TensorSpec, ...]
    aliases: dict[str, str] = {}
    module: ModuleRecord | None = None
    cuts: dict[str, Cut] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all storages together."""
        return sum(self.storages)


class TensorEntry(Struct, array_like=True, frozen=True, gc=False):
    """One tensor of a state as the manifest carries it.

    Field order is the wire's: append only.  `dtype` is an index into `StateManifest.dtypes`;
    `offset` is the first element's byte offset in arena number `arena`; an empty `stride`
    means contiguous; `storage` numbers the storage, so that tensors sharing one can be told.
    """

    name: str
    dtype: NonNegative
    shape: tuple[NonNegative, ...]
    offset: NonNegative
    storage: NonNegative
    arena: NonNegative = 0
    stride: tuple[NonNegative, ...] = ()
    kind: Kind = Kind.PARAMETER
    requires_grad: bool = False


class Arena(Struct, array_like=True, frozen=True, gc=False):
    """One shareable allocation of `nbytes` bytes on `device` (``cpu``, or a GPU's UUID)."""

    nbytes: NonNegative
    device: str = "cpu"


class StateManifest(Struct, array_like=True, frozen=True):
    """What a state is: an entry per tensor, further names, arenas, the dtypes in use, and what is part of what.

    Field order is the wire's: append only.
    """

    dtypes: tuple[str, ...]
    arenas: tuple[Arena, ...]
    tensors: tuple[TensorEntry, ...]
    aliases: dict[str, str] = {}
    module: ModuleRecord | None = None
    cuts: dict[str, Cut] = {}

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all arenas together, padding included."""
        return sum(arena.nbytes for arena in self.arenas)

    def dtype_of(self, entry: TensorEntry) -> str:
        """torch's name of the entry's dtype."""
        return self.dtypes[entry.dtype]


class FileStamp(Struct, array_like=True, frozen=True, gc=False):
    """A file as it was when a state was read from it: `path` as the kernel has it, the rest of its stat(2).

    Field order is the wire's: append only.
    """

    path: bytes
    device: Unsigned
    inode: Unsigned
    size: Unsigned
    mtime_ns: int


class Origin(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The files a state was read from.

    `mount_namespace` tells whether their paths mean the same to another process (0: cannot be
    told), `local` that all stand on file systems that answer at once.
    """

    files: tuple[FileStamp, ...]
    mount_namespace: Unsigned = 0
    local: bool = False


class Layout(Struct, frozen=True, kw_only=True):
    """Where each storage goes: ``(arena number, byte offset)`` by storage, and each arena's bytes."""

    places: tuple[tuple[int, int], ...]
    arena_nbytes: tuple[int, ...]


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The stride, in elements, of a C-contiguous tensor of that shape, as torch gives it."""
    stride = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        stride[i] = stride[i + 1] * max(shape[i + 1], 1)
    return tuple(stride)


def plan_layout(
    storages: Sequence[int], *, alignment: int = ALIGNMENT, granularity: int = ALIGNMENT, max_arena: int = 0
) -> Layout:
    """Lay storages of the given byte counts into arenas, in order.

    Each storage starts at a multiple of `alignment`, each arena's size is a multiple of
    `granularity`.  With `max_arena` no arena exceeds that many bytes, rounded down to a
    multiple of `granularity` (a larger storage gets an arena alone), and a storage goes into
    the first arena with room; without it there is one arena.  No storages, or only empty ones,
    need no arena's bytes but still get a place in one of `granularity` bytes, so that there is
    always an fd to map.
    """
    if max_arena:
        max_arena = max(max_arena // granularity, 1) * granularity
    places: list[tuple[int, int]] = []
    fill: list[int] = []
    open_from = 0  # Arenas before this one are full.
    for nbytes in storages:
        target = -1
        for number in range(open_from, len(fill)):
            if not max_arena or _round_up(fill[number], alignment) + nbytes <= max_arena:
                target = number
                break
        if target < 0:
            target = len(fill)
            fill.append(0)
        offset = _round_up(fill[target], alignment)
        places.append((target, offset))
        fill[target] = offset + nbytes
        while max_arena and open_from < len(fill) and _round_up(fill[open_from], alignment) >= max_arena:
            open_from += 1
    sizes = tuple(max(_round_up(n, granularity), granularity) for n in fill or [0])
    return Layout(places=tuple(places), arena_nbytes=sizes)


def build_manifest(spec: StateSpec, layout: Layout, devices: Sequence[str] = ()) -> StateManifest:
    """The manifest of `spec` laid out as `layout`; `devices` names each arena's (default ``cpu``)."""
    dtypes = tuple(dict.fromkeys(t.dtype for t in spec.tensors))
    number = {name: i for i, name in enumerate(dtypes)}
    entries = []
    for t in spec.tensors:
        arena, start = layout.places[t.storage]
        stride = () if t.stride == contiguous_stride(t.shape) else t.stride
        entries.append(
            TensorEntry(
                t.name, number[t.dtype], t.shape, start + t.offset, t.storage, arena, stride, t.kind, t.requires_grad
            )
        )
    arenas = tuple(Arena(nbytes, devices[i] if devices else "cpu") for i, nbytes in enumerate(layout.arena_nbytes))
    return StateManifest(dtypes, arenas, tuple(entries), dict(spec.aliases), spec.module, dict(spec.cuts))


def spec_of(manifest: StateManifest) -> tuple[StateSpec, list[tuple[int, int]]]:
    """A valid manifest as a spec that can be laid out anew, and where each of its storages starts.

    The starts are ``(arena number, byte offset)`` by storage.  A storage is what its tensors
    reach, from a multiple of ALIGNMENT on.
    """
    storages: dict[int, tuple[int, int, int]] = {}  # arena, start, end
    for entry in manifest.tensors:
        nbytes = tensor_extent(entry) * DTYPE_ITEMSIZE[manifest.dtype_of(entry)]
        low, high = entry.offset - entry.offset % ALIGNMENT, entry.offset + nbytes
        _, start, end = storages.get(entry.storage, (0, low, low))
        if nbytes:
            storages[entry.storage] = (entry.arena, low if start == end else min(start, low), max(end, high))
        else:
            storages.setdefault(entry.storage, (entry.arena, low, low))
    number = {storage: i for i, storage in enumerate(storages)}
    tensors = tuple(
        TensorSpec(
            name=entry.name,
            dtype=manifest.dtype_of(entry),
            shape=entry.shape,
            storage=number[entry.storage],
            offset=entry.offset - storages[entry.storage][1] if tensor_extent(entry) else 0,
            stride=entry.stride or contiguous_stride(entry.shape),
            kind=entry.kind,
            requires_grad=entry.requires_grad,
        )
        for entry in manifest.tensors
    )
    spec = StateSpec(
        storages=tuple(end - start for _, start, end in storages.values()),
        tensors=tensors,
        aliases=dict(manifest.aliases),
        module=manifest.module,
        cuts=dict(manifest.cuts),
    )
    return spec, [(arena, start) for arena, start, _ in storages.values()]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(StateManifest)


def encode_manifest(manifest: StateManifest) -> bytes:
    """The manifest as msgpack.  Raises InvalidManifest for names msgpack cannot carry (lone surrogates)."""
    try:
        return _encoder.encode(manifest)
    except (UnicodeEncodeError, OverflowError) as error:
        raise InvalidManifest(tensor="", reason=f"it cannot be encoded: {error}") from error


def decode_manifest(body: bytes) -> StateManifest:
    """The manifest in `body`, validated.  Raises InvalidManifest."""
    try:
        manifest = _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidManifest(tensor="", reason=f"it does not decode: {error}") from error
    validate_manifest(manifest)
    return manifest


def validate_manifest(manifest: StateManifest) -> None:
    """Check that every tensor lies inside its arena and every alias names a tensor.

    Tensors may overlap: they share storages.  Decoding has already refused negative numbers
    and those beyond 63 bits.  Raises InvalidManifest naming the tensor.
    """
    itemsizes = []
    for dtype in manifest.dtypes:
        if dtype not in DTYPE_ITEMSIZE:
            raise InvalidManifest(tensor="", reason=f"dtype {dtype!r} is unknown")
        itemsizes.append(DTYPE_ITEMSIZE[dtype])
    differentiable = [dtype.startswith(("float", "bfloat", "complex")) for dtype in manifest.dtypes]
    arena_nbytes = [arena.nbytes for arena in manifest.arenas]
    if 0 in arena_nbytes:
        raise InvalidManifest(tensor="", reason=f"arena {arena_nbytes.index(0)} has no bytes")
    several_arenas = len(arena_nbytes) > 1
    # Models repeat few shapes: what each reaches is computed once.
    reaches: dict[tuple[int, tuple[int, ...], tuple[int, ...]], tuple[int, int]] = {}
    arena_of: dict[int, int] = {}
    for entry in manifest.tensors:
        key = (entry.dtype, entry.shape, entry.stride)
        try:
            nbytes, itemsize = reaches.get(key) or reaches.setdefault(key, _reach(entry, itemsizes[entry.dtype]))
            limit = arena_nbytes[entry.arena]
        except IndexError:
            raise InvalidManifest(
                tensor=entry.name,
                reason=f"dtype number {entry.dtype} of {len(itemsizes)}, arena number {entry.arena} "
                f"of {len(arena_nbytes)}",
            ) from None
        offset = entry.offset
        if offset + nbytes > limit:
            raise InvalidManifest(
                tensor=entry.name, reason=f"bytes {offset} to {offset + nbytes} of an arena of {limit}"
            )
        if offset % itemsize:
            raise InvalidManifest(
                tensor=entry.name, reason=f"offset {offset} is no multiple of its {itemsize}-byte elements"
            )
        if several_arenas and arena_of.setdefault(entry.storage, entry.arena) != entry.arena:
            raise InvalidManifest(
                tensor=entry.name,
                reason=f"storage {entry.storage} is in arenas {arena_of[entry.storage]} and {entry.arena}",
            )
        if entry.requires_grad and not differentiable[entry.dtype]:
            raise InvalidManifest(tensor=entry.name, reason=f"a {manifest.dtype_of(entry)} tensor that requires grad")
    names = {entry.name for entry in manifest.tensors}
    if len(names) != len(manifest.tensors):
        raise InvalidManifest(tensor=_repeated(manifest.tensors), reason="its name stands twice")
    for alias, target in manifest.aliases.items():
        if target not in names:
            raise InvalidManifest(tensor=alias, reason=f"it is an alias of {target!r}, which is no tensor")
        if alias in names:
            raise InvalidManifest(tensor=alias, reason="it is both a tensor and an alias")
    if manifest.cuts:
        _validate_cuts(manifest)
    if manifest.module is not None:
        _validate_wrapped(manifest.module.wrapped, names | manifest.aliases.keys())


def _validate_cuts(manifest: StateManifest) -> None:
    shapes = {entry.name: entry.shape for entry in manifest.tensors}
    for name, cut in manifest.cuts.items():
        shape = shapes.get(name)
        if shape is None:
            raise InvalidManifest(tensor=name, reason="it is part of a larger tensor, and is not there")
        whole = sum(cut.parts)
        consistent = cut.rank < cut.ranks and cut.dim < len(shape) and not any(part % cut.ranks for part in cut.parts)
        if not consistent or shape[cut.dim] * cut.ranks != whole:
            raise InvalidManifest(
                tensor=name,
                reason=f"shape {shape} as part {cut.rank} of {cut.ranks} of {len(cut.parts)} parts that add up to "
                f"{whole} along dimension {cut.dim}",
            )


def _validate_wrapped(wrapped: Mapping[str, WrappedTensor], names: AbstractSet[str]) -> None:
    for name, tensor in wrapped.items():
        if name in names:
            raise InvalidManifest(tensor=name, reason="it is both a tensor and a wrapped tensor")
        parts = [f"{name}.{attribute}" for attribute in tensor.inner]
        missing = [part for part in parts if part not in names and part not in wrapped]
        if missing or (tensor.alias_of and tensor.alias_of not in wrapped):
            raise InvalidManifest(tensor=name, reason=f"its part {(missing or [tensor.alias_of])[0]!r} is missing")
        if tensor.alias_of and wrapped[tensor.alias_of].alias_of:
            raise InvalidManifest(tensor=name, reason=f"it is an alias of {tensor.alias_of!r}, which is none itself")


def _reach(entry: TensorEntry, itemsize: int) -> tuple[int, int]:
    """Bytes from the tensor's first to one past its last, and bytes of an element."""
    return tensor_extent(entry) * itemsize, itemsize


def tensor_extent(entry: TensorEntry) -> int:
    """Elements from the first to one past the last that the tensor reaches."""
    shape, stride = entry.shape, entry.stride
    if max(len(shape), len(stride)) > MAX_DIMENSIONS:
        raise InvalidManifest(tensor=entry.name, reason=f"{len(shape)} dimensions with {len(stride)} strides")
    if stride and len(stride) != len(shape):
        raise InvalidManifest(tensor=entry.name, reason=f"shape {shape} with stride {stride}")
    # Empty dimensions count as one: torch multiplies the others up for the stride all the same.
    if math.prod(max(size, 1) for size in shape) > MAX_INT // MAX_ITEMSIZE:
        raise InvalidManifest(tensor=entry.name, reason=f"shape {shape} overflows")
    count = math.prod(shape)
    if not count or not stride:
        return count
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _repeated(entries: Iterable[TensorEntry]) -> str:
    seen: set[str] = set()
    for entry in entries:
        if entry.name in seen:
            return entry.name
        seen.add(entry.name)
    return ""


def compare_config(expected: Mapping[str, Scalar], actual: Mapping[str, Scalar]) -> dict[str, list[Scalar]]:
    """The fields of `expected` that `actual` has otherwise, each as ``[expected, actual]``.

    A field the state does not have counts as None.  Booleans are not numbers here.
    """
    return {
        field: [want, actual.get(field)]
        for field, want in expected.items()
        if actual.get(field) != want or isinstance(actual.get(field), bool) != isinstance(want, bool)
    }


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple

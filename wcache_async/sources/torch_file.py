"""Checkpoints written by `torch.save`: their tensors as views of byte ranges of the file."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from wcache_async.errors import SourceError
from wcache_async.manifest import DTYPE_ITEMSIZE, Kind, StateSpec, TensorSpec
from wcache_async.sources.cast import cast_dtype
from wcache_async.sources.files import FileSource, StorageRange
from wcache_async.sources.locate import TORCH, Checkpoint, check_against_index
from wcache_async.sources.state_dict import select_tensors
from wcache_async.sources.unpickle import Regions, unpickle

if TYPE_CHECKING:
    import torch

__all__ = ["TorchFileSource"]

TRIM = 64
"""Storages are cut at multiples of this many bytes, so that their tensors' alignment stays what it was."""


class TorchFileSource(FileSource):
    """A ``.pt``, ``.pth``, ``.bin`` or ``.ckpt`` file, or Hugging Face's shards of them.

    Tensors that share a storage still do, with stride and distance as they were; the storage is
    cut to what they reach.  One tensor under two names is one tensor and an alias; so are two
    equal views of one storage, as `Module.state_dict` detaches a tied weight once per name.
    A plain tensor counts as a buffer only where the file holds Parameters, and so tells them
    apart.  A storage seen through several dtypes cannot be cast.
    """

    kind = TORCH

    def __init__(self, path: str, checkpoint: Checkpoint, dtype: str = "") -> None:
        super().__init__(path, dtype=dtype)
        self._checkpoint = checkpoint

    def _scan(self) -> tuple[StateSpec, Sequence[StorageRange]]:
        found: dict[str, str] = {}
        tensors: list[TensorSpec] = []
        aliases: dict[str, str] = {}
        ranges: list[StorageRange] = []
        for number, path in enumerate(self._checkpoint.files):
            content = unpickle(self._open_file(path))
            selected = select_tensors(path, content.value)
            for name in selected:
                if name in found:
                    raise SourceError(path=path, tensor=name, reason=f"it stands twice: {found[name]} has it too")
                found[name] = path
            storages = _by_storage(_distinct_views(selected, aliases))
            parts = [_storage_range(path, number, views, content.regions, self._dtype) for views in storages]
            # The older format keeps storages in another order than the pickle names them.
            for part, views in sorted(zip(parts, storages, strict=True), key=lambda each: each[0].offset):
                tensors += _tensor_specs(views, part, len(ranges))
                ranges.append(part)
        check_against_index(self._checkpoint, found)
        if self._checkpoint.index:
            self._open_file(self._checkpoint.index)  # Part of the checkpoint: a new one means other shards.
        nbytes = tuple(part.filled_nbytes for part in ranges)
        return StateSpec(storages=nbytes, tensors=tuple(tensors), aliases=aliases), ranges


class _View(Struct, frozen=True):
    """A tensor as a view of memory: addresses of its storage and its first element, bytes it reaches.

    All three are 0 where it has no element.
    """

    storage: int
    address: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    kind: Kind
    requires_grad: bool


def _distinct_views(tensors: "Mapping[str, torch.Tensor]", aliases: dict[str, str]) -> dict[str, _View]:
    """Each tensor's view once, under its first name; further names go into `aliases`."""
    import torch

    tells_kinds = any(isinstance(tensor, torch.nn.Parameter) for tensor in tensors.values())
    views: dict[str, _View] = {}
    name_of: dict[int | _View, str] = {}
    for name, tensor in tensors.items():
        is_buffer = tells_kinds and not isinstance(tensor, torch.nn.Parameter)
        view = _view(tensor, Kind.BUFFER if is_buffer else Kind.PARAMETER)
        # Tensors without elements all look alike: only the object tells them apart.
        identity = view if view.nbytes else id(tensor)
        first = name_of.setdefault(identity, name)
        if first == name:
            views[name] = view
        else:
            aliases[name] = first
    return views


def _view(tensor: "torch.Tensor", kind: Kind) -> _View:
    dtype = str(tensor.dtype).removeprefix("torch.")
    itemsize = DTYPE_ITEMSIZE[dtype]
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    if not tensor.numel():
        return _View(0, 0, 0, dtype, shape, stride, kind, tensor.requires_grad)
    reach = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    storage = tensor.untyped_storage().data_ptr()
    address = storage + int(tensor.storage_offset()) * itemsize
    return _View(storage, address, reach * itemsize, dtype, shape, stride, kind, tensor.requires_grad)


def _by_storage(views: Mapping[str, _View]) -> list[dict[str, _View]]:
    """The views that share a storage together; each one without elements alone."""
    groups: dict[int | str, dict[str, _View]] = {}
    for name, view in views.items():
        groups.setdefault(view.storage or name, {})[name] = view
    return list(groups.values())


def _start(views: Mapping[str, _View]) -> int:
    """The address from which on the views' storage is kept."""
    storage = next(iter(views.values())).storage
    reached = min(view.address for view in views.values())
    return reached - (reached - storage) % TRIM


def _storage_range(path: str, file: int, views: Mapping[str, _View], regions: Regions, cast_to: str) -> StorageRange:
    """What of the file the storage under `views` is.  Raises SourceError."""
    tensor = next(iter(views))
    start = _start(views)
    nbytes = max(view.address + view.nbytes for view in views.values()) - start
    offset = regions.offset_of(start, nbytes) if nbytes else 0
    if offset is None:
        raise SourceError(path=path, tensor=tensor, reason="its bytes are not in the file")
    dtypes = sorted({view.dtype for view in views.values()})
    if not any(cast_dtype(dtype, cast_to) != dtype for dtype in dtypes):
        return StorageRange(file=file, offset=offset, nbytes=nbytes, tensor=tensor)
    if len(dtypes) > 1:
        raise SourceError(
            path=path,
            tensor=tensor,
            reason=f"{', '.join(views)} share one storage as {', '.join(dtypes)}, and a cast to {cast_to} would part "
            "them; load it without a cast",
        )
    return StorageRange(file=file, offset=offset, nbytes=nbytes, tensor=tensor, dtype=dtypes[0], cast_to=cast_to)


def _tensor_specs(views: Mapping[str, _View], part: StorageRange, storage: int) -> list[TensorSpec]:
    start = _start(views)
    return [
        TensorSpec(
            name=name,
            dtype=part.cast_to or view.dtype,
            shape=view.shape,
            storage=storage,
            offset=part.filled_offset(view.address - start),
            stride=view.stride,
            kind=view.kind,
            requires_grad=view.requires_grad,
        )
        for name, view in views.items()
    ]

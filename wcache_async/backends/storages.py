"""What a set of tensors is made of: their storages, once each, and how every tensor lies on them."""

from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wcache_async.errors import ExportError
from wcache_async.manifest import ALIGNMENT, DTYPE_ITEMSIZE, Kind, StateSpec, TensorSpec

if TYPE_CHECKING:
    import torch

__all__ = ["StorageRegion", "describe_tensors", "refusal"]


@dataclass(frozen=True)
class StorageRegion:
    """The bytes of one storage that some tensor reaches."""

    address: int
    nbytes: int
    tensors: "tuple[torch.Tensor, ...]"
    """Those on it; they keep it alive."""


def refusal(tensor: "torch.Tensor", devices: Collection[str]) -> str | None:
    """Why the bytes of `tensor` cannot be shared as they lie, or None; `devices` are torch device types."""
    try:
        return _refusal(tensor, devices)
    except (RuntimeError, ValueError) as error:  # Lazy and wrapping tensors raise from whatever they are asked.
        return str(error)


def _refusal(tensor: "torch.Tensor", devices: Collection[str]) -> str | None:
    kind = type(tensor).__name__
    if tensor.is_meta:
        return "it is on the meta device and has no bytes"
    if tensor.device.type not in devices:
        return f"it is on {tensor.device}, and only {', '.join(sorted(devices))} is carried"
    if tensor.is_quantized:
        return "it is quantized, and its quantizer is no tensor; share its int_repr() and scales"
    if tensor.is_nested or str(tensor.layout) != "torch.strided":
        return f"its layout is {tensor.layout}{' (nested)' if tensor.is_nested else ''}, not torch.strided"
    if hasattr(tensor, "__tensor_flatten__"):
        return f"a {kind} wraps other tensors; share those"
    if tensor.is_conj() or tensor.is_neg():
        return "it is a lazy conjugate or negation; call resolve_conj() or resolve_neg()"
    if _dtype_name(tensor) not in DTYPE_ITEMSIZE:
        return f"its dtype {tensor.dtype} is unknown"
    if tensor.untyped_storage().device.type != tensor.device.type:
        return f"a {kind} has no memory of its own"
    return None


def describe_tensors(
    state_tensors: "Mapping[str, tuple[torch.Tensor, bool]]",
    *,
    backend: str,
    devices: Collection[str],
    non_persistent: AbstractSet[str] = frozenset(),
    kinds: Mapping[str, Kind] | None = None,
) -> tuple[StateSpec, list[StorageRegion]]:
    """The spec of `state_tensors`, and where the bytes of each of its storages are now.

    A storage is told by the address it starts at, so tensors that share memory go on sharing
    it; one object under two names is one tensor and an alias.  Of a storage only the part
    that its tensors reach is taken.  `kinds` says what a tensor is where neither `is_param` nor
    `non_persistent` can.  Raises ExportError.
    """
    names: dict[int, str] = {}
    aliases: dict[str, str] = {}
    tensors: list[tuple[str, torch.Tensor, bool, int]] = []
    numbers: dict[int, int] = {}
    members: list[list[torch.Tensor]] = []
    for name, (tensor, is_param) in state_tensors.items():
        first = names.setdefault(id(tensor), name)
        if first != name:
            aliases[name] = first
            continue
        reason = refusal(tensor, devices)
        if reason is not None:
            raise ExportError(backend=backend, tensor=name, reason=reason)
        start = tensor.untyped_storage().data_ptr()
        # Storages without memory all start at 0, and have nothing to share.
        number = numbers.setdefault(start, len(members)) if start else len(members)
        if number == len(members):
            members.append([])
        members[number].append(tensor)
        tensors.append((name, tensor, is_param, number))
    regions = [_region(on_it) for on_it in members]
    specs = []
    for name, tensor, is_param, number in tensors:
        kind = Kind.PARAMETER
        if not is_param:
            kind = Kind.NON_PERSISTENT_BUFFER if name in non_persistent else Kind.BUFFER
        kind = kind if kinds is None else kinds[name]
        specs.append(
            TensorSpec(
                name=name,
                dtype=_dtype_name(tensor),
                shape=tuple(tensor.shape),
                storage=number,
                offset=_address(tensor) - regions[number].address if tensor.numel() else 0,
                stride=tensor.stride(),
                kind=kind,
                requires_grad=tensor.requires_grad,
            )
        )
    return StateSpec(storages=tuple(r.nbytes for r in regions), tensors=tuple(specs), aliases=aliases), regions


def _region(tensors: "list[torch.Tensor]") -> StorageRegion:
    start = tensors[0].untyped_storage().data_ptr()
    reached = [(_address(t), _address(t) + _extent(t) * t.element_size()) for t in tensors if t.numel()]
    if not reached:
        return StorageRegion(start, 0, tuple(tensors))
    low = min(first for first, _ in reached)
    low -= (low - start) % ALIGNMENT  # Keeps every tensor's alignment within the storage.
    return StorageRegion(low, max(last for _, last in reached) - low, tuple(tensors))


def _address(tensor: "torch.Tensor") -> int:
    return tensor.untyped_storage().data_ptr() + int(tensor.storage_offset()) * tensor.element_size()


def _extent(tensor: "torch.Tensor") -> int:
    """Elements from the first to one past the last that the tensor, not an empty one, reaches."""
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _dtype_name(tensor: "torch.Tensor") -> str:
    return str(tensor.dtype).removeprefix("torch.")

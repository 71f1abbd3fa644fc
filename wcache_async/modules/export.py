"""A module as a state: its state dict, every buffer not in it, and what else it takes to be the same.

What a client binds is then the module that was exported: ties, kinds, persistence, strides,
training modes, tensors held as plain attributes, and the scalars its classes list in
``wcache_scalars``.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from wcache_async.backends.base import WeightCacheTransportBackend
from wcache_async.backends.storages import StorageRegion, describe_tensors
from wcache_async.errors import ExportError, ModuleError
from wcache_async.manifest import Config, Cut, Kind, ModuleRecord, StateManifest, StateSpec, WrappedTensor
from wcache_async.modules.distributed import cut_of, is_distributed, local_shard
from wcache_async.modules.walk import Held, Walked, walk
from wcache_async.modules.wrapped import is_plain, take_apart, type_name

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["SCALARS_ATTRIBUTE", "Described", "copy_region", "describe_module", "export_state", "scalars_of"]

_CHUNK_NBYTES = 16 << 20

SCALARS_ATTRIBUTE = "wcache_scalars"
"""A module class lists under this name the plain attributes that are exported with it."""


@dataclass(slots=True)
class _Flat:
    """Plain tensors by name, and what was taken apart to get them."""

    tensors: "dict[str, tuple[torch.Tensor, bool]]" = field(default_factory=dict)
    kinds: dict[str, Kind] = field(default_factory=dict)
    wrapped: dict[str, WrappedTensor] = field(default_factory=dict)
    first_name: dict[int, str] = field(default_factory=dict)
    cuts: dict[str, Cut] = field(default_factory=dict)
    of_dtensors: dict[str, bool] = field(default_factory=dict)
    """Local shards by name, and whether the DTensor requires grad: a shard by itself does not."""


@dataclass(frozen=True, slots=True)
class Described:
    """A module that somebody else has taken to pieces, to be exported as those say."""

    walked: Walked
    scalars: Config
    """Plain attributes to set on the modules of whoever binds it, by full name."""
    source: str
    """What is built here, for the daemon's status."""


def describe_module(
    module: "nn.Module", *, backend: str, devices: Collection[str]
) -> tuple[StateSpec, list[StorageRegion]]:
    """The spec of a module's state, and where the bytes of each of its storages are now.

    Raises ModuleError naming what cannot be kept exactly: a module that contains itself, a name
    that stands for two tensors, tensors inside a list, an unregistered tensor subclass, and
    sparse, nested, conjugated, meta or fake tensors.  Of a DTensor it is the local shard that is kept.
    """
    walked = walk(module)
    return _describe_walked(walked, scalars_of(walked), backend=backend, devices=devices)


def _describe_walked(
    walked: Walked, scalars: Config, *, backend: str, devices: Collection[str]
) -> tuple[StateSpec, list[StorageRegion]]:
    for name, container in walked.containers.items():
        raise ModuleError(path=name, reason=f"it is a {container} with tensors in it; hold them as buffers")
    flat = _Flat()
    for name, held in walked.tensors.items():
        _flatten(flat, name, held)
    try:
        spec, regions = describe_tensors(flat.tensors, backend=backend, devices=devices, kinds=flat.kinds)
    except ExportError as error:
        raise ModuleError(path=error.tensor, reason=error.reason) from error
    if flat.of_dtensors:
        spec = _with_dtensors(spec, flat)
    return msgspec.structs.replace(spec, module=_record(walked, scalars, flat, spec)), regions


def _with_dtensors(spec: StateSpec, flat: _Flat) -> StateSpec:
    tensors = tuple(
        msgspec.structs.replace(tensor, requires_grad=flat.of_dtensors.get(tensor.name, tensor.requires_grad))
        for tensor in spec.tensors
    )
    cuts = {tensor.name: flat.cuts[tensor.name] for tensor in tensors if tensor.name in flat.cuts}
    return msgspec.structs.replace(spec, tensors=tensors, cuts=cuts)


def export_state(
    module_or_tensors: "nn.Module | Described | Mapping[str, torch.Tensor]", backend: WeightCacheTransportBackend
) -> StateManifest:
    """Copy a module's state, or named tensors, into arenas of `backend`.  Blocks.

    Raises ModuleError, ExportError, InsufficientMemory, BackendUnavailable, with everything given back.
    """
    from torch import nn

    devices = backend.capabilities.devices
    if isinstance(module_or_tensors, nn.Module):
        spec, regions = describe_module(module_or_tensors, backend=backend.name, devices=devices)
    elif isinstance(module_or_tensors, Described):
        walked, scalars = module_or_tensors.walked, module_or_tensors.scalars
        spec, regions = _describe_walked(walked, scalars, backend=backend.name, devices=devices)
    else:
        _check_named(module_or_tensors)
        named = {name: (tensor, isinstance(tensor, nn.Parameter)) for name, tensor in module_or_tensors.items()}
        spec, regions = describe_tensors(named, backend=backend.name, devices=devices)
    writer = backend.begin_export(spec)
    try:
        for number, region in enumerate(regions):
            with writer.storage(number) as into:
                copy_region(region, into, lambda _: None)
        return writer.finish()
    finally:
        writer.abort()


def _check_named(built: object) -> None:
    # What a caller's `build` returned, so not what its annotation says.
    import torch

    if not isinstance(built, Mapping):
        raise ModuleError(path="", reason=f"{_kind(built)} is neither a module nor a mapping of names to tensors")
    for name, tensor in built.items():
        if not isinstance(tensor, torch.Tensor):
            raise ModuleError(path=str(name), reason=f"{_kind(tensor)} is no tensor")


def _kind(value: object) -> str:
    return f"a value of type {type(value).__qualname__}"


def copy_region(region: StorageRegion, into: memoryview, advance: Callable[[int], None]) -> None:
    """Fill `into` with a region's bytes, wherever it is, telling `advance` of each piece.  Blocks."""
    if not region.nbytes:
        return
    import torch

    storage = region.tensors[0].untyped_storage()
    source = torch.empty(0, dtype=torch.uint8, device=storage.device)
    source.set_(storage, region.address - storage.data_ptr(), (region.nbytes,), (1,))
    target = torch.frombuffer(into, dtype=torch.uint8)
    for start in range(0, region.nbytes, _CHUNK_NBYTES):
        end = min(start + _CHUNK_NBYTES, region.nbytes)
        target[start:end].copy_(source[start:end])
        advance(end - start)


def _flatten(flat: _Flat, name: str, held: Held) -> None:
    tensor = held.tensor
    if is_distributed(tensor):
        cut = cut_of(name, tensor)
        if cut is not None:
            flat.cuts[name] = cut
        flat.of_dtensors[name] = tensor.requires_grad
        tensor = local_shard(tensor)
        if not is_plain(tensor):
            raise ModuleError(path=name, reason=f"it is a DTensor of {type_name(tensor)}")
    if is_plain(tensor):
        flat.tensors[name] = (tensor, held.kind is Kind.PARAMETER)
        flat.kinds[name] = held.kind
        return
    first = flat.first_name.setdefault(id(tensor), name)
    if first != name:
        flat.wrapped[name] = WrappedTensor(type=type_name(tensor), kind=held.kind, alias_of=first)
        return
    parts = take_apart(name, tensor)
    flat.wrapped[name] = WrappedTensor(
        type=type_name(tensor),
        kind=held.kind,
        inner=tuple(parts.inner),
        context=parts.context_text,
        scalars=parts.scalars,
        shape=tuple(tensor.shape),
        stride=tensor.stride(),
        requires_grad=tensor.requires_grad,
    )
    for attribute, inner in parts.inner.items():
        _flatten(flat, f"{name}.{attribute}", Held(held.owner, held.key, Kind.INNER, inner))


def _record(walked: Walked, scalars: Config, flat: _Flat, spec: StateSpec) -> ModuleRecord:
    module = walked.modules[""]
    target_kinds = {alias: flat.kinds[target] for alias, target in spec.aliases.items()}
    return ModuleRecord(
        training=module.training,
        other_mode=tuple(path for path, part in walked.modules.items() if part.training != module.training),
        scalars=scalars,
        wrapped=flat.wrapped,
        alias_kinds={alias: flat.kinds[alias] for alias, kind in target_kinds.items() if flat.kinds[alias] is not kind},
    )


def scalars_of(walked: Walked) -> Config:
    """The plain attributes that the modules' classes list for export, by full name."""
    found: Config = {}
    for path, part in walked.modules.items():
        for key in getattr(type(part), SCALARS_ATTRIBUTE, ()):
            value = getattr(part, key)
            name = f"{path}.{key}" if path else key
            if value is not None and not isinstance(value, bool | int | float | str):
                raise ModuleError(path=name, reason=f"{SCALARS_ATTRIBUTE} lists it, and it is a {type(value).__name__}")
            found[name] = value
    return found

"""A module as a state: its state dict, every buffer not in it, and what else it takes to be the same.

What a client binds is then the module that was exported: ties, kinds, persistence, strides,
training modes, tensors held as plain attributes, and the scalars its classes list in
``wcache_scalars``.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from wcache_async.backends.storages import StorageRegion, describe_tensors
from wcache_async.errors import ExportError, ModuleError
from wcache_async.manifest import Config, Kind, ModuleRecord, StateSpec, WrappedTensor
from wcache_async.modules.walk import Held, Walked, walk
from wcache_async.modules.wrapped import is_plain, take_apart, type_name

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["SCALARS_ATTRIBUTE", "describe_module", "scalars_of"]

SCALARS_ATTRIBUTE = "wcache_scalars"
"""A module class lists under this name the plain attributes that are exported with it."""


@dataclass(slots=True)
class _Flat:
    """Plain tensors by name, and what was taken apart to get them."""

    tensors: "dict[str, tuple[torch.Tensor, bool]]" = field(default_factory=dict)
    kinds: dict[str, Kind] = field(default_factory=dict)
    wrapped: dict[str, WrappedTensor] = field(default_factory=dict)
    first_name: dict[int, str] = field(default_factory=dict)


def describe_module(
    module: "nn.Module", *, backend: str, devices: Collection[str]
) -> tuple[StateSpec, list[StorageRegion]]:
    """The spec of a module's state, and where the bytes of each of its storages are now.

    Raises ModuleError naming what cannot be kept exactly: a module that contains itself, a name
    that stands for two tensors, tensors inside a list, an unregistered tensor subclass, and
    sparse, nested, conjugated, meta or fake tensors.
    """
    walked = walk(module)
    for name, container in walked.containers.items():
        raise ModuleError(path=name, reason=f"it is a {container} with tensors in it; hold them as buffers")
    flat = _Flat()
    for name, held in walked.tensors.items():
        _flatten(flat, name, held)
    try:
        spec, regions = describe_tensors(flat.tensors, backend=backend, devices=devices, kinds=flat.kinds)
    except ExportError as error:
        raise ModuleError(path=error.tensor, reason=error.reason) from error
    return msgspec.structs.replace(spec, module=_record(module, walked, flat, spec)), regions


def _flatten(flat: _Flat, name: str, held: Held) -> None:
    tensor = held.tensor
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


def _record(module: "nn.Module", walked: Walked, flat: _Flat, spec: StateSpec) -> ModuleRecord:
    target_kinds = {alias: flat.kinds[target] for alias, target in spec.aliases.items()}
    return ModuleRecord(
        training=module.training,
        other_mode=tuple(path for path, part in walked.modules.items() if part.training != module.training),
        scalars=scalars_of(walked),
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

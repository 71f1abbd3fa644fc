"""Putting a state's tensors into an nn.Module: `plan` decides, `apply` performs, all or nothing.

`describe` reads a module's structure, `plan` compares it with a manifest without touching
either, and `apply` carries the plan out, which cannot fail half way.  Every step is one
dictionary look-up per tensor.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from wcache_async.backends.base import WeightCacheTransportBackend
from wcache_async.errors import BindError, Scalar
from wcache_async.manifest import StateManifest

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["Plan", "Slot", "Structure", "apply", "bind", "describe", "plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One name of a module's tensor: what it is now, and which others are the same object."""

    is_parameter: bool
    persistent: bool
    """Part of the state dict."""
    dtype: str
    shape: tuple[int, ...]
    on_meta: bool
    identity: int
    """Equal for two names of one object (tied weights)."""


Structure = Mapping[str, Slot]


@dataclass(slots=True)
class Plan:
    """Which name of the module gets which tensor of the state."""

    sources: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor sits in the module tree."""

    owner: "nn.Module"
    key: str


def describe(module: "nn.Module") -> tuple[dict[str, Slot], dict[str, _Place]]:
    """Every parameter and buffer by its full name, tied ones under each of their names."""
    slots: dict[str, Slot] = {}
    places: dict[str, _Place] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for held, is_parameter in ((owner._parameters, True), (owner._buffers, False)):
            for key, tensor in held.items():
                if tensor is None:
                    continue
                name = f"{prefix}.{key}" if prefix else key
                slots[name] = Slot(
                    is_parameter=is_parameter,
                    persistent=key not in owner._non_persistent_buffers_set,
                    dtype=str(tensor.dtype)[6:],
                    shape=tuple(tensor.shape),
                    on_meta=tensor.is_meta,
                    identity=id(tensor),
                )
                places[name] = _Place(owner, key)
    return slots, places


def plan(structure: Structure, manifest: StateManifest, *, strict: bool = True) -> Plan:
    """Decide what goes where.  Pure.

    A name the state lacks is taken from another name of the same object (a tied weight whose
    checkpoint holds it once).  A materialised non-persistent buffer the state lacks is kept:
    the module's constructor has computed it.  Raises BindError listing everything that does
    not fit; without `strict`, tensors the module lacks are passed over, and materialised ones
    the state lacks are kept, but nothing may stay on meta.
    """
    entries = {entry.name: entry for entry in manifest.tensors}
    sources = {name: name for name in entries} | manifest.aliases
    by_identity = {slot.identity: name for name, slot in structure.items() if name in sources}
    result = Plan()
    missing: list[str] = []
    mismatched: dict[str, list[Scalar]] = {}
    for name, slot in structure.items():
        source = name if name in sources else by_identity.get(slot.identity)
        if source is None:
            if slot.on_meta or (strict and slot.persistent):
                missing.append(name)
            continue
        entry = entries[sources[source]]
        if entry.shape != slot.shape or manifest.dtypes[entry.dtype] != slot.dtype:
            mismatched[name] = [_text(slot.dtype, slot.shape), _text(manifest.dtypes[entry.dtype], entry.shape)]
        result.sources[name] = source
    unexpected = [name for name in sources if name not in structure] if strict else []
    if missing or mismatched or unexpected:
        raise BindError(missing=missing, unexpected=unexpected, mismatched=mismatched)
    return result


def apply(
    module: "nn.Module", planned: Plan, places: Mapping[str, _Place], tensors: Mapping[str, "torch.Tensor"]
) -> None:
    """Carry a plan out.  A materialised parameter keeps its identity (hooks, optimizers, ties)."""
    from torch import nn

    replaced: dict[int, torch.Tensor] = {}
    for name, source in planned.sources.items():
        place = places[name]
        is_parameter = place.key in place.owner._parameters
        held = place.owner._parameters if is_parameter else place.owner._buffers
        old = held[place.key]
        if old is None:
            continue
        new = replaced.get(id(old))
        if new is None:
            new = tensors[source]
            if is_parameter and old.is_meta:
                new = nn.Parameter(new, requires_grad=old.requires_grad)
            elif not old.is_meta:
                old.data = new
                new = old
            replaced[id(old)] = new
        held[place.key] = new  # type: ignore[assignment]


def bind(
    module: "nn.Module",
    tensors: Mapping[str, "torch.Tensor"],
    manifest: StateManifest,
    backend: WeightCacheTransportBackend,
    *,
    strict: bool = True,
) -> None:
    """Put `tensors` into `module` as `FetchedState.bind` says.  Raises BindError, the module unchanged."""
    structure, places = describe(module)
    apply(module, plan(structure, manifest, strict=strict), places, tensors)
    # Whatever the tensors need stays as long as the model does, whoever drops the state.
    module._weight_cache_transport_backend = backend  # type: ignore[assignment]


def _text(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}{list(shape)}"

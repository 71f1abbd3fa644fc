"""Putting a state's tensors into an nn.Module: `plan` decides, `apply` performs, all or nothing.

`plan` compares a module's structure with a manifest without touching either; `apply` first
makes every object that is to go in, and then only assigns.  Every step is a few dictionary
look-ups per tensor.

A state that came from a module carries a record of it (`ModuleRecord`), and is bound exactly:
kinds, persistence, ties, training modes and listed scalars come back as they were.  A state
that came from a checkpoint knows names and tensors alone; the module decides the rest.

Of a DTensor it is the local shard that is replaced.  A state that knows how it was cut is
compared with how the module is distributed, so that one of another rank does not fit.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct

from wcache_async.backends.base import WeightCacheTransportBackend
from wcache_async.backends.collector import collector_held
from wcache_async.errors import BindError, Scalar
from wcache_async.manifest import Config, Cut, Kind, ModuleRecord, StateManifest
from wcache_async.modules.distributed import cut_of, is_distributed, local_shard, placement_text, with_local_shard
from wcache_async.modules.walk import Held, Walked, walk
from wcache_async.modules.wrapped import Parts, is_plain, put_together, take_apart, type_name

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["Plan", "Slot", "bind", "bind_walked", "build_on_meta", "describe", "plan"]

ModuleT = TypeVar("ModuleT", bound="nn.Module")


class Slot(Struct, frozen=True, gc=False):
    """One name of a module's tensor: what it is now, and which others are the same object."""

    kind: Kind
    dtype: str
    shape: tuple[int, ...]
    """A DTensor's is that of its local shard."""
    device: str
    identity: int
    """Equal for two names of one object (tied weights)."""
    wrapped: str = ""
    """Class and context of a tensor subclass, as text; empty for a plain tensor."""
    distributed: str = ""
    """A DTensor's placements and mesh, as text; empty for a tensor that is none."""
    cut: Cut | None = None
    """Which part of a DTensor its local shard is; None: all of it."""


@dataclass(slots=True)
class Plan:
    """What goes where.

    `sources` gives for each name of the module the name in the state it is filled from, and
    equal sources become one object; `requires_grad` holds the parameters' where the state
    knows it; the rest is set on the modules by path.
    """

    sources: dict[str, str] = field(default_factory=dict)
    requires_grad: dict[str, bool] = field(default_factory=dict)
    training: dict[str, bool] = field(default_factory=dict)
    scalars: Config = field(default_factory=dict)


class _Offer(Struct, frozen=True, gc=False):
    """One name of a state: what it would put there."""

    canonical: str
    kind: Kind
    dtype: str
    shape: tuple[int, ...]
    requires_grad: bool
    wrapped: str = ""
    cut: Cut | None = None


def describe(walked: Walked) -> dict[str, Slot]:
    """A module's structure, for `plan`.

    Raises ModuleError for a tensor subclass, or a distribution of a DTensor, that is not understood.
    """
    slots = {}
    for name, held in walked.tensors.items():
        tensor = held.tensor
        identity = id(tensor)
        if is_plain(tensor):
            device = "meta" if tensor.is_meta else tensor.device.type
            slots[name] = Slot(held.kind, _dtype_name(tensor.dtype), tuple(tensor.shape), device, identity)
            continue
        distributed, cut = "", None
        if is_distributed(tensor):
            distributed, cut = placement_text(tensor), cut_of(name, tensor)
            tensor = local_shard(tensor)
        plain = is_plain(tensor)
        slots[name] = Slot(
            held.kind,
            _dtype_name(tensor.dtype) if plain else "",
            tuple(tensor.shape),
            tensor.device.type,
            identity,
            wrapped="" if plain else _wrapped_text(type_name(tensor), take_apart(name, tensor).context_text),
            distributed=distributed,
            cut=cut,
        )
    return slots


def plan(
    structure: Mapping[str, Slot],
    manifest: StateManifest,
    *,
    modules: frozenset[str] = frozenset(),
    containers: Mapping[str, str] | None = None,
    strict: bool = True,
) -> Plan:
    """Decide what goes where.  Pure.

    `modules` are the paths of the module's parts, `containers` its lists of tensors, which
    nothing can fill.  For a checkpoint's state, a name it lacks is taken from another name of the
    same object, and what the constructor computes (materialised non-persistent buffers and
    attributes) is kept.  Raises BindError listing everything that does not fit; without
    `strict`, tensors the module lacks are passed over, and materialised ones the state lacks are
    kept, but nothing may stay on meta.
    """
    record = manifest.module
    offers = _offers(manifest)
    by_identity = {} if record else {slot.identity: name for name, slot in structure.items() if name in offers}
    result = Plan()
    missing: list[str] = []
    mismatched: dict[str, list[Scalar]] = {}
    distributed: dict[str, str] = {}  # by the state's name
    for name, slot in structure.items():
        source = name if name in offers else by_identity.get(slot.identity)
        if source is None:
            computed = record is None and slot.kind in (Kind.NON_PERSISTENT_BUFFER, Kind.ATTRIBUTE)
            if slot.device == "meta" or (strict and not computed):
                missing.append(name)
            continue
        offer = offers[source]
        ours, theirs = _compared(slot, offer, exact=record is not None, cuts=bool(manifest.cuts))
        if distributed.setdefault(offer.canonical, slot.distributed) != slot.distributed:
            ours, theirs = f"distributed as {slot.distributed or 'no DTensor'}", f"one tensor with {offer.canonical}"
        if ours != theirs:
            mismatched[name] = [ours, theirs]
        result.sources[name] = offer.canonical
        if record is not None and slot.kind is Kind.PARAMETER:
            result.requires_grad[offer.canonical] = offer.requires_grad
    unexpected = [name for name in offers if name not in structure] if strict else []
    for name, container in (containers or {}).items():
        mismatched[name] = [f"tensors in a {container}", "tensors under names of their own"]
    if record is not None:
        _plan_record(record, modules, result, unexpected, strict=strict)
    if missing or mismatched or unexpected:
        raise BindError(missing=missing, unexpected=unexpected, mismatched=mismatched)
    return result


def _plan_record(
    record: ModuleRecord, modules: frozenset[str], result: Plan, unexpected: list[str], *, strict: bool
) -> None:
    other = set(record.other_mode)
    result.training = {path: record.training is not (path in other) for path in modules}
    result.scalars = {name: value for name, value in record.scalars.items() if name.rpartition(".")[0] in modules}
    if strict:
        unexpected += sorted((other - modules) | (record.scalars.keys() - result.scalars.keys()))


def _offers(manifest: StateManifest) -> dict[str, _Offer]:
    record = manifest.module or ModuleRecord()
    offers: dict[str, _Offer] = {}
    inner: set[str] = set()
    for entry in manifest.tensors:
        if entry.kind is Kind.INNER:
            inner.add(entry.name)
            continue
        dtype = manifest.dtypes[entry.dtype]
        cut = manifest.cuts.get(entry.name)
        offers[entry.name] = _Offer(entry.name, entry.kind, dtype, entry.shape, entry.requires_grad, cut=cut)
    for alias, target in manifest.aliases.items():
        if target in inner:
            continue
        offer = offers[target]
        kind = record.alias_kinds.get(alias, offer.kind)
        if kind is not Kind.INNER:
            offers[alias] = _Offer(target, kind, offer.dtype, offer.shape, offer.requires_grad, cut=offer.cut)
    for name, tensor in record.wrapped.items():
        if tensor.kind is Kind.INNER:
            continue
        whole = record.wrapped[tensor.alias_of] if tensor.alias_of else tensor
        offers[name] = _Offer(
            canonical=tensor.alias_of or name,
            kind=tensor.kind,
            dtype="",
            shape=whole.shape,
            requires_grad=whole.requires_grad,
            wrapped=_wrapped_text(whole.type, whole.context),
        )
    return offers


def _compared(slot: Slot, offer: _Offer, *, exact: bool, cuts: bool) -> tuple[str, str]:
    """Module's and state's side of one name as text, equal where they fit.

    `cuts`: the state knows what it is parts of.  A module without DTensors does not, and has
    the shapes of parts all the same.
    """
    if (
        slot.dtype == offer.dtype
        and slot.shape == offer.shape
        and slot.wrapped == offer.wrapped
        and (slot.kind is offer.kind or not exact)
        and not (cuts and slot.distributed)
    ):
        return "", ""
    ours = slot.wrapped or slot.dtype
    theirs = offer.wrapped or offer.dtype
    ours, theirs = f"{ours}{list(slot.shape)}", f"{theirs}{list(offer.shape)}"
    if cuts and slot.distributed:
        ours, theirs = _with_cut(ours, slot.cut), _with_cut(theirs, offer.cut)
    if exact and slot.kind is not offer.kind:
        ours, theirs = f"{_words(slot.kind)} {ours}", f"{_words(offer.kind)} {theirs}"
    return ours, theirs


def bind(
    module: "nn.Module",
    tensors: "Mapping[str, torch.Tensor]",
    manifest: StateManifest,
    backend: WeightCacheTransportBackend,
    *,
    strict: bool = True,
) -> None:
    """Put `tensors` into `module` as `FetchedState.bind` says.

    Raises BindError or ModuleError, the module unchanged.
    """
    with collector_held():
        bind_walked(walk(module), tensors, manifest, backend, strict=strict)


def bind_walked(
    walked: Walked,
    tensors: "Mapping[str, torch.Tensor]",
    manifest: StateManifest,
    backend: WeightCacheTransportBackend,
    *,
    strict: bool = True,
) -> None:
    """`bind` for a module that has been taken to pieces already."""
    planned = plan(
        describe(walked),
        manifest,
        modules=frozenset(walked.modules),
        containers=walked.containers if manifest.module is not None else None,
        strict=strict,
    )
    _apply(planned, walked, _Maker(tensors, manifest.module or ModuleRecord()))
    # Whatever the tensors need stays as long as the model does, whoever drops the state.
    walked.modules[""]._weight_cache_transport_backend = backend  # type: ignore[assignment]


def build_on_meta(factory: "Callable[[], ModuleT]", dtype: "torch.dtype | None") -> "ModuleT":
    """What `factory` builds, without memory for its tensors, under torch's default `dtype` (None: as it is)."""
    import torch

    before = torch.get_default_dtype()
    if dtype is not None:
        torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            return factory()
    finally:
        torch.set_default_dtype(before)


@dataclass(slots=True)
class _Maker:
    """Makes the objects that go in."""

    tensors: "Mapping[str, torch.Tensor]"
    record: ModuleRecord

    def make(self, source: str, like: "torch.Tensor") -> "torch.Tensor":
        """The state's tensor of that name, wrapped as `like` is where the state says so."""
        wrapped = self.record.wrapped.get(source)
        if wrapped is None:
            return self.tensors[source]
        parts: Parts = take_apart(source, like)
        inner = {a: self.make(f"{source}.{a}", parts.inner.get(a, like)) for a in wrapped.inner}
        return put_together(like, parts, inner, wrapped.scalars)


def _apply(planned: Plan, walked: Walked, maker: _Maker) -> None:
    made: dict[str, torch.Tensor] = {}
    data: list[tuple[torch.Tensor, torch.Tensor]] = []
    for name, source in planned.sources.items():
        if source not in made:
            made[source] = _object_for(walked.tensors[name], source, planned, maker, data)
    # From here on nothing can fail.
    for parameter, tensor in data:
        parameter.data = tensor
    for name, source in planned.sources.items():
        _assign(walked.tensors[name], made[source])
    for source, requires_grad in planned.requires_grad.items():
        if made[source].requires_grad is not requires_grad:
            made[source].requires_grad_(requires_grad)
    for path, training in planned.training.items():
        walked.modules[path].training = training
    for name, value in planned.scalars.items():
        path, _, key = name.rpartition(".")
        setattr(walked.modules[path], key, value)


def _object_for(
    held: Held, source: str, planned: Plan, maker: _Maker, data: "list[tuple[torch.Tensor, torch.Tensor]]"
) -> "torch.Tensor":
    """What the module will hold: its own object with new data where it can keep it (hooks, optimizers)."""
    old = held.tensor
    plain = is_plain(old)
    if not plain and is_distributed(old):
        new = with_local_shard(source, old, maker.make(source, local_shard(old)))
    else:
        new = maker.make(source, old)
    if held.kind is not Kind.PARAMETER:
        return new
    # A device is an object of its own each time it is asked for: the cheaper question first.
    if plain and not old.is_meta and old.device == new.device:
        data.append((old, new))
        return old
    requires_grad = planned.requires_grad.get(source)
    parameter = _parameter_class()(new, requires_grad=old.requires_grad if requires_grad is None else requires_grad)
    # What the module's constructor hung on its parameter: how to load or shard it, say.  A tensor
    # subclass has its own parts there too, which are not to be the old ones.
    if hung := old.__dict__:
        parameter.__dict__.update({key: value for key, value in hung.items() if key not in parameter.__dict__})
    return parameter


@functools.cache
def _parameter_class() -> "type[nn.Parameter]":
    from torch import nn

    return nn.Parameter


def _assign(held: Held, tensor: "torch.Tensor") -> None:
    if held.kind is Kind.PARAMETER:
        held.owner._parameters[held.key] = tensor  # type: ignore[assignment]
    elif held.kind is Kind.ATTRIBUTE:
        held.owner.__dict__[held.key] = tensor
    else:
        held.owner._buffers[held.key] = tensor


@functools.cache
def _dtype_name(dtype: "torch.dtype") -> str:
    return str(dtype).removeprefix("torch.")


def _wrapped_text(name: str, context: str) -> str:
    return f"{name} {context}".rstrip()


def _with_cut(text: str, cut: Cut | None) -> str:
    return text if cut is None else f"{text}, {cut}"


def _words(kind: Kind) -> str:
    return kind.name.lower().replace("_", " ")

"""A vLLM model's tensors, taken out as plain ones, and plain ones put in as vLLM's own parameters.

vLLM's parameters are of classes of its own and carry loaders, dimensions and ranks as attributes.
None of that is in the state: whoever attaches builds the same model on meta, and what its
parameters are besides bytes is kept there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wcache_async.backends.base import WeightCacheTransportBackend
from wcache_async.client.bind import bind_walked
from wcache_async.errors import BindError, ModuleError, Scalar
from wcache_async.manifest import Kind, StateManifest
from wcache_async.modules.walk import Held, Walked, walk
from wcache_async.modules.wrapped import is_plain

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["Taken", "layout_of", "module_scalars", "put_back", "reshape", "take"]

_DEPTH = 3
"""How far tensors are looked for in objects that are no modules: an attention's implementation, a layer's
quantisation method and its kernel."""

_ENGINE = "vllm"
_NOT_FOLLOWED = ("vllm.config.",)
"""Shared by all of an engine, with its every module among what it reaches."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A model in pieces: its tensors made plain, and the parameters they are of."""

    walked: Walked
    originals: "dict[str, torch.Tensor]"
    followers: list[Held]
    """Further places that hold some of `originals`, and are to hold what comes in their stead."""


def take(model: "nn.Module", *, device: "torch.device | None" = None, helpers: bool = True) -> Taken:
    """Take a model to pieces, with the tensors that its layers' helpers hold, which are no modules.

    Without `helpers` theirs are not among the tensors: post-processing makes them anew.  Empty
    tensors in lists (a KV cache to come) are nobody's weights; those on meta are moved to
    `device`, if one is given.  Raises ModuleError for a parameter that has no shape yet.
    """
    walked = walk(model)
    elsewhere = _elsewhere(walked)
    if helpers:
        walked.tensors.update(elsewhere)
    for name in list(walked.containers):
        if _settle_container(walked, name, device):
            del walked.containers[name]
    plain: dict[int, torch.Tensor] = {}
    originals = {}
    for name, held in walked.tensors.items():
        original = originals[name] = held.tensor
        if id(original) not in plain:
            plain[id(original)] = _plain(name, original)
        walked.tensors[name] = Held(held.owner, held.key, held.kind, plain[id(original)])
    return Taken(walked, originals, [] if helpers else list(elsewhere.values()))


def _plain(name: str, tensor: "torch.Tensor") -> "torch.Tensor":
    import torch
    from torch.nn.parameter import is_lazy

    if is_lazy(tensor):
        raise ModuleError(path=name, reason="vLLM gives it a shape only while it loads; use another load format")
    if is_plain(tensor) or hasattr(tensor, "__tensor_flatten__") or not isinstance(tensor, torch.nn.Parameter):
        return tensor
    return torch.nn.Parameter(tensor.detach().as_subclass(torch.Tensor), requires_grad=tensor.requires_grad)


def put_back(
    taken: Taken, tensors: "Mapping[str, torch.Tensor]", manifest: StateManifest, backend: WeightCacheTransportBackend
) -> None:
    """Bind `tensors` into the model, and make its parameters what they were.  Raises BindError, the model unchanged."""
    bind_walked(taken.walked, tensors, manifest, backend)
    replaced: dict[int, torch.Tensor] = {}
    for name, original in taken.originals.items():
        held = taken.walked.tensors[name]
        new: Any = _slots(held.owner, held.kind)[held.key]
        replaced[id(original)] = new
        if held.kind is Kind.PARAMETER:
            if is_plain(new):
                new.__class__ = type(original)
            new.__dict__.update(original.__dict__)
    for follower in taken.followers:
        if id(follower.tensor) in replaced:
            vars(follower.owner)[follower.key] = replaced[id(follower.tensor)]


def layout_of(taken: Taken) -> dict[str, str]:
    """Kind, dtype and shape of every tensor by name, as text to compare; holds on to none."""
    return {
        name: f"{held.kind.name.lower()} {held.tensor.dtype}{list(held.tensor.shape)}"
        for name, held in taken.walked.tensors.items()
    }


def module_scalars(model: "nn.Module") -> dict[str, Scalar]:
    """The plain attributes of every module, by full name, its mode aside."""
    return {
        f"{path}.{key}" if path else key: value
        for path, module in model.named_modules(remove_duplicate=False)
        for key, value in module.__dict__.items()
        if key != "training" and (value is None or isinstance(value, bool | int | float | str))
    }


def reshape(model: "nn.Module", manifest: StateManifest) -> None:
    """Make the tensors of a model on meta those, still on meta, that `manifest` has: what post-processing left.

    Raises BindError where the manifest has a tensor for a module that the model does not have.
    """
    import torch

    record = manifest.module
    if record is None:
        raise BindError(missing=[], unexpected=["tensors of no module"], mismatched={})
    walked = walk(model)
    wanted: dict[str, tuple[Kind, torch.Tensor]] = {}
    for entry in manifest.tensors:
        dtype = getattr(torch, manifest.dtypes[entry.dtype])
        meta = torch.empty(entry.shape, dtype=dtype, device="meta")
        if entry.kind is Kind.PARAMETER:
            meta = torch.nn.Parameter(meta, requires_grad=entry.requires_grad)
        wanted[entry.name] = entry.kind, meta
    for alias, target in manifest.aliases.items():
        kind, meta = wanted[target]
        wanted[alias] = record.alias_kinds.get(alias, kind), meta
    owners = {name: walked.modules.get(name.rpartition(".")[0]) for name in wanted}
    absent = [name for name, owner in owners.items() if owner is None]
    if absent:
        raise BindError(missing=[], unexpected=absent, mismatched={})
    for name, held in walked.tensors.items():
        if name not in wanted:
            _slots(held.owner, held.kind).pop(held.key, None)
    for name, (kind, meta) in wanted.items():
        owner = owners[name]
        if owner is not None:
            _place(owner, name.rpartition(".")[2], kind, meta, walked.tensors.get(name))


def _place(owner: "nn.Module", key: str, kind: Kind, tensor: "torch.Tensor", held: Held | None) -> None:
    if held is not None:
        _slots(owner, held.kind).pop(key, None)
        if held.kind is kind is Kind.PARAMETER:
            tensor.__dict__.update(held.tensor.__dict__)
    owner.__dict__.pop(key, None)
    owner._non_persistent_buffers_set.discard(key)
    if kind is Kind.NON_PERSISTENT_BUFFER:
        owner._non_persistent_buffers_set.add(key)
    _slots(owner, kind)[key] = tensor


def _slots(owner: "nn.Module", kind: Kind) -> dict[str, Any]:  # Any: parameters, buffers, or attributes
    if kind is Kind.PARAMETER:
        return owner._parameters
    return owner.__dict__ if kind is Kind.ATTRIBUTE else owner._buffers


# ------------------------------------------------------------------ what is held by no module
def _elsewhere(walked: Walked) -> dict[str, Held]:
    """The tensors that objects of vLLM hold which are no modules, by the way there."""
    found: dict[str, Held] = {}
    seen: set[int] = set()
    for path, module in walked.modules.items():
        for key, value in list(module.__dict__.items()):
            if _is_followed(value):
                _visit(found, f"{path}.{key}" if path else key, value, seen, _DEPTH)
    return found


def _is_followed(value: object) -> bool:
    from torch import nn

    where = type(value).__module__
    return (
        where.partition(".")[0] == _ENGINE
        and not f"{where}.".startswith(_NOT_FOLLOWED)
        and not isinstance(value, nn.Module)
        and isinstance(getattr(value, "__dict__", None), dict)
    )


def _visit(found: dict[str, Held], path: str, value: Any, seen: set[int], depth: int) -> None:  # Any: a helper
    import torch

    if id(value) in seen:
        return
    seen.add(id(value))
    for key, inner in list(vars(value).items()):
        name = f"{path}.{key}"
        if isinstance(inner, torch.Tensor):
            found[name] = Held(value, key, Kind.ATTRIBUTE, inner)
        elif depth and _is_followed(inner):
            _visit(found, name, inner, seen, depth - 1)


def _settle_container(walked: Walked, name: str, device: "torch.device | None") -> bool:
    """Whether what a list, tuple or dict holds of tensors is all empty, and so nothing to keep."""
    import torch

    path, _, key = name.rpartition(".")
    owner = walked.modules[path]
    container = owner.__dict__[key]
    items = list(container.values() if isinstance(container, dict) else container)
    if any(isinstance(item, torch.Tensor) and item.numel() for item in items):
        return False

    def moved(item: object) -> object:
        return torch.empty_like(item, device=device) if isinstance(item, torch.Tensor) and item.is_meta else item

    if device is not None:
        rebuilt: Callable[..., object] = type(container)
        pairs = zip(container, map(moved, items), strict=True)
        owner.__dict__[key] = rebuilt(pairs if isinstance(container, dict) else map(moved, items))
    return True

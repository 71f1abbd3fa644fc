"""Every tensor a module holds and every module in it, by full name, tied ones under each of their names."""

import functools
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import Struct

from wcache_async.errors import ModuleError
from wcache_async.manifest import Kind

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["Held", "Walked", "walk"]


class Held(Struct, frozen=True, eq=False):
    """One tensor at one place."""

    owner: "nn.Module"
    key: str
    kind: Kind
    tensor: "torch.Tensor"


@dataclass(frozen=True, slots=True)
class Walked:
    """A whole module, in the order of `named_modules`, `named_parameters` and `named_buffers`."""

    tensors: dict[str, Held]
    modules: "dict[str, nn.Module]"
    containers: dict[str, str]
    """Plain attributes that hold tensors inside a list, tuple or dict, and the type of it."""


def walk(module: "nn.Module") -> Walked:
    """Take a module to pieces.  A module reached by two ways is there under both names.

    Raises ModuleError for a module that contains itself, and where one name would be two tensors.
    """
    import torch

    walked = Walked({}, {}, {})
    torchs = _own_attributes()
    parameters = Kind.PARAMETER  # An enumeration's member is looked up slowly.
    for path, owner in _modules(module):
        walked.modules[path] = owner
        prefix = f"{path}." if path else ""
        for key, parameter in owner._parameters.items():
            if parameter is not None:
                _add(walked, prefix + key, Held(owner, key, parameters, parameter))
        for key, buffer in owner._buffers.items():
            if buffer is not None:
                kind = Kind.NON_PERSISTENT_BUFFER if key in owner._non_persistent_buffers_set else Kind.BUFFER
                _add(walked, prefix + key, Held(owner, key, kind, buffer))
        attributes = owner.__dict__
        if attributes.keys() <= torchs:
            continue  # One comparison takes a tenth of looking at each of a module's twenty.
        for key, value in attributes.items():
            if key in torchs or type(value) in _SCALARS:
                continue  # isinstance asks torch's metaclass each time.
            if isinstance(value, torch.Tensor):
                _add(walked, prefix + key, Held(owner, key, Kind.ATTRIBUTE, value))
            elif type(value) in _CONTAINERS and value and _holds_tensor(value):
                walked.containers[prefix + key] = type(value).__name__
    return walked


_CONTAINERS = frozenset({list, tuple, dict, OrderedDict})
_SCALARS = frozenset({type(None), bool, int, float, str})


@functools.cache
def _own_attributes() -> frozenset[str]:
    """What every module's `__dict__` has from torch: its mode, its hooks, and where its tensors are looked for."""
    from torch import nn

    return frozenset(nn.Module().__dict__)


def _modules(root: "nn.Module") -> "Iterator[tuple[str, nn.Module]]":
    # Not named_modules(remove_duplicate=False), which never ends on a module inside itself.
    ancestors: dict[int, str] = {}
    stack: list[tuple[str, nn.Module, bool]] = [("", root, False)]
    while stack:
        path, module, leaving = stack.pop()
        if leaving:
            del ancestors[id(module)]
            continue
        if id(module) in ancestors:
            raise ModuleError(
                path=path, reason=f"it is {ancestors[id(module)] or 'the whole module'}, which contains it"
            )
        yield path, module
        if not module._modules:
            continue
        ancestors[id(module)] = path
        stack.append((path, module, True))
        for name, child in reversed(module._modules.items()):
            if child is not None:
                stack.append((f"{path}.{name}" if path else name, child, False))


def _add(walked: Walked, name: str, held: Held) -> None:
    if name in walked.tensors:
        other = walked.tensors[name].kind.name.lower()
        raise ModuleError(path=name, reason=f"the name stands for a {other} and for a {held.kind.name.lower()}")
    walked.tensors[name] = held


def _holds_tensor(value: "list[object] | tuple[object, ...] | dict[object, object]") -> bool:
    import torch

    items = value.values() if isinstance(value, dict) else value
    return any(isinstance(item, torch.Tensor) for item in items)

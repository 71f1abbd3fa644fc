"""Tensor subclasses taken apart into plain tensors and put together again, by no peer's word.

Two ways.  A class with torch's own protocol (``__tensor_flatten__``, as torchao's have) is put
together by the receiver's class with the receiver's context, which is only compared, as text,
with the sender's: nothing that could run is ever sent.  A class without it, a Parameter
subclass say, is refused unless a pair of functions is registered for it on both sides.
"""

import enum
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

from wcache_async.errors import ModuleError
from wcache_async.manifest import Config

if TYPE_CHECKING:
    import torch

__all__ = ["Parts", "is_plain", "put_together", "register_tensor_type", "take_apart", "type_name"]

TakeApart = Callable[["torch.Tensor"], "tuple[dict[str, torch.Tensor], Config]"]
"""A tensor to its inner tensors by attribute name, and what else it is made of as scalars."""

PutTogether = Callable[["Mapping[str, torch.Tensor]", Config], "torch.Tensor"]
"""The other way round."""

_registered: "dict[type[torch.Tensor], tuple[TakeApart, PutTogether]]" = {}


class _Flattening(Protocol):
    def __tensor_flatten__(self) -> tuple[list[str], object]: ...

    @staticmethod
    def __tensor_unflatten__(
        inner: "dict[str, torch.Tensor]", context: object, size: "torch.Size", stride: tuple[int, ...]
    ) -> "torch.Tensor": ...


@dataclass(frozen=True, slots=True)
class Parts:
    """A wrapping tensor in pieces; `context` is its class's own, `context_text` what is compared."""

    inner: "dict[str, torch.Tensor]"
    context: object
    context_text: str
    scalars: Config


def register_tensor_type(cls: "type[torch.Tensor]", take_apart: TakeApart, put_together: PutTogether) -> None:
    """Let tensors of exactly class `cls` be cached; both sides must have registered it alike.

    `take_apart(tensor)` gives its inner tensors by name and its other properties as scalars;
    `put_together(inner, scalars)` makes an equal one of them without copying.
    """
    _registered[cls] = (take_apart, put_together)


def type_name(tensor: "torch.Tensor") -> str:
    """The qualified name of its class, which both sides compare."""
    return f"{type(tensor).__module__}.{type(tensor).__qualname__}"


@functools.cache
def _plain_types() -> "frozenset[type[torch.Tensor]]":
    import torch

    return frozenset((torch.Tensor, torch.nn.Parameter))


def is_plain(tensor: "torch.Tensor") -> bool:
    """Whether it is a Tensor or Parameter and nothing more, which its bytes say all of."""
    return type(tensor) in _plain_types()


def take_apart(name: str, tensor: "torch.Tensor") -> Parts:
    """The pieces of a tensor that is not plain.  Raises ModuleError naming it."""
    pair = _registered.get(type(tensor))
    if pair is not None:
        inner, scalars = pair[0](tensor)
        return Parts(inner, None, "", scalars)
    if not hasattr(tensor, "__tensor_flatten__"):
        raise ModuleError(
            path=name,
            reason=f"{type_name(tensor)} may hold more than its bytes; register_tensor_type() can say what",
        )
    if tensor.is_nested:
        raise ModuleError(path=name, reason="it is a nested tensor, whose parts have no shape of their own")
    attributes, context = cast(_Flattening, tensor).__tensor_flatten__()
    return Parts({a: getattr(tensor, a) for a in attributes}, context, _text(name, context), {})


def put_together(
    like: "torch.Tensor", parts: Parts, inner: "dict[str, torch.Tensor]", scalars: Config
) -> "torch.Tensor":
    """A tensor as `like` is, whose `parts` are given, on other inner tensors."""
    pair = _registered.get(type(like))
    if pair is not None:
        return pair[1](inner, scalars)
    return cast("type[_Flattening]", type(like)).__tensor_unflatten__(inner, parts.context, like.size(), like.stride())


def _text(name: str, value: Any) -> str:  # Any: whatever a class keeps; what is not understood is refused
    """`value` as text that is equal for equal values of a closed set of types, devices aside."""
    import torch

    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, torch.device):
        return "device"  # The sender's weights are rarely on the receiver's meta device.
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return str(value)
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, list | tuple):
        return f"({', '.join(_text(name, item) for item in value)})"
    if isinstance(value, dict):
        items = sorted((_text(name, key), _text(name, item)) for key, item in value.items())
        return "{" + ", ".join(f"{key}: {item}" for key, item in items) + "}"
    if is_dataclass(value):
        items = [(field.name, _text(name, getattr(value, field.name))) for field in fields(value)]
        return f"{type(value).__qualname__}({', '.join(f'{key}={item}' for key, item in items)})"
    raise ModuleError(path=name, reason=f"its class keeps a {type(value).__qualname__}, which cannot be compared")

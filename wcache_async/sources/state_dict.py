"""Which tensors of an unpickled checkpoint make the state, and that they are plain ones."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from wcache_async.errors import SourceError
from wcache_async.manifest import DTYPE_ITEMSIZE

if TYPE_CHECKING:
    import torch

__all__ = ["NESTED_UNDER", "select_tensors"]

NESTED_UNDER = ("state_dict", "model_state_dict", "model_state", "model", "module", "params", "net", "weights")
"""Keys under which training scripts keep the tensors beside other things."""


def select_tensors(path: str, loaded: object) -> "dict[str, torch.Tensor]":
    """The tensors by name of the state dict in `loaded`: it itself, or what `NESTED_UNDER` holds.

    Names stay as they are.  What else the state dict holds is left out, unless tensors are in
    it.  Raises SourceError where there is no state dict, or more than one, and for tensors that
    are not plain strided bytes.
    """
    import torch

    tensors: dict[str, torch.Tensor] = {}
    for name, value in _state_dict(path, loaded, "").items():
        if not _holds_tensor(value):
            continue
        if not isinstance(name, str):
            raise SourceError(path=path, tensor=repr(name), reason="its name is no string")
        if not isinstance(value, torch.Tensor):
            raise SourceError(
                path=path,
                tensor=name,
                reason=f"it is a {type(value).__name__} with tensors in it; save one flat state dict",
            )
        try:
            name.encode()
        except UnicodeEncodeError as error:  # Pickles hold lone surrogates, the wire cannot.
            raise SourceError(path=path, tensor=ascii(name), reason="its name is no valid Unicode") from error
        _check_plain(path, name, value)
        tensors[name] = value
    return tensors


def _state_dict(path: str, value: object, where: str) -> "Mapping[object, object]":
    import torch

    if not isinstance(value, Mapping):
        what = "a single tensor" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
        raise SourceError(path=path, reason=f"it holds {what}{where}, and no dict of tensors by name")
    nested = [key for key in NESTED_UNDER if isinstance(value.get(key), Mapping) and _holds_tensor(value[key])]
    if len(nested) > 1:
        raise SourceError(
            path=path, reason=f"it holds tensors under each of {', '.join(nested)}{where}; save only the ones wanted"
        )
    if nested:
        return _state_dict(path, value[nested[0]], f"{where} under {nested[0]!r}")
    if not any(isinstance(each, torch.Tensor) for each in value.values()):
        keys = ", ".join(repr(key) for key in list(value)[:10]) or "none"
        raise SourceError(
            path=path,
            reason=f"no tensor was found{where}, its keys are {keys}; tensors are looked for directly and under "
            f"{', '.join(NESTED_UNDER)}",
        )
    return value


def _holds_tensor(value: object) -> bool:
    import torch

    # A loop, and a memory of what was seen: pickles nest beyond Python's stack, and can hold themselves.
    seen: set[int] = set()
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, torch.Tensor):
            return True
        if isinstance(each, Mapping | list | tuple | set) and id(each) not in seen:
            seen.add(id(each))
            left.extend(each.values() if isinstance(each, Mapping) else each)
    return False


def _check_plain(path: str, name: str, tensor: "torch.Tensor") -> None:
    """Raises SourceError unless the tensor is a strided view of bytes, and nothing besides."""
    import torch

    dtype = str(tensor.dtype).removeprefix("torch.")
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        reason = f"it is a {type(tensor).__name__}, and only plain tensors and parameters can be shared"
    elif tensor.layout is not torch.strided:
        reason = f"its layout is {str(tensor.layout).removeprefix('torch.')}; save it dense"
    elif tensor.device.type != "cpu":
        reason = f"it was saved from the {tensor.device.type} device, and has no bytes"
    elif tensor.is_quantized or dtype not in DTYPE_ITEMSIZE:
        reason = f"its dtype {dtype} is more than bytes"
    elif tensor.is_conj() or tensor.is_neg():
        reason = "it is a lazily conjugated or negated view; save it after resolve_conj() or resolve_neg()"
    else:
        return
    raise SourceError(path=path, tensor=name, reason=reason)

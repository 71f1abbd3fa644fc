"""What of a model in vLLM cannot be cached, refused by name before anybody relies on it."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from wcache_async.errors import ModuleError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["refuse_changed", "refuse_quantized_while_loading", "refuse_unless_plain"]


def refuse_quantized_while_loading(model: "nn.Module") -> None:
    """Raises ModuleError for a layer of vLLM's online quantisation: it has no weights as loaded."""
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "uses_meta_device", False):
            raise ModuleError(
                path=name,
                reason=f"{type(method).__name__} quantises it while it is read, so there are no weights as loaded; "
                "use a checkpoint quantised beforehand, or another load format",
            )


def refuse_changed(before: Mapping[str, str], after: Mapping[str, str]) -> None:
    """Raises ModuleError where loading has made other tensors of a model's, by `layout_of` before and after."""
    for name in before.keys() | after.keys():
        if before.get(name) != after.get(name):
            raise ModuleError(
                path=name,
                reason=f"loading makes {after.get(name, 'nothing')} of {before.get(name, 'nothing')}, "
                "which a model built on meta would lack; use another load format",
            )


def refuse_unless_plain(model: "nn.Module", process: Callable[[], None]) -> None:
    """Post-process a model, whose result must be tensors and nothing else.  Raises ModuleError naming what is not."""
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if hasattr(method, "process_weights_after_loading") and not getattr(
            method, "supports_pre_processed_weights", False
        ):
            raise _not_plain(name, f"{type(method).__name__} cannot start from processed weights")
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    process()
    for name, module in model.named_modules():
        for key, value in module.__dict__.items():
            if value is not before.get(name, {}).get(key) and not _is_plain_value(value):
                raise _not_plain(name, f"it sets {key} to a {type(value).__name__}")


def _not_plain(path: str, reason: str) -> ModuleError:
    return ModuleError(path=path, reason=f'post-processing leaves more than tensors: {reason}; use "stage": "raw"')


def _is_plain_value(value: object) -> bool:
    import torch

    return value is None or isinstance(value, bool | int | float | str | torch.Tensor | torch.dtype)

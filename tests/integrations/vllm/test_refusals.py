"""What cannot be cached is refused by its name, with the reason."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from wcache_async.errors import ModuleError
from wcache_async.integrations.vllm.refusals import (
    refuse_changed,
    refuse_quantized_while_loading,
    refuse_unless_plain,
)


class Layer(nn.Module):
    """A layer with a quantisation method, as vLLM's have."""

    def __init__(self, **method: object) -> None:
        super().__init__()
        self.quant_method: Any = SimpleNamespace(**method)
        self.made: Any = None


def model(**method: object) -> nn.Module:
    return nn.Sequential(Layer(**method))


def test_a_layer_quantised_while_it_is_read() -> None:
    refuse_quantized_while_loading(model(uses_meta_device=False))
    with pytest.raises(ModuleError, match="beforehand") as caught:
        refuse_quantized_while_loading(model(uses_meta_device=True))
    assert caught.value.path == "0"


@pytest.mark.parametrize(
    "after",
    [{"w": "parameter torch.int8[2]"}, {}, {"w": "parameter torch.int8[1]", "scale": "buffer torch.float32[]"}],
    ids=["another shape", "gone", "one more"],
)
def test_tensors_that_loading_changes(after: dict[str, str]) -> None:
    before = {"w": "parameter torch.int8[1]"}
    refuse_changed(before, dict(before))
    with pytest.raises(ModuleError) as caught:
        refuse_changed(before, after)
    assert caught.value.path in {"w", "scale"}


def processing(value: object) -> None:
    layer = Layer(process_weights_after_loading=None, supports_pre_processed_weights=True)

    def process() -> None:
        layer.made = value

    refuse_unless_plain(nn.Sequential(layer), process)
    assert layer.made is value


@pytest.mark.parametrize("value", [None, 3, 1.5, "cutlass", torch.ones(2), torch.int8], ids=str)
def test_post_processing_that_leaves_tensors_and_scalars(value: object) -> None:
    processing(value)


def test_post_processing_that_leaves_a_closure() -> None:
    with pytest.raises(ModuleError, match="sets made to a function") as caught:
        processing(lambda x: x)
    assert caught.value.path == "0"


def test_a_method_that_cannot_start_from_its_own_result() -> None:
    def never() -> None:
        raise AssertionError("refused before it is processed")

    with pytest.raises(ModuleError, match="cannot start from processed weights"):
        refuse_unless_plain(model(process_weights_after_loading=None), never)

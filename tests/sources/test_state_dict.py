"""Which tensors of an unpickled object are the state, and which are refused by name."""

import warnings
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch

from wcache_async.errors import SourceError
from wcache_async.sources.state_dict import NESTED_UNDER, select_tensors

W = torch.ones(2)


def _quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


def _sparse_csr() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.eye(3).to_sparse_csr()


class _Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize("key", NESTED_UNDER)
def test_a_state_dict_is_found_under_the_usual_keys(key: str) -> None:
    loaded = {"epoch": 3, key: {"a.w": W}, "optimizer": {"state": {0: {"exp_avg": torch.zeros(2)}}}}
    assert list(select_tensors("x.pt", loaded)) == ["a.w"]


def test_keys_are_followed_inwards_and_names_stay_as_they_are() -> None:
    loaded = {
        "model": {"state_dict": OrderedDict({"module.a.w": W, "model": W, "steps": 3, "note": "x", "none": None})}
    }
    assert list(select_tensors("x.pt", loaded)) == ["module.a.w", "model"]


def test_a_key_that_holds_no_tensor_is_not_followed() -> None:
    assert list(select_tensors("x.pt", {"model": {"layers": 3}, "state_dict": {"w": W}})) == ["w"]
    assert list(select_tensors("x.pt", {"model": {"layers": 3}, "w": W})) == ["w"]


@pytest.mark.parametrize(
    ("loaded", "tensor", "reason"),
    [
        ({}, "", "its keys are none"),
        ({"epoch": 3, "note": "x"}, "", "its keys are 'epoch', 'note'"),
        (
            {"generator": {"w": W}, "discriminator": {"w": W}},
            "",
            "'generator', 'discriminator'; tensors are looked for",
        ),
        ({"model": {"encoder": {"w": W}}}, "", "under 'model', its keys are 'encoder'"),
        ({"model": {"w": W}, "params": {"w": W}}, "", "under each of model, params"),
        (W, "", "a single tensor"),
        ([W], "", "a list"),
        (None, "", "a NoneType"),
        ({"w": W, "optimizer": {"state": {0: [W]}}}, "optimizer", "a dict with tensors in it"),
        ({"w": W, "pair": (W, 1)}, "pair", "a tuple with tensors in it"),
        ({"w": W, 3: W}, "3", "no string"),
        ({"w\ud800": W}, "'w\\ud800'", "no valid Unicode"),
    ],
)
def test_what_is_no_single_flat_state_dict_is_refused(loaded: object, tensor: str, reason: str) -> None:
    with pytest.raises(SourceError) as caught:
        select_tensors("x.pt", loaded)
    assert (caught.value.path, caught.value.tensor) == ("x.pt", tensor)
    assert reason in caught.value.reason
    str(caught.value).encode()


def test_objects_that_hold_themselves_or_nest_deep_end() -> None:
    endless: list[object] = []
    endless.append(endless)
    deep: object = 0
    for _ in range(100_000):
        deep = [deep]
    assert list(select_tensors("x.pt", {"w": W, "endless": endless, "deep": deep})) == ["w"]
    while isinstance(deep, list):  # Taken apart by hand: its destruction would recurse too.
        deep = deep.pop()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.eye(3).to_sparse(), "layout is sparse_coo"),
        (_sparse_csr, "layout is sparse_csr"),
        (_quantized, "qint8 is more than bytes"),
        (lambda: torch.empty(3, device="meta"), "from the meta device"),
        (lambda: torch.ones(3).as_subclass(_Subclass), "it is a _Subclass"),
        (lambda: torch.ones(3, dtype=torch.complex64).conj(), "conjugated"),
        (lambda: torch.ones(3, dtype=torch.complex64).conj().imag, "negated"),
    ],
)
def test_a_tensor_that_is_more_than_plain_bytes_is_refused_by_name(
    make: Callable[[], torch.Tensor], reason: str
) -> None:
    with pytest.raises(SourceError) as caught:
        select_tensors("x.pt", {"good": W, "bad": make()})
    assert (caught.value.path, caught.value.tensor) == ("x.pt", "bad")
    assert reason in caught.value.reason

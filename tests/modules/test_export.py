"""Exporting a module: every tensor under every name, what else it is made of, and what is refused."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from wcache_async.errors import ModuleError
from wcache_async.manifest import Kind, StateSpec
from wcache_async.modules.export import describe_module


class Rich(nn.Module):
    """One of each thing a module may hold."""

    wcache_scalars: ClassVar[tuple[str, ...]] = ("scale", "label", "absent")

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.norm_again = self.norm
        self.register_buffer("angles", torch.arange(3.0), persistent=False)
        self.original_angles = self.angles
        self.first_row = self.embed.weight.detach()[0]
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.scale = 0.5
        self.label = "rich"
        self.absent = None
        self.norm.eval()


def spec_of(module: nn.Module) -> StateSpec:
    return describe_module(module, backend="shm_fd", devices=["cpu"])[0]


def test_every_tensor_is_there_under_every_name_with_its_kind() -> None:
    spec = spec_of(Rich())
    kinds = {tensor.name: tensor.kind for tensor in spec.tensors}
    assert kinds == {
        "frozen": Kind.PARAMETER,
        "angles": Kind.NON_PERSISTENT_BUFFER,
        "first_row": Kind.ATTRIBUTE,
        "embed.weight": Kind.PARAMETER,
        "norm.weight": Kind.PARAMETER,
        "norm.bias": Kind.PARAMETER,
        "norm.running_mean": Kind.BUFFER,
        "norm.running_var": Kind.BUFFER,
        "norm.num_batches_tracked": Kind.BUFFER,
    }
    assert spec.aliases == {
        "original_angles": "angles",
        "head.weight": "embed.weight",
        **{f"norm_again.{key}": f"norm.{key}" for key in ("weight", "bias")},
        **{f"norm_again.{key}": f"norm.{key}" for key in ("running_mean", "running_var", "num_batches_tracked")},
    }


def test_a_view_held_as_an_attribute_stays_on_the_storage_it_looks_at() -> None:
    spec = spec_of(Rich())
    tensors = {tensor.name: tensor for tensor in spec.tensors}
    assert tensors["first_row"].storage == tensors["embed.weight"].storage
    assert spec.storages[tensors["embed.weight"].storage] == 6 * 4 * 4


def test_the_record_keeps_modes_scalars_grad_and_kinds_of_further_names() -> None:
    spec = spec_of(Rich())
    assert spec.module is not None
    assert spec.module.training
    assert spec.module.other_mode == ("norm", "norm_again")
    assert spec.module.scalars == {"scale": 0.5, "label": "rich", "absent": None}
    assert spec.module.alias_kinds == {"original_angles": Kind.ATTRIBUTE}
    assert {tensor.name for tensor in spec.tensors if tensor.requires_grad} == {
        "embed.weight",
        "norm.weight",
        "norm.bias",
    }


class Labelled(nn.Parameter):
    """A parameter that is more than its bytes."""


class TwoInOne(torch.Tensor):
    """A tensor that wraps two others, with a context."""

    low: torch.Tensor
    high: torch.Tensor
    context: object

    @staticmethod
    def __new__(cls, low: torch.Tensor, high: torch.Tensor, context: object) -> "TwoInOne":
        made: TwoInOne = torch.Tensor._make_wrapper_subclass(cls, low.shape, dtype=low.dtype, device=low.device)
        made.low, made.high, made.context = low, high, context
        return made

    def __tensor_flatten__(self) -> tuple[list[str], object]:
        return ["low", "high"], self.context

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types it as an instance method
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        if func is torch.ops.aten.detach.default:
            me = args[0]
            return TwoInOne(me.low, me.high, me.context)
        raise NotImplementedError(func)


@dataclass(frozen=True)
class Layout:
    bits: int
    dtype: torch.dtype = torch.int8


def test_a_wrapping_tensor_is_taken_apart_and_its_context_told_as_text() -> None:
    module = nn.Module()
    module.w = nn.Parameter(
        TwoInOne(
            torch.zeros(2, 3), torch.ones(2, 3), (Layout(4), {"b": 1, "a": torch.device("cpu")}, [True, None, "x"])
        ),
        requires_grad=False,
    )
    module.again = module.w
    spec = spec_of(module)
    assert [(t.name, t.kind) for t in spec.tensors] == [("w.low", Kind.INNER), ("w.high", Kind.INNER)]
    assert spec.module is not None
    wrapped = spec.module.wrapped["w"]
    assert wrapped.inner == ("low", "high")
    assert wrapped.type.endswith("TwoInOne")
    assert wrapped.context == "(Layout(bits=4, dtype=torch.int8), {'a': device, 'b': 1}, (True, None, 'x'))"
    assert spec.module.wrapped["again"].alias_of == "w"


def module_with(**held: torch.Tensor) -> nn.Module:
    module = nn.Module()
    part = nn.Module()
    module.add_module("part", part)
    for key, tensor in held.items():
        part.register_buffer(key, tensor)
    return module


def cyclic() -> nn.Module:
    inner = nn.Sequential()
    module = nn.Sequential(nn.Linear(1, 1), inner)
    inner.append(module)
    return module


def doubled() -> nn.Module:
    module = nn.Linear(1, 1)
    module._buffers["weight"] = torch.zeros(1)
    return module


def with_list() -> nn.Module:
    module = nn.Sequential(nn.Linear(1, 1))
    module[0].caches = [torch.zeros(1)]  # type: ignore[assignment]
    return module


def with_parameter(parameter: torch.Tensor) -> nn.Module:
    module = nn.Module()
    module._parameters["odd"] = parameter  # type: ignore[assignment]
    return module


def with_bad_scalar() -> nn.Module:
    module = Rich()
    module.scale = [1]  # type: ignore[assignment]
    return module


def fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.zeros(2)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "sparse": (lambda: module_with(x=torch.eye(2).to_sparse()), "part.x", "layout"),
    "nested": (
        lambda: module_with(x=torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=torch.jagged)),
        "part.x",
        "",
    ),
    "conjugated": (lambda: module_with(x=torch.zeros(2, dtype=torch.complex64).conj()), "part.x", "conj"),
    "meta": (lambda: module_with(x=torch.zeros(2, device="meta")), "part.x", "meta"),
    "fake": (lambda: module_with(x=fake()), "part.x", ""),
    "cycle": (cyclic, "1.0", "contains it"),
    "duplicated name": (doubled, "weight", "parameter and for a buffer"),
    "tensors in a list": (with_list, "0.caches", "list with tensors"),
    "parameter subclass": (lambda: with_parameter(Labelled(torch.zeros(1))), "odd", "register_tensor_type"),
    "opaque context": (
        lambda: with_parameter(nn.Parameter(TwoInOne(torch.zeros(1), torch.zeros(1), object()))),
        "odd",
        "cannot be compared",
    ),
    "lazy": (lambda: with_parameter(nn.UninitializedParameter()), "odd", "UninitializedParameter"),
    "scalar that is none": (with_bad_scalar, "scale", "list"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_kept_exactly_is_refused_with_its_path(case: str) -> None:
    make, path, reason = REFUSED[case]
    with pytest.raises(ModuleError) as caught:
        spec_of(make())
    assert caught.value.path == path
    assert reason in caught.value.reason

"""storages: each storage once, every tensor as it lies on it, and no more bytes than are reached."""

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from wcache_async.backends.storages import describe_tensors, refusal
from wcache_async.errors import ExportError
from wcache_async.manifest import Kind, StateSpec

CPU = frozenset({"cpu"})
State = dict[str, tuple[torch.Tensor, bool]]


def describe(state: State, non_persistent: frozenset[str] = frozenset()) -> tuple[StateSpec, list[bytes]]:
    """The spec, and a copy of each storage's bytes."""
    spec, regions = describe_tensors(state, backend="test", devices=CPU, non_persistent=non_persistent)
    return spec, [ctypes.string_at(region.address, region.nbytes) for region in regions]


def raw_bytes(tensor: torch.Tensor) -> list[int]:
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).tolist()


def rebuild(spec: StateSpec, storages: list[bytes]) -> dict[str, torch.Tensor]:
    bases = [torch.frombuffer(bytearray(data) or bytearray(16), dtype=torch.uint8) for data in storages]
    tensors = {}
    for t in spec.tensors:
        dtype: torch.dtype = getattr(torch, t.dtype)
        if 0 in t.shape:
            tensors[t.name] = torch.empty_strided(t.shape, t.stride, dtype=dtype)
            continue
        base = bases[t.storage]
        typed = base[: base.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        assert t.offset % dtype.itemsize == 0
        tensors[t.name] = typed.as_strided(t.shape, t.stride, t.offset // dtype.itemsize)
    return tensors


def test_kinds_and_gradients_are_recorded() -> None:
    spec, _ = describe(
        {
            "p": (torch.nn.Parameter(torch.ones(2)), True),
            "frozen": (torch.nn.Parameter(torch.ones(2), requires_grad=False), True),
            "b": (torch.ones(2), False),
            "n": (torch.ones(2), False),
        },
        non_persistent=frozenset({"n"}),
    )
    assert [(t.kind, t.requires_grad) for t in spec.tensors] == [
        (Kind.PARAMETER, True),
        (Kind.PARAMETER, False),
        (Kind.BUFFER, False),
        (Kind.NON_PERSISTENT_BUFFER, False),
    ]


def test_one_object_twice_is_an_alias_and_an_equal_view_is_not() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    spec, storages = describe({"a": (weight, True), "b": (weight, True), "c": (weight.detach(), True)})
    assert [t.name for t in spec.tensors] == ["a", "c"]
    assert spec.aliases == {"b": "a"}
    assert len(storages) == 1


def test_memory_shared_by_two_storage_objects_is_one_storage() -> None:
    array = np.arange(6, dtype=np.float32)
    spec, storages = describe({"a": (torch.from_numpy(array), False), "b": (torch.from_numpy(array), False)})
    assert [t.storage for t in spec.tensors] == [0, 0]
    assert storages == [array.tobytes()]


def test_a_storage_is_cut_to_what_its_tensors_reach() -> None:
    block = torch.arange(10_000, dtype=torch.uint8)
    spec, storages = describe({"a": (block[1000:1100], False), "b": (block[1050:1200], False)})
    (data,) = storages
    assert len(data) <= 200 + 64  # The cut keeps alignment.
    rebuilt = rebuild(spec, storages)
    assert torch.equal(rebuilt["a"], block[1000:1100])
    assert torch.equal(rebuilt["b"], block[1050:1200])


def test_tensors_without_elements_need_no_storage_bytes() -> None:
    block = torch.ones(100)
    spec, storages = describe(
        {"a": (torch.empty(0, 3), True), "b": (torch.empty(2, 0), True), "c": (block[90:90], False)}
    )
    assert storages == [b"", b"", b""]
    assert [(t.shape, t.offset) for t in spec.tensors] == [((0, 3), 0), ((2, 0), 0), ((0,), 0)]
    assert len({t.storage for t in spec.tensors}) == 3


def test_parameter_subclasses_are_taken_for_their_bytes() -> None:
    class Scaled(torch.nn.Parameter):
        scale = 2.0

    spec, storages = describe({"a": (Scaled(torch.ones(2)), True)})
    assert spec.tensors[0].kind is Kind.PARAMETER
    assert storages == [torch.ones(2).numpy().tobytes()]


def _fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(3)


def _wrapper() -> torch.Tensor:
    return TwoTensor(torch.ones(2), torch.ones(2))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.empty(3, device="meta"), "meta"),
        (lambda: torch.eye(2).to_sparse(), "sparse_coo"),
        (lambda: torch.eye(2).to_mkldnn(), "mkldnn"),
        (lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "nested"),
        (lambda: torch.ones(3, dtype=torch.complex64).conj(), "resolve_conj"),
        (lambda: torch.ones(3, dtype=torch.complex64).conj().imag, "resolve_neg"),
        (_wrapper, "wraps other tensors"),
        (_fake, "no memory of its own"),
        (lambda: torch.nn.UninitializedParameter(), "uninitialized"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantized"),
    ],
    ids=["meta", "sparse", "mkldnn", "nested", "conj", "neg", "wrapper", "fake", "uninitialized", "quantized"],
)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:.*nested tensors")
def test_what_has_no_plain_bytes_is_refused_by_name(make: Callable[[], torch.Tensor], reason: str) -> None:
    with pytest.raises(ExportError) as caught:
        describe({"good": (torch.ones(2), True), "bad": (make(), True)})
    assert (caught.value.tensor, caught.value.backend) == ("bad", "test")
    assert reason in caught.value.reason


def test_another_device_is_refused_with_the_ones_carried() -> None:
    assert refusal(torch.ones(2), {"cuda"}) == "it is on cpu, and only cuda is carried"


@st.composite
def states(draw: st.DrawFn) -> State:
    """Random views (slices, transposes, other dtypes) of a few storages, with some names repeated."""
    blocks = [
        torch.randint(0, 256, (draw(st.integers(1, 40)) * 16,), dtype=torch.uint8, generator=torch.Generator())
        for _ in range(draw(st.integers(1, 3)))
    ]
    state: State = {}
    for number in range(draw(st.integers(1, 8))):
        if draw(st.booleans()) and draw(st.booleans()) and state:
            state[f"t{number}"] = state[draw(st.sampled_from(sorted(state)))]
            continue
        dtype = draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex128]))
        view = draw(st.sampled_from(blocks)).view(dtype)
        view = view[draw(st.integers(0, view.numel())) :]
        if draw(st.booleans()):
            view = view[:: draw(st.integers(1, 4))]
        if draw(st.booleans()) and view.numel() % 2 == 0:
            view = view.reshape(2, -1).t() if view.is_contiguous() else view
        state[f"t{number}"] = (view, draw(st.booleans()))
    return state


@given(states())
def test_any_views_come_back_from_copies_of_the_storages(state: State) -> None:
    spec, storages = describe(state)
    rebuilt = rebuild(spec, storages)
    for name, (tensor, _) in state.items():
        copy = rebuilt[spec.aliases.get(name, name)]
        assert (copy.shape, copy.stride(), copy.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
        assert raw_bytes(copy) == raw_bytes(tensor)
    starts = {tensor.untyped_storage().data_ptr() for tensor, _ in state.values() if tensor.numel()}
    assert len({t.storage for t in spec.tensors if 0 not in t.shape}) == len(starts)

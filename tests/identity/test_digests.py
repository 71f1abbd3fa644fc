"""Digests: of a tensor's elements and nothing else, however they lie; of a state, whatever the order and place."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.modules.random_modules import build
from wcache_async.backends.storages import describe_tensors
from wcache_async.identity import digests
from wcache_async.identity.digests import StateDigester, StateDigests, state_digest
from wcache_async.manifest import Cut, Kind, StateSpec, TensorSpec, build_manifest, plan_layout, spec_of
from wcache_async.modules.export import copy_region, describe_module


def hashed(tensor: torch.Tensor) -> bytes:
    """By the definition, with nothing of the package."""
    return xxhash.xxh3_128(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).digest()


def taken(
    spec: StateSpec, fill: Callable[[int, memoryview], None], *, pieces: Sequence[int] = (), told: bool = True
) -> StateDigests:
    """The digests of a state filled by `fill`, told piece by piece, or only at the end."""
    digester = StateDigester(spec)
    for number, nbytes in enumerate(spec.storages):
        storage = digester.storage(number)
        whole = memoryview(bytearray(nbytes))
        fill(number, whole)
        seen: list[int] = []
        advance = storage.watch(whole, seen.append)
        for piece in pieces if told else ():
            advance(min(piece, nbytes - sum(seen)))
        storage.finish(whole)
        assert storage.needs_whole or sum(seen) <= nbytes
    return digester.finish()


def of_tensors(tensors: dict[str, torch.Tensor], **how: object) -> tuple[StateSpec, dict[str, bytes], str]:
    spec, regions = describe_tensors(
        {name: (tensor, True) for name, tensor in tensors.items()}, backend="none", devices=("cpu",)
    )

    def fill(number: int, into: memoryview) -> None:
        copy_region(regions[number], into, lambda _: None)

    found = taken(spec, fill, **how)  # type: ignore[arg-type]
    each = [found.tensors[i : i + 16] for i in range(0, len(found.tensors), 16)]
    return spec, {tensor.name: digest for tensor, digest in zip(spec.tensors, each, strict=True)}, found.state


base = torch.arange(4096, dtype=torch.int32)


@pytest.mark.parametrize(
    "tensor",
    [
        base,
        base[7:100],
        base.view(64, 64).t(),
        base.view(64, 64)[:, ::3],
        base.view(16, 16, 16).permute(2, 0, 1),
        base.view(1, 64, 1, 64).transpose(0, 2),
        base[5],
        torch.zeros(3, 0, 2),
        torch.zeros(0, 5).t(),
        torch.tensor(True),
        torch.randn(9).to(torch.float8_e4m3fn),
        torch.randn(6, 4, dtype=torch.complex128).t(),
        torch.randn(4, 6, dtype=torch.complex64).t(),
        torch.randn(8, 3, dtype=torch.float64).t(),
        torch.randn(8, 3).bfloat16().t(),
        torch.tensor([float("nan"), -0.0, 0.0]),
        torch.zeros(5, 7, dtype=torch.uint8).as_strided((3, 2), (7, 3), 4),
    ],
    ids=lambda tensor: f"{str(tensor.dtype)[6:]}{list(tensor.shape)}{list(tensor.stride())}",
)
def test_a_tensors_digest_is_that_of_its_elements_in_c_order(tensor: torch.Tensor) -> None:
    _, found, _ = of_tensors({"w": tensor})
    assert found == {"w": hashed(tensor)}


@given(
    pieces=st.lists(st.integers(0, 700), max_size=12),
    spans=st.lists(st.tuples(st.integers(0, 500), st.integers(0, 500)), min_size=1, max_size=5),
)
def test_views_of_one_storage_are_hashed_apart_however_it_is_filled(
    pieces: list[int], spans: list[tuple[int, int]]
) -> None:
    memory = torch.arange(500, dtype=torch.int16)
    tensors = {f"t{i}": memory[min(span) : max(span)] for i, span in enumerate(spans)}
    tensors["strided"] = memory[3:400:5]
    _, found, _ = of_tensors(tensors, pieces=pieces)
    assert found == {name: hashed(tensor) for name, tensor in tensors.items()}


def test_bytes_nobody_has_told_of_are_hashed_all_the_same() -> None:
    _, found, _ = of_tensors({"w": base}, pieces=[100, 3, 0])
    assert found == {"w": hashed(base)}
    _, found, _ = of_tensors({"w": base}, told=False)
    assert found == {"w": hashed(base)}


def test_bytes_between_elements_are_nobodys() -> None:
    memory = torch.zeros(64, 2)
    _, found, state = of_tensors({"w": memory[:, 0]})
    memory[:, 1] = 1
    assert of_tensors({"w": memory[:, 0]})[1:] == (found, state)
    memory[63, 0] = 1
    assert of_tensors({"w": memory[:, 0]})[1:] != (found, state)


def test_an_expanded_dimension_counts_once_so_that_few_bytes_are_never_hashed_for_long() -> None:
    row = torch.arange(6.0)
    _, found, _ = of_tensors({"w": row.expand(2**40, 6), "v": row[::2].expand(2**40, 3), "u": row[0].expand(2**50)})
    assert found == {"w": hashed(row), "v": hashed(row[::2]), "u": hashed(row[0])}


def test_overlapping_elements_are_hashed_as_they_lie() -> None:
    memory = torch.arange(1000, dtype=torch.uint8)
    _, found, _ = of_tensors({"w": memory.as_strided((900, 100), (1, 1))})
    assert found == {"w": hashed(memory[:999])}


@pytest.mark.parametrize("shape", [(1000, 37), (3, 12000), (2, 3, 5000), (40000,)])
def test_a_large_scattered_tensor_is_gathered_block_by_block(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    monkeypatch.setattr(digests, "_BLOCK_NBYTES", 10_000)
    tensor = torch.randn(*shape, 2)[..., 0]
    _, found, _ = of_tensors({"w": tensor})
    assert found == {"w": hashed(tensor)}


# ---------------------------------------------------------------------------- the whole state
def two() -> StateSpec:
    return StateSpec(
        storages=(64, 64),
        tensors=(
            TensorSpec(name="a", dtype="float32", shape=(4, 4), storage=0),
            TensorSpec(name="b", dtype="float32", shape=(4, 4), storage=1, kind=Kind.BUFFER),
        ),
        aliases={"c": "a"},
    )


A, B = b"a" * 16, b"b" * 16


def test_a_states_digest_is_32_hexadecimal_digits_and_stays_what_it_is() -> None:
    """A constant: states of other releases are compared with it."""
    assert state_digest(two(), [A, B]) == "ea1d85270640af35af9d1b01475640b3"


def with_tensor(number: int, **changes: object) -> StateSpec:
    spec = two()
    tensors = list(spec.tensors)
    tensors[number] = msgspec.structs.replace(tensors[number], **changes)
    return msgspec.structs.replace(spec, tensors=tuple(tensors))


def on_one_storage(offset: int) -> StateSpec:
    spec = two()
    b = msgspec.structs.replace(spec.tensors[1], storage=0, offset=offset)
    return msgspec.structs.replace(spec, tensors=(spec.tensors[0], b))


@pytest.mark.parametrize(
    "other",
    [
        with_tensor(1, name="bb"),
        with_tensor(1, dtype="int32"),
        with_tensor(1, shape=(2, 8)),
        with_tensor(1, stride=(1, 4)),
        with_tensor(1, kind=Kind.NON_PERSISTENT_BUFFER),
        with_tensor(0, kind=Kind.BUFFER),
        msgspec.structs.replace(two(), aliases={}),
        msgspec.structs.replace(two(), aliases={"c": "b"}),
        msgspec.structs.replace(two(), aliases={"d": "a"}),
        on_one_storage(0),
        on_one_storage(64),
        msgspec.structs.replace(two(), cuts={"a": Cut(0, (8,), 0, 2)}),
        msgspec.structs.replace(two(), cuts={"a": Cut(0, (8,), 1, 2)}),
    ],
)
def test_another_name_layout_kind_tie_or_sharing_is_another_state(other: StateSpec) -> None:
    assert state_digest(other, [A, B]) != state_digest(two(), [A, B])


def test_other_bytes_are_another_state() -> None:
    assert len({state_digest(two(), pair) for pair in ([A, B], [B, A], [A, A], [B, B])}) == 4


def test_what_does_not_matter_does_not_count() -> None:
    """The order of tensors and storages, a tie's first name, where a storage begins, a stride spelt out."""
    spec = two()
    a, b = spec.tensors
    replace = msgspec.structs.replace
    for other, order in (
        (StateSpec(storages=(64, 64), tensors=(b, a), aliases={"c": "a"}), [B, A]),
        (replace(spec, tensors=(replace(a, storage=1), replace(b, storage=0))), [A, B]),
        (replace(spec, tensors=(replace(a, name="c"), b), aliases={"a": "c"}), [A, B]),
        (replace(spec, tensors=(replace(a, offset=128), b), storages=(192, 64)), [A, B]),
        (replace(spec, tensors=(replace(a, stride=(4, 1), requires_grad=True), b)), [A, B]),
    ):
        assert state_digest(other, order) == state_digest(spec, [A, B])


def test_empty_tensors_count_by_name_and_shape() -> None:
    empty = TensorSpec(name="e", dtype="float32", shape=(0, 4), storage=0, offset=0)
    alone = StateSpec(storages=(0,), tensors=(empty,))
    shared = StateSpec(storages=(64,), tensors=(msgspec.structs.replace(empty, offset=16),))
    assert state_digest(alone, [A]) == state_digest(shared, [A])
    assert state_digest(msgspec.structs.replace(alone, tensors=(msgspec.structs.replace(empty, shape=(4, 0)),)), [A])


def test_names_that_cannot_be_sent_have_a_digest() -> None:
    spec = StateSpec(storages=(4,), tensors=(TensorSpec(name="\ud800", dtype="float32", shape=(1,), storage=0),))
    assert len(state_digest(spec, [A])) == 32


@dataclass(frozen=True)
class Described:
    spec: StateSpec
    digests: StateDigests


def described(module: nn.Module) -> Described:
    spec, regions = describe_module(module, backend="none", devices=("cpu",))
    return Described(spec, taken(spec, lambda number, into: copy_region(regions[number], into, lambda _: None)))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@given(seed=st.integers(0, 2**32))
def test_a_module_built_twice_has_one_digest_and_its_manifest_has_it_too(seed: int) -> None:
    one, other = described(build(seed)), described(build(seed))
    assert one.digests.state == other.digests.state
    each = [one.digests.tensors[i : i + 16] for i in range(0, len(one.digests.tensors), 16)]
    laid_out, _ = spec_of(build_manifest(one.spec, plan_layout(one.spec.storages)))
    assert state_digest(laid_out, each) == one.digests.state

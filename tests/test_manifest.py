"""manifest: where storages go, what is on the wire, and every lie a peer may tell in it."""

import gc
import math
import random
from collections.abc import Callable, Sequence
from itertools import combinations

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.msgpack import decode, encode

from wcache_async.errors import InvalidManifest, Scalar
from wcache_async.manifest import (
    ALIGNMENT,
    DTYPE_ITEMSIZE,
    Arena,
    Cut,
    Kind,
    Layout,
    ModuleRecord,
    StateManifest,
    StateSpec,
    TensorEntry,
    TensorSpec,
    WrappedTensor,
    build_manifest,
    compare_config,
    contiguous_stride,
    decode_manifest,
    encode_manifest,
    plan_layout,
    spec_of,
    tensor_extent,
    validate_manifest,
)


# ------------------------------------------------------------------------------------- layout
def first_fit(storages: Sequence[int], alignment: int, max_arena: int) -> list[tuple[int, int]]:
    """The rule said plainly: the first arena with room; one too large for any gets one alone."""
    arenas: list[int] = []
    places = []
    for nbytes in storages:
        starts = [math.ceil(fill / alignment) * alignment for fill in arenas]
        # An arena filled to the brim is closed to empty storages too.
        room = [n for n, start in enumerate(starts) if start < max_arena and start + nbytes <= max_arena]
        number, start = (room[0], starts[room[0]]) if room else (len(arenas), 0)
        if not room:
            arenas.append(0)
        arenas[number] = start + nbytes
        places.append((number, start))
    return places


sizes = st.lists(st.integers(0, 3000) | st.sampled_from([0, 1, 63, 64, 65, 4096, 1 << 40]), max_size=40)
powers = st.sampled_from([1, 2, 16, 64, 256])


@given(storages=sizes, alignment=powers, granularity=powers, max_arena=st.integers(0, 6000))
def test_a_layout_keeps_its_promises(storages: list[int], alignment: int, granularity: int, max_arena: int) -> None:
    layout = plan_layout(storages, alignment=alignment, granularity=granularity, max_arena=max_arena)
    cap = max(max_arena // granularity, 1) * granularity if max_arena else math.inf
    assert len(layout.places) == len(storages)
    assert layout.arena_nbytes
    ends = [0] * len(layout.arena_nbytes)
    alone = [0] * len(layout.arena_nbytes)
    for nbytes, (arena, offset) in zip(storages, layout.places, strict=True):
        assert offset % alignment == 0
        assert offset >= ends[arena], "storages overlap, or are out of order"
        ends[arena] = offset + nbytes
        alone[arena] += 1
    for number, nbytes in enumerate(layout.arena_nbytes):
        assert nbytes % granularity == 0
        assert nbytes >= granularity
        assert ends[number] <= nbytes < max(ends[number], 1) + granularity
        assert nbytes <= cap or alone[number] == 1
    if not max_arena:
        assert len(layout.arena_nbytes) == 1


@given(storages=sizes, alignment=powers, max_arena=st.integers(1, 6000))
def test_a_storage_goes_into_the_first_arena_with_room(storages: list[int], alignment: int, max_arena: int) -> None:
    layout = plan_layout(storages, alignment=alignment, granularity=1, max_arena=max_arena)
    assert list(layout.places) == first_fit(storages, alignment, max_arena)


@pytest.mark.parametrize("storages", [[], [0], [0, 0, 0]])
def test_a_state_with_no_bytes_still_has_an_arena_to_map(storages: list[int]) -> None:
    layout = plan_layout(storages, granularity=4096)
    assert layout == Layout(places=((0, 0),) * len(storages), arena_nbytes=(4096,))


def test_what_is_left_of_an_arena_is_used_by_a_later_storage_that_fits() -> None:
    layout = plan_layout([40, 80, 36], alignment=64, granularity=1, max_arena=100)
    assert layout.places == ((0, 0), (1, 0), (0, 64))
    assert layout.arena_nbytes == (100, 80)


def test_a_cap_that_is_no_multiple_of_the_granularity_is_kept_to() -> None:
    assert plan_layout([4096, 4096], granularity=4096, max_arena=8191).arena_nbytes == (4096, 4096)


@pytest.mark.parametrize(
    "shape", [(), (0,), (1,), (5,), (2, 3), (2, 0, 3), (0, 0), (1, 1, 4), (4, 1, 1), (3, 5, 7, 2), (2, 3, 0)]
)
def test_contiguous_stride_is_torchs(shape: tuple[int, ...]) -> None:
    assert contiguous_stride(shape) == torch.empty(shape, device="meta").stride()


def test_the_dtype_table_is_torchs() -> None:
    """Every dtype torch has, at its size, except those whose tensors carry more than bytes."""
    known = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
    assert {name for name in known if name not in DTYPE_ITEMSIZE} == {
        "qint8",
        "quint8",
        "qint32",
        "quint4x2",
        "quint2x4",
    }
    assert {name: known[name].itemsize for name in known.keys() & DTYPE_ITEMSIZE} == {
        name: DTYPE_ITEMSIZE[name] for name in known.keys() & DTYPE_ITEMSIZE
    }


def test_alignment_suits_every_dtype() -> None:
    assert all(ALIGNMENT % itemsize == 0 for itemsize in DTYPE_ITEMSIZE.values())


# ---------------------------------------------------------------------------------- the build
SPEC = StateSpec(
    storages=(96, 10, 0),
    tensors=(
        TensorSpec(name="w", dtype="float32", shape=(4, 6), storage=0, requires_grad=True),
        TensorSpec(name="w.t", dtype="float32", shape=(6, 4), storage=0, stride=(1, 6)),
        TensorSpec(name="w.row", dtype="float32", shape=(6,), storage=0, offset=24, stride=(1,)),
        TensorSpec(name="scale", dtype="float8_e4m3fn", shape=(10,), storage=1, kind=Kind.BUFFER),
        TensorSpec(name="empty", dtype="float32", shape=(0, 3), storage=2, kind=Kind.NON_PERSISTENT_BUFFER),
    ),
    aliases={"head": "w"},
)
MANIFEST = StateManifest(
    ("float32", "float8_e4m3fn"),
    (Arena(192, "cpu"),),
    (
        TensorEntry("w", 0, (4, 6), 0, 0, 0, (), Kind.PARAMETER, True),
        TensorEntry("w.t", 0, (6, 4), 0, 0, 0, (1, 6), Kind.PARAMETER, False),
        TensorEntry("w.row", 0, (6,), 24, 0, 0, (), Kind.PARAMETER, False),
        TensorEntry("scale", 1, (10,), 128, 1, 0, (), Kind.BUFFER, False),
        TensorEntry("empty", 0, (0, 3), 192, 2, 0, (), Kind.NON_PERSISTENT_BUFFER, False),
    ),
    {"head": "w"},
)


def test_a_spec_laid_out_is_this_manifest() -> None:
    assert build_manifest(SPEC, plan_layout(SPEC.storages)) == MANIFEST
    validate_manifest(MANIFEST)
    assert SPEC.nbytes == 106
    assert MANIFEST.tensor_bytes == 192
    assert [MANIFEST.dtype_of(entry) for entry in MANIFEST.tensors] == ["float32"] * 3 + ["float8_e4m3fn", "float32"]


def test_arenas_are_on_the_devices_named() -> None:
    layout = plan_layout(SPEC.storages, max_arena=128)
    manifest = build_manifest(SPEC, layout, ("GPU-1", "GPU-2"))
    assert manifest.arenas == (Arena(128, "GPU-1"), Arena(64, "GPU-2"))
    assert [entry.arena for entry in manifest.tensors] == [0, 0, 0, 1, 1]


@st.composite
def specs(draw: st.DrawFn) -> StateSpec:
    storages = draw(st.lists(st.integers(0, 4000), min_size=1, max_size=6))
    tensors = []
    for number in range(draw(st.integers(0, 10))):
        storage = draw(st.integers(0, len(storages) - 1))
        dtype = draw(st.sampled_from(["uint8", "bfloat16", "float32", "complex128"]))
        room = storages[storage] // DTYPE_ITEMSIZE[dtype]
        start = draw(st.integers(0, room))
        rows = draw(st.integers(0, room - start))
        columns = draw(st.integers(0, (room - start) // rows)) if rows else draw(st.integers(0, 5))
        tensors.append(
            TensorSpec(
                name=f"t{number}",
                dtype=dtype,
                shape=(rows, columns),
                storage=storage,
                offset=start * DTYPE_ITEMSIZE[dtype],
                stride=draw(st.sampled_from([(), contiguous_stride((rows, columns)), (1, max(rows, 1))])),
                kind=draw(st.sampled_from(Kind)),
            )
        )
    names = [t.name for t in tensors]
    targets = st.sampled_from(names) if names else st.nothing()
    aliases = draw(st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=4).map("a".__add__), targets))
    module = draw(st.sampled_from([None, ModuleRecord(training=True, scalars={"scale": 0.5})]))
    cut = [t for t in tensors if draw(st.booleans())]
    cuts = {t.name: Cut(0, (3 * (t.shape[0] // 2), 0, 3 * (t.shape[0] - t.shape[0] // 2)), 1, 3) for t in cut}
    return StateSpec(storages=tuple(storages), tensors=tuple(tensors), aliases=aliases, module=module, cuts=cuts)


@given(spec=specs(), max_arena=st.sampled_from([0, 512, 5000]))
def test_every_state_laid_out_is_valid_and_comes_back_as_it_went(spec: StateSpec, max_arena: int) -> None:
    layout = plan_layout(spec.storages, max_arena=max_arena)
    manifest = build_manifest(spec, layout)
    assert decode_manifest(encode_manifest(manifest)) == manifest
    for given_spec, entry in zip(spec.tensors, manifest.tensors, strict=True):
        assert (entry.name, entry.shape, entry.kind) == (given_spec.name, given_spec.shape, given_spec.kind)
        assert (entry.stride or contiguous_stride(entry.shape)) == (
            given_spec.stride or contiguous_stride(given_spec.shape)
        )
        arena, start = layout.places[given_spec.storage]
        assert (entry.arena, entry.offset, entry.storage) == (arena, start + given_spec.offset, given_spec.storage)


def bytes_of(manifest: StateManifest, arenas: Sequence[bytearray]) -> dict[str, bytes]:
    """Each tensor's elements in order, read from the arenas."""
    result = {}
    for entry in manifest.tensors:
        dtype = getattr(torch, manifest.dtype_of(entry))
        base = torch.frombuffer(arenas[entry.arena], dtype=dtype)
        stride = entry.stride or contiguous_stride(entry.shape)
        view = torch.as_strided(base, entry.shape, stride, entry.offset // dtype.itemsize)
        result[entry.name] = view.flatten().contiguous().view(torch.uint8).numpy().tobytes()
    return result


@given(spec=specs(), max_arena=st.sampled_from([0, 512, 5000]), other_cap=st.sampled_from([0, 512]), seed=st.integers())
def test_a_manifest_can_be_laid_out_anew(spec: StateSpec, max_arena: int, other_cap: int, seed: int) -> None:
    """Its storages copied from where they start into another layout give the same tensors."""
    manifest = build_manifest(spec, plan_layout(spec.storages, max_arena=max_arena))
    rng = random.Random(seed)
    arenas = [bytearray(rng.randbytes(arena.nbytes)) for arena in manifest.arenas]
    again, starts = spec_of(manifest)
    layout = plan_layout(again.storages, max_arena=other_cap)
    copies = [bytearray(nbytes) for nbytes in layout.arena_nbytes]
    for nbytes, (arena, start), (to_arena, to) in zip(again.storages, starts, layout.places, strict=True):
        copies[to_arena][to : to + nbytes] = arenas[arena][start : start + nbytes]
    copied = build_manifest(again, layout)
    validate_manifest(copied)
    assert bytes_of(copied, copies) == bytes_of(manifest, arenas)
    kept = ("name", "shape", "kind", "requires_grad")
    for entry, other in zip(manifest.tensors, copied.tensors, strict=True):
        assert [getattr(entry, f) for f in kept] == [getattr(other, f) for f in kept]
        assert copied.dtype_of(other) == manifest.dtype_of(entry)
    assert copied.aliases == manifest.aliases
    assert copied.module == manifest.module
    assert copied.cuts == manifest.cuts
    # Who shares a storage still does, at the same distance.
    for (one, new_one), (two, new_two) in combinations(zip(manifest.tensors, copied.tensors, strict=True), 2):
        assert (one.storage == two.storage) == (new_one.storage == new_two.storage)
        if one.storage == two.storage and tensor_extent(one) and tensor_extent(two):
            assert one.offset - two.offset == new_one.offset - new_two.offset


# ------------------------------------------------------------------------------- golden bytes
def test_these_are_the_bytes() -> None:
    """array_like carries no field names: two fields changing places would swap values unseen."""
    manifest = StateManifest(
        ("float32", "int8"),
        (Arena(256, "cpu"), Arena(65536, "GPU-0")),
        (TensorEntry("w", 1, (2, 300), 64, 5, 0, (300, 1), Kind.NON_PERSISTENT_BUFFER, False),),
        {"a": "w"},
        None,
        {"w": Cut(1, (200, 400), 3, 2)},
    )
    body = (
        b"\x96"
        b"\x92\xa7float32\xa4int8"  # dtypes
        b"\x92"  # arenas
        b"\x92\xcd\x01\x00\xa3cpu"  # nbytes, device
        b"\x92\xce\x00\x01\x00\x00\xa5GPU-0"
        b"\x91\x99"  # tensors
        b"\xa1w"  # name
        b"\x01"  # dtype
        b"\x92\x02\xcd\x01\x2c"  # shape
        b"\x40"  # offset
        b"\x05"  # storage
        b"\x00"  # arena
        b"\x92\xcd\x01\x2c\x01"  # stride
        b"\x02"  # kind
        b"\xc2"  # requires_grad
        b"\x81\xa1a\xa1w"  # aliases
        b"\xc0"  # module
        b"\x81\xa1w"  # cuts
        b"\x94\x01"  # dim
        b"\x92\xcc\xc8\xcd\x01\x90"  # parts
        b"\x03\x02"  # rank, ranks
    )
    assert encode_manifest(manifest) == body
    assert msgspec.msgpack.decode(body, type=StateManifest) == manifest


def test_each_kind_keeps_its_number() -> None:
    assert {kind.name: kind.value for kind in Kind} == {
        "PARAMETER": 0,
        "BUFFER": 1,
        "NON_PERSISTENT_BUFFER": 2,
        "ATTRIBUTE": 3,
        "INNER": 4,
    }


def test_fields_a_newer_peer_appends_are_ignored() -> None:
    raw = decode(encode_manifest(MANIFEST))
    raw[1] = [[*arena, "new"] for arena in raw[1]]
    raw[2] = [[*entry, "new", [1]] for entry in raw[2]]
    assert decode_manifest(encode([*raw, {"new": 1}])) == MANIFEST


@pytest.mark.parametrize(
    ("wrapped", "reason"),
    [
        ({"p": WrappedTensor(type="T", kind=Kind.PARAMETER, inner=("data",))}, "its part 'p.data' is missing"),
        ({"w": WrappedTensor(type="T", kind=Kind.PARAMETER)}, "both a tensor and a wrapped tensor"),
        ({"p": WrappedTensor(type="T", kind=Kind.PARAMETER, alias_of="q")}, "its part 'q' is missing"),
        (
            {
                "p": WrappedTensor(type="T", kind=Kind.PARAMETER, alias_of="q"),
                "q": WrappedTensor(type="T", kind=Kind.PARAMETER, alias_of="p"),
            },
            "which is none itself",
        ),
    ],
    ids=["part", "name", "alias", "alias-loop"],
)
def test_a_wrapped_tensor_without_its_parts_is_refused(wrapped: dict[str, WrappedTensor], reason: str) -> None:
    manifest = StateManifest(
        ("int8",), (Arena(64),), (TensorEntry("w", 0, (4,), 0, 0),), {}, ModuleRecord(wrapped=wrapped)
    )
    with pytest.raises(InvalidManifest, match=reason):
        decode_manifest(encode_manifest(manifest))


def test_a_manifest_without_the_optional_fields_is_one_of_an_older_peer() -> None:
    body = encode([["int8"], [[64]], [["w", 0, [4], 0, 0]]])
    assert decode_manifest(body) == StateManifest(("int8",), (Arena(64, "cpu"),), (TensorEntry("w", 0, (4,), 0, 0),))


def llama(layers: int) -> StateSpec:
    hidden, inner, heads = 4096, 14336, 1024
    shapes = {
        "self_attn.q_proj.weight": (hidden, hidden),
        "self_attn.k_proj.weight": (heads, hidden),
        "self_attn.v_proj.weight": (heads, hidden),
        "self_attn.o_proj.weight": (hidden, hidden),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    named = [("model.embed_tokens.weight", (128256, hidden)), ("model.norm.weight", (hidden,))]
    named += [(f"model.layers.{n}.{name}", shape) for n in range(layers) for name, shape in shapes.items()]
    return StateSpec(
        storages=tuple(2 * math.prod(shape) for _, shape in named),
        tensors=tuple(
            TensorSpec(name=name, dtype="bfloat16", shape=shape, storage=i) for i, (name, shape) in enumerate(named)
        ),
        aliases={"lm_head.weight": "model.embed_tokens.weight"},
    )


def test_a_tensor_of_a_large_model_takes_at_most_80_bytes() -> None:
    spec = llama(11_200)
    assert len(spec.tensors) > 100_000
    body = encode_manifest(build_manifest(spec, plan_layout(spec.storages)))
    assert len(body) / len(spec.tensors) <= 80
    assert len(decode_manifest(body).tensors) == len(spec.tensors)


def test_entries_are_no_work_for_the_garbage_collector() -> None:
    entry, arena = MANIFEST.tensors[0], MANIFEST.arenas[0]
    assert not gc.is_tracked(entry)
    assert not gc.is_tracked(arena)
    assert not gc.is_tracked(SPEC.tensors[0])


# --------------------------------------------------------------------------------------- lies
def honest() -> list[list[object]]:
    """A manifest as a peer may write it: dtypes, arenas, tensors, aliases, module, cuts."""
    return [
        ["float32", "int8"],
        [[1024, "cpu"], [64, "cpu"]],
        [["w", 0, [4, 4], 64, 0, 0, [], 0, True], ["b", 1, [8], 0, 1, 1, [], 1, False]],
        {"a": "w"},  # type: ignore[list-item]
        None,  # type: ignore[list-item]
        {"b": [0, [4, 12], 1, 2]},  # type: ignore[list-item]
    ]


def entry_lie(**changes: object) -> Callable[[list[list[object]]], None]:
    fields = ["name", "dtype", "shape", "offset", "storage", "arena", "stride", "kind", "requires_grad"]

    def tell(raw: list[list[object]]) -> None:
        entry = raw[2][0]
        assert isinstance(entry, list)
        for name, value in changes.items():
            entry[fields.index(name)] = value

    return tell


def part_lie(part: int, value: object) -> Callable[[list[list[object]]], None]:
    def tell(raw: list[list[object]]) -> None:
        raw[part] = value  # type: ignore[call-overload]

    return tell


def test_the_manifest_the_lies_are_told_in_is_valid() -> None:
    assert len(decode_manifest(encode(honest())).tensors) == 2


HUGE = 2**63 - 1


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        # Numbers that are none.
        pytest.param(entry_lie(offset=-1), ">= 0", id="negative offset"),
        pytest.param(entry_lie(shape=[-1, 4]), ">= 0", id="negative size"),
        pytest.param(entry_lie(stride=[-4, 1]), ">= 0", id="negative stride"),
        pytest.param(entry_lie(dtype=-1), ">= 0", id="negative dtype number"),
        pytest.param(entry_lie(arena=-1), ">= 0", id="negative arena number"),
        pytest.param(entry_lie(storage=-1), ">= 0", id="negative storage number"),
        pytest.param(entry_lie(offset=2**63), "<= ", id="offset of 64 bits"),
        pytest.param(entry_lie(shape=[2**64 - 1]), "<= ", id="size of 64 bits"),
        pytest.param(entry_lie(shape=[4.0]), "int", id="size with a fraction"),
        pytest.param(entry_lie(shape=4), "array", id="shape that is a number"),
        pytest.param(entry_lie(name=7), "str", id="name that is a number"),
        pytest.param(entry_lie(name=None), "str", id="no name"),
        pytest.param(entry_lie(kind=5), "5", id="unknown kind"),
        pytest.param(entry_lie(requires_grad=1), "bool", id="flag that is a number"),
        pytest.param(part_lie(1, [[-1, "cpu"]]), ">= 0", id="arena of negative size"),
        pytest.param(part_lie(2, [["w"]]), "5", id="entry too short"),
        # Places outside.
        pytest.param(entry_lie(dtype=2), "dtype number 2 of 2", id="dtype number out of range"),
        pytest.param(entry_lie(dtype=HUGE), f"dtype number {HUGE} of 2", id="huge dtype number"),
        pytest.param(entry_lie(arena=2), "arena number 2 of 2", id="arena number out of range"),
        pytest.param(entry_lie(offset=964), "bytes 964 to 1028 of an arena of 1024", id="one element past the end"),
        pytest.param(entry_lie(offset=HUGE - 3), "of an arena of 1024", id="huge offset"),
        pytest.param(entry_lie(shape=[0], offset=1028), "of an arena of 1024", id="empty tensor past the end"),
        pytest.param(entry_lie(shape=[], offset=1024), "bytes 1024 to 1028", id="scalar past the end"),
        pytest.param(entry_lie(stride=[100, 1]), "bytes 64 to 1280", id="stride past the end"),
        pytest.param(entry_lie(stride=[HUGE, HUGE]), "of an arena of 1024", id="huge stride"),
        pytest.param(entry_lie(shape=[2**40, 1], stride=[1, 1]), "of an arena of 1024", id="huge size"),
        pytest.param(entry_lie(offset=66), "no multiple of its 4-byte elements", id="element out of line"),
        # Numbers that torch would multiply beyond 63 bits.
        pytest.param(entry_lie(shape=[2**32, 2**32]), "overflows", id="overflow"),
        pytest.param(entry_lie(shape=[2**61]), "overflows", id="overflow in bytes"),
        pytest.param(entry_lie(shape=[2**32, 2**32], stride=[0, 0]), "overflows", id="overflow without extent"),
        pytest.param(entry_lie(shape=[0, 2**32, 2**32]), "overflows", id="overflow of an empty tensor's stride"),
        pytest.param(entry_lie(shape=[1] * 65), "65 dimensions", id="too many dimensions"),
        pytest.param(entry_lie(shape=[2**62] * 200_000), "200000 dimensions", id="dimensions to be busy with"),
        pytest.param(entry_lie(shape=[4], stride=[1] * 200_000), "200000 strides", id="strides to be busy with"),
        # Contradictions.
        pytest.param(entry_lie(stride=[4]), "with stride", id="stride shorter than shape"),
        pytest.param(entry_lie(stride=[4, 1, 1]), "with stride", id="stride longer than shape"),
        pytest.param(entry_lie(shape=[], stride=[1]), "with stride", id="stride of a scalar"),
        pytest.param(entry_lie(storage=1), "storage 1 is in arenas 0 and 1", id="storage in two arenas"),
        pytest.param(entry_lie(dtype=1), "int8 tensor that requires grad", id="integers that require grad"),
        pytest.param(entry_lie(name="b"), "stands twice", id="name twice"),
        pytest.param(part_lie(0, ["float32", "qint8"]), "'qint8' is unknown", id="quantised dtype"),
        pytest.param(part_lie(0, ["float32", "__class__"]), "'__class__' is unknown", id="no dtype at all"),
        pytest.param(part_lie(0, []), "of 0", id="no dtypes"),
        pytest.param(part_lie(1, []), "of 0", id="no arenas"),
        pytest.param(part_lie(1, [[1024, "cpu"], [0, "cpu"]]), "arena 1 has no bytes", id="empty arena"),
        pytest.param(part_lie(3, {"a": "nobody"}), "'nobody', which is no tensor", id="alias of nothing"),
        pytest.param(part_lie(3, {"a": "a"}), "'a', which is no tensor", id="alias of itself"),
        pytest.param(part_lie(3, {"a": "c", "c": "a"}), "which is no tensor", id="alias loop"),
        pytest.param(part_lie(3, {"a": "w", "c": "a"}), "'a', which is no tensor", id="alias of an alias"),
        pytest.param(part_lie(3, {"b": "w"}), "both a tensor and an alias", id="alias that is a tensor"),
        pytest.param(part_lie(3, {"a": 1}), "str", id="alias of a number"),
        pytest.param(part_lie(5, {"a": [0, [8], 0, 2]}), "is not there", id="cut of an alias"),
        pytest.param(part_lie(5, {"b": [0, [16], 2, 2]}), "part 2 of 2", id="rank past the last"),
        pytest.param(part_lie(5, {"b": [0, [16], 0, 0]}), "part 0 of 0", id="cut for nobody"),
        pytest.param(part_lie(5, {"b": [1, [16], 0, 2]}), "along dimension 1", id="cut along no dimension"),
        pytest.param(part_lie(5, {"b": [0, [15, 1], 0, 2]}), "add up to 16", id="parts that do not divide"),
        pytest.param(part_lie(5, {"b": [0, [14], 0, 2]}), "add up to 14", id="cut that is too large"),
        pytest.param(part_lie(5, {"b": [0, [HUGE] * 100_000, 0, 2]}), "100000 parts", id="parts to be busy with"),
        pytest.param(part_lie(5, {"b": [0, [16], -1, 2]}), ">= 0", id="negative rank"),
    ],
)
def test_a_lie_is_refused_with_its_reason(lie: Callable[[list[list[object]]], None], reason: str) -> None:
    raw = honest()
    lie(raw)
    with pytest.raises(InvalidManifest) as caught:
        decode_manifest(encode(raw))
    assert reason in caught.value.reason
    assert len(str(caught.value)) < 1000


def test_a_shape_seen_before_is_not_believed_with_another_stride() -> None:
    """Extents are remembered by shape and stride, as models repeat few of them."""
    raw = honest()
    raw[2].append(["w.2", 0, [4, 4], 64, 0, 0, [100, 1], 0, False])
    with pytest.raises(InvalidManifest) as caught:
        decode_manifest(encode(raw))
    assert caught.value.tensor == "w.2"


def test_the_tensor_is_named() -> None:
    raw = honest()
    entry_lie(offset=1024)(raw)
    with pytest.raises(InvalidManifest) as caught:
        decode_manifest(encode(raw))
    assert caught.value.tensor == "w"


@pytest.mark.parametrize(
    "truth",
    [
        pytest.param(entry_lie(offset=960), id="up to the last byte"),
        pytest.param(entry_lie(shape=[], offset=1020), id="scalar in the last bytes"),
        pytest.param(entry_lie(shape=[0, 7], offset=1024), id="empty tensor at the end"),
        pytest.param(entry_lie(shape=[0, 3], stride=[HUGE, HUGE]), id="empty tensor of any stride"),
        pytest.param(entry_lie(shape=[2**20, 4], stride=[0, 1]), id="expanded"),
        pytest.param(entry_lie(shape=[1, 4], stride=[HUGE, 1]), id="any stride where there is one element"),
        pytest.param(entry_lie(stride=[1, 4]), id="transposed"),
        pytest.param(entry_lie(shape=[1] * 64), id="as many dimensions as torch takes"),
        pytest.param(part_lie(2, []), id="no tensors"),
    ],
)
def test_what_is_odd_and_true_is_taken(truth: Callable[[list[list[object]]], None]) -> None:
    raw = honest()
    truth(raw)
    if not raw[2]:
        raw[3] = raw[5] = {}  # type: ignore[call-overload]
    manifest = decode_manifest(encode(raw))
    arena = torch.zeros(1024, dtype=torch.uint8)
    for entry in manifest.tensors[:1]:
        base = arena.view(getattr(torch, manifest.dtype_of(entry)))
        stride = entry.stride or contiguous_stride(entry.shape)
        assert torch.as_strided(base, entry.shape, stride, entry.offset // 4).shape == entry.shape


def test_tensors_may_share_bytes() -> None:
    raw = honest()
    raw[2] += [["w.t", 0, [4, 4], 64, 0, 0, [1, 4], 0, False], ["w.1", 0, [4], 80, 0, 0, [], 0, False]]
    assert len(decode_manifest(encode(raw)).tensors) == 4


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc0",
        b"\x80",
        b"\x94\x90\x90\x90",
        b"\x90",
        b"\x94\x90\x90\xdd\xff\xff\xff\xff",
        b"\x95\x90\x90\x90\x80" + b"\x91" * 100_000,
        b"\x94\x91\xa1\xff\x90\x90\x80",
    ],
    ids=repr,
)
def test_a_body_that_is_no_manifest_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidManifest, match="does not decode"):
        decode_manifest(body)


@given(body=st.binary(max_size=100), at=st.integers(0, 1000), byte=st.integers(0, 255))
def test_random_and_damaged_bytes_are_refused_or_decoded(body: bytes, at: int, byte: int) -> None:
    damaged = bytearray(encode_manifest(MANIFEST))
    damaged[at % len(damaged)] = byte
    for candidate in (body, bytes(damaged)):
        try:
            manifest = decode_manifest(candidate)
        except InvalidManifest:
            continue
        validate_manifest(manifest)


@pytest.mark.parametrize("name", ["\ud800", "w\udcff"])
def test_a_name_that_is_no_text_is_refused_at_the_sender(name: str) -> None:
    manifest = StateManifest(("int8",), (Arena(64),), (TensorEntry(name, 0, (1,), 0, 0),))
    with pytest.raises(InvalidManifest, match="cannot be encoded"):
        encode_manifest(manifest)


# ------------------------------------------------------------------------------------- config
@pytest.mark.parametrize(
    ("expected", "actual", "differences"),
    [
        ({}, {"dtype": "float32"}, {}),
        ({"dtype": "float32"}, {"dtype": "float32", "tp_size": 2}, {}),
        ({"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": ["float32", "bfloat16"]}),
        ({"dtype": "float32"}, {}, {"dtype": ["float32", None]}),
        ({"revision": None}, {}, {}),
        ({"revision": None}, {"revision": None}, {}),
        ({"revision": None}, {"revision": "main"}, {"revision": [None, "main"]}),
        ({"tp": 1}, {"tp": 1.0}, {}),
        ({"tp": 1}, {"tp": True}, {"tp": [1, True]}),
        ({"tied": False}, {"tied": 0}, {"tied": [False, 0]}),
        ({"tied": False}, {}, {"tied": [False, None]}),
        ({"tied": True}, {"tied": True}, {}),
        ({"tp": "1"}, {"tp": 1}, {"tp": ["1", 1]}),
        ({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 3, "c": 4}, {"b": [2, 3], "c": [3, 4]}),
    ],
)
def test_configs_are_compared_field_by_field(
    expected: dict[str, Scalar], actual: dict[str, Scalar], differences: dict[str, list[Scalar]]
) -> None:
    assert compare_config(expected, actual) == differences
    found = compare_config(expected, actual)
    assert {k: [type(v) for v in pair] for k, pair in found.items()} == {
        k: [type(v) for v in pair] for k, pair in differences.items()
    }

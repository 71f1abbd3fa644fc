"""Plans for tensor parallelism: what each pattern names, what each style cuts, and every plan that makes no sense."""

import json

import pytest

from wcache_async.errors import SourceError
from wcache_async.manifest import Cut
from wcache_async.sources.tp_plan import Rule, TpPlan, cut_tensors, parse_plan, patterns_that_name

Shapes = dict[str, tuple[int, ...]]


def plan_of(entries: object) -> TpPlan:
    return parse_plan("/plan.json", json.dumps(entries).encode())


def cut(entries: object, shapes: Shapes, *, rank: int = 1, ranks: int = 2) -> dict[str, Cut]:
    return cut_tensors("/model", plan_of(entries), shapes, rank=rank, ranks=ranks)


def refused(entries: object, shapes: Shapes, *, ranks: int = 2) -> SourceError:
    with pytest.raises(SourceError) as caught:
        cut(entries, shapes, ranks=ranks)
    return caught.value


# --------------------------------------------------------------------------------- what is cut
@pytest.mark.parametrize(
    ("style", "shapes", "expected"),
    [
        ("colwise", {"l.weight": (6, 4), "l.bias": (6,)}, {"l.weight": (0, (6,)), "l.bias": (0, (6,))}),
        ("rowwise", {"l.weight": (6, 4), "l.bias": (6,)}, {"l.weight": (1, (4,))}),
        ("rowwise", {"l.weight": (4,)}, {"l.weight": (0, (4,))}),
        ("embedding_rowwise", {"l.weight": (6, 4)}, {"l.weight": (0, (6,))}),
        ("embedding_colwise", {"l.weight": (6, 4)}, {"l.weight": (1, (4,))}),
        ("replicated", {"l.weight": (6, 4)}, {}),
        ("replicated", {"l.weight": (3, 5)}, {}),
        ("packed_colwise", {"l.weight": (8, 4), "l.bias": (8,)}, {"l.weight": (0, (4, 4)), "l.bias": (0, (4, 4))}),
        ("packed_rowwise", {"l.weight": (3, 8), "l.bias": (3,)}, {"l.weight": (1, (4, 4))}),
        # Experts: [experts, output, input].
        ("colwise", {"l": (3, 6, 4)}, {"l": (1, (6,))}),
        ("rowwise", {"l": (3, 5, 4)}, {"l": (2, (4,))}),
        ("packed_colwise", {"l": (3, 8, 5)}, {"l": (1, (4, 4))}),
        ("packed_rowwise", {"l": (3, 5, 8)}, {"l": (2, (4, 4))}),
    ],
)
def test_a_style_cuts_the_dimension_it_says(
    style: str, shapes: Shapes, expected: dict[str, tuple[int, tuple[int, ...]]]
) -> None:
    assert cut({"l": style}, shapes) == {name: Cut(dim, parts, 1, 2) for name, (dim, parts) in expected.items()}


def test_a_fused_projection_is_cut_part_by_part() -> None:
    entries = {"qkv": {"style": "packed_colwise", "parts": [8, 4, 4]}}
    assert cut(entries, {"qkv.weight": (16, 3), "qkv.bias": (16,)}, ranks=4) == {
        "qkv.weight": Cut(0, (8, 4, 4), 1, 4),
        "qkv.bias": Cut(0, (8, 4, 4), 1, 4),
    }


@pytest.mark.parametrize(
    ("heads", "ranks", "expected"),
    [
        (4, 2, [(0, 2), (1, 2)]),
        (2, 4, [(0, 2), (0, 2), (1, 2), (1, 2)]),
        (6, 4, [(0, 2), (0, 2), (1, 2), (1, 2)]),
        (6, 3, [(0, 3), (1, 3), (2, 3)]),
        (2, 3, [None, None, None]),
        (1, 2, [None, None]),
    ],
)
def test_units_stay_whole_and_ranks_beyond_them_have_their_neighbours(
    heads: int, ranks: int, expected: list[tuple[int, int] | None]
) -> None:
    entries = {"kv": {"style": "unit_colwise", "unit": 8}, "o": {"style": "unit_rowwise", "unit": 8}}
    size = heads * 8
    shapes: Shapes = {"kv.weight": (size, 3), "kv.bias": (size,), "o.weight": (3, size), "o.bias": (3,)}
    for rank, share in enumerate(expected):
        cuts = cut(entries, shapes, rank=rank, ranks=ranks)
        dims = {"kv.weight": 0, "kv.bias": 0, "o.weight": 1}
        assert cuts == ({} if share is None else {name: Cut(dim, (size,), *share) for name, dim in dims.items()})


def test_units_that_are_not_told_or_do_not_fit_are_an_error() -> None:
    assert "without a unit" in refused({"kv": "unit_colwise"}, {"kv.weight": (8, 3)}).reason
    assert "has a unit, which a colwise has not" in refused({"l": {"style": "colwise", "unit": 2}}, {}).reason
    error = refused({"kv": {"style": "unit_colwise", "unit": 3}}, {"kv.weight": (8, 3)})
    assert (error.tensor, error.path) == ("kv.weight", "/model")
    assert "8 elements, which are no units of 3" in error.reason


def test_what_no_pattern_names_is_whole() -> None:
    assert cut({"a": "colwise"}, {"a.weight": (4, 3), "norm.weight": (5,)}).keys() == {"a.weight"}


# ---------------------------------------------------------------------------- what is matched
@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("layers.*.q_proj", "layers.0.q_proj.weight", True),
        ("layers.*.q_proj", "layers.11.q_proj.bias", True),
        ("layers.*.q_proj.weight", "layers.0.q_proj.weight", True),
        ("layers.*.q_proj", "model.layers.0.q_proj.weight", True),
        ("model.layers.*.q_proj", "layers.0.q_proj.weight", True),
        ("model.layers.*.q_proj", "model.layers.0.q_proj.weight", True),
        ("layers.*.q_proj", "layers.0.attn.q_proj.weight", False),
        ("layers.*.q_proj", "decoder.layers.0.q_proj.weight", False),
        ("layers.*.q_proj", "layers.0.q_proj_norm.weight", False),
        ("layers.*", "layers.0.q_proj.weight", False),
        ("q_proj.*", "q_proj.weight", True),
        ("lm_head", "lm_head.weight", True),
        ("head", "head", True),
        ("a[0]?", "a0.weight", False),
    ],
)
def test_a_pattern_names_a_tensor_or_its_module(pattern: str, name: str, matches: bool) -> None:
    plan = TpPlan(origin="/plan.json", rules=(Rule(pattern=pattern, style="colwise"),))
    assert patterns_that_name(plan, [name]) == ({pattern} if matches else set())
    if matches:
        assert cut({pattern: "colwise"}, {name: (4, 4)}).keys() == {name}


def test_another_base_model_has_another_prefix() -> None:
    plan = TpPlan(origin="x", rules=(Rule(pattern="h.*.fc", style="colwise"),), prefix="transformer.")
    assert patterns_that_name(plan, ["transformer.h.0.fc.weight"])
    assert not patterns_that_name(plan, ["model.h.0.fc.weight"])


def test_the_more_exact_of_two_patterns_wins() -> None:
    entries = {
        "layers.*.o.bias": "colwise",
        "layers.*.o": "rowwise",
        "layers.0.o": "replicated",
        "*.*.o": "embedding_rowwise",
    }
    shapes: Shapes = {f"layers.{n}.o.{part}": (4, 4) for n in (0, 1) for part in ("weight", "bias")}
    cuts = cut(entries, {**shapes, "other.0.o.weight": (4, 4)})
    assert {name: c.dim for name, c in cuts.items()} == {
        "layers.0.o.bias": 0,
        "layers.1.o.bias": 0,
        "layers.1.o.weight": 1,
        "other.0.o.weight": 0,
    }


def test_two_patterns_that_match_alike_are_an_error() -> None:
    for entries in ({"a.*.w": "colwise", "*.b.w": "rowwise"}, {"a.b.w": "colwise", "model.a.b.w": "rowwise"}):
        error = refused(entries, {"a.b.w": (4, 4)})
        assert (error.path, error.tensor) == ("/plan.json", "a.b.w")
        assert all(repr(pattern) in error.reason for pattern in entries)


# ------------------------------------------------------------------------ what makes no sense
@pytest.mark.parametrize(
    ("style", "shape", "told"),
    [
        ("colwise", (7, 4), "7 of its dimension 0 cannot be cut into 2 equal slices"),
        ("rowwise", (4, 9), "9 of its dimension 1 cannot be cut into 2 equal slices"),
        ("packed_colwise", (6, 4), "a part of 3 of its dimension 0 cannot be cut into 2 equal slices"),
        ("packed_colwise", (7, 4), "a part of 3 of its dimension 0"),
        ("colwise", (), "shape [] has no dimension to cut"),
        ("rowwise", (), "shape [] has no dimension to cut"),
        ("embedding_colwise", (4,), "shape [4] has no dimension to cut"),
    ],
)
def test_a_tensor_that_cannot_be_cut_so_is_named_with_the_numbers(
    style: str, shape: tuple[int, ...], told: str
) -> None:
    error = refused({"l": style}, {"l.weight": shape})
    assert (error.path, error.tensor) == ("/model", "l.weight")
    assert told in error.reason
    assert f"(l: {style})" in error.reason


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ([8, 4, 8], "has 16 elements, and the plan's parts add up to 20"),
        ([12, 4], "a part of 12"),
    ],
)
def test_parts_must_make_the_whole_and_divide(parts: list[int], told: str) -> None:
    error = refused({"qkv": {"style": "packed_colwise", "parts": parts}}, {"qkv.weight": (16, 3)}, ranks=8)
    assert error.tensor == "qkv.weight"
    assert told in error.reason


def test_a_pattern_that_names_nothing_is_an_error() -> None:
    error = refused({"a": "colwise", "layers.*.q": "colwise", "norm": "replicated"}, {"a.weight": (4, 4)})
    assert (error.path, error.tensor) == ("/model", "")
    assert "no tensor for layers.*.q, norm of /plan.json" in error.reason


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"{}", "the plan is empty"),
        (b"", "it is no plan"),
        (b"[]", "it is no plan"),
        (b"\xff", "it is no plan"),
        (b"[" * 100_000, "it is no plan"),
        (b'{"a": 1}', "it is no plan"),
        (b'{"a": {"parts": [1]}}', "style"),
        (b'{"a": {"style": "packed_colwise", "part": [1]}}', "part"),
        (b'{"a": "colwise", "a": "rowwise"}', "'a' stands twice"),
        (b'{"a": {"style": "packed_colwise", "parts": [8, -4]}}', ">= 0"),
        (b'{"a": "columnwise"}', "'a' has the unknown style 'columnwise'; known are colwise, "),
        (b'{"a": {"style": "colwise", "parts": [4]}}', "'a' has parts"),
    ],
)
def test_a_file_that_is_no_plan_is_refused_by_name(body: bytes, told: str) -> None:
    with pytest.raises(SourceError) as caught:
        cut_tensors("/model", parse_plan("/plan.json", body), {"a.weight": (4, 4)}, rank=0, ranks=2)
    assert caught.value.path == "/plan.json"
    assert told in caught.value.reason


def test_a_plan_that_names_each_tensor_takes_no_longer_than_their_number() -> None:
    """Matching every name against every pattern would be 10^10 comparisons here."""
    names = [f"layers.{n}.weight" for n in range(100_000)]
    cuts = cut(dict.fromkeys(names, "colwise"), dict.fromkeys(names, (4, 4)))
    assert len(cuts) == len(names)

"""How a checkpoint's tensors are cut for tensor parallelism: a plan read, its patterns matched, shares worked out.

Pure.  The words are those of transformers' ``base_model_tp_plan``
(https://huggingface.co/docs/transformers/perf_infer_gpu_multi): a pattern names a module or a
tensor, and a style how it is cut; what no pattern names, every rank has whole.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec import Struct

from wcache_async.errors import SourceError
from wcache_async.manifest import Cut, NonNegative

__all__ = ["STYLES", "Rule", "TpPlan", "cut_tensors", "parse_plan", "patterns_that_name"]

_OUTPUT, _INPUT, _FIRST, _SECOND, _WHOLE = "output", "input", "first", "second", "whole"

STYLES: dict[str, str] = {
    **dict.fromkeys(("colwise", "colwise_rep", "colwise_gather_output", "packed_colwise", "unit_colwise"), _OUTPUT),
    **dict.fromkeys(("rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise", "unit_rowwise"), _INPUT),
    "embedding_rowwise": _FIRST,
    "embedding_colwise": _SECOND,
    **dict.fromkeys(("replicated", "replicate", "replicated_with_grad_allreduce", "sequence_parallel"), _WHOLE),
    **dict.fromkeys(("all_reduce", "mla_kv_a_proj", "moe_tp_experts", "moe_identity_expert", "local_params"), _WHOLE),
}
"""Which dimension a style cuts.

A linear layer's weight is ``[output, input]``, an expert's ``[experts, output, input]``.  The
bias of a layer cut by its input is whole, as it is added to the sum of all ranks.  Those that
cut nothing say how a module computes; names are transformers 5.25's and the plain ones.
"""

_ANY = "*"
_PACKED = ("packed_colwise", "packed_rowwise")
_UNITS = ("unit_colwise", "unit_rowwise")


class Rule(Struct, frozen=True, kw_only=True):
    """What a plan says about the tensors that `pattern` names.

    `parts` are the sizes of what a packed style's dimension is fused of, in elements of the
    whole tensor; empty: two equal halves.  `unit` is how many elements of a unit style's
    dimension stay together, as those of an attention head do.  Without `required` it may match
    nothing.
    """

    pattern: str
    style: str
    parts: tuple[int, ...] = ()
    unit: int = 0
    required: bool = True

    @property
    def cuts(self) -> bool:
        """Whether it is a style that cuts anything."""
        return STYLES[self.style] != _WHOLE

    @property
    def has_units(self) -> bool:
        """Whether its style cuts between units alone."""
        return self.style in _UNITS

    def __str__(self) -> str:
        return f"{self.pattern}: {self.style}"


class TpPlan(Struct, frozen=True, kw_only=True):
    """Rules, and where they are from; `prefix` is what names of the base model may have in front, dot included."""

    origin: str
    rules: tuple[Rule, ...]
    prefix: str = "model."


class _Entry(Struct, forbid_unknown_fields=True):
    style: str
    parts: tuple[NonNegative, ...] = ()
    unit: NonNegative = 0


def parse_plan(origin: str, body: bytes) -> TpPlan:
    """The plan that a JSON file holds: patterns to styles, or to an object of ``style`` and ``parts`` or ``unit``.

    `origin` is the file's path.  Raises SourceError.
    """
    try:
        loaded = json.loads(body, object_pairs_hook=_once)
        entries = msgspec.convert(loaded, dict[str, str | _Entry])
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise SourceError(
            path=origin, reason=f"it is no plan, a JSON object of patterns and styles: {error}"
        ) from error
    if not entries:
        raise SourceError(path=origin, reason="the plan is empty")
    rules = []
    for pattern, entry in entries.items():
        told = _Entry(entry) if isinstance(entry, str) else entry
        rules.append(Rule(pattern=pattern, style=told.style, parts=told.parts, unit=told.unit))
    return TpPlan(origin=origin, rules=tuple(rules))


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)!r} stands twice")
    return found


def cut_tensors(
    path: str, plan: TpPlan, shapes: Mapping[str, Sequence[int]], *, rank: int, ranks: int
) -> dict[str, Cut]:
    """The share that rank number `rank` of `ranks` has of each tensor that the plan cuts, by name.

    `shapes` are those of the whole tensors, `path` the checkpoint's, for errors.  A pattern is
    parts between dots, ``*`` for any one; it names a tensor, or the module that holds it.  Of
    several, one that names the tensor itself wins, then the one with the fewest ``*``.  Raises
    SourceError for an unknown style, a pattern that matches nothing, two that match alike, and
    sizes that do not divide.
    """
    index = _Index(plan)
    cuts: dict[str, Cut] = {}
    for name, shape in shapes.items():
        rule = index.find(name)
        if rule is not None:
            cut = _cut(path, rule, name, tuple(shape), rank, ranks)
            if cut is not None:
                cuts[name] = cut
    unused = [rule.pattern for rule in plan.rules if rule.required and rule.pattern not in index.used]
    if unused:
        raise SourceError(
            path=path,
            reason=f"it has no tensor for {_listed(unused)} of {plan.origin}; give a --tp-plan for the names it has",
        )
    return cuts


def patterns_that_name(plan: TpPlan, names: Iterable[str]) -> set[str]:
    """The patterns that match at least one of those tensors' names.  Raises SourceError as `cut_tensors` does."""
    index = _Index(plan)
    for name in names:
        index.find(name)
    return index.used


class _Index:
    """A plan's rules, found by name; `used` collects the patterns that named something."""

    def __init__(self, plan: TpPlan) -> None:
        self.used: set[str] = set()
        self._plan = plan
        self._exact: dict[tuple[str, ...], list[Rule]] = {}
        self._wild: dict[int, list[tuple[tuple[str, ...], Rule]]] = {}
        for rule in plan.rules:
            _check_rule(plan.origin, rule)
            parts = tuple(rule.pattern.removeprefix(plan.prefix).split("."))
            if _ANY in parts:
                self._wild.setdefault(len(parts), []).append((parts, rule))
            else:
                self._exact.setdefault(parts, []).append(rule)

    def find(self, name: str) -> Rule | None:
        """The rule for a tensor, if any: its own, else its module's.  Raises SourceError where two are as good."""
        parts = tuple(name.removeprefix(self._plan.prefix).split("."))
        found, of_module = self._matching(parts), self._matching(parts[:-1])
        self.used.update(rule.pattern for _, rule in (*found, *of_module))
        return self._best(name, found or of_module)

    def _matching(self, parts: tuple[str, ...]) -> list[tuple[int, Rule]]:
        """The rules whose pattern is `parts`, and the number of wildcards it takes."""
        found = [(0, rule) for rule in self._exact.get(parts, ())]
        for pattern, rule in self._wild.get(len(parts), ()):
            if all(mine in (_ANY, theirs) for mine, theirs in zip(pattern, parts, strict=True)):
                found.append((pattern.count(_ANY), rule))
        return found

    def _best(self, name: str, found: list[tuple[int, Rule]]) -> Rule | None:
        fewest = min((wildcards for wildcards, _ in found), default=0)
        rules = [rule for wildcards, rule in found if wildcards == fewest]
        if len(rules) > 1:
            raise SourceError(
                path=self._plan.origin,
                tensor=name,
                reason=f"{rules[0].pattern!r} and {rules[1].pattern!r} both name it; remove one",
            )
        return rules[0] if rules else None


def _check_rule(origin: str, rule: Rule) -> None:
    if rule.style not in STYLES:
        raise SourceError(
            path=origin,
            reason=f"{rule.pattern!r} has the unknown style {rule.style!r}; known are {', '.join(STYLES)}",
        )
    if rule.parts and rule.style not in _PACKED:
        raise SourceError(
            path=origin, reason=f"{rule.pattern!r} has parts, which a {rule.style} has not; {_PACKED[0]} has"
        )
    if rule.has_units and not rule.unit:
        raise SourceError(
            path=origin, reason=f"{rule.pattern!r} is a {rule.style} without a unit: the size of an attention head"
        )
    if rule.unit and not rule.has_units:
        raise SourceError(
            path=origin, reason=f"{rule.pattern!r} has a unit, which a {rule.style} has not; {_UNITS[0]} has"
        )


def _cut(path: str, rule: Rule, name: str, shape: tuple[int, ...], rank: int, ranks: int) -> Cut | None:
    dim = _dimension(rule, name, len(shape))
    if dim is None:
        return None
    if not 0 <= dim < len(shape):
        raise SourceError(path=path, tensor=name, reason=f"shape {list(shape)} has no dimension to cut ({rule})")
    size = shape[dim]
    if rule.has_units:
        return _cut_between_units(path, rule, name, dim, size, rank, ranks)
    parts = rule.parts
    if not parts:
        parts = (size // 2, size - size // 2) if rule.style in _PACKED else (size,)
    if sum(parts) != size:
        raise SourceError(
            path=path,
            tensor=name,
            reason=f"its dimension {dim} has {size} elements, and the plan's parts add up to {sum(parts)} ({rule})",
        )
    for part in parts:
        if part % ranks:
            whole = f"{part}" if len(parts) == 1 else f"a part of {part}"
            raise SourceError(
                path=path,
                tensor=name,
                reason=f"{whole} of its dimension {dim} cannot be cut into {ranks} equal slices ({rule})",
            )
    return Cut(dim, parts, rank, ranks)


def _cut_between_units(path: str, rule: Rule, name: str, dim: int, size: int, rank: int, ranks: int) -> Cut | None:
    """The share where units stay whole: of ranks that do not all get others, neighbours have the same."""
    units, left = divmod(size, rule.unit)
    if left:
        raise SourceError(
            path=path,
            tensor=name,
            reason=f"its dimension {dim} has {size} elements, which are no units of {rule.unit} ({rule})",
        )
    # As transformers' mesh of (units, replicas) has it; two units and three ranks: each has both.
    slices = math.gcd(units, ranks)
    return Cut(dim, (size,), rank * slices // ranks, slices) if slices > 1 else None


def _dimension(rule: Rule, name: str, dimensions: int) -> int | None:
    """Which dimension of the tensor the rule cuts; None: none."""
    style = STYLES[rule.style]
    if style == _OUTPUT:
        return max(dimensions - 2, 0)
    if style == _INPUT:
        bias = name.rpartition(".")[2] == "bias" or (rule.style == "packed_rowwise" and dimensions == 1)
        return None if bias else dimensions - 1
    return {_FIRST: 0, _SECOND: 1, _WHOLE: None}[style]


def _listed(patterns: Sequence[str], shown: int = 5) -> str:
    more = f" and {len(patterns) - shown} more" if len(patterns) > shown else ""
    return ", ".join(patterns[:shown]) + more

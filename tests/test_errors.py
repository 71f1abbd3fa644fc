"""errors: the tree as drawn, a class behind every code, and every error whole on the other side."""

import copy
import inspect
import pickle
import re
from collections.abc import Iterator
from dataclasses import Field, fields, is_dataclass

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect as shapes

from wcache_async import errors
from wcache_async.errors import (
    BindError,
    ConfigMismatch,
    Detail,
    RemoteError,
    SourceError,
    StateNotFound,
    WeightCacheError,
    error_from_wire,
    known_codes,
    wire_text,
)

CLASSES = list(known_codes().values())


def by_name(cls: type) -> str:
    return cls.__name__


def fields_of(cls: type[WeightCacheError]) -> tuple[Field[object], ...]:
    return fields(cls) if is_dataclass(cls) else ()


def field_types(cls: type[WeightCacheError]) -> dict[str, object]:
    return {f.name: f.type for f in fields_of(cls)}


def samples() -> Iterator[int]:
    yield from range(1001, 10_000)


def sample_of(shape: shapes.Type, name: str, numbers: Iterator[int]) -> object:
    """A value of that shape, telling by its text which field it belongs to."""
    match shape:
        case shapes.StrType():
            return f"{name}-{next(numbers)}"
        case shapes.BoolType():
            return True
        case shapes.IntType():
            return next(numbers)
        case shapes.FloatType():
            return next(numbers) + 0.5
        case shapes.ListType(item_type=item, min_length=least):
            return [sample_of(item, name, numbers) for _ in range(least or 2)]
        case shapes.DictType(value_type=value):
            return {f"{name}-{next(numbers)}": sample_of(value, name, numbers)}
        case shapes.UnionType(types=types):
            return sample_of(next(t for t in types if not isinstance(t, shapes.NoneType)), name, numbers)
    raise TypeError(f"no sample of {shape}: a wire detail is a scalar, or a list or dict of those")


def sample(cls: type[WeightCacheError]) -> WeightCacheError:
    numbers = samples()
    return cls(**{n: sample_of(shapes.type_info(t), n, numbers) for n, t in field_types(cls).items()})


# --------------------------------------------------------------------------------------- tree
def drawn_tree() -> dict[str, str]:
    """Class name to its parent's, as the module's docstring draws them."""
    tree: dict[str, str] = {}
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        if found := re.fullmatch(r"    (?P<lines>(?:│   )*(?:[├└]── )?)(?P<name>[A-Z]\w+)(?:  +\S.*)?", line):
            depth = len(found["lines"]) // 4
            del above[depth:]
            tree[found["name"]] = above[-1] if above else "Exception"
            above.append(found["name"])
    return tree


def test_the_drawing_in_the_docstring_is_the_tree() -> None:
    real = {cls.__name__: cls.__base__.__name__ for cls in CLASSES if cls.__base__}
    assert drawn_tree() == real


def test_the_drawing_is_drawn_well() -> None:
    """A corner ends each branch, a tee does not."""
    lines = [line[4:] for line in (errors.__doc__ or "").splitlines() if re.match(r"    [│├└]", line)]
    assert lines
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        column = max(line.find("├"), line.find("└"))
        goes_on = following[column : column + 1] in ("├", "└", "│")
        assert line[column] == ("├" if goes_on else "└"), line


def test_every_class_is_public_and_lives_here() -> None:
    assert {cls.__name__ for cls in CLASSES} == {
        name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, WeightCacheError)
    }
    assert {cls.__name__ for cls in CLASSES} <= set(errors.__all__)
    assert sorted(errors.__all__) == errors.__all__
    assert all(hasattr(errors, name) for name in errors.__all__)


# -------------------------------------------------------------------------------------- codes
@pytest.mark.parametrize("cls", CLASSES, ids=by_name)
def test_a_code_is_the_class_name_in_snake_case(cls: type[WeightCacheError]) -> None:
    assert cls.code == re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
    assert known_codes()[cls.code] is cls


def test_a_code_that_is_taken_is_refused_when_the_class_is_made() -> None:
    before = known_codes()
    with pytest.raises(TypeError, match=r"'state_not_found' of Second is taken by StateNotFound"):

        class Second(WeightCacheError):
            code = "state_not_found"

    assert known_codes() == before


def test_a_class_without_a_code_of_its_own_is_refused() -> None:
    before = known_codes()
    with pytest.raises(TypeError, match="Heir declares no error code of its own"):

        class Heir(StateNotFound):
            pass

    assert known_codes() == before


def test_the_registry_cannot_be_changed_through_what_is_handed_out() -> None:
    known_codes().clear()
    assert known_codes()


# ------------------------------------------------------------------------------------ crossing
@pytest.mark.parametrize("cls", CLASSES, ids=by_name)
def test_an_error_crosses_the_wire_whole(cls: type[WeightCacheError]) -> None:
    sent = sample(cls)
    wire = msgspec.msgpack.encode(sent.details())
    details = msgspec.msgpack.decode(wire, type=dict[str, Detail])
    got = error_from_wire(sent.code, sent.message, sent.hint, details)
    assert type(got) is cls
    assert got.details() == sent.details()
    assert set(got.details()) == set(field_types(cls))
    assert (got.message, got.hint, str(got), repr(got)) == (sent.message, sent.hint, str(sent), repr(sent))


@pytest.mark.parametrize("cls", CLASSES, ids=by_name)
def test_an_error_can_be_pickled_and_copied(cls: type[WeightCacheError]) -> None:
    sent = sample(cls)
    for got in (pickle.loads(pickle.dumps(sent)), copy.copy(sent), copy.deepcopy(sent)):
        assert type(got) is cls
        assert (got.details(), str(got)) == (sent.details(), str(sent))


@pytest.mark.parametrize("cls", CLASSES, ids=by_name)
def test_fields_a_newer_peer_added_are_ignored(cls: type[WeightCacheError]) -> None:
    sent = sample(cls)
    got = error_from_wire(sent.code, "", "", {**sent.details(), "a_new_field": [1]})
    assert type(got) is cls
    assert got.details() == sent.details()


@pytest.mark.parametrize("cls", [cls for cls in CLASSES if field_types(cls)], ids=by_name)
def test_fields_that_do_not_fit_leave_the_peers_own_words(cls: type[WeightCacheError]) -> None:
    details = sample(cls).details()
    required = [f.name for f in fields_of(cls) if f.default is f.default_factory]
    for name in details:
        wrong: list[dict[str, Detail]] = [{**details, name: {"x": [[]]}}]  # type: ignore[list-item]
        if name in required:
            wrong.append({key: value for key, value in details.items() if key != name})
        for candidate in wrong:
            got = error_from_wire(cls.code, "so it is", "Do this", candidate)
            assert type(got) is RemoteError, (name, candidate)
            assert str(got) == f"so it is ({cls.code}). Do this"


def test_an_unknown_code_leaves_the_peers_own_words() -> None:
    got = error_from_wire("from_the_future", "so it is", "", {"name": "m"})
    assert type(got) is RemoteError
    assert (got.remote_code, got.remote_message, got.remote_hint) == ("from_the_future", "so it is", "")
    assert str(got) == "so it is (from_the_future)"


@pytest.mark.parametrize("pair", [[], ["one"], ["one", "two", "three"], "two"])
def test_a_difference_that_is_no_pair_is_not_taken(pair: list[str]) -> None:
    """Its message could not be built: both values are in it."""
    for code, details in (
        (ConfigMismatch.code, {"name": "m", "rank": 0, "differences": {"dtype": pair}}),
        (BindError.code, {"missing": [], "unexpected": [], "mismatched": {"w": pair}}),
    ):
        assert type(error_from_wire(code, "x", "", details)) is RemoteError  # type: ignore[arg-type]


_scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5)
_details = _scalars | st.lists(_scalars, max_size=3) | st.dictionaries(st.text(max_size=3), st.lists(_scalars))


@given(data=st.data(), cls=st.sampled_from(CLASSES))
def test_any_details_make_an_error_with_a_text_that_can_be_sent_on(
    data: st.DataObject, cls: type[WeightCacheError]
) -> None:
    names = st.sampled_from([*field_types(cls), "unknown"])
    details = data.draw(st.dictionaries(names, _details))
    got = error_from_wire(cls.code, "message", "hint", details)
    assert type(got) in (cls, RemoteError)
    assert str(got)
    assert repr(got)
    assert msgspec.msgpack.encode(got.details())


def test_details_can_be_sent_whatever_is_in_them() -> None:
    error = ConfigMismatch(
        name="\udcff", rank=2**70, differences={"\ud800": ["\udc80", -(2**70)], "ok": [True, float("inf")]}
    )
    assert error.details() == {
        "name": "\\udcff",
        "rank": 2**64 - 1,
        "differences": {"\\ud800": ["\\udc80", -(2**63)], "ok": [True, float("inf")]},
    }
    assert error.details()["differences"]["ok"][0] is True  # type: ignore[index, call-overload]
    assert msgspec.msgpack.encode(error.details())


def test_text_is_left_alone_where_utf8_has_it() -> None:
    text = "näme \U0001f40d \\udcff"
    assert wire_text(text) == text


# --------------------------------------------------------------------------------------- text
@pytest.mark.parametrize("cls", CLASSES, ids=by_name)
def test_the_text_of_an_error_reads_well(cls: type[WeightCacheError]) -> None:
    error = sample(cls)
    message, hint = error.message, error.hint
    assert message
    assert not message[0].isspace()
    assert not message.endswith((".", " ", ":", ";", ","))
    assert not hint.endswith((".", " ", ":", ";", ","))
    # A hint is told to a reader, and begins a sentence; RemoteError's is the peer's, SourceError's a field.
    assert not hint or hint[0].isupper() or cls in (RemoteError, SourceError)
    text = str(error)
    assert text == (f"{message}. {hint}" if hint else message)
    assert not re.search(r"(?<!\.)\.\.(?!\.)|  |\. \.|\bNone\b|<[a-z_.]+ object", text), text


@pytest.mark.parametrize("cls", CLASSES, ids=by_name)
def test_the_text_of_an_error_says_what_no_other_does(cls: type[WeightCacheError]) -> None:
    """A class that inherits its parent's words tells a reader nothing of its own."""
    for other in CLASSES:
        if other is not cls:
            assert str(sample(other)) != str(sample(cls))
    assert cls.__doc__
    assert not cls.__doc__.startswith(f"{cls.__name__}("), "the docstring is dataclass's, not ours"


UNTOLD = {
    ("AddressInUse", "reason"),  # the message says it in its own words
    ("LoadingTimeout", "bytes_done"),  # told as a percentage
}


@pytest.mark.parametrize("cls", CLASSES, ids=by_name)
def test_the_text_of_an_error_tells_every_field(cls: type[WeightCacheError]) -> None:
    error = sample(cls)
    for name, value in error.details().items():
        if (cls.__name__, name) in UNTOLD:
            continue
        if isinstance(value, dict):
            value = [*value, *(item for pair in value.values() for item in pair)]
        for item in value if isinstance(value, list) else [value]:
            assert str(item) in str(error), (name, item)


def test_a_reason_that_ends_in_a_full_stop_does_not_double_it() -> None:
    assert str(errors.NotRunning(socket="/s", reason="Connection refused.")).startswith(
        "no weight-cache daemon answers on /s: Connection refused. Start one"
    )


def test_a_command_to_load_names_the_rank_where_it_is_not_the_first() -> None:
    assert "`wcache load MODEL --name m`" in StateNotFound(name="m", rank=0, available=[]).hint
    assert "`wcache load MODEL --name m --rank 3`" in StateNotFound(name="m", rank=3, available=[]).hint
    assert "`wcache load MODEL --name m --rank 3`" in errors.StateFailed(name="m", rank=3, reason="gone").hint


@pytest.mark.parametrize(("needed", "advised"), [(101, "--max-bytes 101"), (100, "Unload or unpin something")])
def test_nothing_is_to_be_unloaded_for_what_an_empty_daemon_would_not_hold(needed: int, advised: str) -> None:
    assert advised in errors.BudgetExceeded(needed=needed, max_bytes=100, held=50, evictable=20).hint


def test_an_error_is_made_by_keyword_and_shows_its_fields() -> None:
    error = SourceError(path="/m", reason="no such file")
    assert repr(error) == "SourceError(path='/m', reason='no such file', tensor='', advice='')"
    assert str(error) == "cannot load /m: no such file"
    with pytest.raises(TypeError):
        SourceError("/m", "no such file")  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        SourceError(path="/m")  # type: ignore[call-arg]


def test_errors_are_told_apart_by_identity_and_can_be_kept_in_sets() -> None:
    one, other = errors.Draining(), errors.Draining()
    assert len({one, other}) == 2


def test_long_lists_of_names_are_cut_and_counted() -> None:
    error = BindError(missing=[f"layers.{n}.weight" for n in range(1000)], unexpected=[], mismatched={})
    assert "layers.7.weight and 992 more" in error.message
    assert len(str(error)) < 500
    assert len(error.missing) == 1000

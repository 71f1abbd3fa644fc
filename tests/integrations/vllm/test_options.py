"""The extra config: what it may say, and what it is told of the rest."""

import pytest

from wcache_async.errors import InvalidRequest
from wcache_async.integrations.vllm.options import Options, parse_options


def test_nothing_said_is_the_defaults() -> None:
    assert parse_options({}) == parse_options(None) == Options()
    assert (Options().stage, Options().on_missing) == ("raw", "load_and_publish")


def test_everything_may_be_said() -> None:
    said = {"socket": "/s", "name": "n", "stage": "processed", "timeout": 5, "on_missing": "error"}
    assert parse_options(said) == Options(socket="/s", name="n", stage="processed", timeout=5.0, on_missing="error")


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({"sockt": "/s"}, "sockt"),
        ({"stage": "cooked"}, "stage"),
        ({"on_missing": "disk"}, "on_missing"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": "1"}, "timeout"),
        ({"socket": 3}, "socket"),
        ("raw", "object"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(extra: object, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        parse_options(extra)

"""README: the tables that come from the code say what the code does."""

import re
from pathlib import Path

import pytest

from wcache_async.backends.registry import _load, known_backends
from wcache_async.cli.outcome import EXIT_CODES

README = (Path(__file__).parent.parent / "README.md").read_text()

DEVICES = {"cpu": "CPU", "cuda": "CUDA"}


def section(name: str) -> str:
    """What stands between a section's markers."""
    found = re.search(rf"<!-- {name}:begin -->\n(.*?)<!-- {name}:end -->", README, re.DOTALL)
    assert found, f"README has no section {name}"
    return found[1]


def table(*rows: tuple[str, ...]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]]) + "\n"


def backends_table() -> str:
    rows = [("backend", "tensors on", "a client's write", "when the daemon dies", "across containers")]
    for name in known_backends():
        has = _load(name).capabilities
        rows.append(
            (
                f"`{name}`",
                ", ".join(DEVICES[device] for device in sorted(has.devices)),
                "reaches nobody else" if has.read_only else "reaches everybody",
                "clients keep computing" if has.survives_daemon_exit else "clients lose CUDA tensors (`DaemonLost`)",
                "needs one PID namespace" if has.needs_shared_pid_namespace else "needs the socket alone",
            )
        )
    return table(*rows)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("backends", backends_table()),
        ("exit-codes", table(("code", "when"), *((str(int(code)), text) for code, text in EXIT_CODES.items()))),
    ],
)
def test_a_table_is_the_one_that_comes_from_the_code(name: str, expected: str) -> None:
    assert section(name) == expected

"""What a newcomer reads, and what starting the command costs in imports."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import Wcache
from wcache_async.cli.app import app
from wcache_async.cli.outcome import EXIT_CODES

COMMANDS = ("serve", "status", "fetch", "verify", "load", "unload", "pin", "unpin", "stop", "doctor")
HEAVY = {"torch", "numpy", "cuda", "rich", "safetensors"}


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as ended:
        app(argv, prog_name="wcache")
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_help_lists_every_command_whole_and_every_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "--help")
    listed = text.partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
    assert tuple(line.split()[0] for line in listed) == COMMANDS
    assert not any(line.endswith("...") for line in listed)
    for code, meaning in EXIT_CODES.items():
        assert f"  {code:>3}  {meaning}\n" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_an_example_of_two_lines(capsys: pytest.CaptureFixture[str], command: str) -> None:
    example = shown(capsys, command, "-h").partition("Example:\n")[2].partition("\n\n")[0].splitlines()
    assert len(example) == 2
    assert all(line.startswith(f"    wcache {command}") for line in example)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, "--version") == "wcache 0.1.0\n"


def imported_by(*lines: list[str]) -> set[str]:
    """The top-level modules and the rooms that these command lines import together, in a Python of their own."""
    code = f"""
import contextlib, sys
from wcache_async.cli.app import app
for line in {[list(map(str, line)) for line in lines]!r}:
    try:
        app(line, prog_name="wcache")
    except SystemExit as ended:
        assert not ended.code, line
print("imported", *{{".".join(name.split(".")[:2 if name.startswith("wcache_async") else 1]) for name in sys.modules}})
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return set(ran.stdout.splitlines()[-1].split()[1:])


def test_help_imports_no_more_than_the_command_line() -> None:
    loaded = imported_by(["--help"], ["serve", "--help"])
    assert loaded & (HEAVY | {"asyncio", "uvloop", "msgspec"}) == set()
    assert {name for name in loaded if name.startswith("wcache_async.")} == {"wcache_async.cli", "wcache_async.version"}


def test_what_needs_no_tensor_imports_no_torch(wcache: Wcache, checkpoint: Path) -> None:
    with wcache.serve() as serving:
        socket = ["--socket", str(serving.socket_path)]
        lines = [["load", str(checkpoint)], ["status"], ["status", "--json"], ["unload", "tiny"], ["stop"]]
        assert imported_by(*([*line, *socket] for line in lines)) & HEAVY == set()

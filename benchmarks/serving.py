"""Server processes that say ``ready`` when they serve, and are gone when their context is left."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

__all__ = ["ENVIRONMENT", "STATE_NAME", "script", "serving", "serving_pid", "wcache_serve"]

STATE_NAME = "benchmark"
"""What a daemon under measurement serves its state as."""

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
"""Of every process that is measured: an installed package has its bytecode beside it, after the first run at least."""

_STOP_TIMEOUT_S = 30.0


@contextmanager
def serving(*commands: Sequence[str]) -> Iterator[None]:
    """Run every command, from the lines ``ready…`` on.  Raises RuntimeError if one ends without it."""
    with ExitStack() as stack:
        processes = [stack.enter_context(_running(command)) for command in commands]
        for command, process in zip(commands, processes, strict=True):
            _await_ready(command, process)
        yield


@contextmanager
def serving_pid(command: Sequence[str]) -> Iterator[int]:
    """The same for one command, whose process id this gives."""
    with _running(command) as process:
        _await_ready(command, process)
        yield process.pid


def _await_ready(command: Sequence[str], process: subprocess.Popen[str]) -> None:
    if process.stdout is None or not process.stdout.readline().startswith("ready"):
        raise RuntimeError(f"{' '.join(command)} ended with {process.wait()} before it was ready")


@contextmanager
def _running(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()


def script(name: str, *arguments: object) -> list[str]:
    """The command that runs one of the scripts here."""
    return [sys.executable, str(Path(__file__).with_name(name)), *map(str, arguments)]


def wcache_serve(checkpoint: Path, address: str) -> list[str]:
    """The command that serves `checkpoint` as a user would."""
    wcache = Path(sys.executable).with_name("wcache")
    return [str(wcache), "serve", str(checkpoint), "--name", STATE_NAME, "--socket", address]

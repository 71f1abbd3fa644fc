"""A server process that says ``ready`` when it serves, and is gone when its context is left."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

__all__ = ["STATE_NAME", "serving", "wcache_serve"]

STATE_NAME = "benchmark"
"""What a daemon under measurement serves its state as."""

_STOP_TIMEOUT_S = 30.0


@contextmanager
def serving(command: Sequence[str | Path]) -> Iterator[subprocess.Popen[str]]:
    """Run `command` from its line ``ready…`` on.  Raises RuntimeError if it ends without one."""
    with subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, text=True) as process:
        try:
            if process.stdout is None or not process.stdout.readline().startswith("ready"):
                raise RuntimeError(f"{command} ended with {process.wait()} before it was ready")
            yield process
        finally:
            process.terminate()
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()


def wcache_serve(checkpoint: Path, address: str) -> list[str | Path]:
    """The command that serves `checkpoint` as a user would."""
    return [Path(sys.executable).with_name("wcache"), "serve", checkpoint, "--name", STATE_NAME, "--socket", address]

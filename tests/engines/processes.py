"""Processes of the tests with engines: vLLM in an environment of its own, and the daemon in this one."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["PYTHON_VARIABLE", "DaemonProcess", "EngineFailed", "EngineProcess", "StartEngine"]

DEADLINE_S = 420.0
"""For one answer of an engine; importing vLLM takes ten seconds of a core that is free."""

ENGINE = Path(__file__).with_name("engine.py")
PYTHON_VARIABLE = "WCACHE_VLLM_PYTHON"
"""Names the Python of vLLM's environment."""


class EngineFailed(Exception):
    """An engine process raised, or ended."""


class EngineProcess:
    """A process that runs engine.py; leaving it ends it."""

    def __init__(self, log: Path, environment: dict[str, str]) -> None:
        self._log = log
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [os.environ[PYTHON_VARIABLE], ENGINE, str(commands), str(answers)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[commands, answers],
                env=os.environ | {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"} | environment,
                process_group=0,
            )
        os.close(commands)
        os.close(answers)
        self._received = b""
        self._closed = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        """Everything it has written so far."""
        return self._log.read_text(errors="replace")

    def say(self, do: str, **arguments: object) -> None:
        """Tell it to do something."""
        os.write(self._commands, json.dumps({"do": do, **arguments}).encode() + b"\n")

    def hear(self) -> Any:
        """Its next answer.  Raises EngineFailed."""
        deadline = time.monotonic() + DEADLINE_S
        while b"\n" not in self._received:
            ready, _, _ = select.select([self._answers], [], [], max(0, deadline - time.monotonic()))
            piece = os.read(self._answers, 1 << 16) if ready else b""
            if not piece:
                what = "ended" if ready else f"did not answer for {DEADLINE_S:.0f} s"
                raise EngineFailed(f"the engine {what}; it wrote: ...{self.log[-6000:]}")
            self._received += piece
        line, _, self._received = self._received.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineFailed(f"{answer['error']}; it wrote: ...{self.log[-6000:]}")
        return answer["value"]

    def do(self, do: str, **arguments: object) -> Any:
        """Tell it to do something, and hear what came of it."""
        self.say(do, **arguments)
        return self.hear()

    def kill(self) -> None:
        """SIGKILL, for it and its workers."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End it and its workers; further calls do nothing."""
        if self._closed:
            return
        self._closed = True
        os.close(self._commands)  # It ends when nobody can command it any more.
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.kill()
            self._process.wait()
            os.close(self._answers)


StartEngine = Callable[..., EngineProcess]


class DaemonProcess:
    """`wcache serve` with nothing in it, from this environment, which has no vLLM."""

    def __init__(self, socket: Path) -> None:
        self.socket = str(socket)
        log = socket.with_suffix(".log")
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [Path(sys.executable).with_name("wcache"), "serve", "--socket", socket],
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        if not self._line().startswith(b"ready"):
            self.close()
            raise RuntimeError(f"the daemon did not start: {log.read_text()}")

    def _line(self) -> bytes:
        return self._process.stdout.readline() if self._process.stdout is not None else b""

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._process.kill()
        self._process.wait(60)

    def close(self) -> None:
        self.kill()
        if self._process.stdout is not None:
            self._process.stdout.close()

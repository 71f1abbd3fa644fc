"""Runs `wcache` command lines in processes of their own, forked with torch imported."""

import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

# What commands import when they need it is imported here: once in the forge, not in every process.
import wcache_async.backends.torch_ipc
import wcache_async.backends.vmm_fd
import wcache_async.cli.attach
import wcache_async.cli.compare
import wcache_async.daemon.lifecycle  # noqa: F401
from tests.processes import DEADLINE_S, Child, Forge, Peer
from wcache_async.cli import main

__all__ = ["Ran", "Serving", "Wcache", "run_command"]


def run_command(_: Peer, out: socket.socket, err: socket.socket, argv: list[str]) -> None:
    """What the child does: the whole command line, from `sys.argv` to the exit code."""
    for number, sock in ((1, out), (2, err)):
        os.dup2(sock.fileno(), number)
        sock.close()
    # New ones, as an interpreter makes at its start: the old ones remember what 1 and 2 were.
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.argv = ["wcache", *argv]
    try:
        main()
    except SystemExit as end:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else 1)


Run = Callable[[Peer, socket.socket, socket.socket, list[str]], None]


@dataclass(frozen=True)
class Ran:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Serving:
    """A command that runs, `serve` mostly."""

    def __init__(self, child: Child, socket_path: Path, out: TextIO, err: TextIO) -> None:
        self.pid = child.pid
        self.socket_path = socket_path
        self._child = child
        self._out = out
        self._err = err
        self._told: list[str] = []

    def ready(self) -> str:
        """Its next line on standard output; empty where it has ended."""
        return self._out.readline()

    def told(self, text: str) -> str:
        """Its next line on standard error that has `text` in it."""
        for line in self._err:
            self._told.append(line)
            if text in line:
                return line
        raise AssertionError(f"it ended without saying {text!r}: {self.err}")

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def ended(self) -> tuple[int, str]:
        """Its exit code once it ends by itself, and what is left of its output."""
        return self._child.exit_status, self._out.read()

    @property
    def err(self) -> str:
        """All it wrote to standard error; waits for its end."""
        self._told += self._err.readlines()
        return "".join(self._told)


class Wcache:
    """The command, for one test: every call but `start` and `serve` waits for its end."""

    def __init__(self, forge: Forge, socket_path: Path) -> None:
        self.socket_path = socket_path
        self._forge = forge

    def __call__(self, *argv: str | Path) -> Ran:
        """Run it against this test's socket."""
        with self.start(*argv) as running:
            code, out = running.ended()
            return Ran(code, out, running.err)

    @contextmanager
    def start(self, *argv: str | Path, run: Run = run_command) -> Iterator[Serving]:
        """Run it against this test's socket, until it has ended or the context has."""
        words = [str(word) for word in (*argv, "--socket", self.socket_path)]
        with ExitStack() as stack:
            ends = [stack.enter_context(end) for _ in range(2) for end in socket.socketpair()]
            for end in ends:
                end.settimeout(DEADLINE_S)
            out, err = (stack.enter_context(end.makefile(errors="surrogateescape")) for end in ends[::2])
            child = self._forge.start(run, ends[1], ends[3], words)
            stack.callback(child.close)
            yield Serving(child, self.socket_path, out, err)

    @contextmanager
    def serve(self, *argv: str | Path) -> Iterator[Serving]:
        """A `wcache serve` that is ready; ended with the context."""
        with self.start("serve", *argv) as serving:
            line = serving.ready()
            assert line.startswith("ready "), serving.err
            yield serving

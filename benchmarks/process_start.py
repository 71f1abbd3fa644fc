"""Measures what is there before any weights: importing the package, and starting the daemon.

The daemon is started as a user does, and counts from its process's start to the socket's accepting
a connection; whether it has torch loaded by then is looked up in its mappings.  Every sample is a
process of its own, its bytecode compiled before.  Prints a table, and writes all samples as JSON.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
from msgspec import Struct
from results import RESULTS, Environment, Spread, milliseconds, spread, write_json
from serving import ENVIRONMENT

TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
PAUSE_S = 0.0005
_IMPORT = """
import json, sys, time
started = time.perf_counter()
import wcache_async
seconds = time.perf_counter() - started
print(json.dumps({"seconds": seconds, "torch": "torch" in sys.modules, "cuda": "cuda" in sys.modules}))
"""


class Imported(Struct, frozen=True):
    """One import, in seconds, and what came with it."""

    seconds: float
    torch: bool
    cuda: bool


class Accepting(Struct, frozen=True):
    """One daemon's start, in seconds, and whether libtorch was mapped by then."""

    seconds: float
    torch: bool


class Report(Struct, frozen=True, kw_only=True):
    """One run; `heavy` says that some import brought torch or cuda, `daemon_torch` that some daemon had torch."""

    environment: Environment
    load_average_after: tuple[float, float, float]
    rounds: int
    importing: Spread
    heavy: bool
    accepting: Spread
    daemon_torch: bool


def import_once() -> Imported:
    """In a process that has imported nothing else."""
    command = [sys.executable, "-c", _IMPORT]
    done = subprocess.run(command, capture_output=True, check=True, env=ENVIRONMENT)
    return msgspec.json.decode(done.stdout, type=Imported)


def start_once(folder: Path) -> Accepting:
    """Start a daemon, connect as soon as it lets one, and end it.  Raises RuntimeError where it never does."""
    path = str(folder / "s")
    wcache = str(Path(sys.executable).with_name("wcache"))
    command = [wcache, "serve", "--socket", path, "--log-level", "error"]
    started = time.perf_counter()
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=ENVIRONMENT)
    with running as daemon, socket.socket(socket.AF_UNIX) as sock:
        try:
            while time.perf_counter() - started < TIMEOUT_S:
                try:
                    sock.connect(path)
                except (FileNotFoundError, ConnectionRefusedError):
                    if daemon.poll() is not None:
                        raise RuntimeError(f"wcache serve ended with {daemon.returncode}") from None
                    time.sleep(PAUSE_S)
                    continue
                seconds = time.perf_counter() - started
                return Accepting(seconds, "libtorch" in Path(f"/proc/{daemon.pid}/maps").read_text(errors="replace"))
            raise RuntimeError(f"no connection within {TIMEOUT_S:.0f} s")
        finally:
            daemon.terminate()
            try:
                daemon.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                daemon.kill()


def table(report: Report) -> str:
    """The report as Markdown."""
    rows = (
        f"| {name} | {milliseconds(value.median)} ({milliseconds(value.least)}-{milliseconds(value.most)}) | {torch} |"
        for name, value, torch in (
            ("`import wcache_async`", report.importing, "torch or cuda" if report.heavy else "neither torch nor cuda"),
            (
                "`wcache serve` to its socket accepting",
                report.accepting,
                "torch" if report.daemon_torch else "no torch",
            ),
        )
    )
    return (
        f"Median of {report.rounds} processes (least to most in brackets), in milliseconds.\n\n"
        "| start | | loaded by then |\n|---|--:|---|\n" + "\n".join(rows)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="2 rounds: does everything work?")
    parser.add_argument("--output", type=Path, default=RESULTS / "process_start.json", help="default: %(default)s")
    options = parser.parse_args()
    rounds: int = 2 if options.quick else options.rounds
    environment = Environment.here()
    imported, accepting = [], []
    with tempfile.TemporaryDirectory(prefix="wcache-start-") as folder:
        for number in range(rounds + 1):  # The first compiles what has no bytecode yet, and is not counted.
            one, other = import_once(), start_once(Path(folder))
            if number:
                imported.append(one)
                accepting.append(other)
    report = Report(
        environment=environment,
        load_average_after=os.getloadavg(),
        rounds=rounds,
        importing=spread([one.seconds for one in imported]),
        heavy=any(one.torch or one.cuda for one in imported),
        accepting=spread([one.seconds for one in accepting]),
        daemon_torch=any(one.torch for one in accepting),
    )
    write_json(report, options.output)
    print(table(report))


if __name__ == "__main__":
    main()

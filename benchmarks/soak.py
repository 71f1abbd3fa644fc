"""One daemon under two hundred clients that do everything at once, for ten minutes.

    make soak                          ten minutes
    SOAK_SECONDS=60 make soak          the form for CI
    python benchmarks/soak.py --seed N --json

Processes of several connections each, in random order, attach, bind, publish, release, load and
unload, give up half-way, stall, send junk and lie; all the time some are stopped with SIGSTOP or
killed with SIGKILL, and others take their places.  The states do not fit into the daemon's budget,
so that it evicts.  Then everybody goes, everything is unloaded, and the daemon must have no more
than after a storm of a few seconds before: fds, mappings, tasks, leases, memory.  Every byte that
any client held must have been right, and nothing may have reached the daemon's event loop.

Exits with 1 where anything of that does not hold.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import msgspec
import torch
from msgspec import Struct
from results import Environment, write_json
from soak_crowd import Crowd
from soak_daemon import Level, breaches, daemon, errors_in, health_of, settled
from soak_states import write_checkpoints

from wcache_async.cli.table import print_table
from wcache_async.cli.units import size_text

__all__ = ["Report", "table"]

WARM_UP_S: Final = 6.0
STALL_TARGET_S: Final = 0.05


class Report(Struct, frozen=True, kw_only=True):
    """One soak; times in seconds."""

    environment: Environment
    seed: int
    seconds: float
    realtime: bool
    """Whether the daemon had a processor whenever it wanted one, so that its stalls are its own."""
    connections: int
    processes: int
    started: int
    killed: int
    stopped: int
    survived: int
    """Processes that ended by themselves, with every byte right."""
    done: dict[str, int]
    refused: dict[str, int]
    """Typed refusals, by code: each is an answer that was allowed."""
    baseline: Level
    end: Level
    stalls_beyond: tuple[tuple[float, int], ...]
    """Of each of some lengths, how many stalls of the daemon's loop in the storm were longer."""
    worst_stall_s: float
    worst_stall_computing_s: float
    """Since the daemon's start, when it had yet to import torch; of it, what the loop computed itself."""
    load_average_after: tuple[float, float, float]
    problems: tuple[str, ...]


def soak(options: argparse.Namespace, folder: Path) -> Report:
    environment = Environment.here()
    torch.set_num_threads(1)
    write_checkpoints(folder)
    address, log = str(folder / "wcache.sock"), folder / "daemon.log"
    per_process = max(1, options.connections // options.processes)
    hostile = max(1, per_process // 5) if per_process > 1 else 0
    chance = random.Random(options.seed)
    crowd = Crowd(address, folder, chance, options.seed, honest=per_process - hostile, hostile=hostile)
    with daemon(address, log, realtime=options.realtime) as process:
        crowd.storm(options.processes, min(WARM_UP_S, options.seconds))
        baseline, before = settled(address, None)
        crowd.storm(options.processes, options.seconds)
        end, status = settled(address, baseline)
        if process.poll() is not None:
            crowd.problems.append(f"the daemon ended with {process.returncode}")
    if process.returncode:
        crowd.problems.append(f"the daemon, told to end, ended with {process.returncode}")
    health_before, health = health_of(before), health_of(status)
    return Report(
        environment=environment,
        seed=options.seed,
        seconds=options.seconds,
        realtime=options.realtime,
        connections=options.processes * per_process,
        processes=options.processes,
        started=crowd.started,
        killed=crowd.killed,
        stopped=crowd.stopped,
        survived=crowd.survived,
        done=dict(sorted(crowd.done.items())),
        refused=dict(sorted(crowd.refused.items())),
        baseline=baseline,
        end=end,
        stalls_beyond=tuple(
            (bound, count - had)
            for (bound, had), (_, count) in zip(
                health_before.loop_stalls_beyond, health.loop_stalls_beyond, strict=True
            )
        ),
        worst_stall_s=health.worst_loop_stall_s,
        worst_stall_computing_s=health.worst_loop_stall_computing_s,
        load_average_after=os.getloadavg(),
        problems=(*crowd.problems, *breaches(baseline, end), *errors_in(log)),
    )


def table(report: Report) -> str:
    """The report as the page shows it."""
    rows = [
        ("connections at once", f"{report.connections}, of {report.processes} processes"),
        ("deeds of clients", f"{sum(n for name, n in report.done.items() if not name.startswith('hostile')):,}"),
        ("of peers that break rules", f"{sum(n for name, n in report.done.items() if name.startswith('hostile')):,}"),
        ("refused with a typed error", f"{sum(report.refused.values()):,}"),
        ("processes stopped, killed", f"{report.stopped:,}, {report.killed:,}"),
        ("processes that ended by themselves, every byte right", f"{report.survived:,}"),
        ("fds, mappings, tasks, leases", f"{_levels(report.baseline)} before, {_levels(report.end)} after"),
        (
            "resident memory of the daemon",
            f"{size_text(report.baseline.memory_bytes)} before, {size_text(report.end.memory_bytes)} after",
        ),
        (
            f"stalls of the daemon's loop (none longer than {STALL_TARGET_S * 1e3:.0f} ms is the target)",
            ", ".join(f"{count:,} longer than {bound * 1e3:.0f} ms" for bound, count in report.stalls_beyond),
        ),
        (
            "its worst stall since it started, with the import of torch",
            f"{report.worst_stall_s * 1e3:.0f} ms, of which it computed {report.worst_stall_computing_s * 1e3:.0f} ms",
        ),
        ("problems", str(len(report.problems))),
    ]
    return (
        f"{report.seconds:.0f} s, seed {report.seed}.  {report.environment}; "
        f"load average after {report.load_average_after[0]:.2f}.\n\n| | |\n|---|---|\n"
        + "\n".join(f"| {name} | {value} |" for name, value in rows)
    )


def _levels(level: Level) -> str:
    return f"{level.fds}, {level.mappings}, {level.tasks}, {level.leases}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="default: %(default)g")
    parser.add_argument("--processes", type=int, default=40, help="default: %(default)s")
    parser.add_argument("--connections", type=int, default=200, help="of all processes (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="of everything that is drawn (default: the clock)")
    parser.add_argument(
        "--realtime",
        action="store_true",
        help="run the daemon before the crowd, which outnumbers the processors, so that a stall is its own (chrt)",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--output", type=Path, default=None, help="write the report as JSON there")
    options = parser.parse_args()
    if options.seed is None:
        options.seed = time.time_ns() % 1_000_000
    print(
        f"seed {options.seed}: {options.connections} connections for {options.seconds:g} s", file=sys.stderr, flush=True
    )
    with tempfile.TemporaryDirectory(prefix="wcache-soak-") as folder:
        report = soak(options, Path(folder))
    if options.output is not None:
        write_json(report, options.output)
    if options.json:
        print(msgspec.json.encode(report).decode())
    else:
        print(table(report))
        counts = sorted((report.done | {f"refused: {k}": v for k, v in report.refused.items()}).items())
        print_table(("WHAT", "COUNT"), [(name, f"{count:,}") for name, count in counts], right=("COUNT",))
    for problem in report.problems:
        print(f"problem: {problem}", file=sys.stderr)
    sys.exit(1 if report.problems else 0)


if __name__ == "__main__":
    main()

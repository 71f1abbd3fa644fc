"""Measures many clients that attach in the same moment: what each waits, and what it costs the daemon.

The client processes are made beforehand, with everything imported, and begin at one time that
they are told.  Each attaches once and holds on; a round has new processes.  Prints a table, and
writes it as JSON.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from checkpoints import write_thin
from forked import Attached, answer, attach_at, clients
from msgspec import Struct
from process_memory import cpu_seconds
from results import RESULTS, Environment, milliseconds, write_json
from serving import serving_pid, wcache_serve

COUNTS = (1, 4, 16, 64, 256)
HEAD_START_S = 0.25
"""Between the telling and the beginning."""
WAVE = 64
"""The crowd that the targets speak of."""


class Crowd(Struct, frozen=True, kw_only=True):
    """So many at once, over all rounds; in seconds."""

    clients: int
    rounds: int
    p50: float
    p99: float
    most: float
    total: float
    """Median over the rounds, first begin to last end."""
    client_cpu: float
    """Median over the rounds, all clients' CPU time for their attach."""
    daemon_cpu: float
    """Median over the rounds, the daemon's CPU time for each attach: accept, handshake and fetch."""
    daemon_cpu_samples: tuple[float, ...]

    def over_work(self, cores: int) -> float:
        """The whole wave's time over what the clients' work takes on so many cores."""
        return self.total / (self.client_cpu / min(cores, self.clients))


class Report(Struct, frozen=True, kw_only=True):
    """One run."""

    environment: Environment
    load_average_after: tuple[float, float, float]
    tensors: int
    nbytes: int
    crowds: tuple[Crowd, ...]


def attach_together(count: int, address: str, daemon: int) -> tuple[list[Attached], float]:
    """What `count` new clients took, and the daemon's CPU time in seconds for all of them."""
    with clients(count, attach_at, address) as connections:
        before = cpu_seconds(daemon)
        begin = time.monotonic() + HEAD_START_S
        for connection in connections:
            connection.send(begin)
        attached = []
        for connection in connections:
            said = answer(connection)
            if not isinstance(said, Attached):
                raise RuntimeError(f"a client said {said!r}")
            attached.append(said)
        return attached, cpu_seconds(daemon) - before


def summarised(count: int, rounds: Sequence[tuple[Sequence[Attached], float]]) -> Crowd:
    """The rounds of one count."""
    each = [attached.seconds for found, _ in rounds for attached in found]
    percentiles = statistics.quantiles(each, n=100, method="inclusive") if len(each) > 1 else each * 99
    daemon = tuple(cpu / count for _, cpu in rounds)
    return Crowd(
        clients=count,
        rounds=len(rounds),
        p50=percentiles[49],
        p99=percentiles[98],
        most=max(each),
        total=statistics.median(
            max(one.finished for one in found) - min(one.started for one in found) for found, _ in rounds
        ),
        client_cpu=statistics.median(sum(one.cpu_s for one in found) for found, _ in rounds),
        daemon_cpu=statistics.median(daemon),
        daemon_cpu_samples=daemon,
    )


def table(report: Report) -> str:
    """The report as Markdown."""
    cores = report.environment.cores
    rows = (
        f"| {crowd.clients} | {milliseconds(crowd.p50)} | {milliseconds(crowd.p99)} | {crowd.p99 / crowd.p50:.2f} "
        f"| {milliseconds(crowd.total)} | {crowd.over_work(cores):.2f} | {crowd.daemon_cpu * 1e6:.0f} |"
        for crowd in report.crowds
    )
    return (
        f"{report.tensors:,} tensors in {report.nbytes >> 20} MiB, {cores} cores. Every client is a process made "
        "beforehand that attaches once, all in the same moment; milliseconds from begin to a dict of tensors. *Work* "
        "is the clients' CPU time over the cores there are for it.\n\n"
        "| clients at once | p50 | p99 | p99 ÷ p50 | all of them | ÷ work | daemon's CPU per client, µs |\n"
        "|--:|--:|--:|--:|--:|--:|--:|\n" + "\n".join(rows)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, action="append", help=f"at once (default: each of {COUNTS})")
    parser.add_argument("--tensors", type=int, default=300, help="default: %(default)s")
    parser.add_argument("--mebibytes", type=int, default=64, help="size of the state (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="at most 16 clients, 1 round: does everything work?")
    parser.add_argument("--output", type=Path, default=RESULTS / "crowd.json", help="default: %(default)s")
    options = parser.parse_args()
    counts: Sequence[int] = options.clients or ((1, 4, 16, WAVE) if options.quick else COUNTS)
    rounds: int = 1 if options.quick else options.rounds
    nbytes: int = options.mebibytes << 20
    environment = Environment.here()
    crowds = []
    with tempfile.TemporaryDirectory(prefix="wcache-crowd-") as folder:
        checkpoint, address = Path(folder, "model.safetensors"), str(Path(folder, "s"))
        write_thin(checkpoint, options.tensors, nbytes)
        with serving_pid(wcache_serve(checkpoint, address)) as daemon:
            attach_together(1, address, daemon)  # What only a daemon's first client costs is not measured here.
            for count in counts:
                print(f"{count} at once, {rounds} rounds", file=sys.stderr)
                crowds.append(summarised(count, [attach_together(count, address, daemon) for _ in range(rounds)]))
    report = Report(
        environment=environment,
        load_average_after=os.getloadavg(),
        tensors=options.tensors,
        nbytes=nbytes,
        crowds=tuple(crowds),
    )
    write_json(report, options.output)
    print(table(report))


if __name__ == "__main__":
    main()

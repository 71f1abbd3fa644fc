"""Measures how attaching grows: with the number of tensors, and with their bytes.

At each point a daemon of its own, the floor (see `floor.py`, with the number of tensors alone) and
`safetensors.torch.load_file`, in turn, each attach in a new process forked with everything
imported.  The checkpoints are zeros: nothing is touched, so none of it matters to attaching.
Beside the time: how many bytes the manifest has, and the daemon's CPU time for a fetch.  A point
for which memory is short is left out, and said to be.  Prints tables, and writes all samples as JSON.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from checkpoints import write_thin
from forked import Attached, Fetches, answer, attach_by, clients, fetch_over_and_over
from msgspec import Struct
from process_memory import available_memory, cpu_seconds
from results import RESULTS, Environment, Spread, milliseconds, spread, write_json
from serving import script, serving, serving_pid, wcache_serve

MIB = 1 << 20
TENSORS = (100, 1_000, 10_000, 100_000)
TENSORS_NBYTES = 256 * MIB
SIZES = tuple(MIB << power for power in range(6, 14))
SIZES_TENSORS = 300
WCACHE, FLOOR, SAFETENSORS = "wcache", "floor", "safetensors"
METHODS = {WCACHE: "wcache-async", FLOOR: "the floor", SAFETENSORS: "`load_file`"}
FETCHES_BEFORE = 3


class Series(Struct, frozen=True, kw_only=True):
    """One way to attach at one point."""

    method: str
    attach: Spread


class Point(Struct, frozen=True, kw_only=True):
    """One number of tensors in one number of bytes; `daemon_cpu` in seconds for a connection with one fetch."""

    tensors: int
    nbytes: int
    series: tuple[Series, ...]
    manifest_nbytes: int
    daemon_cpu: Spread

    def attach(self, method: str) -> float:
        """The median in seconds.  Raises KeyError."""
        return {series.method: series.attach.median for series in self.series}[method]


class Report(Struct, frozen=True, kw_only=True):
    """One run; `left_out` are points as text, with the reason."""

    environment: Environment
    load_average_after: tuple[float, float, float]
    rounds: int
    by_tensors: tuple[Point, ...]
    by_size: tuple[Point, ...]
    left_out: tuple[str, ...]


def measure_point(tensors: int, nbytes: int, methods: Sequence[str], rounds: int, fetches: int) -> Point:
    """Serve as many zeros in every way, and attach `rounds` times by each."""
    with tempfile.TemporaryDirectory(prefix="wcache-scaling-") as name, ExitStack() as stack:
        folder = Path(name)
        checkpoint = folder / "model.safetensors"
        write_thin(checkpoint, tensors, nbytes)
        addresses = {WCACHE: str(folder / "w"), FLOOR: str(folder / "f"), SAFETENSORS: str(checkpoint)}
        daemon = stack.enter_context(serving_pid(wcache_serve(checkpoint, addresses[WCACHE])))
        if FLOOR in methods:
            stack.enter_context(serving(script("attach_server.py", FLOOR, addresses[FLOOR], checkpoint)))
        _forget(checkpoint)
        samples: dict[str, list[float]] = {method: [] for method in methods}
        for number in range(rounds + 1):  # The first brings what is read into memory, and is not counted.
            for method in methods:
                seconds = _attach(method, addresses[method])
                if number:
                    samples[method].append(seconds)
        manifest_nbytes, daemon_cpu = _fetch(addresses[WCACHE], daemon, rounds, fetches)
    return Point(
        tensors=tensors,
        nbytes=nbytes,
        series=tuple(Series(method=method, attach=spread(taken)) for method, taken in samples.items()),
        manifest_nbytes=manifest_nbytes,
        daemon_cpu=daemon_cpu,
    )


def _forget(checkpoint: Path) -> None:
    """Free what the daemon read through the page cache; attaching needs the header alone."""
    fd = os.open(checkpoint, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _attach(method: str, address: str) -> float:
    with clients(1, attach_by, method, address, False) as (connection,):
        connection.send(None)
        said = answer(connection)
    if not isinstance(said, Attached):
        raise RuntimeError(f"{method} said {said!r}")
    return said.seconds


def _fetch(address: str, daemon: int, rounds: int, fetches: int) -> tuple[int, Spread]:
    nbytes = 0
    costs = []
    with clients(1, fetch_over_and_over, address) as (connection,):
        for number in range(rounds + 1):
            before = cpu_seconds(daemon)
            connection.send(fetches if number else FETCHES_BEFORE)
            said = answer(connection)
            if not isinstance(said, Fetches):
                raise RuntimeError(f"a client said {said!r}")
            nbytes = said.manifest_nbytes
            if number:
                costs.append((cpu_seconds(daemon) - before) / said.count)
    return nbytes, spread(costs)


def table(report: Report) -> str:
    """The report as Markdown."""
    parts = [
        f"Median of {report.rounds} processes each, in milliseconds, from nothing to a dict of tensors; the "
        "checkpoints are zeros, and nothing is touched. *Daemon's CPU* is its time for one connection with one fetch.",
        _table(report.by_tensors, (WCACHE, FLOOR, SAFETENSORS), f"tensors in {TENSORS_NBYTES // MIB} MiB", "{0:,}"),
    ]
    if report.by_size:
        parts.append(_table(report.by_size, (WCACHE, SAFETENSORS), f"MiB of {SIZES_TENSORS} tensors", "{1:,}"))
    parts += [f"Left out: {reason}." for reason in report.left_out]
    return "\n\n".join(parts)


def _table(points: Sequence[Point], methods: Sequence[str], head: str, which: str) -> str:
    costs = ("a tensor, µs", "manifest, bytes a tensor", "daemon's CPU, µs")
    columns = [head, *(METHODS[method] for method in methods), *costs]
    lines = [f"| {' | '.join(columns)} |", "|--:" * len(columns) + "|"]
    for point in points:
        cells = [
            which.format(point.tensors, point.nbytes // MIB),
            *(milliseconds(point.attach(method)) for method in methods),
            f"{point.attach(WCACHE) / point.tensors * 1e6:.1f}",
            f"{point.manifest_nbytes / point.tensors:.1f}",
            f"{point.daemon_cpu.median * 1e6:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="processes a way and point (default: %(default)s)")
    parser.add_argument("--fetches", type=int, default=30, help="a round, for the daemon's CPU (default: %(default)s)")
    parser.add_argument("--tensors", type=int, action="append", help=f"a point (default: each of {TENSORS})")
    parser.add_argument("--mebibytes", type=int, action="append", help="a point (default: 64 to 8192, doubling)")
    parser.add_argument("--quick", action="store_true", help="few points, 1 round: does everything work?")
    parser.add_argument("--output", type=Path, default=RESULTS / "scaling.json", help="default: %(default)s")
    options = parser.parse_args()
    numbers: Sequence[int] = options.tensors or ((100, 1_000, 10_000) if options.quick else TENSORS)
    given = [mebibytes * MIB for mebibytes in options.mebibytes or ()]
    sizes: Sequence[int] = given or ((64 * MIB, 128 * MIB) if options.quick else SIZES)
    rounds: int = 1 if options.quick else options.rounds
    fetches: int = 5 if options.quick else options.fetches

    environment = Environment.here()
    left_out: list[str] = []
    by_tensors, by_size = [], []
    for tensors in numbers:
        print(f"{tensors:,} tensors", file=sys.stderr)
        by_tensors.append(measure_point(tensors, TENSORS_NBYTES, tuple(METHODS), rounds, fetches))
    for nbytes in sizes:
        # The arena, and the page cache that it is read through.
        if available_memory() < 1.1 * nbytes + (1 << 30):
            left_out.append(f"{nbytes // MIB:,} MiB, for which {available_memory() // MIB:,} MiB of memory are too few")
            continue
        print(f"{nbytes // MIB:,} MiB", file=sys.stderr)
        by_size.append(measure_point(SIZES_TENSORS, nbytes, (WCACHE, SAFETENSORS), rounds, fetches))
    report = Report(
        environment=environment,
        load_average_after=os.getloadavg(),
        rounds=rounds,
        by_tensors=tuple(by_tensors),
        by_size=tuple(by_size),
        left_out=tuple(left_out),
    )
    write_json(report, options.output)
    print(table(report))


if __name__ == "__main__":
    main()

"""Measures having weights that are processed after loading: from the cache, and by doing it again.

The processing is a cast to float16 and the query, key and value projections of each layer in one
matrix.  Without the cache every process loads the checkpoint from warm page cache and does both;
with it, one did and published what came out.  Every sample is a new process, forked with
everything imported.  Prints a table, and writes all samples as JSON.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from checkpoints import Checkpoint
from forked import Attached, answer, clients
from msgspec import Struct
from processed_clients import attach_processed, process_again, publish_processed
from results import RESULTS, Environment, Spread, milliseconds, spread, write_json
from serving import script, serving_pid

MIB = 1 << 20


class Way(Struct, frozen=True, kw_only=True):
    """One way, in seconds: to a dict of tensors, and the first touch of every page then."""

    attach: Spread
    touch: Spread
    both: Spread


class Report(Struct, frozen=True, kw_only=True):
    """One run; the ratios are of medians, how many times as long it takes without the cache."""

    environment: Environment
    load_average_after: tuple[float, float, float]
    rounds: int
    tensors: int
    nbytes: int
    again: Way
    cached: Way
    attach_ratio: float
    touch_ratio: float


def _way(samples: list[Attached]) -> Way:
    return Way(
        attach=spread([sample.seconds for sample in samples]),
        touch=spread([sample.touch_s for sample in samples]),
        both=spread([sample.seconds + sample.touch_s for sample in samples]),
    )


def _once(target: Callable[..., None], address: str) -> Attached:
    with clients(1, target, address) as (connection,):
        connection.send(None)
        said = answer(connection)
    if not isinstance(said, Attached):
        raise RuntimeError(f"a client said {said!r}")
    return said


def measure(folder: Path, tensors: int, nbytes: int, rounds: int) -> Report:
    """Both ways in turn, on one checkpoint."""
    environment = Environment.here()
    subprocess.run(script("checkpoints.py", folder, tensors, nbytes), check=True)
    checkpoint, address = str(Checkpoint.in_folder(folder).safetensors), str(folder / "s")
    again, cached = [], []
    wcache = str(Path(sys.executable).with_name("wcache"))
    with serving_pid([wcache, "serve", "--socket", address]):
        with clients(1, publish_processed, checkpoint, address) as (connection,):
            connection.send(None)
            answer(connection)
        for number in range(1, rounds + 1):
            print(f"round {number} of {rounds}", file=sys.stderr)
            again.append(_once(process_again, checkpoint))
            cached.append(_once(attach_processed, address))
    without, through = _way(again), _way(cached)
    return Report(
        environment=environment,
        load_average_after=os.getloadavg(),
        rounds=rounds,
        tensors=tensors,
        nbytes=nbytes,
        again=without,
        cached=through,
        attach_ratio=without.attach.median / through.attach.median,
        touch_ratio=without.both.median / through.both.median,
    )


def table(report: Report) -> str:
    """The report as Markdown."""
    rows = (
        f"| {name} | {' | '.join(_cell(value) for value in (way.attach, way.touch, way.both))} |"
        for name, way in (("loaded and processed again", report.again), ("wcache-async, processed once", report.cached))
    )
    return (
        f"{report.tensors:,} tensors in {report.nbytes // MIB:,} MiB, cast to float16 and their QKV projections fused. "
        f"Median of {report.rounds} processes (least to most in brackets), in milliseconds.\n\n"
        "| processed weights | ready | first touch | ready + touch |\n|---|--:|--:|--:|\n"
        + "\n".join(rows)
        + f"\n| ratio | {report.attach_ratio:.0f} | | {report.touch_ratio:.1f} |"
    )


def _cell(value: Spread) -> str:
    return f"{milliseconds(value.median)} ({milliseconds(value.least)}-{milliseconds(value.most)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=300, help="default: %(default)s")
    parser.add_argument("--mebibytes", type=int, help="size of the checkpoint (default: 1024)")
    parser.add_argument("--rounds", type=int, default=7, help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="64 MiB, 1 round: does everything work?")
    parser.add_argument("--output", type=Path, default=RESULTS / "processed.json", help="default: %(default)s")
    options = parser.parse_args()
    nbytes = (options.mebibytes or (64 if options.quick else 1024)) * MIB
    with tempfile.TemporaryDirectory(prefix="wcache-processed-") as folder:
        report = measure(Path(folder), options.tensors, nbytes, 1 if options.quick else options.rounds)
    write_json(report, options.output)
    print(table(report))


if __name__ == "__main__":
    main()

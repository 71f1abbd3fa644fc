"""Measures the start of a process with a transformers model: from its start to its first forward's end.

Without wcache, the checkpoint in the page cache (warm) or not (cold), and with it; for the model
as it is stored, and with processing that costs after loading: a cast, QKV fusion, int8
quantisation.  Every sample is a process of its own, all ways in turn, in another order each
round.  All ways of a variant must compute the same logits, bit for bit.  Prints a table, and
writes all samples as JSON.
"""

import argparse
import ctypes
import mmap
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct
from results import RESULTS, Environment, Spread, spread, write_json
from serving import ENVIRONMENT, script, serving
from startup_sample import StartupSample

WARM, COLD, CACHE = "from_pretrained, warm", "from_pretrained, cold", "from_cache"
WAYS = (WARM, COLD, CACHE)
VARIANTS = {
    "stored": "as stored (bfloat16)",
    "cast": "cast to float16",
    "fused": "QKV fused",
    "int8": "quantised to int8",
    "all": "cast to float16, QKV fused, quantised to int8",
}
TARGET = 50
"""Loading and processing again should take so many times as long as having the cache do it."""


class Failed(Exception):
    """A process did not compute what it was to compute."""


class WayResult(Struct, frozen=True, kw_only=True):
    """One way to start, in seconds; see `StartupSample`."""

    way: str
    imports: Spread
    weights: Spread
    state: Spread | None
    forward: Spread
    total: Spread


class VariantResult(Struct, frozen=True, kw_only=True):
    """Every way to start with one variant of the model.

    The ratios are of medians, all to the cache's: `warm` and `cold` of the time to a model that
    can compute; `state_warm` of that, warm, to the cache's fetching and binding without the
    building of the structure; `total` of whole processes, warm.
    """

    variant: str
    ways: tuple[WayResult, ...]
    warm: float
    cold: float
    state_warm: float
    total: float
    met: bool
    """Whether `warm` is TARGET or more."""
    state_met: bool
    """Whether `state_warm` is."""


class Report(Struct, frozen=True, kw_only=True):
    """One run; `cached` is the largest share of the checkpoint that was still in memory before a cold start."""

    environment: Environment
    load_average_after: tuple[float, float, float]
    rounds: int
    nbytes: int
    cached: float
    target: int
    variants: tuple[VariantResult, ...]


# ------------------------------------------------------------------------------- the page cache
def checkpoint_files(folder: Path) -> list[Path]:
    """Every file with bytes in it."""
    return [path for path in sorted(folder.iterdir()) if path.stat().st_size]


def evict(files: Sequence[Path]) -> None:
    """Have the kernel forget what it holds of them."""
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)  # Pages still to be written are not dropped (posix_fadvise(2)).
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def cached_share(files: Sequence[Path]) -> float:
    """How much of them is in memory, from 0 to 1; see mincore(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = resident = 0
    for path in files:
        nbytes = path.stat().st_size
        with open(path, "rb") as file, mmap.mmap(file.fileno(), nbytes, flags=mmap.MAP_PRIVATE) as mapped:
            count = -(-nbytes // mmap.PAGESIZE)
            seen = (ctypes.c_ubyte * count)()
            start = ctypes.addressof(ctypes.c_ubyte.from_buffer(mapped))
            if libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), seen):
                raise OSError(ctypes.get_errno(), f"mincore of {path}")
        pages += count
        resident += sum(page & 1 for page in seen)
    return resident / pages


# ------------------------------------------------------------------------------------ measuring
def measure(folder: Path, address: str, variants: Sequence[str], rounds: int) -> tuple[list[VariantResult], float]:
    """Start `rounds` processes each way; the other result is `Report.cached`."""
    files = checkpoint_files(folder)
    samples: dict[tuple[str, str], list[StartupSample]] = {(v, w): [] for v in variants for w in WAYS}
    cached = 0.0
    for number, variant, way in _turns(variants, rounds):
        print(f"round {number} of {rounds}: {VARIANTS[variant]}, {way}", file=sys.stderr)
        if way == COLD:
            evict(files)
            cached = max(cached, cached_share(files))
        elif way == WARM:
            for path in files:
                path.read_bytes()
        samples[variant, way].append(_start(variant, way, folder, address))
    for variant in variants:
        computed = {sample.logits for way in WAYS for sample in samples[variant, way]}
        if len(computed) > 1:
            raise Failed(f"{VARIANTS[variant]}: {len(computed)} different logits were computed")
    return [_summarised(variant, samples) for variant in variants], cached


def _turns(variants: Sequence[str], rounds: int) -> Iterator[tuple[int, str, str]]:
    order = random.Random(0)
    pairs = [(variant, way) for variant in variants for way in WAYS]
    for number in range(1, rounds + 1):
        for variant, way in order.sample(pairs, len(pairs)):
            yield number, variant, way


def _start(variant: str, way: str, folder: Path, address: str) -> StartupSample:
    how = "cache" if way == CACHE else "load"
    command = script("startup_process.py", how, variant, folder, address, time.monotonic())
    process = subprocess.run(command, capture_output=True, check=False, env=ENVIRONMENT)
    if process.returncode:
        last = process.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise Failed(f"{VARIANTS[variant]}, {way}: {last or f'exit status {process.returncode}'}")
    return msgspec.json.decode(process.stdout, type=StartupSample)


def _summarised(variant: str, samples: dict[tuple[str, str], list[StartupSample]]) -> VariantResult:
    ways = []
    for way in WAYS:
        taken = samples[variant, way]
        states = [sample.state_s for sample in taken if sample.state_s is not None]
        ways.append(
            WayResult(
                way=way,
                imports=spread([sample.imports_s for sample in taken]),
                weights=spread([sample.weights_s for sample in taken]),
                state=spread(states) if states else None,
                forward=spread([sample.forward_s for sample in taken]),
                total=spread([sample.total_s for sample in taken]),
            )
        )
    warm, cold, cache = ways
    state = cache.state or cache.weights
    ratio, state_ratio = (warm.weights.median / cost.median for cost in (cache.weights, state))
    return VariantResult(
        variant=variant,
        ways=tuple(ways),
        warm=ratio,
        cold=cold.weights.median / cache.weights.median,
        state_warm=state_ratio,
        total=warm.total.median / cache.total.median,
        met=ratio >= TARGET,
        state_met=state_ratio >= TARGET,
    )


# --------------------------------------------------------------------------------------- report
def table(report: Report) -> str:
    """The report as Markdown."""
    parts = [
        f"A random Llama of {report.nbytes / 2**30:.2f} GiB in bfloat16. Median of {report.rounds} fresh processes "
        "(least to most in brackets), in seconds. *Model* is from everything imported to a model that can compute: "
        "loaded and processed, or fetched, built and bound; *state* is of that the fetching and binding alone. "
        "*Start to forward* is the whole process, imports included, to its first forward's end. Before a cold start at "
        f"most {100 * report.cached:.0f} % of the checkpoint was in memory. {report.environment}."
    ]
    for result in report.variants:
        head = f"| {VARIANTS[result.variant]} | model | state | first forward | imports | start to forward |"
        parts.append("\n".join([head, "|---|--:|--:|--:|--:|--:|", *map(_row, result.ways)]))
    parts.append("\n".join(map(_verdict, report.variants)))
    return "\n\n".join(parts)


def _row(result: WayResult) -> str:
    cells = (result.weights, result.state, result.forward, result.imports, result.total)
    return f"| {result.way} | {' | '.join('' if cell is None else _cell(cell) for cell in cells)} |"


def _cell(value: Spread) -> str:
    return f"{value.median:.3f} ({value.least:.3f}-{value.most:.3f})"


def _verdict(result: VariantResult) -> str:
    state, model = _against_target(result.state_warm, result.state_met), _against_target(result.warm, result.met)
    return (
        f"- {VARIANTS[result.variant]}: loading again, warm, takes {state} as long as the cache's giving the state, "
        f"and {model} as long with the structure built; cold {result.cold:.1f} times; the whole process "
        f"{result.total:.2f} times."
    )


def _against_target(ratio: float, met: bool) -> str:
    return f"{ratio:.1f} times ({'at least' if met else 'MISSED:'} {TARGET})"


def main() -> int:
    """Run; 1 where something could not be measured, whatever the figures are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=VARIANTS, action="append", help="one to measure (default: all)")
    parser.add_argument("--mebibytes", type=int, help="the model's size (default: 1024)")
    parser.add_argument("--rounds", type=int, help="fresh processes per variant and way (default: 5)")
    parser.add_argument("--quick", action="store_true", help="8 MiB, 1 round: does everything work?")
    parser.add_argument("--output", type=Path, default=RESULTS / "startup.json", help="default: %(default)s")
    options = parser.parse_args()
    variants: list[str] = options.variant or list(VARIANTS)
    nbytes = (options.mebibytes or (8 if options.quick else 1024)) << 20
    rounds: int = options.rounds or (1 if options.quick else 5)

    environment = Environment.here()
    with tempfile.TemporaryDirectory(prefix="wcache-startup-") as temporary:
        folder, address = Path(temporary, "model"), str(Path(temporary, "s"))
        print("writing the checkpoint", file=sys.stderr)
        # By a process of its own, so that this one holds no tensors.
        subprocess.run(script("startup_model.py", folder, nbytes), check=True, stdout=subprocess.DEVNULL)
        size = sum(path.stat().st_size for path in checkpoint_files(folder))
        print("loading every variant into the daemon", file=sys.stderr)
        try:
            with serving(script("startup_server.py", address, folder, *variants)):
                results, cached = measure(folder, address, variants, rounds)
        except Failed as error:
            print(f"startup: {error}", file=sys.stderr)
            return 1
    report = Report(
        environment=environment,
        load_average_after=os.getloadavg(),
        rounds=rounds,
        nbytes=size,
        cached=cached,
        target=TARGET,
        variants=tuple(results),
    )
    write_json(report, options.output)
    print(table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())

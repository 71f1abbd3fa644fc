"""Measures how long a fresh process takes to attach to a model's tensors, and to touch them first.

Beside wcache, in the same run, in turn, on the same warm tensors: the floor (see `floor.py`), and
what people use without it (see `alternatives.py`).  Every sample is a process of its own, with
torch imported before the clock runs.  Prints a table, and writes all samples as JSON.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from checkpoints import Checkpoint
from msgspec import Struct
from results import RESULTS, Environment, Sample, Spread, milliseconds, replace_section, spread, write_json
from serving import ENVIRONMENT, script, serving, wcache_serve

README = Path(__file__).parent.parent / "README.md"
SECTION = "attach-benchmark"
CASES = ("300x1024", "5000x1024")

FLOOR = "floor"
METHODS = {
    "wcache": "wcache-async, `Client` on uvloop",
    "wcache-blocking": "wcache-async, `blocking`",
    FLOOR: "the floor: one fd, one list, one view a tensor",
    "safetensors": "`safetensors.torch.load_file`",
    "torch-load-mmap": "`torch.load(mmap=True)`",
    "torch-load": "`torch.load`",
    "multiprocessing": "`torch.multiprocessing`, file_descriptor",
    "pickle": "pickle over a Unix socket",
}
SERVED = (FLOOR, "multiprocessing", "pickle")
"""Those with a server of their own in `attach_server.py`."""


class Failed(Exception):
    """A method did not deliver the tensors."""


@dataclass(frozen=True)
class Case:
    """So many tensors in so many bytes."""

    tensors: int
    nbytes: int

    @classmethod
    def parse(cls, text: str) -> "Case":
        """``300x1024`` is 300 tensors in 1024 MiB."""
        tensors, _, mebibytes = text.partition("x")
        return cls(int(tensors), int(mebibytes) << 20)

    def __str__(self) -> str:
        size = f"{self.nbytes >> 30} GiB" if self.nbytes % (1 << 30) == 0 else f"{self.nbytes >> 20} MiB"
        return f"{self.tensors:,} tensors in {size}"


class MethodResult(Struct, frozen=True, kw_only=True):
    """One way to attach; `error` stands where it could not, `floors` is its median attach over the floor's."""

    method: str
    attach: Spread | None = None
    touch: Spread | None = None
    again: Spread | None = None
    floors: float | None = None
    error: str = ""


class CaseResult(Struct, frozen=True, kw_only=True):
    """Every method on the same tensors."""

    tensors: int
    nbytes: int
    methods: tuple[MethodResult, ...]


class Report(Struct, frozen=True, kw_only=True):
    """One run."""

    environment: Environment
    load_average_after: tuple[float, float, float]
    rounds: int
    cases: tuple[CaseResult, ...]


def measure_case(case: Case, methods: Sequence[str], rounds: int, folder: Path) -> CaseResult:
    """Serve one checkpoint in every way that `methods` ask for, and attach `rounds` times by each."""
    print(f"{case}: writing the checkpoint", file=sys.stderr)
    # By a process of its own, so that this one holds no tensors.
    subprocess.run(script("checkpoints.py", folder, case.tensors, case.nbytes), check=True)
    checkpoint = Checkpoint.in_folder(folder)
    addresses = {method: str(folder / f"{method}.sock") for method in ("wcache", *SERVED)}
    addresses["wcache-blocking"] = addresses["wcache"]
    addresses["safetensors"] = str(checkpoint.safetensors)
    addresses["torch-load"] = addresses["torch-load-mmap"] = str(checkpoint.torch)
    samples: dict[str, list[Sample]] = {method: [] for method in methods}
    errors: dict[str, str] = {}
    servers = [
        script("attach_server.py", method, addresses[method], checkpoint.safetensors)
        for method in SERVED
        if method in methods
    ]
    if {"wcache", "wcache-blocking"} & set(methods):
        servers.append(wcache_serve(checkpoint.safetensors, addresses["wcache"]))
    with serving(*servers):
        for round_number, method in _turns(methods, rounds):
            if method in errors:
                continue
            print(f"{case}: round {round_number} of {rounds}, {method}", file=sys.stderr)
            try:
                samples[method].append(_attach(method, addresses[method], case))
            except Failed as error:
                errors[method] = str(error)
                print(f"{method} failed: {error}", file=sys.stderr)
    return CaseResult(tensors=case.tensors, nbytes=case.nbytes, methods=tuple(_summarised(samples, errors)))


def _turns(methods: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Every method once a round, in another order each, the same in every run."""
    order = random.Random(0)
    for number in range(1, rounds + 1):
        for method in order.sample(methods, len(methods)):
            yield number, method


def _attach(method: str, address: str, case: Case) -> Sample:
    """One fresh process.  Raises Failed with the last line it wrote."""
    command = script("attach_process.py", method, address, "--tensors", case.tensors, "--bytes", case.nbytes)
    process = subprocess.run(command, capture_output=True, check=False, env=ENVIRONMENT)
    if process.returncode:
        last = process.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise Failed(last or f"exit status {process.returncode}")
    return msgspec.json.decode(process.stdout, type=Sample)


def _summarised(samples: Mapping[str, Sequence[Sample]], errors: Mapping[str, str]) -> Iterator[MethodResult]:
    floor = [] if FLOOR in errors else [sample.attach_s for sample in samples.get(FLOOR, ())]
    for method in samples:
        if method in errors:
            yield MethodResult(method=method, error=errors[method])
            continue
        attach = spread([sample.attach_s for sample in samples[method]])
        yield MethodResult(
            method=method,
            attach=attach,
            touch=spread([sample.touch_s for sample in samples[method]]),
            again=spread([sample.again_s for sample in samples[method]]),
            floors=attach.median / spread(floor).median if floor else None,
        )


def table(report: Report) -> str:
    """The report as Markdown."""
    parts = [
        f"Median of {report.rounds} fresh processes, torch imported before the clock runs (least to most in brackets), "
        "in milliseconds. *Attach* ends with a dict of tensors; *first touch* then reads a byte of every page; "
        "*again* is the same process's second attach. Every byte was in memory before. "
        f"{report.environment}."
    ]
    parts += [
        f"| {Case(case.tensors, case.nbytes)} | attach | ÷ floor | first touch | attach + touch | again |\n"
        "|---|--:|--:|--:|--:|--:|\n" + "\n".join(map(_row, case.methods))
        for case in report.cases
    ]
    return "\n\n".join(parts)


def _row(result: MethodResult) -> str:
    name = METHODS[result.method]
    if result.attach is None or result.touch is None or result.again is None:
        return f"| {name} | failed: {result.error.replace('|', '/')} | | | | |"
    floors = "" if result.floors is None else f"{result.floors:.{2 if result.floors < 100 else 0}f}"
    both = spread([a + t for a, t in zip(result.attach.samples, result.touch.samples, strict=True)])
    cells = (_cell(result.attach), floors, _cell(result.touch), _cell(both), _cell(result.again))
    return f"| {name} | {' | '.join(cells)} |"


def _cell(value: Spread) -> str:
    return f"{milliseconds(value.median)} ({milliseconds(value.least)}-{milliseconds(value.most)})"


def main() -> int:
    """Run; 1 where wcache or the floor could not be measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--case", type=Case.parse, action="append", metavar="TENSORSxMIB", help="default: 300x1024 and 5000x1024"
    )
    parser.add_argument("--method", choices=METHODS, action="append", help="one to measure (default: all)")
    parser.add_argument("--rounds", type=int, help="fresh processes per method and case (default: 7)")
    parser.add_argument("--quick", action="store_true", help="300 tensors in 64 MiB, 3 rounds: does everything work?")
    parser.add_argument("--output", type=Path, default=RESULTS / "attach.json", help="default: %(default)s")
    parser.add_argument("--update-readme", action="store_true", help="put the table into README.md")
    options = parser.parse_args()
    if options.update_readme and (options.quick or options.method):
        parser.error("the README shows whole runs: without --quick and --method")
    cases: list[Case] = options.case or [Case.parse(text) for text in (("300x64",) if options.quick else CASES)]
    rounds: int = options.rounds or (3 if options.quick else 7)

    environment = Environment.here()
    results = []
    for case in cases:
        with tempfile.TemporaryDirectory(prefix="wcache-attach-") as folder:
            results.append(measure_case(case, options.method or list(METHODS), rounds, Path(folder)))
    report = Report(environment=environment, load_average_after=os.getloadavg(), rounds=rounds, cases=tuple(results))
    write_json(report, options.output)
    print(table(report))
    if options.update_readme:
        replace_section(README, SECTION, table(report))
    failed = [result.method for case in results for result in case.methods if result.error]
    return 1 if {"wcache", "wcache-blocking", FLOOR} & set(failed) else 0


if __name__ == "__main__":
    sys.exit(main())

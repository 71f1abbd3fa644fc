"""Measures what processes that hold the same model and have touched every page of it take in memory.

In the way of each method, processes are started one after the other, all stay, and at 1, 4 and 16
of them the kernel is asked.  The weights' memory is every process's share (PSS) of what is under
its tensors, with the daemon's or server's share of the same files; what a process takes beyond its imports is the
memory that is its own alone, after against before.  Prints a table, and writes it as JSON.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
from checkpoints import Checkpoint
from memory_process import Held
from msgspec import Struct
from process_memory import Mapping, anonymous, available_memory, mappings, proportional_within
from results import RESULTS, Environment, write_json
from serving import ENVIRONMENT, script, serving_pid, wcache_serve

MIB = 1 << 20
COUNTS = (1, 4, 16)
METHODS = {
    "wcache": "wcache-async",
    "safetensors": "`load_file`",
    "safetensors-cast": "`load_file`, cast to float16",
    "torch-load": "`torch.load`",
    "multiprocessing": "`torch.multiprocessing`",
}
OWN_COPIES = ("safetensors-cast", "torch-load")
"""Those of which every process has a copy: no more of them than memory has room for."""
STOP_TIMEOUT_S = 60.0


class Together(Struct, frozen=True, kw_only=True):
    """So many processes at once, in bytes: their weights together, and the most that one has of its own."""

    processes: int
    weights: int
    own: int


class MethodResult(Struct, frozen=True, kw_only=True):
    """One way; `error` stands where it could not, or not for as many."""

    method: str
    counts: tuple[Together, ...]
    error: str = ""

    def at(self, processes: int) -> Together | None:
        return next((each for each in self.counts if each.processes == processes), None)


class Report(Struct, frozen=True, kw_only=True):
    """One run."""

    environment: Environment
    load_average_after: tuple[float, float, float]
    tensors: int
    nbytes: int
    methods: tuple[MethodResult, ...]


class Holder:
    """One process that holds the model."""

    def __init__(self, stack: ExitStack, method: str, address: str) -> None:
        pipe = subprocess.PIPE
        command = script("memory_process.py", method, address)
        self._process = stack.enter_context(
            subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=ENVIRONMENT)
        )
        stack.callback(self._end)
        self.pid = self._process.pid
        if self._line() != "imported":
            raise RuntimeError(f"{method}: a process ended with {self._process.wait()} before it had imported anything")
        before = anonymous(self.pid)
        if self._process.stdin is not None:
            print("attach", file=self._process.stdin, flush=True)
        line = self._line()
        if not line:
            raise RuntimeError(f"{method}: a process ended with {self._process.wait()}")
        self.ranges = msgspec.json.decode(line, type=Held).ranges
        held = mappings(self.pid)
        under = anonymous_under(held, self.ranges) if method in OWN_COPIES else 0
        self.own = sum(mapping.anonymous for mapping in held) - under - before

    def _line(self) -> str:
        return self._process.stdout.readline().strip() if self._process.stdout is not None else ""

    def _end(self) -> None:
        # Asked to, as one that is killed writes no traceback where something is wrong.
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()


def anonymous_under(held: Sequence[Mapping], ranges: Sequence[tuple[int, int]]) -> int:
    """What of a process's own memory is under its tensors: where each has a copy, that is the weights."""
    found = 0.0
    for mapping in held:
        under = sum(max(0, min(mapping.end, end) - max(mapping.start, start)) for start, end in ranges)
        found += mapping.anonymous * under / (mapping.end - mapping.start)
    return round(found)


def together(holders: Sequence[Holder], server: int | None) -> Together:
    """What they all take at this moment; `server` holds the same memory, perhaps."""
    weights = 0
    files: set[str] = set()
    for holder in holders:
        held = mappings(holder.pid)
        weights += proportional_within(held, holder.ranges)
        for mapping in held:
            if mapping.file and any(start < mapping.end and mapping.start < end for start, end in holder.ranges):
                files.add(mapping.file)
    if server is not None:
        weights += sum(mapping.proportional for mapping in mappings(server) if mapping.file in files)
    return Together(processes=len(holders), weights=weights, own=max(holder.own for holder in holders))


def measure(method: str, address: str, server: int | None, nbytes: int, counts: Sequence[int]) -> MethodResult:
    """Start as many as the largest of `counts`, and look at each of these."""
    found: list[Together] = []
    with ExitStack() as stack:
        holders: list[Holder] = []
        for number in range(1, max(counts) + 1):
            if method in OWN_COPIES and available_memory() < 2 * nbytes + (1 << 30):
                return MethodResult(method=method, counts=tuple(found), error=f"no memory for {number} copies")
            try:
                holders.append(Holder(stack, method, address))
            except RuntimeError as error:
                return MethodResult(method=method, counts=tuple(found), error=str(error))
            if number in counts:
                print(f"{method}: {number} processes", file=sys.stderr)
                found.append(together(holders, server))
    return MethodResult(method=method, counts=tuple(found))


def measure_all(
    folder: Path, tensors: int, nbytes: int, methods: Sequence[str], counts: Sequence[int]
) -> list[MethodResult]:
    """Each method after the other, on one checkpoint."""
    subprocess.run(script("checkpoints.py", folder, tensors, nbytes), check=True)
    checkpoint = Checkpoint.in_folder(folder)
    address = str(folder / "s")
    servers = {
        "wcache": wcache_serve(checkpoint.safetensors, address),
        "multiprocessing": script("attach_server.py", "multiprocessing", address, checkpoint.safetensors),
    }
    results = []
    for method in methods:
        if method in servers:
            with serving_pid(servers[method]) as server:
                results.append(measure(method, address, server, nbytes, counts))
            Path(address).unlink(missing_ok=True)
        else:
            path = checkpoint.torch if method == "torch-load" else checkpoint.safetensors
            results.append(measure(method, str(path), None, nbytes, counts))
    return results


def table(report: Report) -> str:
    """The report as Markdown."""
    counts = sorted({each.processes for result in report.methods for each in result.counts})
    columns = [f"{report.nbytes // MIB:,} MiB of weights", *map(str, counts), "a process's own beyond imports"]
    lines = [f"| {' | '.join(columns)} |", "|---" + "|--:" * (len(counts) + 1) + "|"]
    for result in report.methods:
        cells = [METHODS[result.method]]
        for count in counts:
            at = result.at(count)
            cells.append(f"{at.weights / MIB:,.0f} ({at.weights / report.nbytes:.2f})" if at else result.error)
        own = max((each.own for each in result.counts), default=0)
        cells.append(f"{own / MIB:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return (
        "Weights in memory in MiB (in copies) with so many processes that have attached and touched every page: the "
        "sum of their shares (PSS) of what is under their tensors, and their server's.\n\n" + "\n".join(lines)
    )


def main() -> int:
    """Run; 1 where wcache could not be measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=300, help="default: %(default)s")
    parser.add_argument("--mebibytes", type=int, help="size of the model (default: 256)")
    parser.add_argument("--method", choices=METHODS, action="append", help="one to measure (default: all)")
    parser.add_argument("--processes", type=int, action="append", help=f"how many to look at (default: {COUNTS})")
    parser.add_argument("--quick", action="store_true", help="16 MiB, 1 and 2 processes of two methods: does it work?")
    parser.add_argument("--output", type=Path, default=RESULTS / "memory.json", help="default: %(default)s")
    options = parser.parse_args()
    nbytes = (options.mebibytes or (16 if options.quick else 256)) * MIB
    methods: list[str] = options.method or (["wcache", "torch-load"] if options.quick else list(METHODS))
    counts: Sequence[int] = options.processes or ((1, 2) if options.quick else COUNTS)
    environment = Environment.here()
    with tempfile.TemporaryDirectory(prefix="wcache-memory-") as folder:
        results = measure_all(Path(folder), options.tensors, nbytes, methods, counts)
    report = Report(
        environment=environment,
        load_average_after=os.getloadavg(),
        tensors=options.tensors,
        nbytes=nbytes,
        methods=tuple(results),
    )
    write_json(report, options.output)
    print(table(report))
    return 1 if any(result.method == "wcache" and result.error for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())

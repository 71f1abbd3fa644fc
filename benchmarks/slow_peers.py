"""Measures what peers that never speak, or read one byte a second, cost those who attach.

Eight client processes, made beforehand, attach over and over at the same time: connect, fetch,
import, release, hang up.  They do so in turns beside nobody, and beside 64 peers that are silent
after connecting (connecting anew when dropped) and 16 that ask for the state again and again and
read one byte of the answers a second.  Prints the latencies, and writes them as JSON.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
from checkpoints import Checkpoint
from msgspec import Struct
from results import RESULTS, Environment, milliseconds, write_json
from serving import ENVIRONMENT, script, serving, wcache_serve

MIB = 1 << 20


class Latency(Struct, frozen=True, kw_only=True):
    """Attach latencies of one condition over all rounds and clients, in seconds."""

    slow_peers: bool
    attaches: int
    p50: float
    p99: float
    most: float


class Report(Struct, frozen=True, kw_only=True):
    """One run; `p50_ratio` and `p99_ratio` are with the slow peers over without."""

    environment: Environment
    load_average_after: tuple[float, float, float]
    clients: int
    silent: int
    trickling: int
    tensors: int
    nbytes: int
    without: Latency
    beside: Latency
    p50_ratio: float
    p99_ratio: float


Client = subprocess.Popen[str]


@contextmanager
def clients(count: int, address: str) -> Iterator[list[Client]]:
    """Processes that have imported everything and wait to be told how often to attach."""
    command = script("attach_repeatedly.py", address)
    pipe = subprocess.PIPE
    with ExitStack() as stack:
        started = [
            stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=ENVIRONMENT))
            for _ in range(count)
        ]
        try:
            for client in started:
                if _line(client) != "ready":
                    raise RuntimeError(f"a client ended with {client.wait()} before it was ready")
            yield started
        finally:
            for client in started:
                client.terminate()


def attach_all(processes: Sequence[Client], attaches: int) -> list[float]:
    """Seconds of every attach, `attaches` by each client, all at the same time."""
    for client in processes:
        if client.stdin is not None:
            client.stdin.write(f"{attaches}\n")
            client.stdin.flush()
    latencies: list[float] = []
    for client in processes:
        latencies += msgspec.json.decode(_line(client), type=list[float])
    return latencies


def _line(client: Client) -> str:
    return client.stdout.readline().strip() if client.stdout is not None else ""


def latency(samples: Sequence[float], *, slow_peers: bool) -> Latency:
    """The percentiles of at least two samples."""
    percentiles = statistics.quantiles(samples, n=100, method="inclusive")
    return Latency(
        slow_peers=slow_peers, attaches=len(samples), p50=percentiles[49], p99=percentiles[98], most=max(samples)
    )


def measure(options: argparse.Namespace, folder: Path) -> Report:
    """Alternate between the two conditions."""
    environment = Environment.here()
    tensors: int = options.tensors
    nbytes: int = options.mebibytes * MIB
    subprocess.run(script("checkpoints.py", folder, tensors, nbytes), check=True)
    address = str(folder / "wcache.sock")
    peers = script("slow_peers_process.py", address, options.silent, options.trickling)
    without: list[float] = []
    beside: list[float] = []
    with (
        serving(wcache_serve(Checkpoint.in_folder(folder).safetensors, address)),
        clients(options.clients, address) as processes,
    ):
        attach_all(processes, 2)  # What only a process's first attach costs is not measured here.
        for number in range(1, options.rounds + 1):
            print(f"round {number} of {options.rounds}", file=sys.stderr)
            without += attach_all(processes, options.attaches)
            with serving(peers):
                beside += attach_all(processes, options.attaches)
    one, other = latency(without, slow_peers=False), latency(beside, slow_peers=True)
    return Report(
        environment=environment,
        load_average_after=os.getloadavg(),
        clients=options.clients,
        silent=options.silent,
        trickling=options.trickling,
        tensors=tensors,
        nbytes=nbytes,
        without=one,
        beside=other,
        p50_ratio=other.p50 / one.p50,
        p99_ratio=other.p99 / one.p99,
    )


def table(report: Report) -> str:
    """The report as Markdown."""
    rows = (
        f"| {name} | {milliseconds(value.p50)} | {milliseconds(value.p99)} | {milliseconds(value.most)} |"
        for name, value in (("nobody", report.without), ("the slow peers", report.beside))
    )
    return (
        f"{report.clients} clients attach at the same time, {report.without.attaches:,} times in each row, to "
        f"{report.tensors:,} tensors; the slow peers are {report.silent} silent ones and {report.trickling} that read "
        f"a byte a second. Milliseconds. {report.environment}.\n\n"
        "| beside | p50 | p99 | most |\n|---|--:|--:|--:|\n"
        + "\n".join(rows)
        + f"\n| ratio | {report.p50_ratio:.2f} | {report.p99_ratio:.2f} | |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--silent", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--trickling", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--tensors", type=int, default=300, help="default: %(default)s")
    parser.add_argument("--mebibytes", type=int, default=64, help="size of the state (default: %(default)s)")
    parser.add_argument("--attaches", type=int, default=50, help="a round and client (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="one short round: does everything work?")
    parser.add_argument("--output", type=Path, default=RESULTS / "slow_peers.json", help="default: %(default)s")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.attaches = 1, 5
    with tempfile.TemporaryDirectory(prefix="wcache-peers-") as folder:
        report = measure(options, Path(folder))
    write_json(report, options.output)
    print(table(report))


if __name__ == "__main__":
    main()

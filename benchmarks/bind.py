"""Measures binding a state to a module, beyond importing it: a module whose parameters are there, and one on meta.

A daemon serves the checkpoint; each sample is a new process that builds the module, fetches and
imports the state, and binds it, the last alone under the clock.  Prints a table, and writes all
samples as JSON.
"""

import argparse
import subprocess
import tempfile
from pathlib import Path

import msgspec
from checkpoints import write_checkpoint
from msgspec import Struct
from results import RESULTS, Environment, Spread, milliseconds, spread, write_json
from serving import ENVIRONMENT, script, serving, wcache_serve

MIB = 1 << 20
DEVICES = ("cpu", "meta")


class Report(Struct, frozen=True, kw_only=True):
    """By the device the module was built on: seconds from a module and imported tensors to the module bound."""

    environment: Environment
    tensors: int
    nbytes: int
    bind: dict[str, Spread]

    def __str__(self) -> str:
        head = f"Binding {self.tensors:,} tensors, in milliseconds: median (least to most).  {self.environment}"
        rows = (
            f"  built on {device:<5} {milliseconds(took.median):>7} "
            f"({milliseconds(took.least)}-{milliseconds(took.most)})"
            for device, took in self.bind.items()
        )
        return "\n".join((head, *rows))


def measure(tensors: int, nbytes: int, rounds: int) -> Report:
    """Processes of each device in turn.  Raises CalledProcessError where one fails."""
    environment = Environment.here()
    taken: dict[str, list[float]] = {device: [] for device in DEVICES}
    with tempfile.TemporaryDirectory(prefix="wcache-bench-") as folder:
        checkpoint = write_checkpoint(Path(folder), tensors, nbytes)
        socket = f"{folder}/wcache.sock"
        with serving(wcache_serve(checkpoint.safetensors, socket)):
            for _ in range(rounds):
                for device, samples in taken.items():
                    command = script("bind_process.py", socket, device, tensors, nbytes)
                    done = subprocess.run(command, env=ENVIRONMENT, stdout=subprocess.PIPE, check=True)
                    samples.append(msgspec.json.decode(done.stdout, type=float))
    return Report(
        environment=environment,
        tensors=tensors,
        nbytes=nbytes,
        bind={device: spread(samples) for device, samples in taken.items()},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=5000, help="default: %(default)s")
    parser.add_argument("--mebibytes", type=int, default=256, help="size of the state (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=RESULTS / "bind.json", help="default: %(default)s")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds is at least 1")
    report = measure(options.tensors, options.mebibytes * MIB, options.rounds)
    write_json(report, options.output)
    print(report)


if __name__ == "__main__":
    main()

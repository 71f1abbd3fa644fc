"""Shows the whole path: a checkpoint on disk, one daemon, four processes attached to it at once.

Writes a Llama-shaped checkpoint into a temporary directory, runs `wcache serve` on it, attaches
every process in the same moment, has each compare every byte with the checkpoint, and prints what
it took in time and memory.  Ends with nothing left behind: no process, no file.
"""

import argparse
import asyncio
import contextlib
import json
import math
import random
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import NoReturn

import msgspec
from checkpoints import tensor_shapes
from msgspec import Struct
from serving import ENVIRONMENT, script

from wcache_async.cli.table import print_table
from wcache_async.cli.units import duration_text, size_text

STATE_NAME = "demo"
TENSORS = 147  # As many as Llama 3.2 1B has: nine in each of 16 layers, and three.
SHARDS = 4
INDEX = "model.safetensors.index.json"
TIMEOUT_S = 60.0
_POOL_NBYTES = 32 << 20


class DemoError(Exception):
    """Something did not go as it should have; the text says what."""


class Attached(Struct, frozen=True):
    """What one process found: seconds from nothing to a dict of tensors, and what differs from the checkpoint."""

    attach_s: float
    tensors: int
    nbytes: int
    differences: tuple[str, ...]


class ArenaMemory(Struct, frozen=True):
    """A process's arenas in its memory, in bytes: `shared` with others, `private` to it, and its share of all that."""

    shared: int
    private: int
    proportional: int


# --------------------------------------------------------------------------------- checkpoint
def write_checkpoint(folder: Path, nbytes: int, *, tensors: int = TENSORS, shards: int = SHARDS) -> None:
    """Write `nbytes` (a multiple of 1 MiB) of random bfloat16 weights, in shards with an index as Hugging Face does."""
    import torch

    # Random numbers are dear: each tensor is a stretch of one pool of them, from a place of its own.
    pool = bytearray(min(_POOL_NBYTES, nbytes))
    torch.frombuffer(pool, dtype=torch.bfloat16).normal_(generator=torch.Generator().manual_seed(0))
    places = random.Random(0)
    shapes = tensor_shapes(tensors, nbytes)
    weight_map: dict[str, str] = {}
    for number, part in enumerate(_parts(shapes, nbytes / shards), start=1):
        name = f"model-{number:05}-of-{shards:05}.safetensors"
        weight_map |= dict.fromkeys(part, name)
        _write_shard(folder / name, {tensor: shapes[tensor] for tensor in part}, memoryview(pool), places)
    index = {"metadata": {"total_size": nbytes}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2))


def _parts(shapes: Mapping[str, tuple[int, ...]], nbytes: float) -> Iterator[list[str]]:
    """The names in order, in lists of about `nbytes` bytes."""
    part: list[str] = []
    seen = 0
    full = nbytes
    for name, shape in shapes.items():
        part.append(name)
        seen += 2 * math.prod(shape)
        if seen >= full:
            yield part
            part = []
            full += nbytes
    if part:
        yield part


def _write_shard(path: Path, shapes: Mapping[str, tuple[int, ...]], pool: memoryview, places: random.Random) -> None:
    header = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for shape in shapes.values():
            left = 2 * math.prod(shape)
            start = places.randrange(0, len(pool), 2)
            while left:
                piece = pool[start : start + left]
                file.write(piece)
                left -= len(piece)
                start = 0


# ------------------------------------------------------------------------- one of the processes
def attach(model: str, socket_path: str) -> None:
    """What each process does: attach when told to, compare, and hold on until told to end."""
    import torch  # noqa: F401

    from wcache_async import Client
    from wcache_async.cli.compare import compare_with_source
    from wcache_async.sources import open_source

    async def run() -> None:
        started = perf_counter()
        async with Client(socket_path) as client:
            # What differs from the checkpoint is to be found by looking at the bytes.
            state = await client.fetch_state(STATE_NAME, timeout=TIMEOUT_S, allow_stale=True)
            tensors = await state.import_tensors()
            attach_s = perf_counter() - started

            def compare() -> Attached:
                with open_source(model) as source:
                    found = compare_with_source(source, tensors, lambda *_: None, threads=1)
                return Attached(attach_s, found.tensors, found.nbytes, tuple(map(str, found.differences)))

            _tell(msgspec.json.encode(await asyncio.to_thread(compare)))
            await asyncio.to_thread(sys.stdin.readline)

    _tell(b"imported")
    if sys.stdin.readline():
        asyncio.run(run())


def _tell(line: bytes) -> None:
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


# -------------------------------------------------------------------------------- the processes
@contextmanager
def running(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that is gone when the context is left.

    In a process group of its own: an interrupt from the keyboard is this one's, which ends the others in order.
    """
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT, process_group=0
    ) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()


def next_line(process: subprocess.Popen[str], what: str) -> str:
    """The next line a process prints.  Raises DemoError where it ends instead."""
    line = process.stdout.readline() if process.stdout is not None else ""
    if not line:
        raise DemoError(f"{what} ended with exit code {process.wait(TIMEOUT_S)}")
    return line


def ready_line(daemon: subprocess.Popen[str], socket_path: Path) -> str:
    """The line by which a daemon says it has loaded everything.  Raises DemoError where its status says it cannot."""
    from wcache_async import blocking
    from wcache_async.errors import NotRunning

    while daemon.stdout is not None and not select.select([daemon.stdout], [], [], 0.5)[0]:
        with contextlib.suppress(NotRunning):
            for state in blocking.status(socket_path).states:
                if state.phase == "failed":
                    raise DemoError(state.error)
    return next_line(daemon, "wcache serve")


def tell(process: subprocess.Popen[str], line: str) -> None:
    if process.stdin is not None:
        process.stdin.write(f"{line}\n")
        process.stdin.flush()


def arena_memory(pid: int) -> ArenaMemory:
    """What /proc/PID/smaps says of the mappings of arenas (proc_pid_smaps(5))."""
    fields = dict.fromkeys(("Pss", "Shared_Clean", "Shared_Dirty", "Private_Clean", "Private_Dirty"), 0)
    within = False
    with open(f"/proc/{pid}/smaps", encoding="utf-8", errors="replace") as smaps:
        for line in smaps:
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                within = "memfd:wcache-arena" in line
            elif within:
                name, _, value = line.partition(":")
                if name in fields:
                    fields[name] += int(value.split()[0]) << 10
    return ArenaMemory(
        shared=fields["Shared_Clean"] + fields["Shared_Dirty"],
        private=fields["Private_Clean"] + fields["Private_Dirty"],
        proportional=fields["Pss"],
    )


def private_memory(pid: int) -> int:
    """Bytes that a process shares with no other, torch's and Python's own among them."""
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii", errors="replace") as rollup:
        found = re.findall(r"^Private_(?:Clean|Dirty): +(\d+) kB$", rollup.read(), re.MULTILINE)
    return sum(map(int, found)) << 10


# ------------------------------------------------------------------------------------- the demo
def demo(nbytes: int, processes: int) -> None:
    """Run it.  Raises DemoError."""
    with tempfile.TemporaryDirectory(prefix="wcache-demo-") as name:
        folder = Path(name)
        model = folder / "model"
        run = folder / "run"
        model.mkdir()
        run.mkdir(mode=0o700)
        free = shutil.disk_usage(folder).free
        if free < nbytes * 1.05:
            raise DemoError(
                f"{folder} has {size_text(free)} free, and {size_text(nbytes)} are to be written: set TMPDIR"
            )
        started = perf_counter()
        write_checkpoint(model, nbytes)
        print(
            f"wrote      {model}: {size_text(nbytes)} in {SHARDS} shards, in {duration_text(perf_counter() - started)}"
        )
        serve_and_attach(model, run, processes)
        if left := list(run.iterdir()):
            raise DemoError(f"the daemon has left {', '.join(map(str, left))} behind")


def serve_and_attach(model: Path, run: Path, processes: int) -> None:
    """Serve `model` on a socket in the folder `run`, and attach.  Raises DemoError."""
    socket_path = run / "wcache.sock"
    wcache = str(Path(sys.executable).with_name("wcache"))
    serve = [wcache, "serve", str(model), "--name", STATE_NAME, "--socket", str(socket_path), "--log-level", "warning"]
    with ExitStack() as stack:
        started = perf_counter()
        daemon = stack.enter_context(running(serve))
        line = ready_line(daemon, socket_path)
        load_s = perf_counter() - started
        print(f"served     {line.strip()}, {duration_text(load_s)} after its process was started")
        children = [
            stack.enter_context(running(script("demo.py", "--attach", model, socket_path))) for _ in range(processes)
        ]
        for child in children:
            next_line(child, "a process that was to attach")
        for child in children:
            tell(child, "attach")
        found = [msgspec.json.decode(next_line(child, "an attaching process"), type=Attached) for child in children]
        # All of them have touched every page by now, and hold it still.
        memory = [arena_memory(child.pid) for child in children]
        report(found, memory, [private_memory(child.pid) for child in children])
        for child in children:
            if child.stdin is not None:
                child.stdin.close()
            if child.wait(TIMEOUT_S):
                raise DemoError(f"an attached process ended with exit code {child.returncode}")
        daemon.terminate()
        if daemon.wait(TIMEOUT_S):
            raise DemoError(f"wcache serve ended with exit code {daemon.returncode} at SIGTERM")


def report(found: Sequence[Attached], memory: Sequence[ArenaMemory], private: Sequence[int]) -> None:
    """Print what was found.  Raises DemoError if any process saw other bytes than the checkpoint's."""
    columns = ("PROCESS", "ATTACHED IN", "TENSORS", "COMPARED", "WEIGHTS SHARED", "WEIGHTS PRIVATE", "ALL ELSE PRIVATE")
    rows = [
        (
            str(number),
            duration_text(each.attach_s),
            str(each.tensors),
            f"{size_text(each.nbytes)}, {'equal' if not each.differences else 'DIFFERENT'}",
            size_text(held.shared),
            size_text(held.private),
            size_text(other - held.private),
        )
        for number, (each, held, other) in enumerate(zip(found, memory, private, strict=True), start=1)
    ]
    print()
    print_table(columns, rows, right=columns)
    together = sum(held.proportional for held in memory)
    copies = sum(each.nbytes for each in found)
    print(
        f"\nweights in memory, all {len(found)} processes together: {size_text(together)}; "
        f"{len(found)} separate copies would be {size_text(copies)}"
    )
    for number, each in enumerate(found, start=1):
        if each.differences:
            raise DemoError(f"process {number} sees other bytes than the checkpoint's: {'; '.join(each.differences)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 where everything was as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1024, metavar="MIB", help="of the checkpoint (default: 1024)")
    parser.add_argument("--processes", type=int, default=4, metavar="N", help="that attach (default: 4)")
    parser.add_argument("--attach", nargs=2, metavar=("MODEL", "SOCKET"), help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.attach:
        attach(*chosen.attach)
        return 0
    signal.signal(signal.SIGTERM, _interrupt)  # So that it, too, leaves nothing behind.
    try:
        demo(chosen.size << 20, chosen.processes)
    except (DemoError, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        return 130
    print("nothing is left: no process, no file")
    return 0


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())

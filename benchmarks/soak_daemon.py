"""The daemon of a soak, and what it has of the machine before and after."""

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from msgspec import Struct
from serving import ENVIRONMENT

from wcache_async import Client
from wcache_async.cli.units import size_text
from wcache_async.errors import StateNotFound
from wcache_async.protocol.messages import Health, StatusResponse

__all__ = ["Level", "breaches", "daemon", "errors_in", "health_of", "settled"]

WCACHE = Path(sys.executable).with_name("wcache")

MAX_BYTES: Final = 24 << 20
"""The daemon's budget; everything together would be 26 MiB."""
SETTLE_S: Final = 90.0
"""For the daemon to give back what a storm had of it: more than each of its time limits."""
_ASK_AGAIN_S: Final = 0.5
MEMORY_TOLERANCE: Final = 32 << 20
"""Of resident memory, which malloc keeps in pieces; a state left behind would be mapped as well, and is counted so."""


class Level(Struct, frozen=True, kw_only=True):
    """What an idle daemon has: `wcache status`, less what the question itself takes."""

    fds: int
    mappings: int
    tasks: int
    leases: int
    generations: int
    clients: int
    memory_bytes: int


@contextmanager
def daemon(address: str, log: Path, *, realtime: bool) -> Iterator[subprocess.Popen[bytes]]:
    """`wcache serve` as a user runs it, with its log in a file; `realtime`: before every ordinary process."""
    command = ["chrt", "--rr", "30"] if realtime else []
    command += [str(WCACHE), "serve", "--socket", address, "--max-bytes", str(MAX_BYTES), "--drain-timeout", "5"]
    with (
        log.open("wb") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, env=ENVIRONMENT) as process,
    ):
        try:
            if process.stdout is None or not process.stdout.readline().startswith(b"ready"):
                raise RuntimeError(f"the daemon ended with {process.wait()}: {log.read_text()}")
            yield process
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def health_of(status: StatusResponse) -> Health:
    """How it fares.  Raises RuntimeError for a daemon that does not tell."""
    if status.health is None:
        raise RuntimeError(f"the daemon, {status.version}, tells nothing of its health")
    return status.health


def level(status: StatusResponse) -> Level:
    """What an idle daemon has, by its status."""
    health = health_of(status)
    return Level(
        # Of these one each is the question's own connection.
        fds=health.fds - 1,
        tasks=health.tasks - 1,
        clients=status.clients - 1,
        mappings=health.mappings,
        leases=health.leases,
        generations=health.generations,
        memory_bytes=health.memory_bytes,
    )


def settled(address: str, baseline: Level | None) -> tuple[Level, StatusResponse]:
    """The daemon's level once everybody has gone and everything is unloaded, and the status it is of.

    Waits until it is the baseline's, or nothing changes any more, for SETTLE_S at most.
    """
    return asyncio.run(_settled(address, baseline))


async def _settled(address: str, baseline: Level | None) -> tuple[Level, StatusResponse]:
    deadline = time.monotonic() + SETTLE_S
    before: Level | None = None
    while True:
        async with Client(address, backends=()) as client:
            status = await client.status()
            for state in status.states:
                with contextlib.suppress(StateNotFound):  # It went by itself.
                    await client.unload(state.name)
        now = level(status)
        empty = not (status.states or now.clients or now.leases or now.generations)
        quiet = empty and before is not None and not breaches(before, now)
        if (quiet and (baseline is None or not breaches(baseline, now))) or time.monotonic() > deadline:
            return now, status
        before = now
        await asyncio.sleep(_ASK_AGAIN_S)


def breaches(baseline: Level, end: Level) -> list[str]:
    """What there is more of at the end."""
    found = []
    for name in ("fds", "mappings", "tasks", "leases", "generations", "clients"):
        had, has = getattr(baseline, name), getattr(end, name)
        if has > had:
            found.append(f"the daemon has {has} {name}, and had {had} before")
    if end.memory_bytes > baseline.memory_bytes + MEMORY_TOLERANCE:
        had, has = size_text(baseline.memory_bytes), size_text(end.memory_bytes)
        found.append(f"the daemon has {has} of memory, and had {had} before")
    return found


def errors_in(log: Path) -> list[str]:
    """Lines of a daemon's log that tell of something nobody foresaw."""
    signs = ("Traceback", "Task exception was never retrieved", "unexpectedly", "Exception in callback", " failed\n")
    lines = log.read_text(errors="replace").splitlines(keepends=True)
    return [
        "the daemon's log: " + "".join(lines[number : number + 25])
        for number, line in enumerate(lines)
        if any(sign in line for sign in signs)
    ]

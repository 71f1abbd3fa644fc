"""Client processes forked from one that has imported everything: milliseconds each instead of seconds.

The standard library's fork server does the forking.  What it imports beforehand is this module,
whose functions are what the children run; each says ``ready``, and then does what it is told.
"""

import gc
import multiprocessing
import os
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import perf_counter

import uvloop
from alternatives import attach_safetensors
from attach_process import attach_wcache, touch
from floor import attach as attach_floor
from msgspec import Struct
from serving import STATE_NAME

from wcache_async import Client
from wcache_async.protocol.connection import Received
from wcache_async.protocol.messages import FetchState, FetchStateResponse
from wcache_async.testing.scripted_peer import ScriptedPeer

__all__ = [
    "Attached",
    "Fetches",
    "answer",
    "attach_at",
    "attach_by",
    "begin",
    "clients",
    "fetch_over_and_over",
    "run_child",
    "wait",
]

TIMEOUT_S = 120.0
_CONTEXT = multiprocessing.get_context("forkserver")

gc.freeze()  # A collection in a child would copy every page that holds an object.


class Attached(Struct, frozen=True):
    """One attach: when it began and ended on the monotonic clock, and the process's CPU time for it; in seconds."""

    started: float
    finished: float
    cpu_s: float
    touch_s: float

    @property
    def seconds(self) -> float:
        return self.finished - self.started


class Fetches(Struct, frozen=True):
    """Fetches one after the other, and what the manifest they brought has in bytes."""

    count: int
    manifest_nbytes: int


@contextmanager
def clients(count: int, target: Callable[..., None], *arguments: object) -> Iterator[list[Connection]]:
    """`count` children that run `target` with a connection and the arguments, and are ready.

    They are told to end by the end of the connection.  Raises RuntimeError where one is not ready.
    """
    _prepare()
    with ExitStack() as stack:
        connections = []
        for _ in range(count):
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=target, args=(theirs, *arguments), daemon=True)
            stack.callback(_end, process)
            stack.callback(ours.close)
            process.start()
            theirs.close()
            connections.append(ours)
        for connection in connections:
            if answer(connection) != "ready":
                raise RuntimeError("a client did not begin with being ready")
        yield connections


def answer(connection: Connection) -> object:
    """What a child says next.  Raises RuntimeError where it ends or stays silent instead."""
    if not connection.poll(TIMEOUT_S):
        raise RuntimeError(f"a client said nothing for {TIMEOUT_S:.0f} s")
    try:
        said: object = connection.recv()
    except EOFError:
        raise RuntimeError("a client ended before it was to") from None
    if isinstance(said, Exception):
        raise RuntimeError(f"a client failed: {said!r}")
    return said


def _prepare() -> None:
    here = str(Path(__file__).parent)
    # The server finds modules by this alone: it is not given sys.path before Python 3.13.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    _CONTEXT.set_forkserver_preload(["forked"])


def _end(process: BaseProcess) -> None:
    process.join(TIMEOUT_S)
    if process.is_alive():
        process.kill()
    process.join()


# ------------------------------------------------------------------------- what children run
def attach_at(connection: Connection, address: str, state: str = STATE_NAME) -> None:
    """Attach at the monotonic time that comes; answer with Attached, and hold on until the connection ends."""

    async def run() -> None:
        begin(connection)
        time.sleep(max(0.0, connection.recv() - time.monotonic()))  # noqa: ASYNC251  (nothing else is in this loop)
        cpu, started = time.process_time(), time.monotonic()
        async with Client(address) as client:
            tensors = await (await client.fetch_state(state)).import_tensors()
            finished = time.monotonic()
            connection.send(Attached(started, finished, time.process_time() - cpu, 0.0))
            wait(connection)
            del tensors

    run_child(connection, run)


def attach_by(connection: Connection, method: str, address: str, touching: bool) -> None:
    """Attach by one of ``wcache``, ``floor`` and ``safetensors``, once; answer with Attached."""

    async def run() -> None:
        begin(connection)
        connection.recv()
        started, clock = time.process_time(), perf_counter()
        async with AsyncExitStack() as stack:
            if method == "wcache":
                tensors = await attach_wcache(address, stack)
            else:
                attach = {"floor": attach_floor, "safetensors": attach_safetensors}[method]
                tensors = attach(address, stack.enter_context(ExitStack()))
            finished, cpu = perf_counter(), time.process_time() - started
            touch_s = touch(tensors) if touching else 0.0
            connection.send(Attached(clock, finished, cpu, touch_s))
            wait(connection)

    run_child(connection, run)


def fetch_over_and_over(connection: Connection, address: str, state: str = STATE_NAME) -> None:
    """As often as each number that comes: connect, fetch, hang up.  Answers with Fetches.

    Nothing is decoded of a manifest, so that the daemon is asked at the same pace whatever its size: a
    processor that has slept for longer is slower.
    """

    async def run() -> None:
        begin(connection)
        while count := _next(connection):
            nbytes = 0
            for _ in range(count):
                async with ScriptedPeer.connect(address) as peer:
                    await peer.greet()
                    await peer.say(1, FetchState(name=state))
                    heard = await peer.hear()
                    if not isinstance(heard, Received):
                        raise RuntimeError(f"the daemon answered a fetch with {heard!r}")
                    for fd in heard.fds:
                        fd.close()
                    if not isinstance(heard.message, FetchStateResponse):
                        raise RuntimeError(f"the daemon answered a fetch with {heard.message!r}")
                    nbytes = heard.message.manifest_nbytes
            connection.send(Fetches(count, nbytes))

    run_child(connection, run)


def begin(connection: Connection) -> None:
    """Say that everything is imported."""
    connection.send("ready")


def _next(connection: Connection) -> int:
    try:
        return int(connection.recv())
    except EOFError:
        return 0


def wait(connection: Connection) -> None:
    """Until the connection ends, or something comes."""
    with suppress(EOFError):
        connection.recv()


def run_child(connection: Connection, run: Callable[[], Coroutine[object, object, None]]) -> None:
    """Run it on a loop of its own; an error goes to whoever started this process."""
    try:
        uvloop.run(run())
    except Exception as error:
        connection.send(RuntimeError(repr(error)))

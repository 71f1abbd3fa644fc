"""`wcache stop`: have the daemon shut down, and wait until it has."""

import contextlib
import os
import select
from typing import Annotated

import typer

from wcache_async.cli.options import AsJson, SocketPath
from wcache_async.cli.outcome import ExitCode, print_json, reported

__all__ = ["stop"]


@reported
def stop(
    *,
    socket_path: SocketPath = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until its process has ended.")] = True,
    as_json: AsJson = False,
) -> ExitCode:
    """Have the daemon shut down, as SIGTERM does.

    Processes that attached keep what they hold.

    \b
    Example:
      wcache stop
      wcache stop --socket /run/user/1000/wcache/wcache.sock --no-wait
    """
    import asyncio

    from wcache_async.client.client import Client

    async def ask() -> tuple[int, int | None]:
        async with Client(socket_path, backends=(), name="wcache stop") as client:
            # Before it is asked: its number could be another process's afterwards.
            pidfd = _open_pidfd(client.daemon_pid) if wait else None
            return await client.stop(), pidfd

    pid, pidfd = asyncio.run(ask())
    ended = pidfd is not None
    if pidfd is not None:
        select.select([pidfd], [], [])
        os.close(pidfd)
    if as_json:
        print_json({"pid": pid, "ended": ended})
    else:
        print(f"daemon {pid} has stopped" if ended else f"daemon {pid} is stopping")
    return ExitCode.OK


def _open_pidfd(pid: int) -> int | None:
    """None where the process cannot be seen from here: one of another PID namespace shows as 0."""
    with contextlib.suppress(ProcessLookupError):
        return os.pidfd_open(pid) if pid else None
    return None

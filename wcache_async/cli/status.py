"""`wcache status`: what the daemon is, and what it holds."""

import time
from typing import TYPE_CHECKING

from wcache_async.cli.options import AsJson, SocketPath
from wcache_async.cli.outcome import print_json, reported
from wcache_async.cli.table import print_table
from wcache_async.cli.units import count_text, duration_text, size_text

if TYPE_CHECKING:
    from wcache_async.protocol.messages import StateStatus, StatusResponse

__all__ = ["state_as_builtins", "status"]


@reported
def status(*, socket_path: SocketPath = None, as_json: AsJson = False) -> None:
    """Show the daemon and what it holds.

    \b
    Example:
      wcache status
      wcache status --json | jq '.states[] | select(.phase == "failed")'
    """
    import asyncio

    from wcache_async.client.client import Client

    async def ask() -> "StatusResponse":
        async with Client(socket_path, backends=(), name="wcache status") as client:
            return await client.status()

    answer = asyncio.run(ask())
    if as_json:
        print_json(_as_builtins(answer))
    else:
        _print(answer)


def _as_builtins(answer: "StatusResponse") -> dict[str, object]:
    from msgspec.structs import asdict

    health = None if answer.health is None else asdict(answer.health)
    return asdict(answer) | {"states": [state_as_builtins(state) for state in answer.states], "health": health}


def state_as_builtins(state: "StateStatus") -> dict[str, object]:
    """Every field of one state's status, also those that have their defaults."""
    from msgspec.structs import asdict

    return asdict(state)


def _print(answer: "StatusResponse") -> None:
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() - answer.uptime_s))
    draining = ", shutting down" if answer.draining else ""
    # This question's own connection is one of them.
    clients = count_text(max(answer.clients - 1, 0), "other client")
    print(f"daemon {answer.version}, pid {answer.pid}, on {answer.socket}{draining}")
    print(f"up {duration_text(answer.uptime_s)} since {started}, {clients}")
    if not answer.states:
        print("no states; `wcache load MODEL --name N` adds one")
        return
    columns = ("NAME", "RANK", "PHASE", "GEN", "TENSORS", "SIZE", "BACKEND", "LEASES", "CONFIG")
    right = ("RANK", "GEN", "TENSORS", "SIZE", "LEASES")
    print_table(columns, [_row(state) for state in answer.states], right=right)
    for state in answer.states:
        if state.error is not None:
            print(f"{state.name}:{state.rank}: {state.error}")
        if state.stale:
            print(
                f"{state.name}:{state.rank}: the files it was loaded from have changed since; "
                f"`wcache load MODEL --name {state.name} --replace` loads them anew"
            )


def _row(state: "StateStatus") -> tuple[str, ...]:
    phase = state.phase
    if phase == "loading" and state.bytes:
        phase = f"loading {100 * state.bytes_done // state.bytes} %"
    return (
        state.name,
        str(state.rank),
        phase,
        str(state.generation),
        str(state.tensors),
        size_text(state.bytes),
        ", ".join(state.backends),
        str(state.leases),
        " ".join(f"{key}={value}" for key, value in state.config.items()),
    )

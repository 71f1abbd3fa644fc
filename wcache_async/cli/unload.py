"""`wcache unload`: have the daemon forget a state."""

from typing import TYPE_CHECKING, Annotated

import typer

from wcache_async.cli.options import AsJson, SocketPath, StateName
from wcache_async.cli.outcome import print_json, reported
from wcache_async.cli.units import size_text

if TYPE_CHECKING:
    from wcache_async.protocol.messages import UnloadResponse

__all__ = ["unload"]


@reported
def unload(
    name: StateName,
    *,
    rank: Annotated[
        int | None,
        typer.Option("--rank", min=0, metavar="R", show_default=False, help="Its rank. Default: every rank."),
    ] = None,
    socket_path: SocketPath = None,
    as_json: AsJson = False,
) -> None:
    """Have the daemon forget a state.

    Processes that attached it keep it until they let go.

    \b
    Example:
      wcache unload llama-8b
      wcache unload llama-8b --rank 1
    """
    import asyncio

    from wcache_async.client.client import Client

    async def ask() -> "UnloadResponse":
        async with Client(socket_path, backends=(), name="wcache unload") as client:
            return await client.unload(name, rank=rank)

    answer = asyncio.run(ask())
    if as_json:
        print_json({"unloaded": list(answer.unloaded), "bytes": answer.bytes})
    else:
        print(f"unloaded {', '.join(answer.unloaded)}: {size_text(answer.bytes)}")

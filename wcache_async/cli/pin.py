"""`wcache pin` and `wcache unpin`: keep a state from making room for others, or no longer."""

from typing import Annotated

import typer

from wcache_async.cli.options import AsJson, SocketPath, StateName
from wcache_async.cli.outcome import print_json, reported

__all__ = ["pin", "unpin"]

OneRank = Annotated[
    int | None,
    typer.Option("--rank", min=0, metavar="R", show_default=False, help="Its rank. Default: every rank."),
]


@reported
def pin(name: StateName, *, rank: OneRank = None, socket_path: SocketPath = None, as_json: AsJson = False) -> None:
    """Keep a state even when memory is needed for others.

    It matters where `serve --max-bytes` sets a limit.

    \b
    Example:
      wcache pin llama-8b
      wcache pin llama-8b --rank 1
    """
    _ask(name, rank, socket_path, pinned=True, as_json=as_json)


@reported
def unpin(name: StateName, *, rank: OneRank = None, socket_path: SocketPath = None, as_json: AsJson = False) -> None:
    """Let a state make room for others again while nobody holds it.

    \b
    Example:
      wcache unpin llama-8b
      wcache unpin llama-8b --rank 1
    """
    _ask(name, rank, socket_path, pinned=False, as_json=as_json)


def _ask(name: str, rank: int | None, socket_path: str | None, *, pinned: bool, as_json: bool) -> None:
    import asyncio

    from wcache_async.client.client import Client

    async def ask() -> tuple[str, ...]:
        async with Client(socket_path, backends=(), name="wcache pin") as client:
            return await client.pin(name, rank=rank, pinned=pinned)

    states = asyncio.run(ask())
    if as_json:
        print_json({"states": list(states), "pinned": pinned})
    else:
        print(f"{'pinned' if pinned else 'unpinned'} {', '.join(states)}")

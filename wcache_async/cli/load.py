"""`wcache load`: have the running daemon load one more checkpoint."""

from typing import TYPE_CHECKING, Annotated

import typer

from wcache_async.cli.options import (
    AsJson,
    BackendName,
    ConfigItems,
    DtypeName,
    ModelPath,
    OptionItems,
    Rank,
    SocketPath,
    SourceKind,
    model_name,
    parse_items,
)
from wcache_async.cli.outcome import print_json, reported
from wcache_async.cli.progress import progress_display
from wcache_async.cli.status import state_as_builtins
from wcache_async.cli.tensor_parallel import TpPlanFile, TpSize, shares
from wcache_async.cli.units import count_text, size_text

if TYPE_CHECKING:
    from wcache_async.protocol.messages import StateStatus

__all__ = ["load"]


@reported
def load(
    model: ModelPath,
    *,
    name: Annotated[
        str,
        typer.Option(
            "--name",
            metavar="N",
            show_default=False,
            help="What it is called. Default: the folder's name, or the file's without its suffix.",
        ),
    ] = "",
    rank: Rank = 0,
    socket_path: SocketPath = None,
    source: SourceKind = "auto",
    dtype: DtypeName = "",
    option: OptionItems = None,
    config: ConfigItems = None,
    tp_size: TpSize = None,
    tp_plan: TpPlanFile = "",
    backend: BackendName = "auto",
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Take the place of a state of that name; who holds the old one keeps it."),
    ] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it is loaded.")] = True,
    as_json: AsJson = False,
) -> None:
    """Have the daemon load one more checkpoint.

    \b
    Example:
      wcache load ./llama-8b --name llama-8b --dtype bfloat16
      wcache load ./llama-8b-v2 --name llama-8b --replace
    """
    import asyncio

    from wcache_async.client.client import Client

    name = name or model_name(model)
    values = parse_items(config, "--config")
    options = parse_items(option, "--option")
    ranks = shares(tp_size, tp_plan, rank=rank, source=source)

    async def ask() -> "list[StateStatus]":
        async with Client(socket_path, backends=(), name="wcache load") as client:
            with progress_display() as display:
                loads = [
                    client.load(
                        model,
                        name,
                        rank=number,
                        source=source,
                        dtype=dtype,
                        backend=backend,
                        options=options | share,
                        config=values,
                        replace=replace,
                        wait=wait,
                        progress=display.track(f"loading {name}:{number}"),
                    )
                    for number, share in ranks
                ]
                return await asyncio.gather(*loads)

    states = asyncio.run(ask())
    if as_json:
        shown = [state_as_builtins(state) for state in states]
        print_json(shown[0] if tp_size is None else {"states": shown})
        return
    for state in states:
        _print(state)


def _print(state: "StateStatus") -> None:
    if state.phase == "ready":
        print(
            f"{state.name}:{state.rank} is ready: generation {state.generation}, "
            f"{count_text(state.tensors, 'tensor')}, {size_text(state.bytes)}"
        )
    else:
        print(f"{state.name}:{state.rank} is {state.phase}; `wcache status` shows how far it is")

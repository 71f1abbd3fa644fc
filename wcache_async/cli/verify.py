"""`wcache verify`: every byte that a client sees, or all that a model shows, against the checkpoint on disk."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from wcache_async.cli.options import (
    AsJson,
    DtypeName,
    OptionItems,
    Rank,
    SocketPath,
    SourceKind,
    model_name,
    parse_items,
)
from wcache_async.cli.outcome import ExitCode, print_json, reported
from wcache_async.cli.progress import progress_display
from wcache_async.cli.table import print_table
from wcache_async.cli.tensor_parallel import TpPlanFile, TpSize, share_of
from wcache_async.cli.units import count_text, size_text

if TYPE_CHECKING:
    from wcache_async.cli.compare import Comparison
    from wcache_async.client.fetch import FetchedState

__all__ = ["verify"]


@reported
def verify(
    model: Annotated[
        str, typer.Argument(metavar="[MODEL]", show_default=False, help="A checkpoint: a file, or a folder of shards.")
    ] = "",
    *,
    against: Annotated[
        str,
        typer.Option(
            "--against",
            metavar="MODEL",
            show_default=False,
            help="Load this as serve would, and compare strides, kinds, persistence, ties, shared storages and "
            "digests as well, so that a model of either would be the same.",
        ),
    ] = "",
    name: Annotated[
        str,
        typer.Option(
            "--name",
            metavar="N",
            show_default=False,
            help="The state's name. Default: the folder's name, or the file's without its suffix.",
        ),
    ] = "",
    rank: Rank = 0,
    socket_path: SocketPath = None,
    source: SourceKind = "auto",
    dtype: DtypeName = "",
    option: OptionItems = None,
    tp_size: TpSize = None,
    tp_plan: TpPlanFile = "",
    as_json: AsJson = False,
) -> ExitCode:
    """Compare a state with its checkpoint, byte by byte.

    Names, shapes and dtypes are compared too; with --against in place of MODEL, all that a model
    shows.  Give --source, --dtype, --option, --tp-size and --tp-plan as they were given to serve
    or load.  Exits with 1 on any difference, and names each.

    \b
    Example:
      wcache verify ./llama-8b --name llama-8b --dtype bfloat16 --json
      wcache verify --name llama-8b --against ./llama-8b --source transformers
    """
    import asyncio

    import uvloop

    from wcache_async.cli.attach import attached
    from wcache_async.cli.compare import compare_with_source
    from wcache_async.cli.parity import Attached, compare_exactly
    from wcache_async.sources import open_source

    if bool(model) == bool(against):
        raise typer.BadParameter("give one of MODEL and --against MODEL", param_hint="MODEL")
    exactly, model = bool(against), model or against
    name = name or model_name(model)
    options = parse_items(option, "--option") | share_of(tp_size, tp_plan, rank=rank, source=source)

    async def run() -> "tuple[FetchedState, Comparison]":
        async with attached(socket_path, name, rank=rank, client="wcache verify", allow_stale=True) as attachment:
            state, tensors = attachment.state, attachment.tensors
            digests = await state.fetch_digests() if exactly else {}
            with progress_display() as display:
                update = display.track(f"comparing {name}:{rank}", quiet_s=2.0)

                def compare() -> "Comparison":
                    with open_source(model, kind=source, dtype=dtype, options=options) as opened:
                        if not exactly:
                            return compare_with_source(opened, tensors, update)
                        seen = Attached(manifest=state.manifest, tensors=tensors, digest=state.digest, digests=digests)
                        return compare_exactly(opened, seen, update)

                return state, await asyncio.to_thread(compare)

    state, comparison = uvloop.run(run())
    if as_json:
        print_json(_as_builtins(model, state, comparison))
    else:
        _print(model, state, comparison, exactly=exactly)
        for advice in _advice(state, comparison, dtype=dtype, tp_size=tp_size):
            print(advice, file=sys.stderr)
    return ExitCode.DIFFERENT if comparison.differences else ExitCode.OK


def _as_builtins(model: str, state: "FetchedState", comparison: "Comparison") -> dict[str, object]:
    from dataclasses import asdict

    return {
        "name": state.name,
        "rank": state.rank,
        "generation": state.generation,
        "model": model,
        "transport_backend": state.transport_backend,
        "digest": state.digest,
        "tensors": comparison.tensors,
        "bytes": comparison.nbytes,
        "equal": not comparison.differences,
        "differences": [asdict(difference) for difference in comparison.differences],
    }


def _advice(state: "FetchedState", comparison: "Comparison", *, dtype: str, tp_size: int | None) -> list[str]:
    """What a difference is explained by that is none: the checkpoint is read otherwise than the daemon read it."""
    from wcache_async.sources.cast import CASTABLE

    differs_in = {difference.what for difference in comparison.differences}
    said = state.config
    forgotten = []
    if "dtype" in differs_in and not dtype and said.get("dtype") in CASTABLE:
        forgotten.append("dtype")
    if "shape" in differs_in and tp_size is None and "tp_size" in said:
        forgotten.append("tp_size")
    return [
        f"The state says {field}={said[field]}: if it was loaded with --{field.replace('_', '-')}, give that here too"
        for field in forgotten
    ]


def _print(model: str, state: "FetchedState", comparison: "Comparison", *, exactly: bool) -> None:
    what = f"{state.name}:{state.rank} generation {state.generation} through {state.transport_backend}"
    compared = f"{count_text(comparison.tensors, 'tensor')}, {size_text(comparison.nbytes)}"
    differences = comparison.differences
    if not differences:
        print(f"{what} equals {model}: {compared}, every byte{', layout, tie and digest' if exactly else ''}")
    elif exactly:
        print(f"{what} differs from {model} in {count_text(len(differences), 'respect')}, of {compared}:")
        rows = [(each.tensor, each.where, each.checkpoint, each.client) for each in differences]
        print_table(("TENSOR", "WHAT", "CHECKPOINT", "CLIENT"), rows)
    else:
        print(f"{what} differs from {model} in {count_text(len(differences), 'tensor')}; compared were {compared}:")
        for difference in differences:
            print(f"  {difference}")

"""`wcache fetch`: attach to a state once, and tell what that took."""

import time
from typing import TYPE_CHECKING, Annotated

import typer

from wcache_async.cli.options import AsJson, Rank, SocketPath, StateName, one_of, parse_items
from wcache_async.cli.outcome import print_json, reported
from wcache_async.cli.table import print_table
from wcache_async.cli.units import count_text, duration_text, size_text

if TYPE_CHECKING:
    import torch

    from wcache_async.cli.attach import Attachment
    from wcache_async.client.fetch import FetchedState

__all__ = ["fetch"]


def _known_backends(values: list[str] | None) -> list[str] | None:
    from wcache_async.backends.registry import known_backends

    for value in values or ():
        one_of(value, known_backends())
    return values


@reported
def fetch(
    name: StateName,
    *,
    rank: Rank = 0,
    socket_path: SocketPath = None,
    expect: Annotated[
        list[str] | None,
        typer.Option(
            "--expect",
            metavar="KEY=VALUE",
            show_default=False,
            help="What its config must say (repeatable); values as for `wcache serve --config`.",
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            min=0,
            metavar="SECONDS",
            show_default=False,
            help="How long to wait while it is loading. Default: as long as it takes.",
        ),
    ] = None,
    backends: Annotated[
        list[str] | None,
        typer.Option(
            "--backend",
            metavar="BACKEND",
            callback=_known_backends,
            show_default=False,
            help="A way of sharing to accept (repeatable). Default: all that work here.",
        ),
    ] = None,
    allow_stale: Annotated[
        bool, typer.Option("--allow-stale", help="Attach also if the files it was loaded from have changed since.")
    ] = False,
    touch: Annotated[bool, typer.Option("--touch", help="Read a byte of every page, too.")] = False,
    tensors: Annotated[bool, typer.Option("--tensors", help="List the tensors.")] = False,
    as_json: AsJson = False,
) -> None:
    """Attach to a state, and tell how long it took.

    Every tensor is imported; with --touch, every page is read as well.  Then it lets go.

    \b
    Example:
      wcache fetch llama-8b --touch
      wcache fetch llama-8b --expect dtype=bfloat16 --timeout 60
    """
    import asyncio

    import uvloop

    from wcache_async.cli.attach import attached

    values = parse_items(expect, "--expect")

    async def run() -> "Attachment":
        async with attached(
            socket_path,
            name,
            rank=rank,
            client="wcache fetch",
            expect=values,
            timeout=timeout,
            backends=backends,
            allow_stale=allow_stale,
        ) as attachment:
            if touch:
                started = time.perf_counter()
                await asyncio.to_thread(_touch, attachment.tensors)
                attachment.seconds["touch"] = time.perf_counter() - started
            return attachment

    attachment = uvloop.run(run())
    if as_json:
        print_json(_as_builtins(attachment, tensors=tensors))
    else:
        _print(attachment)
        if tensors:
            _print_tensors(attachment.state)


def _touch(tensors: "dict[str, torch.Tensor]") -> None:
    """Read one byte of every page of every storage."""
    import mmap

    import torch

    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors.values()}
    for tensor in storages.values():
        storage = tensor.untyped_storage()
        torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)[:: mmap.PAGESIZE].sum().item()


def _as_builtins(attachment: "Attachment", *, tensors: bool) -> dict[str, object]:
    state = attachment.state
    listed: dict[str, object] = {}
    if tensors:
        listed["listed"] = [
            {"name": name, "dtype": dtype, "shape": list(shape), "kind": kind, "bytes": nbytes, "alias_of": alias_of}
            for name, dtype, shape, kind, nbytes, alias_of in _listed(state)
        ]
    return {
        "name": state.name,
        "rank": state.rank,
        "generation": state.generation,
        "tensors": len(attachment.tensors),
        "bytes": state.resident_bytes,
        "transport_backend": state.transport_backend,
        "manifest_bytes": state.manifest_nbytes,
        "digest": state.digest,
        "config": state.config,
        "daemon_pid": state.daemon_pid,
        "seconds": attachment.seconds,
    } | listed


def _print(attachment: "Attachment") -> None:
    state = attachment.state
    print(f"state       {state.name}:{state.rank}, generation {state.generation}")
    print(f"tensors     {len(attachment.tensors)}, {size_text(state.resident_bytes)}")
    print(f"transport   {state.transport_backend}, {count_text(state.manifest_nbytes, 'byte')} of manifest")
    print(f"digest      {state.digest or 'not known'}")
    print(f"config      {' '.join(f'{key}={value}' for key, value in state.config.items())}")
    for step, seconds in attachment.seconds.items():
        note = " (importing torch, once per process)" if step == "prepare" else ""
        print(f"{step:<11} {duration_text(seconds)}{note}")


def _print_tensors(state: "FetchedState") -> None:
    rows = [
        (name, dtype, "x".join(map(str, shape)) or "scalar", kind, f"= {alias_of}" if alias_of else size_text(nbytes))
        for name, dtype, shape, kind, nbytes, alias_of in _listed(state)
    ]
    print()
    print_table(("TENSOR", "DTYPE", "SHAPE", "KIND", "SIZE"), rows, right=("SIZE",))


def _listed(state: "FetchedState") -> "list[tuple[str, str, tuple[int, ...], str, int, str | None]]":
    """Name, dtype, shape, kind, bytes and, for an alias, its target, in the manifest's order."""
    import math

    from wcache_async.manifest import DTYPE_ITEMSIZE

    manifest = state.manifest
    rows: list[tuple[str, str, tuple[int, ...], str, int, str | None]] = []
    by_name = {}
    for entry in manifest.tensors:
        dtype = manifest.dtype_of(entry)
        row = (dtype, entry.shape, entry.kind.name.lower(), math.prod(entry.shape) * DTYPE_ITEMSIZE[dtype])
        by_name[entry.name] = row
        rows.append((entry.name, *row, None))
    rows += [(alias, *by_name[target], target) for alias, target in manifest.aliases.items()]
    return rows

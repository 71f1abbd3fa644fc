"""`wcache serve`: run a daemon in this process until it is told to stop."""

import logging
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from wcache_async.cli.logs import LogLevel, log_to_standard_error
from wcache_async.cli.options import (
    BackendName,
    ConfigItems,
    DtypeName,
    OptionItems,
    Rank,
    SocketPath,
    SourceKind,
    parse_items,
    parse_size,
    split_model,
)
from wcache_async.cli.outcome import ExitCode, reported
from wcache_async.cli.progress import Display, Update, progress_display
from wcache_async.cli.tensor_parallel import TpPlanFile, TpSize, shares

if TYPE_CHECKING:
    from wcache_async.daemon.lifecycle import Daemon
    from wcache_async.daemon.states import Generation

__all__ = ["serve"]

logger = logging.getLogger("wcache_async.cli")


@reported
def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME=]MODEL",
            show_default=False,
            help="Checkpoints to load: a file, or a folder of shards, each. "
            "Without a name it is the folder's, or the file's without its suffix.",
        ),
    ] = None,
    *,
    name: Annotated[
        str, typer.Option("--name", metavar="N", show_default=False, help="What the one MODEL is called.")
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
    device: Annotated[str, typer.Option("--device", metavar="DEVICE", help="Where states are kept.")] = "cpu",
    max_clients: Annotated[
        int, typer.Option("--max-clients", min=1, metavar="N", help="Connections to serve at once.")
    ] = 1024,
    max_bytes: Annotated[
        str,
        typer.Option(
            "--max-bytes",
            metavar="SIZE",
            show_default=False,
            help="Most bytes of states to hold, e.g. 40GiB: states that nobody holds or has pinned make room, "
            "least recently used first. Default: no limit but memory's.",
        ),
    ] = "",
    drain_timeout: Annotated[
        float,
        typer.Option("--drain-timeout", min=0, metavar="SECONDS", help="How long a shutdown waits for requests."),
    ] = 30.0,
    log_level: Annotated[
        LogLevel, typer.Option("--log-level", help="How much to log to standard error.")
    ] = LogLevel.INFO,
) -> ExitCode:
    """Run a daemon that holds checkpoints in memory.

    It listens before it loads, so that clients wait for a state instead of finding nothing.
    Once everything is loaded it prints one line, "ready socket=PATH states=N".  A checkpoint
    that cannot be loaded is told on standard error and shown by `wcache status`; the daemon
    stays up, and does not say it is ready.  SIGTERM or SIGINT lets running requests end; a
    second one does not.

    \b
    Example:
      wcache serve ./llama-8b --name llama-8b --dtype bfloat16
      wcache serve draft=./small.safetensors target=./large
    """
    import uvloop

    from wcache_async.daemon.lifecycle import Daemon
    from wcache_async.daemon.server import ServerLimits

    named = _named(models or (), name)
    values = parse_items(config, "--config")
    options = parse_items(option, "--option")
    ranks = shares(tp_size, tp_plan, rank=rank, source=source)
    log_to_standard_error(log_level)
    _raise_fd_limit()
    daemon = Daemon(
        socket_path,
        backend=backend,
        device=device,
        limits=ServerLimits(max_clients=max_clients),
        drain_timeout=drain_timeout,
        max_bytes=parse_size(max_bytes, "--max-bytes"),
    )

    def begin_loads() -> "list[Generation]":
        return [
            daemon.begin_load(
                path, name=state, rank=number, kind=source, dtype=dtype, options=options | share, config=values
            )
            for state, path in named.items()
            for number, share in ranks
        ]

    with progress_display() as display:
        uvloop.run(_serve(daemon, begin_loads, display))
    return ExitCode.INTERRUPTED if daemon.cut_short else ExitCode.OK


def _named(models: Sequence[str], name: str) -> Mapping[str, str]:
    """Path by state name."""
    if name and len(models) != 1:
        raise typer.BadParameter(
            f"it names one MODEL, and {len(models)} are given; write NAME=MODEL for each", param_hint="--name"
        )
    if name:
        return {name: models[0]}
    named: dict[str, str] = {}
    for state, path in map(split_model, models):
        if state in named:
            raise typer.BadParameter(
                f"{named[state]} and {path} would both be called {state!r}; write NAME=MODEL", param_hint="MODEL"
            )
        named[state] = path
    return named


def _raise_fd_limit() -> None:
    """Each client holds an fd, and the soft limit is 1024 mostly for the sake of select(2), which nothing here uses."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _serve(daemon: "Daemon", begin_loads: "Callable[[], list[Generation]]", display: Display) -> None:
    import asyncio

    with _signals_held():
        await daemon.start()
        serving = asyncio.create_task(daemon.serve_forever(handle_signals=True))
        await asyncio.sleep(0)  # Its first step takes the signals over.
    try:
        announcing = asyncio.create_task(_announce(daemon, begin_loads(), display))
        await serving
    finally:
        await daemon.close()
    await announcing


@contextmanager
def _signals_held() -> Iterator[None]:
    """Keep SIGTERM and SIGINT waiting, which would kill a daemon that has made its files and not yet a handler."""
    held = {signal.SIGTERM, signal.SIGINT}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


async def _announce(daemon: "Daemon", generations: "Sequence[Generation]", display: Display) -> None:
    """Say so once all of them are READY."""
    import asyncio

    loads = [_has_loaded(daemon, generation, display.track(f"loading {generation.key}")) for generation in generations]
    if all(await asyncio.gather(*loads)):
        try:
            print(f"ready socket={daemon.socket_path} states={len(generations)}", flush=True)
        except OSError as error:
            # Whoever started the daemon does not listen; that is no reason not to serve.
            logger.warning("the ready line could not be written: %s", error)


async def _has_loaded(daemon: "Daemon", generation: "Generation", progress: Update) -> bool:
    from wcache_async.errors import WeightCacheError

    try:
        await daemon.loaded(generation, progress)
    except WeightCacheError:
        return False  # The daemon has logged why.
    return True

"""The `wcache` command line: its verbs put together, its help, and its way out."""

import sys
import traceback
from typing import Annotated

import typer

from wcache_async.cli.doctor import doctor
from wcache_async.cli.fetch import fetch
from wcache_async.cli.load import load
from wcache_async.cli.outcome import EXIT_CODES, ExitCode
from wcache_async.cli.pin import pin, unpin
from wcache_async.cli.serve import serve
from wcache_async.cli.status import status
from wcache_async.cli.stop import stop
from wcache_async.cli.unload import unload
from wcache_async.cli.verify import verify
from wcache_async.version import __version__

__all__ = ["app", "main"]

_EPILOG = "\n\n".join(
    [
        "\b\nTo begin with:\n  wcache serve ./model --name demo     in one terminal\n"
        "  wcache status                        in another",
        "\b\nExit codes:\n" + "\n".join(f"  {code:>3}  {text}" for code, text in EXIT_CODES.items()),
    ]
)

# No markup: drawing help with rich would cost more than all the rest of `wcache --help`.
app = typer.Typer(
    name="wcache",
    epilog=_EPILOG,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"wcache {__version__}")
        raise typer.Exit


@app.callback()
def wcache(
    _: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")] = (
        False
    ),
) -> None:
    """One daemon keeps a model's weights in shared memory; inference processes attach in milliseconds."""


for _command in (serve, status, fetch, verify, load, unload, pin, unpin, stop, doctor):
    app.command()(_command)


def main() -> None:
    """Run the command line of this process, and exit."""
    for stream in (sys.stdout, sys.stderr):
        # A path that is no UTF-8 is printed as the bytes it is.
        getattr(stream, "reconfigure", lambda **_: None)(errors="surrogateescape")
    try:
        app(prog_name="wcache")
    except Exception:
        # A defect.  Python would exit with 1, which says that a comparison found a difference.
        traceback.print_exc()
        sys.exit(int(ExitCode.FAILED))

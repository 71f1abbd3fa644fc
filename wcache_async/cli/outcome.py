"""How a command ends: its exit code, and its error in words and, where asked for, as JSON."""

import functools
import json
import sys
from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, ParamSpec

import typer

if TYPE_CHECKING:
    from wcache_async.errors import WeightCacheError

__all__ = ["EXIT_CODES", "ExitCode", "exit_code", "print_json", "reported"]

P = ParamSpec("P")


class ExitCode(IntEnum):
    """What `wcache` exits with; `EXIT_CODES` says when."""

    OK = 0
    DIFFERENT = 1
    USAGE = 2
    NO_DAEMON = 3
    REFUSED = 4
    CANNOT_LOAD = 5
    FAILED = 6
    INTERRUPTED = 130


EXIT_CODES = {
    ExitCode.OK: "done",
    ExitCode.DIFFERENT: "what is there is not what was expected (verify, --expect)",
    ExitCode.USAGE: "the command line makes no sense",
    ExitCode.NO_DAEMON: "no daemon answers, it is still loading, or it is shutting down",
    ExitCode.REFUSED: "the daemon refused: no such state, name taken, too many clients, ...",
    ExitCode.CANNOT_LOAD: "the checkpoint cannot be loaded, or does not fit into memory",
    ExitCode.FAILED: "anything else: connection lost, no transport that works here, socket in use, ...",
    ExitCode.INTERRUPTED: "interrupted: by the keyboard, or `serve` by a second signal that cut its shutdown short",
}


def exit_code(error: "WeightCacheError") -> ExitCode:
    """What an error makes the command exit with: whose fault it was, as its class says."""
    from wcache_async import errors

    # Most special first: StateFailed and ConfigMismatch are refusals too.
    match error:
        case errors.ConfigMismatch() | errors.StaleState():
            return ExitCode.DIFFERENT
        case errors.StateFailed() | errors.SourceError() | errors.InsufficientMemory() | errors.ExportError():
            return ExitCode.CANNOT_LOAD
        case errors.RequestRefused():
            return ExitCode.REFUSED
        case errors.DaemonUnavailable():
            return ExitCode.NO_DAEMON
        case _:
            return ExitCode.FAILED


def reported(command: Callable[P, ExitCode | None]) -> Callable[P, None]:
    """`command` as typer is to run it: its result becomes the exit code, and so does a WeightCacheError.

    The error is told on standard error and, where the command has a true `as_json`, as one
    JSON object on standard output besides.
    """

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        from wcache_async.errors import WeightCacheError

        try:
            code = command(*args, **kwargs) or ExitCode.OK
        except WeightCacheError as error:
            code = exit_code(error)
            if kwargs.get("as_json"):
                print_json({"error": _as_builtins(error, code)})
            print(f"wcache: {error.message}", file=sys.stderr)
            if error.hint:
                print(error.hint, file=sys.stderr)
        raise typer.Exit(int(code))

    return run


def print_json(value: object) -> None:
    """Write `value` to standard output as one JSON document."""
    print(json.dumps(value, indent=2))


def _as_builtins(error: "WeightCacheError", code: ExitCode) -> dict[str, object]:
    return {
        "code": error.code,
        "message": error.message,
        "hint": error.hint,
        "details": error.details(),
        "exit_code": int(code),
    }

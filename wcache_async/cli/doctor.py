"""`wcache doctor`: what this machine can do for wcache-async, and what is slow about it."""

from typing import TYPE_CHECKING

from wcache_async.cli.options import AsJson, SocketPath
from wcache_async.cli.outcome import ExitCode, print_json, reported
from wcache_async.cli.table import print_table
from wcache_async.cli.units import count_text

if TYPE_CHECKING:
    from wcache_async.cli.machine import Finding

__all__ = ["doctor"]


@reported
def doctor(*, socket_path: SocketPath = None, as_json: AsJson = False) -> ExitCode:
    """Tell what this machine can do, and what is slow.

    Looks at the kernel's settings and limits, measures a small arena, and asks each transport
    whether it works here.  Exits with 6 where none does.

    \b
    Example:
      wcache doctor
      wcache doctor --json | jq '.findings[] | select(.verdict != "ok")'
    """
    from wcache_async.cli.machine import Verdict, examine

    findings = [*examine(), _daemon(socket_path)]
    usable = any(finding.topic.startswith("transport ") and finding.verdict is Verdict.OK for finding in findings)
    if as_json:
        from dataclasses import asdict

        print_json({"usable": usable, "findings": [asdict(finding) for finding in findings]})
    else:
        rows = [(finding.topic, finding.verdict.value, finding.found) for finding in findings]
        print_table(("WHAT", "VERDICT", "FOUND"), rows)
        for finding in findings:
            if finding.advice:
                print(f"\n{finding.topic}: {finding.advice}")
    return ExitCode.OK if usable else ExitCode.FAILED


def _daemon(socket_path: str | None) -> "Finding":
    """Whether a daemon can be had where this process would look for one, or start one."""
    import asyncio

    from wcache_async.cli.machine import Finding, Verdict
    from wcache_async.client.client import Client
    from wcache_async.errors import NotRunning, WeightCacheError

    async def ask() -> str:
        async with Client(socket_path, backends=(), name="wcache doctor") as client:
            status = await client.status()
            return f"pid {status.pid} on {status.socket}, {count_text(len(status.states), 'state')}"

    try:
        return Finding(topic="daemon", verdict=Verdict.OK, found=asyncio.run(ask()))
    except NotRunning as error:
        return Finding(topic="daemon", verdict=Verdict.OK, found=f"none on {error.socket}")
    except WeightCacheError as error:
        return Finding(topic="daemon", verdict=Verdict.NO, found=error.message, advice=error.hint)

"""Runs what `startup_process.py` runs, time and again in one process forked with torch imported: imports are slow."""

import sys
import time
from pathlib import Path

from tests.processes import Peer

__all__ = ["start_each"]


def start_each(peer: Peer) -> None:
    """Answers each ``(how, variant, folder, address)`` with the sample's fields, until None comes."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    import msgspec
    from startup_process import measure

    while (request := peer.receive()) is not None:
        how, variant, folder, address = request
        peer.send(msgspec.to_builtins(measure(how, variant, Path(folder), address, time.monotonic())))

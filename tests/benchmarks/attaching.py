"""What forked processes of `test_attach_process.py` run.

They do not have pytest's path, so the benchmarks are imported in them, and not above.
"""

import socket
import sys
from pathlib import Path

from tests.processes import Peer

__all__ = ["attach", "serve"]

_BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


def serve(peer: Peer, output: socket.socket, method: str, address: str, checkpoint: str) -> None:
    """One server, its standard output on the socket."""
    sys.path.insert(0, _BENCHMARKS)
    import attach_server

    del output  # It has come as this process's own.
    sys.stdout = peer.sockets[0].makefile("w")
    attach_server.main(method, address, checkpoint)


def attach(peer: Peer, method: str, address: str, tensors: int, nbytes: int) -> None:
    """Measure once; sends the three times in seconds."""
    sys.path.insert(0, _BENCHMARKS)
    from attach_process import BLOCKING, measure_blocking

    sample = measure_blocking(BLOCKING[method], address, tensors, nbytes)
    peer.send((sample.attach_s, sample.touch_s, sample.again_s))

"""One server of `attach.py` in a process of its own: METHOD ADDRESS CHECKPOINT."""

import sys
from pathlib import Path

import alternatives
import floor


def main(method: str, address: str, checkpoint: str) -> None:
    """Serve until killed."""
    servers = {
        "floor": floor.serve,
        "multiprocessing": alternatives.serve_multiprocessing,
        "pickle": alternatives.serve_pickle,
    }
    servers[method](address, Path(checkpoint))


if __name__ == "__main__":
    main(*sys.argv[1:])

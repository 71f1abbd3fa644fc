"""The daemon that `startup.py` measures: holds the model in every variant asked for, and says ``ready``."""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import uvloop
from startup_model import VARIANTS, load

from wcache_async import Daemon
from wcache_async.sources.module import ModuleSource


async def load_variants(daemon: Daemon, folder: Path, variants: Sequence[str]) -> None:
    """Have the daemon hold each under its own name."""
    for name in variants:
        variant = VARIANTS[name]
        if variant.source == "transformers":
            dtype = str(variant.dtype).removeprefix("torch.")
            await daemon.load(folder, name=name, kind="transformers", dtype=dtype)
        else:
            await daemon.load(ModuleSource(partial(load, folder, variant)), name=name)


async def serve(address: str, folder: Path, variants: Sequence[str]) -> None:
    """Until SIGTERM."""
    async with Daemon(address) as daemon:
        await load_variants(daemon, folder, variants)
        print("ready", flush=True)
        await daemon.serve_forever(handle_signals=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("folder", type=Path)
    parser.add_argument("variants", nargs="+", choices=VARIANTS)
    options = parser.parse_args()
    uvloop.run(serve(options.address, options.folder, options.variants))


if __name__ == "__main__":
    main()

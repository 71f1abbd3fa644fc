"""One fresh process of `startup.py`: has a model its first tokens computed, and prints what it took as JSON.

By ``load`` from the checkpoint's folder, or by ``cache`` from the daemon at ADDRESS.  STARTED is
the monotonic clock (CLOCK_MONOTONIC, in seconds) just before the process was started.
"""

import argparse
import hashlib
import sys
import time
from pathlib import Path

import msgspec
import torch
from startup_model import VARIANTS, Model, Variant, build_structure, load
from startup_sample import StartupSample

from wcache_async import blocking
from wcache_async.integrations import transformers as integration
from wcache_async.manifest import ModuleRecord

TOKENS = 8


class Stopwatch:
    """Seconds spent in building modules, of whoever builds one."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._started


def from_cache(variant: Variant, name: str, folder: Path, address: str, building: Stopwatch) -> Model:
    """The model out of the cache; `building` runs while its structure is built."""
    if variant.source == "module":
        state = blocking.fetch_state(name, socket_path=address)
        with building:
            model = build_structure(folder, variant)
        state.bind(model)
        model.weight_cache_state = state
        return model
    build = integration.build_model

    def timed(record: ModuleRecord) -> Model:
        with building:
            return build(record)

    # The one call that users make, and what of it has nothing to do with weights.
    integration.build_model = timed
    try:
        return integration.from_cache(name, socket_path=address)
    finally:
        integration.build_model = build


def measure(way: str, name: str, folder: Path, address: str, started: float) -> StartupSample:
    """Have the model compute; `way` is ``load`` or ``cache``, `started` as STARTED above."""
    variant = VARIANTS[name]
    building = Stopwatch()
    imported = time.monotonic()
    model = load(folder, variant) if way == "load" else from_cache(variant, name, folder, address, building)
    ready = time.monotonic()
    with torch.inference_mode():
        logits = model(torch.arange(TOKENS)[None]).logits
    computed = time.monotonic()
    return StartupSample(
        imports_s=imported - started,
        weights_s=ready - imported,
        state_s=ready - imported - building.seconds if way == "cache" else None,
        forward_s=computed - ready,
        total_s=computed - started,
        logits=hashlib.sha256(logits.view(torch.uint8).numpy().tobytes()).hexdigest(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=("load", "cache"))
    parser.add_argument("variant", choices=VARIANTS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("address")
    parser.add_argument("started", type=float)
    options = parser.parse_args()
    sample = measure(options.way, options.variant, options.folder, options.address, options.started)
    sys.stdout.buffer.write(msgspec.json.encode(sample) + b"\n")


if __name__ == "__main__":
    main()

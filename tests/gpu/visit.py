"""What to find out in five minutes with a GPU.  Prints one JSON object; exits with 1 if anything was wrong.

    make visit-gpu                                          everything
    python -m tests.gpu.visit --mib 1024 --backends vmm_fd  one size of one backend

- What the driver answers otherwise than the emulator that the tests run on.
- For each backend and size: loading, attaching (from the request to every tensor, CUDA being
  initialised and torch imported), and whether a second process sees every byte.
- Whether tensors outlive the daemon's SIGKILL, on backends that say so.
- What a write to a parameter gives the writer, where a client's write reaches nobody, and whether
  others see their bytes still.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Sequence

import msgspec
import torch

from tests.emulated_gpu import conformance
from tests.gpu.trials import Trial, run
from tests.processes import Forge

__all__ = ["main"]


def device() -> dict[str, object]:
    if not torch.cuda.is_available():
        return {"name": "no CUDA device that torch can use"}
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "gib": round(properties.total_memory / 2**30, 1),
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default="vmm_fd,torch_ipc", help="transports to try, by name")
    parser.add_argument("--mib", default="1024,8192,32768", help="sizes of the states")
    parser.add_argument("--seconds", type=float, default=270, help="begin no further trial after these")
    parser.add_argument("--no-conformance", action="store_true", help="do not ask the driver its 60 questions")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    trials: list[Trial] = []
    left_out: list[str] = []
    forge = Forge()
    try:
        for mib in map(int, options.mib.split(",")):
            for name in options.backends.split(","):
                if time.monotonic() - began > options.seconds:
                    left_out.append(f"{name} with {mib} MiB")
                    continue
                trials.append(run(forge, name, mib))
                print(msgspec.json.encode(trials[-1]).decode(), file=sys.stderr, flush=True)
    finally:
        forge.close()
    differences = None
    if not options.no_conformance:
        recorded = json.loads(conformance.RECORDED.read_text())
        differences = conformance.differences(conformance.probe(), recorded)
    report = {
        "device": device(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernel": platform.release(),
        "seconds": round(time.monotonic() - began, 1),
        "trials": [msgspec.to_builtins(trial) for trial in trials],
        "left_out": left_out,
        "driver_answers_otherwise_than_the_emulator": differences,
    }
    print(json.dumps(report, indent=1))
    return 0 if trials and all(trial.good for trial in trials) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

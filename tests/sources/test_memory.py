"""A load costs the memory of the state, and little more: measured in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

STATE = 128 << 20
TENSORS = 8

_LOAD = """
import json, mmap, os, sys

def private():  # Pages of files, such as torch's libraries, are anybody's.
    fields = dict(line.split(":") for line in open("/proc/self/status"))
    return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))

from wcache_async.sources import open_source

path, dtype = sys.argv[1:]
idle = private()
if dtype or not path.endswith(".safetensors"):
    import torch
with_torch = peak = private()

def advance(nbytes):
    global peak
    peak = max(peak, private())

arenas = []  # The state stays resident, as the daemon's does.
with open_source(path, dtype=dtype) as source:
    spec = source.open()
    opened = private()
    for number, nbytes in enumerate(spec.storages):
        fd = os.memfd_create("arena")
        os.posix_fallocate(fd, 0, nbytes)
        arenas.append(mmap.mmap(fd, nbytes))
        os.close(fd)
        with memoryview(arenas[-1]) as into:
            source.read(number, into, advance)
print(json.dumps({
    "state": spec.nbytes, "idle": idle, "with_torch": with_torch, "opened": opened, "peak": peak,
}))
"""


def _save(tensors: dict[str, torch.Tensor], folder: Path, kind: str) -> Path:
    path = folder / ("x.safetensors" if kind == "safetensors" else "x.pt")
    if kind == "safetensors":
        save_file(tensors, path)
    else:
        torch.save(tensors, path, _use_new_zipfile_serialization=kind == "archive")
    return path


@pytest.mark.parametrize(
    ("kind", "dtype"), [("safetensors", ""), ("safetensors", "bfloat16"), ("archive", ""), ("legacy", "")]
)
def test_a_load_peaks_at_the_state_and_little_more(tmp_path: Path, kind: str, dtype: str) -> None:
    count = STATE // (2 if dtype else 4)
    sizes = [count // 2] + [count // 2 // (TENSORS - 1)] * (TENSORS - 1)
    path = _save({f"{i}": torch.ones(size) for i, size in enumerate(sizes)}, tmp_path, kind)
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, path, dtype], capture_output=True, text=True, check=True, timeout=100
    )
    used: dict[str, int] = json.loads(done.stdout)
    state = used["state"]
    assert used["peak"] - used["with_torch"] >= 0.99 * state  # Otherwise this measures nothing.
    assert used["peak"] - used["idle"] <= 1.1 * state + (200 << 20)
    assert used["peak"] - used["with_torch"] <= 1.02 * state + (24 << 20)
    assert used["opened"] - used["with_torch"] <= 4 << 20

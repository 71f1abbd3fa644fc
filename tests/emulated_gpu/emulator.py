"""The CUDA driver emulator: compiled from `fakecuda.c`, and made the driver of whole processes.

`cuda.bindings` loads it as `libcuda.so.1` without knowing.  Device memory is memfds and device
pointers are mappings of them, so torch sees CPU tensors there.  A process has one driver for its
life, so tests that want this one run in a pytest of their own:

    python -m tests.emulated_gpu.emulator tests/emulated_gpu/suite -k export
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

__all__ = ["build", "emulated", "environment", "stand_in"]

SOURCE = Path(__file__).with_name("fakecuda.c")
MARK = "WCACHE_TESTS_CUDA"
FLAGS = (
    *("-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror"),
    *("-shared", "-fPIC", "-fvisibility=hidden", "-Wl,-soname,libcuda.so.1"),
)


def build() -> Path:
    """The folder with the library; compiled once per source text.  Raises FileNotFoundError without a compiler."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        raise FileNotFoundError("the CUDA emulator needs a C compiler (apt-get install gcc libc6-dev)")
    key = hashlib.sha256(SOURCE.read_bytes() + " ".join([compiler, *FLAGS]).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"wcache-fakecuda-{os.getuid()}-{key}"
    library = folder / "libcuda.so.1"
    if not library.exists():
        folder.mkdir(mode=0o700, exist_ok=True)
        unfinished = folder / f".{os.getpid()}"
        subprocess.run([compiler, *FLAGS, "-o", unfinished, SOURCE, "-lpthread"], check=True)
        unfinished.replace(library)  # Test processes may race here.
    return folder


def environment(**settings: str) -> dict[str, str]:
    """The environment of a process whose CUDA driver is the emulator; `settings` are of `fakecuda.c`, lower case."""
    path = os.environ.get("LD_LIBRARY_PATH", "")
    return {
        **os.environ,
        MARK: "emulated",
        "LD_LIBRARY_PATH": f"{build()}:{path}".rstrip(":"),
        "FAKECUDA_GROUP": f"tests-{os.getpid()}",
        **{f"FAKECUDA_{name.upper()}": value for name, value in settings.items()},
    }


def emulated() -> bool:
    """Whether this process was started for the emulator."""
    return os.environ.get(MARK) == "emulated"


def stand_in() -> None:
    """Have the backend make its tensors where the emulator's memory is: on the CPU."""
    from wcache_async.backends.vmm_fd import VmmFdTransportBackend

    VmmFdTransportBackend.torch_device_type = "cpu"


def run_pytest(arguments: Sequence[str], **settings: str) -> subprocess.CompletedProcess[str]:
    """Run pytest on the emulator and return its output."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *arguments],
        env=environment(**settings),
        cwd=SOURCE.parent.parent.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


if __name__ == "__main__":
    os.execve(sys.executable, [sys.executable, "-m", "pytest", *sys.argv[1:]], environment())

"""What a benchmark found, as a value, as JSON and as tables; and the machine it was found on."""

import os
import platform
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import msgspec
from msgspec import Struct

__all__ = ["RESULTS", "Environment", "Sample", "Spread", "milliseconds", "replace_section", "spread", "write_json"]

RESULTS = Path(__file__).parent / "results"
"""Where reports are kept."""

_PACKAGES = ("wcache-async", "torch", "safetensors", "msgspec", "uvloop")


class Sample(Struct, frozen=True):
    """One fresh process, in seconds."""

    attach_s: float
    """Connect (or open) to a dict of tensors."""
    touch_s: float
    """One byte of every page, for the first time."""
    again_s: float
    """The second attach of the same process."""


class Spread(Struct, frozen=True):
    """A set of samples, in seconds, in the order they were taken."""

    median: float
    least: float
    most: float
    samples: tuple[float, ...]


class Environment(Struct, frozen=True):
    """Where and when a benchmark ran; `memory` in bytes, `load_average` over 1, 5 and 15 minutes."""

    time: str
    cpu: str
    cores: int
    memory: int
    kernel: str
    shmem_huge_pages: str
    python: str
    versions: dict[str, str]
    load_average: tuple[float, float, float]

    @classmethod
    def here(cls) -> "Environment":
        """This process's, now."""
        return cls(
            time=datetime.now(UTC).isoformat(timespec="seconds"),
            cpu=_cpu(),
            cores=len(os.sched_getaffinity(0)),
            memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            kernel=platform.release(),
            shmem_huge_pages=_setting(Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")),
            python=platform.python_version(),
            versions={package: version(package) for package in _PACKAGES},
            load_average=os.getloadavg(),
        )

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return (
            f"{self.cpu}, {self.cores} cores, {self.memory / 2**30:.0f} GiB; Linux {self.kernel}, "
            f"huge pages for shared memory: {self.shmem_huge_pages}; Python {self.python}, {versions}; "
            f"load average before {self.load_average[0]:.2f}; {self.time[:10]}"
        )


def spread(samples: Sequence[float]) -> Spread:
    """Median and extremes of at least one sample."""
    return Spread(statistics.median(samples), min(samples), max(samples), tuple(samples))


def milliseconds(seconds: float) -> str:
    """Three significant digits, without a unit."""
    value = seconds * 1e3
    return f"{value:.{max(0, 3 - len(str(int(value)))) if value >= 1 else 3}f}"


def write_json(report: Struct, path: Path) -> None:
    """Write a report, one value a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


def replace_section(page: Path, name: str, text: str) -> None:
    """Put `text` between ``<!-- name:begin -->`` and ``<!-- name:end -->``.  Raises ValueError where these are not."""
    old = page.read_text()
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, found_begin, rest = old.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"{page} has no section from {begin} to {end}")
    page.write_text(f"{before}{begin}\n{text.strip()}\n{end}{after}")


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _setting(path: Path) -> str:
    """The value in brackets, of those a kernel setting may have."""
    try:
        return path.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return "unknown"

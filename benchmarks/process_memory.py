"""What the kernel says of a process: its memory by mapping (proc_pid_smaps(5)), and its CPU time in nanoseconds."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Mapping", "anonymous", "available_memory", "cpu_seconds", "mappings", "proportional_within"]


@dataclass(frozen=True)
class Mapping:
    """One mapping; sizes in bytes.  `file` is device and inode, the same for all that map it; empty without one."""

    start: int
    end: int
    file: str
    proportional: int
    anonymous: int


def mappings(pid: int) -> list[Mapping]:
    """Every mapping of a process, in order."""
    return list(_parsed(Path(f"/proc/{pid}/smaps").read_text(errors="replace")))


def _parsed(smaps: str) -> Iterator[Mapping]:
    for block in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", smaps, flags=re.MULTILINE):
        head, _, rest = block.partition("\n")
        if not head:
            continue
        span, _, _, device, inode, *_ = head.split()
        start, end = (int(part, 16) for part in span.split("-"))
        sizes = {
            name: int(kibibytes) << 10 for name, kibibytes in re.findall(r"^(\w+): +(\d+) kB$", rest, re.MULTILINE)
        }
        file = f"{device} {inode}" if inode != "0" else ""
        yield Mapping(start, end, file, sizes["Pss"], sizes["Anonymous"])


def proportional_within(held: Sequence[Mapping], ranges: Sequence[tuple[int, int]]) -> int:
    """A process's share of the memory under some ranges of addresses, in bytes.

    A mapping that is under them in part counts in that part, as if its pages were all alike.
    """
    found = 0.0
    for mapping in held:
        under = sum(max(0, min(mapping.end, end) - max(mapping.start, start)) for start, end in ranges)
        found += mapping.proportional * under / (mapping.end - mapping.start)
    return round(found)


def anonymous(pid: int) -> int:
    """Bytes that belong to a process alone: its heaps and stacks, and the pages of files that it wrote to."""
    return sum(mapping.anonymous for mapping in mappings(pid))


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads that live, user and kernel, to the nanosecond (proc_pid_schedstat, first field)."""
    tasks = Path(f"/proc/{pid}/task")
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()) / 1e9


def available_memory() -> int:
    """Bytes that can be had without swapping (MemAvailable), or all there is where the kernel does not tell."""
    found = re.search(r"^MemAvailable: +(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(found[1]) << 10 if found else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

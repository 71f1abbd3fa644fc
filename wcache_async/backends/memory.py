"""How much memory can still be had, and who was promised it.

What is asked is the kernel (/proc/meminfo) and every memory cgroup from this process's own up to
the root, version 1 and 2.  A page of a memfd is charged to the cgroup of the process that first
touches it, and a cgroup over its limit kills: so it is asked before anything is taken.
"""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from wcache_async.errors import InsufficientMemory

__all__ = ["Reservation", "available_memory"]

_lock = threading.Lock()
_promised = 0


class Reservation:
    """Memory promised to one state and not yet taken, so that loads side by side see each other.

    Gone when all of it was taken, or when `release` is called.
    """

    def __init__(self, nbytes: int) -> None:
        """Raises InsufficientMemory, with nothing reserved, if `nbytes` cannot be had."""
        global _promised
        self._left = 0
        with _lock:
            available, limit = available_memory()
            available = max(available - _promised, 0)
            if nbytes > available:
                raise InsufficientMemory(needed=nbytes, available=available, limit=limit)
            self._left = nbytes
            _promised += nbytes

    def take(self, nbytes: int) -> None:
        """`nbytes` of it are about to be allocated, and count by the kernel's own account."""
        global _promised
        with _lock:
            taken = min(nbytes, self._left)
            self._left -= taken
            _promised -= taken

    def release(self) -> None:
        """Give up what was not taken.  Idempotent."""
        self.take(self._left)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def available_memory(root: Path = Path("/")) -> tuple[int, str]:
    """Bytes that can be allocated without swapping or being killed, and what limits them.

    Page cache counts as available.  `root` is where /proc and the paths it names are looked up.
    """
    candidates = [_meminfo(root), *_cgroups(root)]
    return min(candidates, default=(1 << 63, "no limit known"))


def _meminfo(root: Path) -> tuple[int, str]:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024, "MemAvailable of the machine"
    return 1 << 63, "a kernel that does not say"


def _cgroups(root: Path) -> Iterator[tuple[int, str]]:
    for mount, path, version in _memory_hierarchies(root):
        folder = mount / path if (mount / path).is_dir() else mount
        while True:
            # A folder may go away, and a controller be off: such a one limits nothing.
            with contextlib.suppress(OSError, ValueError, KeyError):
                yield _headroom(folder, version), f"memory limit of cgroup {folder}"
            if folder == mount:
                break
            folder = folder.parent


def _headroom(folder: Path, version: int) -> int:
    names = ("memory.max", "memory.current", "") if version == 2 else _V1_NAMES
    limit = (folder / names[0]).read_text().strip()
    if limit == "max":
        return 1 << 63
    used = int((folder / names[1]).read_text())
    stat = dict(line.split(maxsplit=1) for line in (folder / "memory.stat").read_text().splitlines())
    # File pages on the LRU lists can be dropped; those of memfds stand on the anonymous lists.
    cache = sum(int(stat[f"{names[2]}{kind}_file"]) for kind in ("active", "inactive"))
    return max(int(limit) - used + cache, 0)


_V1_NAMES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def _memory_hierarchies(root: Path) -> Iterator[tuple[Path, str, int]]:
    """Each mounted hierarchy with a memory controller: mount point, this process's path in it, version."""
    paths: dict[int, str] = {}
    try:
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0" and not controllers:
                paths[2] = path
            elif "memory" in controllers.split(","):
                paths[1] = path
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return
    for line in mounts:
        # proc(5): ID parent major:minor root mountpoint options [tags…] - type source superoptions
        before, _, after = line.partition(" - ")
        fields, (kind, *_, options) = before.split(), after.split()
        version = {"cgroup2": 2, "cgroup": 1}.get(kind, 0)
        if version not in paths or (version == 1 and "memory" not in options.split(",")):
            continue
        # In a container that sees only part of the hierarchy, paths start above the mount's root.
        path = paths[version]
        if fields[3] != "/" and path.startswith(fields[3]):
            path = path[len(fields[3]) :]
        yield root / fields[4].lstrip("/"), path.strip("/"), version

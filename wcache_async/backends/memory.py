"""How much memory can still be had, and who was promised it.

What is asked is the kernel (/proc/meminfo) and every memory cgroup from this process's own up to
the root, version 1 and 2.  A page of a memfd is charged to the cgroup of the process that first
touches it, and a cgroup over its limit kills: so it is asked before anything is taken.
"""

import contextlib
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

from wcache_async.errors import InsufficientMemory

__all__ = ["Reservation", "available_memory"]

_UNLIMITED = 1 << 63
_lock = threading.Lock()


class Reservation:
    """Memory promised to one state and not yet taken, so that loads side by side see each other.

    Over when all of it was taken, when `release` is called, or when it is dropped.
    """

    def __init__(self, nbytes: int) -> None:
        """Raises InsufficientMemory, with nothing reserved, if `nbytes` cannot be had."""
        self._left = nbytes
        with _lock:
            available, limit = available_memory()
            available = max(available - sum(other._left for other in _reservations), 0)
            if nbytes > available:
                raise InsufficientMemory(needed=nbytes, available=available, limit=limit)
            _reservations.add(self)

    def take(self, nbytes: int) -> None:
        """`nbytes` of it are about to be allocated, and count by the kernel's own account."""
        with _lock:
            self._left -= min(nbytes, self._left)

    def release(self) -> None:
        """Give up what was not taken.  Idempotent."""
        self._left = 0


_reservations: "weakref.WeakSet[Reservation]" = weakref.WeakSet()


def available_memory(root: Path = Path("/")) -> tuple[int, str]:
    """Bytes that can be allocated without swapping or being killed, and what limits them.

    Page cache counts as available.  `root` is where /proc and the paths it names are looked up.
    """
    return min([*_meminfo(root), *_cgroups(root)], default=(_UNLIMITED, "no limit is known"))


def _meminfo(root: Path) -> Iterator[tuple[int, str]]:
    with contextlib.suppress(OSError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) * 1024, "MemAvailable of the machine"


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
        return _UNLIMITED
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

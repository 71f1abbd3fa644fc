"""What the kernel says this process holds."""

import os

__all__ = ["arena_fds", "arena_mappings"]

_ARENA = "/memfd:wcache-arena-"


def arena_mappings() -> list[str]:
    """Permissions (``rw-p`` …) of every mapping of an arena in this process."""
    with open("/proc/self/maps") as maps:
        return [line.split()[1] for line in maps if _ARENA in line]


def arena_fds() -> list[int]:
    """Every fd of this process that is an arena."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith(_ARENA):
                found.append(int(name))
        except FileNotFoundError:
            pass  # the listing's own
    return found

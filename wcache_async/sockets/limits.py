"""How many file descriptors this process may hold, and room for more of them."""

import contextlib
import errno
import os
import resource
from dataclasses import dataclass
from typing import Final

__all__ = ["FdRoom", "fd_room", "raise_fd_limit"]

_HIGHEST: Final = 1 << 16
"""Children inherit the limit, and some close every number below it one by one: where the hard
limit is a billion, as in many containers, they would never get to work."""

_UNLIMITED: Final = 1 << 30
"""More than the kernel allows (fs.nr_open)."""


@dataclass(frozen=True)
class FdRoom:
    """How many fds the process may hold, and how many it holds."""

    limit: int
    used: int

    @property
    def left(self) -> int:
        return self.limit - self.used


def raise_fd_limit() -> int:
    """Raise the soft limit (RLIMIT_NOFILE) to the hard one, or to 65,536 where that is higher; never lower it.

    Returns the limit there is then.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _HIGHEST if hard == resource.RLIM_INFINITY else min(hard, _HIGHEST)
    if soft == resource.RLIM_INFINITY:
        return _UNLIMITED
    if soft < wanted:
        # A sandbox may forbid it, and then the old limit is what there is.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
    return soft


def fd_room() -> FdRoom:
    """Room for fds once the limit is raised."""
    limit = raise_fd_limit()
    try:
        # The listing's own descriptor counts, but is gone again.
        return FdRoom(limit, len(os.listdir("/proc/self/fd")) - 1)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        return FdRoom(limit, limit)

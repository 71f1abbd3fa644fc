"""How many file descriptors this process may hold, and room for more of them."""

import contextlib
import os
import resource
from dataclasses import dataclass
from typing import Final

__all__ = ["FdRoom", "make_room_for_fds"]

_HIGHEST: Final = 1 << 16
"""Children inherit the limit, and some close every number below it one by one: where the hard
limit is a billion, as in many containers, they would never get to work."""


@dataclass(frozen=True)
class FdRoom:
    """How many fds the process may hold, and how many it holds."""

    limit: int
    used: int

    @property
    def left(self) -> int:
        return self.limit - self.used


def make_room_for_fds() -> FdRoom:
    """Raise the soft limit (RLIMIT_NOFILE) to the hard one, or to 65,536 where that is higher; never lower it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = _HIGHEST if hard == unlimited else min(hard, _HIGHEST)
    if soft != unlimited and soft < wanted:
        # A sandbox may forbid it, and then the old limit is what there is.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    # The listing's own descriptor counts, but is gone again.
    return FdRoom(1 << 30 if soft == unlimited else soft, len(os.listdir("/proc/self/fd")) - 1)

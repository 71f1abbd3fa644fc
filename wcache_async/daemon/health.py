"""How the daemon itself fares: how long its loop was held up, and what it has of the process.

The loop is watched by a timer that is late when something kept the loop from it.  The timer runs
only while there is something to do, so that a daemon whose clients merely hold their states sleeps.
"""

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

__all__ = ["Footprint", "LoopWatch", "read_footprint"]

INTERVAL_S: Final = 0.01
"""How often the loop is looked at while it is watched: a stall may have been longer by this than it is told."""
STALL_BOUNDS_S: Final = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Of the stalls longer than each it is counted how many there were."""
LINGER_S: Final = 1.0
"""How long the loop is watched past the last thing that it had to do."""


class LoopWatch:
    """Watches the running loop from `attend` until there has been nothing to do for a while.

    `busy` tells whether there still is.  Times are in seconds.
    """

    def __init__(self, busy: Callable[[], bool]) -> None:
        self.worst_stall_s = 0.0
        """The longest that the loop kept a timer waiting."""
        self.worst_stall_computing_s = 0.0
        """Of that, what this thread computed; in the rest it waited for a processor, the GIL or the kernel."""
        self.stalls_beyond = dict.fromkeys(STALL_BOUNDS_S, 0)
        """How many stalls were longer than so many seconds."""
        self._busy = busy
        self._timer: asyncio.TimerHandle | None = None
        self._due = self._computed = self._until = 0.0

    @property
    def watching(self) -> bool:
        return self._timer is not None

    def attend(self) -> None:
        """There is something to do."""
        self._until = time.monotonic() + LINGER_S
        if self._timer is None:
            self._arm()

    def close(self) -> None:
        """Watch no more; `attend` begins anew."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        # Not loop.time(), which uvloop reads once for all that one wake-up runs.
        self._due = time.monotonic() + INTERVAL_S
        self._computed = time.thread_time()
        self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._look)

    def _look(self) -> None:
        self._timer = None
        now = time.monotonic()
        late = now - self._due
        if late > self.worst_stall_s:
            self.worst_stall_s = late
            self.worst_stall_computing_s = min(late, time.thread_time() - self._computed)
        for bound in STALL_BOUNDS_S:
            if late > bound:
                self.stalls_beyond[bound] += 1
        if self._busy():
            self._until = now + LINGER_S
        if now <= self._until:
            self._arm()


@dataclass(frozen=True, slots=True)
class Footprint:
    """What this process has of the kernel."""

    fds: int
    mappings: int
    """Of memory that is or may be shared: arenas, and manifests of their own."""
    memory_bytes: int
    """What is resident, shared memory that it has touched included."""


def read_footprint() -> Footprint:
    """This process's, now.  Blocks, for about a millisecond per thousand fds and mappings."""
    with open("/proc/self/maps", "rb") as maps:
        mappings = sum(1 for line in maps if line.split(None, 2)[1].endswith(b"s") or b" /memfd:" in line)
    with open("/proc/self/statm", "rb") as statm:
        resident = int(statm.read().split()[1])
    # Without the descriptor that reads the list.
    fds = len(os.listdir("/proc/self/fd")) - 1
    return Footprint(fds=fds, mappings=mappings, memory_bytes=resident * os.sysconf("SC_PAGE_SIZE"))

"""How long a peer has for the rest of a frame that it began.

A connection on which nothing has begun may be silent for ever.  One with half a frame may not: the
fds that came with it are held for the rest, and the peer's own end may be among them, so that its
closing would never be seen.
"""

import asyncio
from collections.abc import Callable

from wcache_async.errors import PeerTimeout

__all__ = ["FrameTimer"]


class FrameTimer:
    """Calls `on_late` with the error once a frame is `timeout` seconds old; never, where that is None."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, timeout: float | None, on_late: Callable[[PeerTimeout], None]
    ) -> None:
        self._loop = loop
        self._timeout = timeout
        self._on_late = on_late
        self._timer: asyncio.TimerHandle | None = None

    def expect(self, begun: bool, *, another: bool) -> None:
        """Whether a frame has begun, and whether it is `another` than the one that is timed already."""
        if another or not begun:
            self.stop()
        if begun and self._timer is None and self._timeout is not None:
            self._timer = self._loop.call_later(self._timeout, self._late, self._timeout)

    def stop(self) -> None:
        """Expect nothing, as while it is this side that does not read."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def forget_loop(self) -> None:
        """The loop is closed, or another process's."""
        self._timer = None

    def _late(self, timeout: float) -> None:
        self._timer = None
        self._on_late(PeerTimeout(what="send the rest of a message it began", seconds=timeout))

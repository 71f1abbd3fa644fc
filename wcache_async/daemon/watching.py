"""Looks whether the files that READY states were read from have changed since, off the loop."""

import asyncio
from functools import partial

from wcache_async.daemon.states import Generation, StateTable
from wcache_async.daemon.threads import Threads
from wcache_async.identity.files import changed_files

__all__ = ["FileWatch"]

LOOK_TIMEOUT_S = 1.0
"""A file server that does not answer costs a status no more than this; what was last seen is then told."""


class FileWatch:
    """Keeps `Generation.stale` of one daemon's states; looks when it is told to, one look at a time."""

    def __init__(self, table: StateTable) -> None:
        self._table = table
        self._looking: asyncio.Future[list[Generation]] | None = None
        self._threads = Threads(1, "wcache-look")

    async def look(self) -> None:
        """Look now, or wait for the look under way; for no longer than LOOK_TIMEOUT_S."""
        looking = self._looking
        if looking is None:
            known = [generation for generation in self._table if generation.origin is not None]
            if not known:
                return
            loop = asyncio.get_running_loop()
            looking = self._looking = loop.run_in_executor(self._threads, partial(_stale, known))
            looking.add_done_callback(partial(self._told, known))
        await asyncio.wait((looking,), timeout=LOOK_TIMEOUT_S)

    def close(self) -> None:
        """Look no more; a look under way is not waited for."""
        if self._looking is not None:
            self._looking.cancel()
        self._threads.shutdown()

    def _told(self, known: list[Generation], looking: "asyncio.Future[list[Generation]]") -> None:
        self._looking = None
        if looking.cancelled():
            return
        stale = looking.result()
        for generation in known:
            generation.stale = generation in stale


def _stale(known: list[Generation]) -> list[Generation]:
    return [generation for generation in known if generation.origin is not None and changed_files(generation.origin)]

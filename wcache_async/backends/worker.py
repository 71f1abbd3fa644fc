"""A thread that does one job after the other and keeps nothing of a job that is done.

A ThreadPoolExecutor will not do where jobs return what must be freed on time: the future of
`run_in_executor` holds its result in a reference cycle (asyncio's `wrap_future`), so that the
result lives until the garbage collector comes by.  Nor may a finaliser submit to one: it takes a
lock that the interrupted thread may hold.
"""

import asyncio
import logging
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

__all__ = ["Worker"]

T = TypeVar("T")

logger = logging.getLogger("wcache_async.backends")

_Jobs = queue.SimpleQueue["tuple[Future[None] | None, Callable[[], object]]"]


class Worker:
    """One thread, that ends with the process.  It is started by `start` or the first job, anew in a forked process."""

    def __init__(self, name: str, around: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        """Each job is done within the context manager that `around` makes."""
        self._name = name
        self._around = around
        self._pid = 0
        self._lock = threading.Lock()
        # SimpleQueue.put may interrupt itself, as a finaliser does (its documentation).
        self._jobs: _Jobs = queue.SimpleQueue()

    def start(self) -> None:
        """Have the thread run in this process."""
        with self._lock:
            if self._pid != os.getpid():
                if self._pid:
                    self._jobs = queue.SimpleQueue()  # Its jobs are those of the process that was forked.
                self._pid = os.getpid()
                threading.Thread(target=self._serve, args=(self._jobs,), name=self._name, daemon=True).start()

    async def run(self, work: Callable[[], T]) -> T:
        """Do `work` in the thread.

        A cancelled caller does not stop what has begun: what `work` returns is then dropped, and
        must free itself.
        """
        results: list[T] = []
        future = self._submit(lambda: results.append(work()))
        try:
            await asyncio.wrap_future(future)
        except BaseException:
            # The traceback keeps this frame, which would keep what is still to come.
            future.add_done_callback(lambda _: results.clear())
            raise
        return results.pop()

    def run_blocking(self, work: Callable[[], object]) -> None:
        """Do `work` in the thread, and wait for it; not to be called from the thread itself."""
        self._submit(work).result()

    def post(self, work: Callable[[], object]) -> None:
        """Have `work` done some time later, once the thread is started.  For finalisers: never blocks."""
        self._jobs.put((None, work))

    def _submit(self, work: Callable[[], object]) -> "Future[None]":
        self.start()
        future: Future[None] = Future()
        self._jobs.put((future, work))
        return future

    def _serve(self, jobs: _Jobs) -> None:
        while True:
            future, work = jobs.get()
            if future is None or future.set_running_or_notify_cancel():
                try:
                    with self._around():
                        work()
                except BaseException as error:  # The waiter's to handle, whatever it is.
                    if future is None:
                        logger.error("freeing in %s failed: %s", self._name, error)
                    else:
                        future.set_exception(error)
                else:
                    if future is not None:
                        future.set_result(None)
            del future, work  # Nothing a job holds may live until the next one comes.

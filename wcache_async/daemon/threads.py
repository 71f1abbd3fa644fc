"""Threads for work that may never end, such as reading from a file server that is gone: nobody waits for them.

The threads of a ThreadPoolExecutor, the loop's default one included, are joined before the interpreter
exits (concurrent.futures.thread), so that one stuck read would keep a daemon from ending.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import ParamSpec, TypeVar

__all__ = ["Threads"]

P = ParamSpec("P")
T = TypeVar("T")

_Job = Callable[[], None]


class Threads(Executor):
    """Up to `most` threads, started as they are needed, that end with `shutdown` or with the process."""

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._started = 0
        self._unfinished = 0
        self._shut = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """Have it done.  Raises RuntimeError after `shutdown`."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # Who stops waiting does not undo what was asked for.
        with self._lock:
            if self._shut:
                raise RuntimeError(f"{self._name}: no more work is taken after shutdown")
            self._unfinished += 1
            self._jobs.put(partial(_do, future, partial(fn, *args, **kwargs)))
            if self._started < min(self._unfinished, self._most):
                self._started += 1
                name = f"{self._name}-{self._started}"
                threading.Thread(target=self._serve, name=name, daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more work; what was submitted is still done, and not waited for, whatever `wait` says."""
        with self._lock:
            self._shut = True
            for _ in range(self._started):
                self._jobs.put(None)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # Nothing that it holds may live until the next one comes.
            with self._lock:
                self._unfinished -= 1


def _do(future: "Future[T]", work: Callable[[], T]) -> None:
    try:
        result = work()
    except BaseException as error:  # The waiter's to handle, whatever it is.
        future.set_exception(error)
    else:
        future.set_result(result)

"""A thread for jobs: in order, forgetting each, and usable by finalisers and after a fork."""

import asyncio
import gc
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from wcache_async.backends.worker import Worker


class Thing:
    """Something that must be freed on time."""


@pytest.fixture
def worker() -> Worker:
    return Worker("test-worker")


def settle(worker: Worker) -> None:
    worker.run_blocking(lambda: None)


async def test_a_result_is_returned(worker: Worker) -> None:
    assert await worker.run(lambda: threading.current_thread().name) == "test-worker"


async def test_jobs_run_one_after_the_other_in_order(worker: Worker) -> None:
    order: list[int] = []
    await asyncio.gather(*(worker.run(lambda n=n: order.append(n)) for n in range(50)))  # type: ignore[misc]
    assert order == list(range(50))


async def test_an_error_is_raised_and_the_next_job_runs(worker: Worker) -> None:
    def fail() -> None:
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        await worker.run(fail)
    with pytest.raises(KeyError, match="lost"):
        worker.run_blocking(fail)
    assert await worker.run(lambda: 1) == 1


async def test_a_result_lives_no_longer_than_its_user(worker: Worker) -> None:
    """That of `run_in_executor` lives until the garbage collector runs."""
    gc.disable()
    try:
        thing = await worker.run(Thing)
        gone = weakref.ref(thing)
        settle(worker)
        del thing
        assert gone() is None
    finally:
        gc.enable()


async def test_what_a_job_holds_is_dropped_when_it_is_done(worker: Worker) -> None:
    thing = Thing()
    gone = weakref.ref(thing)
    worker.run_blocking(lambda thing=thing: None)  # type: ignore[misc]
    del thing
    settle(worker)
    assert gone() is None


async def test_the_result_of_a_cancelled_caller_is_dropped(worker: Worker) -> None:
    begun, go_on = threading.Event(), threading.Event()
    made: list[weakref.ref[Thing]] = []

    def work() -> Thing:
        begun.set()
        go_on.wait(30)
        thing = Thing()
        made.append(weakref.ref(thing))
        return thing

    task = asyncio.create_task(worker.run(work))
    await asyncio.to_thread(begun.wait, 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    go_on.set()
    await asyncio.to_thread(settle, worker)
    assert made[0]() is None
    assert caught.value.__traceback__ is not None, "it keeps the frames that must not keep the result"


async def test_a_caller_cancelled_in_the_queue_has_its_job_left_out(worker: Worker) -> None:
    begun, go_on = threading.Event(), threading.Event()
    ran: list[bool] = []

    def wait() -> None:
        begun.set()
        go_on.wait(30)

    first = asyncio.create_task(worker.run(wait))
    await asyncio.to_thread(begun.wait, 30)
    second = asyncio.create_task(worker.run(lambda: ran.append(True)))
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    go_on.set()
    await first
    await asyncio.to_thread(settle, worker)
    assert not ran


def test_each_job_runs_within_the_context() -> None:
    inside: list[bool] = []

    @contextmanager
    def around() -> Iterator[None]:
        inside.append(True)
        yield
        inside.pop()

    worker = Worker("test-worker", around)
    seen: list[int] = []
    worker.run_blocking(lambda: seen.append(len(inside)))
    worker.post(lambda: seen.append(len(inside)))
    settle(worker)
    assert seen == [1, 1]


def test_what_is_posted_runs_after_what_was_there(worker: Worker) -> None:
    order: list[str] = []
    worker.start()
    worker.post(lambda: order.append("first"))
    worker.run_blocking(lambda: order.append("second"))
    assert order == ["first", "second"]


def test_what_is_posted_before_the_start_is_not_lost(worker: Worker) -> None:
    done: list[bool] = []
    worker.post(lambda: done.append(True))
    worker.start()
    settle(worker)
    assert done == [True]


def test_what_is_posted_and_fails_is_logged(worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise KeyError("no such handle")

    worker.start()
    worker.post(fail)
    settle(worker)
    assert "no such handle" in caplog.text
    assert "test-worker" in caplog.text


def test_a_finaliser_may_post_whatever_it_interrupts(worker: Worker) -> None:
    done: list[int] = []

    class Finalised:
        def __del__(self) -> None:
            worker.post(lambda: done.append(1))

    worker.start()
    threshold = gc.get_threshold()
    gc.set_threshold(1)  # Collect, and so finalise, wherever anything is allocated: inside `post` too.
    try:
        for _ in range(200):
            cycle: list[object] = [Finalised()]
            cycle.append(cycle)
            del cycle
            worker.post(lambda: None)
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    settle(worker)
    assert len(done) == 200


def test_a_forked_process_has_a_thread_of_its_own(worker: Worker) -> None:
    ran: list[int] = []
    worker.run_blocking(lambda: ran.append(os.getpid()))
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        worker.run_blocking(lambda: os.write(write, b"%d" % os.getpid()))
        os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        assert int(pipe.read()) == pid
    assert os.waitpid(pid, 0)[1] == 0
    assert ran == [os.getpid()]

"""collector: held off while any holder is inside, and afterwards as it was."""

import gc
import threading
from collections.abc import Iterator

import pytest

from wcache_async.backends.collector import collector_held


@pytest.fixture(autouse=True)
def collector_on() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_it_is_off_inside_and_on_after() -> None:
    with collector_held():
        assert not gc.isenabled()
        with collector_held():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_one_that_was_off_stays_off() -> None:
    gc.disable()
    with collector_held():
        pass
    assert not gc.isenabled()


def test_an_exception_gives_it_back() -> None:
    with pytest.raises(KeyError), collector_held():
        raise KeyError
    assert gc.isenabled()


def test_holders_in_several_threads_leave_it_to_the_last() -> None:
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with collector_held():
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=hold)
    with collector_held():
        thread.start()
        assert inside.wait(30)
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()

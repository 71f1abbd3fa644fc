"""What every test runs under.

- Each async test runs on asyncio and on uvloop.
- It fails on any exception that reached the loop, on any file descriptor left open, and on
  any call that blocks made by the package on a loop's thread.
"""

import asyncio
import contextlib
import fcntl
import gc
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, SupportsIndex

import pytest
import uvloop
from hypothesis import HealthCheck, settings

import wcache_async

if TYPE_CHECKING:
    from tests.processes import Forge

# No deadline and no check for slowness: on a shared machine they would measure the neighbours.
# CI tries the same examples each time, so that a change fails on its own account;
# `--hypothesis-profile=long` tries many.
_untimed = settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("suite", _untimed, derandomize="CI" in os.environ)
settings.register_profile("long", _untimed, max_examples=20_000)
settings.load_profile("suite")

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


# ------------------------------------------------------------------------- on both event loops
_unhandled: list[str] = []


def _record_unhandled(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    error = context.get("exception")
    _unhandled.append(f"{context.get('message')}: {error!r}" if error is not None else str(context))


def _watched(new_loop: LoopFactory) -> LoopFactory:
    def factory() -> asyncio.AbstractEventLoop:
        loop = new_loop()
        loop.set_exception_handler(_record_unhandled)
        return loop

    return factory


# The first loop of a process makes libuv's signal pipe, which stays.
uvloop.new_event_loop().close()
_LOOPS = {"asyncio": _watched(asyncio.new_event_loop), "uvloop": _watched(uvloop.new_event_loop)}


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, LoopFactory]:
    """Both loops; `@pytest.mark.asyncio(loop_factories=["uvloop"])` chooses."""
    return _LOOPS


@pytest.fixture(autouse=True)
def unhandled_loop_exceptions() -> Iterator[list[str]]:
    """What reached a loop's exception handler; a test that provokes some clears the list."""
    _unhandled.clear()
    yield _unhandled
    gc.collect(1)  # a task whose exception nobody retrieved tells so when it is collected
    if _unhandled:
        pytest.fail("unhandled in the event loop: " + "; ".join(_unhandled), pytrace=False)


# ------------------------------------------------------------------------ no descriptor is left
def _open_fds() -> dict[int, str]:
    fds = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            fds[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return fds


def _leaked(before: dict[int, str]) -> dict[int, str]:
    tracker = getattr(resource_tracker._resource_tracker, "_fd", None)  # one for the life of the process
    return {
        fd: target
        for fd, target in _open_fds().items()
        if before.get(fd) != target and fd != tracker and not target.startswith("/dev/")
    }


@pytest.fixture(autouse=True)
def no_leaked_fds(unhandled_loop_exceptions: list[str]) -> Iterator[None]:
    """Every descriptor that a test opened is closed when it and its loop have ended."""
    before = _open_fds()
    yield
    if _leaked(before):
        gc.collect()
        deadline = time.monotonic() + 2
        while _leaked(before) and time.monotonic() < deadline:
            time.sleep(0.01)  # a thread may be about to close it
        if leaked := _leaked(before):
            pytest.fail(f"left open: {leaked}", pytrace=False)


# ------------------------------------------------------------------- nothing blocks on the loop
def _is_on_disk(path: object) -> bool:
    name = os.fsdecode(path) if isinstance(path, str | bytes) else ""
    return bool(name) and not name.startswith(("/proc/", "/dev/", "/sys/"))


def _always(*_: object) -> bool:
    return True


# Audit events (docs.python.org, "Audit events table") and whether the call blocks, by its arguments.
_BLOCKING: dict[str, Callable[..., bool]] = {
    "open": lambda path, *_: _is_on_disk(path),
    "os.listdir": lambda path, *_: _is_on_disk(path),
    "os.scandir": lambda path, *_: _is_on_disk(path),
    "fcntl.flock": lambda _, operation: not operation & fcntl.LOCK_NB,
    "socket.connect": lambda sock, *_: isinstance(sock, socket.socket) and sock.gettimeout() != 0,
    "ctypes.dlopen": _always,
    "mmap.__new__": _always,
    "os.posix_spawn": _always,
    "os.system": _always,
    "shutil.copyfile": _always,
    "shutil.rmtree": _always,
    "socket.getaddrinfo": _always,
    "subprocess.Popen": _always,
    "time.sleep": _always,
}
_PACKAGE = os.path.dirname(wcache_async.__file__) + os.sep
# Opens the lock file, before anything is served.
_EXEMPT = (_PACKAGE + os.path.join("sockets", "address.py"),)
# Frames that answer for the call themselves: a test, the loop, an import, the reading of source
# lines for a traceback.
_ANSWERABLE = (
    os.path.dirname(__file__) + os.sep,
    os.path.dirname(asyncio.__file__) + os.sep,
    "<frozen importlib",
    os.path.join(os.path.dirname(os.__file__), "linecache.py"),
)
_blocking_calls: list[str] = []


def _blame(frame: FrameType | None) -> str | None:
    """Where in the package a call comes from, through whatever libraries; None if from elsewhere."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE):
            name = file.removeprefix(_PACKAGE)
            return None if file in _EXEMPT else f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
        if file.startswith(_ANSWERABLE) and file != __file__:
            return None
        frame = frame.f_back
    return None


def _audit(event: str, args: tuple[object, ...]) -> None:
    blocks = _BLOCKING.get(event)
    if blocks is None or asyncio._get_running_loop() is None or not blocks(*args):
        return
    place = _blame(sys._getframe(1))
    if place is not None:
        _blocking_calls.append(f"{event}{args!r:.200} at {place}")


sys.addaudithook(_audit)
if sys.version_info < (3, 13):  # which raises the event by itself
    _sleep = time.sleep

    def _audited_sleep(seconds: SupportsIndex | float) -> None:
        sys.audit("time.sleep", seconds)
        _sleep(seconds)

    time.sleep = _audited_sleep


@pytest.fixture(autouse=True)
def blocking_calls() -> Iterator[list[str]]:
    """Calls of the package that blocked a loop's thread; a test that provokes some clears the list."""
    _blocking_calls.clear()
    yield _blocking_calls
    if _blocking_calls:
        pytest.fail("blocked the event loop: " + "; ".join(_blocking_calls), pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def blocking_loop() -> None:
    """The blocking client's loop, started before any test counts fds: it stays as long as the process."""
    from wcache_async import blocking
    from wcache_async.errors import NotRunning

    with contextlib.suppress(NotRunning):
        blocking.status("/nonexistent/wcache.sock")


# ------------------------------------------------------------------------------- places to be
@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A folder of mode 0700 with a path short enough for sockets, whatever $TMPDIR is."""
    folder = Path(tempfile.mkdtemp(prefix="wc-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


# ------------------------------------------------------------------------------ other processes
@pytest.fixture(scope="session")
def forge() -> Iterator["Forge"]:
    """Starts processes that have torch imported already, in milliseconds."""
    from tests.processes import Forge

    forge = Forge()
    yield forge
    forge.close()

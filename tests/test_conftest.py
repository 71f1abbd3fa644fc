"""The guards that every test runs under do fail what they are there for."""

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import wcache_async

pytest_plugins = ["pytester"]


def _in_package(source: str) -> Callable[[str], None]:
    """A function `call(path)` with that body, as if a module of the package defined it."""
    names: dict[str, Callable[[str], None]] = {}
    file = Path(wcache_async.__file__).with_name("pretended.py")
    exec(compile(f"def call(path):\n    {source}\n", str(file), "exec"), names)
    return names["call"]


@pytest.mark.parametrize(
    "source",
    [
        "open(path).close()",
        "import pathlib; pathlib.Path(path).read_bytes()",
        "import os; os.listdir(os.path.dirname(path))",
        "import time; time.sleep(0)",
        "import subprocess; subprocess.run(['true'])",
        "import fcntl, os; fd = os.memfd_create('x'); fcntl.flock(fd, fcntl.LOCK_EX); os.close(fd)",
        "import mmap; mmap.mmap(-1, 4096).close()",
    ],
)
async def test_a_call_of_the_package_that_blocks_on_the_loop_is_recorded(
    source: str, short_tmp: Path, blocking_calls: list[str]
) -> None:
    file = short_tmp / "file"
    file.touch()
    _in_package(source)(str(file))
    assert blocking_calls
    assert all("pretended.py:2 in call" in call for call in blocking_calls)
    blocking_calls.clear()


async def test_a_blocking_connect_of_the_package_is_recorded(short_tmp: Path, blocking_calls: list[str]) -> None:
    connect = "import socket, contextlib\n    with socket.socket(socket.AF_UNIX) as sock, contextlib.suppress(OSError):"
    path = str(short_tmp / "nobody")
    _in_package(f"{connect}\n        sock.setblocking(False); sock.connect(path)")(path)
    assert not blocking_calls
    _in_package(f"{connect}\n        sock.connect(path)")(path)
    assert len(blocking_calls) == 1
    blocking_calls.clear()


async def test_what_may_block_is_not_recorded(short_tmp: Path, blocking_calls: list[str]) -> None:
    """In a thread, in a test itself, and of files that are none."""
    file = short_tmp / "file"
    file.touch()
    await asyncio.to_thread(_in_package("open(path).close()"), str(file))
    assert os.listdir(short_tmp) == ["file"]
    _in_package("open('/proc/self/status').close()")("")
    assert not blocking_calls


def test_leaks_and_lost_exceptions_fail_a_test_on_both_loops(pytester: pytest.Pytester) -> None:
    shutil.copy(Path(__file__).with_name("conftest.py"), pytester.path)
    pytester.makepyprojecttoml("[tool.pytest.ini_options]\nasyncio_mode = 'auto'\n")
    pytester.makepyfile(
        """
        import asyncio, os

        kept = []

        async def test_clean():
            asyncio.get_running_loop().call_soon(print)
            await asyncio.sleep(0)
            os.close(os.eventfd(0))

        async def test_lost():
            async def fail():
                raise ValueError("lost")
            task = asyncio.create_task(fail())
            await asyncio.sleep(0)

        async def test_raised_in_a_callback():
            asyncio.get_running_loop().call_soon(lambda: 1 / 0)
            await asyncio.sleep(0.01)

        async def test_leak():
            kept.append(os.eventfd(0))
        """
    )
    result = pytester.runpytest_subprocess(
        "-q", "-p", "no:cacheprovider", "-o", "asyncio_default_fixture_loop_scope=function"
    )
    # What a guard finds, it finds after the test: its body passed, its end did not.
    result.assert_outcomes(passed=8, errors=6)
    result.stdout.fnmatch_lines_random(
        [
            f"ERROR *test_{name}?{loop}?*"
            for name in ("lost", "raised_in_a_callback", "leak")
            for loop in ("asyncio", "uvloop")
        ]
    )

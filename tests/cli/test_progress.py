"""Progress where there is no terminal, and on one."""

import contextlib
import os
import pty
import sys
from collections.abc import Iterator
from typing import TextIO

import pytest

from wcache_async.cli.progress import LineDisplay, progress_display


class Screen:
    """A terminal, and what was written to it."""

    def __init__(self, ours: int, terminal: TextIO) -> None:
        self._ours = ours
        self.terminal = terminal

    def shown(self) -> str:
        with contextlib.suppress(BlockingIOError):
            return os.read(self._ours, 65536).decode()
        return ""


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Screen]:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    with os.fdopen(ours), os.fdopen(theirs, "w", buffering=1) as terminal:
        yield Screen(ours, terminal)


def test_a_line_is_written_for_each_tenth_that_is_reached(capsys: pytest.CaptureFixture[str]) -> None:
    update = LineDisplay().track("loading m:0")
    for done in range(0, 1001, 5):
        update(done, 1000)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"loading m:0: {tenth}0 % of 1000 B" for tenth in range(1, 11)]


def test_a_large_step_is_one_line_and_an_unknown_total_none(capsys: pytest.CaptureFixture[str]) -> None:
    update = LineDisplay().track("m")
    update(0, 0)
    update(10, 1000)
    update(990, 1000)
    update(990, 1000)
    assert capsys.readouterr().err == "m: 90 % of 1000 B\n"


def test_nothing_is_told_of_what_is_over_soon(capsys: pytest.CaptureFixture[str]) -> None:
    LineDisplay().track("m", quiet_s=3600)(1000, 1000)
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_bars_that_are_gone_afterwards(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    # Here and not in the fixture, after which pytest puts its own capture in place.
    monkeypatch.setattr(sys, "stderr", screen.terminal)
    with progress_display() as display:
        first, second = display.track("loading [red]a"), display.track("loading b")
        first(1 << 20, 4 << 20)
        second(0, 0)
    shown = screen.shown()
    assert "loading [red]a" in shown
    assert "━" in shown
    assert "\x1b[2K" in shown.rpartition("━")[2]  # The last thing done is to clear the lines.


def test_a_terminal_gets_nothing_without_updates(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", screen.terminal)
    with progress_display() as display:
        display.track("loading a")
        display.track("loading b", quiet_s=3600)(1, 2)
    assert screen.shown() == ""

"""How far long work has come, on standard error: bars on a terminal, else one line per 10 %."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from wcache_async.cli.units import size_text

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = ["Display", "LineDisplay", "Update", "progress_display"]

Update = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


class Display(Protocol):
    """Where progress is shown."""

    def track(self, label: str, *, quiet_s: float = 0.0) -> Update:
        """Show one more piece of work, from its first update on, and not within its first `quiet_s` seconds."""


@contextmanager
def progress_display() -> Iterator[Display]:
    """The display that suits standard error, until the context is left."""
    if not sys.stderr.isatty():
        yield LineDisplay()
        return
    display = _BarDisplay()
    try:
        yield display
    finally:
        display.close()


class LineDisplay:
    """One line whenever a piece of work has come another 10 % further."""

    def track(self, label: str, *, quiet_s: float = 0.0) -> Update:
        shown = 0
        quiet_until = time.monotonic() + quiet_s

        def update(done: int, total: int) -> None:
            nonlocal shown
            tenths = 10 * done // total if total else 0
            if tenths > shown and time.monotonic() >= quiet_until:
                shown = tenths
                print(f"{label}: {10 * tenths} % of {size_text(total)}", file=sys.stderr, flush=True)

        return update


class _BarDisplay:
    """A bar for each piece of work, gone once the display is closed."""

    def __init__(self) -> None:
        self._progress: Progress | None = None

    def track(self, label: str, *, quiet_s: float = 0.0) -> Update:
        task: TaskID | None = None
        quiet_until = time.monotonic() + quiet_s

        def update(done: int, total: int) -> None:
            nonlocal task
            if time.monotonic() < quiet_until:
                return
            progress = self._started()
            if task is None:
                task = progress.add_task(label, total=None)
            progress.update(task, completed=done, total=total or None)

        return update

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()

    def _started(self) -> "Progress":
        if self._progress is None:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

            columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(binary_units=True))
            self._progress = Progress(*columns, TransferSpeedColumn(), console=Console(stderr=True), transient=True)
            self._progress.start()
        return self._progress

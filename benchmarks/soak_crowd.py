"""The crowd of a soak: processes that SIGSTOP and SIGKILL befall, while others take their places."""

import os
import random
import select
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
from soak_clients import Line, run_process

__all__ = ["Crowd"]

TELL_INTERVAL_S: Final = 10.0
GRACE_S: Final = 120.0
"""For a process to end by itself once its time is over."""


@dataclass(slots=True)
class _Process:
    pid: int
    pidfd: int
    pipe: int
    number: int
    heard: bytes = b""
    wakes_at: float = 0.0
    """When it is to be continued, while it is stopped."""
    killed: bool = False
    ended: bool = False


@dataclass(slots=True)
class Crowd:
    """Every process of the crowd, forked from this one, which has torch imported and no second thread."""

    address: str
    folder: Path
    chance: random.Random
    seed: int
    honest: int
    hostile: int
    done: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    started: int = 0
    killed: int = 0
    stopped: int = 0
    survived: int = 0
    _alive: dict[int, _Process] = field(default_factory=dict)

    def storm(self, processes: int, seconds: float) -> None:
        """Keep so many processes up for so long, in trouble, and see them end."""
        until = time.monotonic() + seconds
        trouble_at = tell_at = time.monotonic()
        while time.monotonic() < until:
            if time.monotonic() >= tell_at:
                self._tell(until)
                tell_at += TELL_INTERVAL_S
            while len(self._alive) < processes:
                self._start(until)
            self._listen(0.02)
            self._continue_stopped()
            if time.monotonic() >= trouble_at:
                self._trouble()
                trouble_at = time.monotonic() + self.chance.expovariate(2.0)
        give_up_at = time.monotonic() + GRACE_S
        while self._alive and time.monotonic() < give_up_at:
            self._listen(0.1)
            self._continue_stopped()
        for process in list(self._alive.values()):
            self.problems.append(f"process {process.number} did not end within {GRACE_S:g} s of its time")
            self._kill(process)
        while self._alive:
            self._listen(1.0)

    def _tell(self, until: float) -> None:
        left = max(0.0, until - time.monotonic())
        print(
            f"{left:4.0f} s left: {self.done.total():,} deeds, {self.refused.total():,} refusals, "
            f"{self.stopped} stopped, {self.killed} killed, {len(self.problems)} problems",
            file=sys.stderr,
            flush=True,
        )

    def _start(self, until: float) -> None:
        self.started += 1
        ours, theirs = os.pipe()
        pid = os.fork()
        if not pid:
            status = 1
            try:
                os.close(ours)
                for other in self._alive.values():
                    os.close(other.pipe)
                    os.close(other.pidfd)
                run_process(
                    self.address,
                    self.folder,
                    theirs,
                    seed=self.seed * 1_000_003 + self.started,
                    honest=self.honest,
                    hostile=self.hostile,
                    until=until,
                )
                status = 0
            finally:
                os._exit(status)
        os.close(theirs)
        os.set_blocking(ours, False)
        self._alive[ours] = _Process(pid, os.pidfd_open(pid), ours, self.started)

    def _listen(self, timeout: float) -> None:
        ready, _, _ = select.select(list(self._alive), [], [], timeout)
        for pipe in ready:
            process = self._alive[pipe]
            said = os.read(pipe, 1 << 16)
            if not said:
                self._bury(process)
            *lines, process.heard = (process.heard + said).split(b"\n")
            for line in lines:
                self._take(process, line)

    def _take(self, process: _Process, line: bytes) -> None:
        try:
            told = msgspec.json.decode(line, type=Line)
        except msgspec.DecodeError:
            told = Line(problem=line.decode(errors="replace"))
        self.done.update(told.done)
        self.refused.update(told.refused)
        process.ended |= told.ended
        if told.problem:
            self.problems.append(f"process {process.number}: {told.problem}")

    def _bury(self, process: _Process) -> None:
        del self._alive[process.pipe]
        _, status = os.waitpid(process.pid, 0)
        os.close(process.pipe)
        os.close(process.pidfd)
        if process.ended:
            self.survived += 1
        elif not process.killed:
            self.problems.append(f"process {process.number} ended with {os.waitstatus_to_exitcode(status)}")

    def _trouble(self) -> None:
        process = self.chance.choice(list(self._alive.values()))
        if process.killed or process.wakes_at:
            return
        if self.chance.random() < 0.4:
            self._kill(process)
        else:
            signal.pidfd_send_signal(process.pidfd, signal.SIGSTOP)
            process.wakes_at = time.monotonic() + self.chance.uniform(0.1, 5.0)
            self.stopped += 1

    def _kill(self, process: _Process) -> None:
        process.killed = True
        signal.pidfd_send_signal(process.pidfd, signal.SIGKILL)
        self.killed += 1

    def _continue_stopped(self) -> None:
        for process in self._alive.values():
            if process.wakes_at and time.monotonic() >= process.wakes_at:
                process.wakes_at = 0.0
                signal.pidfd_send_signal(process.pidfd, signal.SIGCONT)

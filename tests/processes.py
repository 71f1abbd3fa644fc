"""Test processes forked from one that has torch imported: milliseconds each instead of seconds.

    def double(peer: Peer, tensor_name: str) -> None:      # in an importable module
        peer.send(2 * peer.receive())

    with forge.start(double, "weight") as child:
        child.send(21)
        assert child.receive() == 42
    assert child.exit_status == 0

The forge is single-threaded, so that its forks are sound, and reaps them: a child's end, by
return, exception or signal, is the last thing its peer receives.
"""

import contextlib
import ctypes
import gc
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self

__all__ = ["Child", "ChildError", "Forge", "Peer"]

P = ParamSpec("P")

_ROOT = Path(__file__).resolve().parent.parent
_MESSAGE_NBYTES = 128 << 10  # of a SOCK_SEQPACKET message, below the default socket buffer
_PR_SET_PDEATHSIG = 1
DEADLINE_S = 60.0


class ChildError(Exception):
    """The child's function raised; the text is its traceback."""


class Peer:
    """The child's line to the test that started it, and the sockets it was given."""

    def __init__(self, line: socket.socket, sockets: Sequence[socket.socket]) -> None:
        self._line = line
        self.sockets = tuple(sockets)
        self.finalize = False
        """Whether the child ends as an interpreter does, which takes a second, or at once."""

    def send(self, value: object) -> None:
        self._line.sendall(pickle.dumps(("value", value)))

    def receive(self) -> Any:
        """The next value the test sends.  Raises EOFError when it has hung up."""
        body = self._line.recv(_MESSAGE_NBYTES)
        if not body:
            raise EOFError
        return pickle.loads(body)


class Child:
    """The test's side of one child process; leaving it kills what still runs."""

    def __init__(self, pid: int, line: socket.socket) -> None:
        self.pid = pid
        self._line = line
        self._status: int | None = None

    @property
    def exit_status(self) -> int:
        """Its exit code, negative for the signal that ended it; waits for the end."""
        while self._status is None:
            with contextlib.suppress(EOFError):
                self.receive()
        return self._status

    def send(self, value: object) -> None:
        self._line.sendall(pickle.dumps(value))

    def receive(self) -> Any:
        """The next value the child sends.  Raises ChildError for its exception, EOFError at its end."""
        if self._status is None:
            kind, value = pickle.loads(self._line.recv(_MESSAGE_NBYTES))
            if kind == "value":
                return value
            if kind == "error":
                raise ChildError(value)
            self._status = value
        raise EOFError(f"the child has ended with status {self._status}")

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def close(self) -> None:
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                self.kill()
            with contextlib.suppress(ChildError):
                _ = self.exit_status
        self._line.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            _ = self.exit_status
        self.close()


class Forge:
    """The process that forks; one for a whole test session."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from tests.processes import serve; serve({theirs.fileno()})"],
                cwd=_ROOT,
                pass_fds=[theirs.fileno()],
            )

    def start(
        self,
        function: Callable[Concatenate[Peer, P], object],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Child:
        """Fork a process that calls `function` with a Peer and the arguments; sockets among them are handed over."""
        line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        line.settimeout(DEADLINE_S)
        sockets = [arg for arg in args if isinstance(arg, socket.socket)]
        plain = [sockets.index(arg) if isinstance(arg, socket.socket) else None for arg in args]
        values = [None if isinstance(arg, socket.socket) else arg for arg in args]
        body = pickle.dumps((function, values, plain, kwargs))
        with theirs:
            socket.send_fds(self._control, [body], [theirs.fileno(), *(s.fileno() for s in sockets)])
            pid = int(line.recv(64))
        for handed_over in sockets:
            handed_over.close()
        return Child(pid, line)

    def close(self) -> None:
        self._control.close()
        self._process.wait(DEADLINE_S)


def serve(control_fd: int) -> None:
    """The forge's main: fork on request, report ends, go when the test session goes."""
    import torch

    import wcache_async.backends.shm_fd  # noqa: F401  (imported once for every child)

    torch.set_num_threads(1)
    gc.freeze()  # A collection in a child would copy every page that holds an object.
    control = socket.socket(fileno=control_fd)
    wakeup, noise = socket.socketpair()
    noise.setblocking(False)
    wakeup.setblocking(False)
    signal.set_wakeup_fd(noise.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    lines: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([control, wakeup], [], [])
        if wakeup in ready:
            wakeup.recv(4096)
            _report_ends(lines)
        if control not in ready:
            continue
        body, fds, _, _ = socket.recv_fds(control, _MESSAGE_NBYTES, 32)
        if not body:
            return
        given = [socket.socket(fileno=fd) for fd in fds]
        with contextlib.suppress(Exception):  # The child meets it again, and reports it.
            pickle.loads(body)  # Imports what the call needs here, for every later child too.
        pid = os.fork()
        if pid:
            lines[pid] = given[0]
            for sock in given[1:]:
                sock.close()
            continue
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        for sock in (control, wakeup, noise, *lines.values()):
            sock.close()
        given[0].sendall(str(os.getpid()).encode())
        _call(body, given[0], given[1:])
        return


def _call(body: bytes, line: socket.socket, sockets: Sequence[socket.socket]) -> None:
    try:
        function, values, indices, kwargs = pickle.loads(body)
        args = [value if index is None else sockets[index] for value, index in zip(values, indices, strict=True)]
        peer = Peer(line, sockets)
        function(peer, *args, **kwargs)
        if not peer.finalize:
            os._exit(0)
    except Exception:
        line.sendall(pickle.dumps(("error", traceback.format_exc()[-60_000:])))
        os._exit(1)


def _report_ends(lines: dict[int, socket.socket]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        with lines.pop(pid) as line, contextlib.suppress(OSError):
            line.sendall(pickle.dumps(("end", os.waitstatus_to_exitcode(status))))

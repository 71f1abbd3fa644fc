"""File descriptors with an owner: closed once, by whoever holds them last."""

import os
import socket
from array import array
from collections.abc import Iterable
from types import TracebackType
from typing import Self

__all__ = ["OwnedFd", "own_received"]


class OwnedFd:
    """One file descriptor and the duty to close it.

    Closes when `close` is called, when its context is left, or when it is collected; after
    `take` the duty is the caller's.  Not for sockets an event loop watches: those must be
    unregistered first.
    """

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        """The descriptor's number.  Raises ValueError once closed or taken."""
        if self._fd < 0:
            raise ValueError("the file descriptor is closed or was taken over")
        return self._fd

    @property
    def closed(self) -> bool:
        return self._fd < 0

    def take(self) -> int:
        """The number, with the duty to close it."""
        fd = self.fileno()
        self._fd = -1
        return fd

    def duplicate(self) -> "OwnedFd":
        """A second descriptor of the same open file (F_DUPFD_CLOEXEC).  Raises OSError."""
        return OwnedFd(os.dup(self.fileno()))

    def close(self) -> None:
        """Close it; does nothing a second time."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"OwnedFd({self._fd if self._fd >= 0 else 'closed'})"


def own_received(ancillary: Iterable[tuple[int, int, bytes]]) -> list[OwnedFd]:
    """An owner for every fd in the ancillary data of one `recvmsg`, in order.

    For before anything else is looked at: until then nobody would close them.
    """
    owned = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array("i")
            # A truncated block may end inside a number.
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
            owned += [OwnedFd(number) for number in numbers]
    return owned

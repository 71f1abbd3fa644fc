"""Sealed memfds: how memory is made, proven final, and checked before anybody maps it.

F_SEAL_WRITE, GROW, SHRINK and SEAL together make a memfd immutable for good, for the process
that made it too (memfd_create(2), fcntl(2)).  A receiver that has seen them can map the memory
knowing that no byte changes under it and that no page goes away, which would be SIGBUS.
"""

import errno
import fcntl
import os
import stat
from typing import Final

from wcache_async.errors import InvalidMemfd
from wcache_async.sockets.fds import OwnedFd

__all__ = [
    "SEALS",
    "check_memfd",
    "create_memfd",
    "read_memfd",
    "read_memfd_into",
    "seal_memfd",
    "sealed_memfd",
    "write_memfd",
]

_SEAL_NAMES: Final = {
    fcntl.F_SEAL_SEAL: "F_SEAL_SEAL",
    fcntl.F_SEAL_SHRINK: "F_SEAL_SHRINK",
    fcntl.F_SEAL_GROW: "F_SEAL_GROW",
    fcntl.F_SEAL_WRITE: "F_SEAL_WRITE",
}
SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

_MFD_NOEXEC_SEAL: Final = 0x0008  # linux/memfd.h, Linux 6.3; demanded where vm.memfd_noexec = 2


def create_memfd(name: str, nbytes: int) -> OwnedFd:
    """A memfd of `nbytes` bytes without any memory yet; `name` shows in /proc/PID/maps.  Raises OSError."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = OwnedFd(os.memfd_create(name, flags | _MFD_NOEXEC_SEAL))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fd = OwnedFd(os.memfd_create(name, flags))
    try:
        os.ftruncate(fd.fileno(), nbytes)
    except BaseException:
        fd.close()
        raise
    return fd


def write_memfd(fd: OwnedFd, data: memoryview | bytes, offset: int) -> None:
    """Write all of `data` at `offset`.  Raises OSError: ENOSPC where memory cannot be had."""
    view = memoryview(data).cast("B")
    while view:
        written = os.pwrite(fd.fileno(), view, offset)  # At most 2 GiB a call (write(2), NOTES).
        view = view[written:]
        offset += written


def seal_memfd(fd: OwnedFd) -> None:
    """Make it immutable.  Raises OSError: EBUSY while a writable shared mapping is left anywhere."""
    fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, SEALS)


def sealed_memfd(name: str, data: bytes) -> OwnedFd:
    """A sealed memfd that holds `data`.  Raises OSError."""
    fd = create_memfd(name, len(data))
    try:
        write_memfd(fd, data, 0)
        seal_memfd(fd)
    except BaseException:
        fd.close()
        raise
    return fd


def check_memfd(fd: OwnedFd, nbytes: int, what: str) -> None:
    """Refuse what is not a sealed memfd of exactly `nbytes` bytes.

    Raises InvalidMemfd, which calls it `what` and says what is missing.  Never reads or maps it.
    """
    info = os.fstat(fd.fileno())
    if not stat.S_ISREG(info.st_mode):
        raise InvalidMemfd(what=what, reason="it is no memfd")
    try:
        seals = fcntl.fcntl(fd.fileno(), fcntl.F_GET_SEALS)
    except OSError:
        raise InvalidMemfd(what=what, reason="it is no memfd") from None
    # Opened anew for writing alone (proc_pid_fd(5)), it has the seals and can be neither read nor mapped.
    if fcntl.fcntl(fd.fileno(), fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY:
        raise InvalidMemfd(what=what, reason="it is not open for reading")
    missing = [name for seal, name in _SEAL_NAMES.items() if not seals & seal]
    if missing:
        raise InvalidMemfd(what=what, reason=f"it lacks {', '.join(missing)}")
    if info.st_size != nbytes:
        raise InvalidMemfd(what=what, reason=f"it has {info.st_size} bytes where {nbytes} were announced")


def read_memfd(fd: OwnedFd, nbytes: int, what: str) -> bytes:
    """All bytes of a memfd that passes `check_memfd`.  Raises InvalidMemfd, OSError."""
    check_memfd(fd, nbytes, what)
    parts = []
    offset = 0
    while offset < nbytes:
        part = os.pread(fd.fileno(), nbytes - offset, offset)
        parts.append(part)
        offset += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_memfd_into(fd: OwnedFd, into: memoryview, offset: int) -> None:
    """Fill `into` with the bytes from `offset` on, all of which must be there.  Raises OSError."""
    while into:
        read = os.preadv(fd.fileno(), [into], offset)  # At most 2 GiB a call (read(2), NOTES).
        if not read:
            raise OSError(errno.ENODATA, f"{len(into)} bytes are missing at offset {offset}")
        into = into[read:]
        offset += read

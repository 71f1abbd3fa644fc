"""Where the daemon's socket lies, whether that place can be trusted, and which process holds it.

Trust rules, for the folder and for a socket found in it: owner this user or root; a folder
others may write must be sticky, as ``/tmp`` is (others may then add files, but not rename or
remove ours); a symbolic link in either's place must have been made by this user or root
(what fs.protected_symlinks asks of links in sticky folders, proc_sys_fs(5)).  Ancestors of
the folder are not checked: whoever can swap those can only take the daemon out of reach, as
both sides also check the connected peer's uid.

Everything here touches the file system and is for before serving starts.
"""

import fcntl
import os
import stat
from collections.abc import Collection, Mapping
from types import TracebackType
from typing import Final, Self

from wcache_async.errors import AddressError, AddressInUse, AddressNotTrusted, AddressTooLong
from wcache_async.sockets.fds import OwnedFd

__all__ = ["MAX_PATH_NBYTES", "SocketLock", "check_path", "check_trusted", "default_socket_path", "prepare_folder"]

MAX_PATH_NBYTES: Final = 107
"""sun_path has 108 bytes, one of them for the NUL (unix(7))."""


def default_socket_path(environ: Mapping[str, str] | None = None) -> str:
    """The socket's path where none is given.

    ``$WCACHE_SOCKET``; else ``$XDG_RUNTIME_DIR/wcache/wcache.sock``; else
    ``wcache-UID/wcache.sock`` in ``$TMPDIR`` or ``/tmp``.
    """
    env = os.environ if environ is None else environ
    if named := env.get("WCACHE_SOCKET"):
        return named
    runtime = env.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime):  # The XDG base directory specification has relative ones ignored.
        return os.path.join(runtime, "wcache", "wcache.sock")
    return os.path.join(env.get("TMPDIR") or "/tmp", f"wcache-{os.geteuid()}", "wcache.sock")


def check_path(path: str) -> None:
    """Raises AddressTooLong over 107 bytes, AddressError for what names no file."""
    length = len(os.fsencode(path))
    if length > MAX_PATH_NBYTES:
        raise AddressTooLong(path=path, length=length)
    if "\0" in path:
        raise AddressError(path=path.replace("\0", "@"), reason="abstract names are open to every user; name a file")
    if not os.path.basename(path):
        raise AddressError(path=path, reason="it does not name a file")


def prepare_folder(path: str) -> None:
    """Make the socket's folder, for this user alone, if there is none.

    Raises AddressNotTrusted where the folder belongs, or is open, to others, and
    AddressError where it cannot be made.
    """
    folder = _folder(path)
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise AddressError(path=path, reason=f"folder {folder} cannot be made: {error.strerror}") from error
    try:
        _check_folder(path, _trusted_uids(None))
    except OSError as error:
        raise AddressError(path=path, reason=f"folder {folder}: {error.strerror}") from error


def check_trusted(path: str, allowed_uids: Collection[int] | None = None) -> None:
    """What a client asks of a socket before it connects.

    `allowed_uids` are trusted besides root (None: this process's own).  Raises
    AddressNotTrusted, AddressError where there is something else than a socket, and OSError
    where `path` cannot be looked at.
    """
    trusted = _trusted_uids(allowed_uids)
    info = _followed(path, path, trusted)
    if not stat.S_ISSOCK(info.st_mode):
        raise AddressError(path=path, reason="it is not a socket")
    if info.st_uid not in trusted:
        raise AddressNotTrusted(path=path, reason=f"it belongs to uid {info.st_uid}")
    _check_folder(path, trusted)


def _folder(path: str) -> str:
    return os.path.dirname(os.path.abspath(path))


def _trusted_uids(allowed: Collection[int] | None) -> frozenset[int]:
    return frozenset({0, os.geteuid()} if allowed is None else {0, *allowed})


def _followed(path: str, entry: str, trusted: Collection[int]) -> os.stat_result:
    info = os.lstat(entry)
    if not stat.S_ISLNK(info.st_mode):
        return info
    if info.st_uid not in trusted:
        raise AddressNotTrusted(path=path, reason=f"{entry} is a symbolic link made by uid {info.st_uid}")
    return os.stat(entry)


def _check_folder(path: str, trusted: Collection[int]) -> None:
    folder = _folder(path)
    info = _followed(path, folder, trusted)
    if not stat.S_ISDIR(info.st_mode):
        raise AddressError(path=path, reason=f"{folder} is not a folder")
    if info.st_uid not in trusted:
        raise AddressNotTrusted(path=path, reason=f"folder {folder} belongs to uid {info.st_uid}")
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not info.st_mode & stat.S_ISVTX:
        mode = stat.S_IMODE(info.st_mode)
        raise AddressNotTrusted(path=path, reason=f"others may write folder {folder} (mode {mode:04o})")


class SocketLock:
    """The right to serve on `path`: a flock on ``path.lock``, which names the holder's pid.

    Taken before anything is loaded.  The kernel gives it up when the process dies, so a lock
    file left behind is never in the way.  Usable as a context manager.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.lock_path = f"{path}.lock"
        self._fd: OwnedFd | None = None
        self._socket: tuple[int, int] | None = None

    @property
    def held(self) -> bool:
        return self._fd is not None

    def acquire(self) -> None:
        """Take the lock at once, or raise AddressInUse, AddressNotTrusted or AddressError."""
        while not self.held:
            with self._open() as fd:
                try:
                    fcntl.flock(fd.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise AddressInUse(path=self.path, pid=_read_pid(fd.fileno())) from None
                # The last holder may have removed the file between our open and our flock: what
                # we locked is then nobody's, and the next comer would lock a new file.
                if _identity(self.lock_path) != _identity(fd.fileno()):
                    continue
                os.ftruncate(fd.fileno(), 0)
                os.pwrite(fd.fileno(), b"%d\n" % os.getpid(), 0)
                self._fd = OwnedFd(fd.take())

    def release(self) -> None:
        """Remove the socket and the lock file, where they are still ours, and give up the lock.  Idempotent."""
        fd, self._fd = self._fd, None
        if fd is None:
            return
        with fd:
            self.remove_socket()
            # While it is still locked, or it might be the next holder's.
            if _identity(self.lock_path) == _identity(fd.fileno()):
                os.unlink(self.lock_path)

    def adopt_socket(self) -> None:
        """The socket now at `path` is this holder's, to be removed by it and by nobody else."""
        self._socket = _identity(self.path)

    def remove_socket(self) -> None:
        """Remove the adopted socket, unless something else lies at `path` by now.  Idempotent.

        For before the listening socket is closed, which keeps its inode number from being reused.
        """
        adopted, self._socket = self._socket, None
        if adopted is not None and _identity(self.path) == adopted:
            os.unlink(self.path)

    def _open(self) -> OwnedFd:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            fd = OwnedFd(os.open(self.lock_path, flags, 0o600))
        except OSError as error:
            raise AddressError(path=self.path, reason=f"lock file {self.lock_path}: {error.strerror}") from error
        info = os.fstat(fd.fileno())
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
            fd.close()
            raise AddressNotTrusted(path=self.path, reason=f"{self.lock_path} is no file of this user's")
        return fd

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _identity(where: str | int) -> tuple[int, int] | None:
    """Device and inode of an open file, or of what lies at a path; None where nothing does."""
    try:
        info = os.fstat(where) if isinstance(where, int) else os.lstat(where)
    except FileNotFoundError:
        return None
    return info.st_dev, info.st_ino


def _read_pid(fd: int) -> int:
    """The pid in a lock file; 0 where its holder has not written it yet."""
    try:
        return int(os.pread(fd, 32, 0))
    except ValueError:
        return 0

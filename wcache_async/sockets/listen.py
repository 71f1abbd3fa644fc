"""Connections over a socket file: binding it, accepting from it, and connecting to it."""

import asyncio
import errno
import math
import os
import random
import socket
import stat
import zlib
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Final

from wcache_async.errors import AddressError, AddressInUse, AddressNotTrusted, NotRunning, WeightCacheError
from wcache_async.protocol.framing import Segment, encode_frame
from wcache_async.protocol.messages import ErrorResponse, encode_message
from wcache_async.sockets.address import MAX_PATH_NBYTES, SocketLock, check_path, check_trusted
from wcache_async.sockets.fds import OwnedFd
from wcache_async.sockets.peer import PeerCredentials, check_peer, peer_credentials

__all__ = ["Listener", "bind_listener", "connect", "refuse"]

_ACCEPTS_PER_WAKEUP: Final = 32
_OUT_OF_FDS: Final = frozenset({errno.EMFILE, errno.ENFILE})
_OUT_OF_MEMORY: Final = frozenset({errno.ENOBUFS, errno.ENOMEM})
_FIRST_PAUSE_S: Final = 0.01
_LAST_PAUSE_S: Final = 0.5
_FIRST_CONNECT_PAUSE_S: Final = 0.001
_LAST_CONNECT_PAUSE_S: Final = 0.05


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)


# --------------------------------------------------------------------------------- listening
def bind_listener(path: str, lock: SocketLock, *, backlog: int = 1024, mode: int = 0o600) -> socket.socket:
    """A non-blocking socket that listens at `path`, for the holder of its lock.

    It takes the place of a stale socket in one step, so that a client finds the old one, which
    refuses, or the new one, which accepts.  Whatever else lies there is left alone: raises
    AddressError or AddressNotTrusted for it, and AddressInUse for a socket that somebody
    without our lock listens on.
    """
    if not lock.held or lock.path != path:
        raise ValueError(f"binding {path} needs its lock")
    check_path(path)
    _check_replaceable(path)
    sock = _new_socket()
    try:
        # Before bind, which gives the file this mode less the umask: no moment with a wider one.
        os.fchmod(sock.fileno(), mode)
        # Nobody else's, as only the lock's holder makes one, and so cleared away by the next holder.
        temporary = f"{path}.new"
        if len(os.fsencode(temporary)) > MAX_PATH_NBYTES:
            temporary = os.path.join(os.path.dirname(path), f".{zlib.crc32(os.fsencode(path)):08x}.new")
        try:
            with suppress(FileNotFoundError):
                os.unlink(temporary)
            _bind(sock, temporary)
            sock.listen(backlog)
            os.rename(temporary, path)
        except OSError as error:
            with suppress(OSError):
                os.unlink(temporary)
            raise AddressError(path=path, reason=f"it cannot be bound: {error.strerror or error}") from error
        lock.adopt_socket()
    except BaseException:
        sock.close()
        raise
    return sock


def _check_replaceable(path: str) -> None:
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise AddressError(path=path, reason=str(error.strerror)) from error
    if not stat.S_ISSOCK(info.st_mode):
        raise AddressError(path=path, reason="something that is not a socket is in the way")
    if info.st_uid != os.geteuid():
        raise AddressNotTrusted(path=path, reason=f"a socket of uid {info.st_uid} is in the way")
    with _new_socket() as probe:
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except BlockingIOError:
            raise AddressInUse(path=path, pid=0) from None
        except OSError as error:
            raise AddressError(path=path, reason=f"another socket is in the way: {error.strerror}") from error
        raise AddressInUse(path=path, pid=peer_credentials(probe).pid)


def _bind(sock: socket.socket, path: str) -> None:
    if len(os.fsencode(path)) <= MAX_PATH_NBYTES:
        sock.bind(path)
        return
    folder, name = os.path.split(os.path.abspath(path))
    with OwnedFd(os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        sock.bind(f"/proc/self/fd/{fd.fileno()}/{name}")


class Listener:
    """Accepts connections on the running loop, until closed, whatever happens.

    `on_connection(sock, peer)` is called for each, before a byte of it is read, with a
    non-blocking socket that it takes over; `peer` comes from the kernel and decides whether
    to serve it, or to `refuse` it.  What it raises goes to the loop's exception handler.

    When the process or the system is out of fds, waiting clients are accepted on a reserve fd and given to
    `on_refused(sock)`, which takes them over and closes them soon: the reserve is whole again
    only then.  Accepting resumes by itself.

    With `lock`, closing removes the socket file first.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_connection: Callable[[socket.socket, PeerCredentials], None],
        on_refused: Callable[[socket.socket], None],
        *,
        lock: SocketLock | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._fd = sock.fileno()
        self._on_connection = on_connection
        self._on_refused = on_refused
        self._lock = lock
        self._pause_s = _FIRST_PAUSE_S
        self._resume: asyncio.TimerHandle | None = None
        self._reserve: OwnedFd | None = _reserve()
        self._closed = False
        self._loop.add_reader(self._fd, self._on_readable)

    @property
    def paused(self) -> bool:
        """Whether accepting waits for fds or memory to be free again."""
        return self._resume is not None

    def close(self) -> None:
        """Stop accepting, after those who have connected already.  Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._lock is not None:
            self._lock.remove_socket()
        if self._resume is not None:
            self._resume.cancel()
        else:
            self._loop.remove_reader(self._fd)
        while self._accept():
            pass
        if self._reserve is not None:
            self._reserve.close()
        self._sock.close()

    def _on_readable(self) -> None:
        for _ in range(_ACCEPTS_PER_WAKEUP):
            if not self._accept():
                return

    def _accept(self) -> bool:
        """Accept one connection; False where there is none, or none can be had for now."""
        try:
            sock, _ = self._sock.accept()
        except BlockingIOError:
            return False
        except ConnectionAbortedError:
            return True
        except OSError as error:
            if error.errno in _OUT_OF_FDS:
                self._refuse_waiting()
            elif error.errno not in _OUT_OF_MEMORY:
                self._report("accepting a connection failed", error)
            self._pause()
            return False
        self._pause_s = _FIRST_PAUSE_S
        self._hand_over(sock, self._identify)
        return True

    def _identify(self, sock: socket.socket) -> None:
        self._on_connection(sock, peer_credentials(sock))

    def _refuse_waiting(self) -> None:
        for _ in range(_ACCEPTS_PER_WAKEUP):
            if self._reserve is None:
                break
            self._reserve.close()
            self._reserve = None
            try:
                sock, _ = self._sock.accept()
            except OSError:
                break
            self._hand_over(sock, self._on_refused)
            self._restore_reserve()
        self._restore_reserve()

    def _restore_reserve(self) -> None:
        if self._reserve is None:
            with suppress(OSError):
                self._reserve = _reserve()

    def _hand_over(self, sock: socket.socket, taker: Callable[[socket.socket], None]) -> None:
        try:
            sock.setblocking(False)
            taker(sock)
        except Exception as error:  # One connection's failure is not the listener's.
            if sock.fileno() >= 0:
                # Closed while still watched, its number would make libuv abort the process.
                self._loop.remove_reader(sock.fileno())
                self._loop.remove_writer(sock.fileno())
                sock.close()
            self._report("a new connection could not be served", error)

    def _report(self, message: str, error: Exception) -> None:
        self._loop.call_exception_handler({"message": message, "exception": error})

    def _pause(self) -> None:
        if self._closed:
            return
        self._loop.remove_reader(self._fd)
        self._resume = self._loop.call_later(self._pause_s, self._continue)
        self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)

    def _continue(self) -> None:
        self._resume = None
        self._restore_reserve()
        self._loop.add_reader(self._fd, self._on_readable)


def _reserve() -> OwnedFd:
    return OwnedFd(os.eventfd(0, os.EFD_CLOEXEC))


def refuse(sock: socket.socket, error: WeightCacheError) -> None:
    """Tell a peer in one write that never blocks why it is not served, and close `sock`.

    Needs no loop and no further fd, so that it works for `Listener`'s `on_refused`.
    """
    with sock:
        try:
            sock.setblocking(False)
            farewell: list[Segment[OwnedFd]] = encode_frame(0, encode_message(ErrorResponse.of(error)))
            sock.send(farewell[0].data, socket.MSG_NOSIGNAL)
            sock.shutdown(socket.SHUT_WR)
            # Closing over unread bytes would reset the connection under the peer.
            sock.recv(64 << 10)
        except OSError:
            pass  # It is gone, or said nothing yet.


# -------------------------------------------------------------------------------- connecting
async def connect(
    path: str, timeout: float | None, *, wait: bool = False, allowed_uids: Collection[int] | None = None
) -> socket.socket:
    """A non-blocking socket connected to the daemon at `path`.

    The folder and the socket are checked before connecting and the daemon's uid, which must be
    one of `allowed_uids` (None: this process's), after it.  While the daemon's backlog is full
    it is tried again for `timeout` seconds (None: for ever); with `wait` so is a daemon that is
    not there yet.

    Raises NotRunning, AddressTooLong, AddressNotTrusted, AddressError, PeerNotAllowed.
    """
    check_path(path)
    loop = asyncio.get_running_loop()
    deadline = math.inf if timeout is None else loop.time() + timeout
    pause = _FIRST_CONNECT_PAUSE_S
    while True:
        try:
            return _connect_now(path, allowed_uids)
        except BlockingIOError:
            reason = "its queue of waiting clients stayed full"
        except (FileNotFoundError, ConnectionRefusedError) as error:
            reason = str(error.strerror)
            if not wait:
                raise NotRunning(socket=path, reason=reason) from error
        left = deadline - loop.time()
        if left <= 0:
            raise NotRunning(socket=path, reason=f"{reason} for {timeout:g} s")
        # Not a blocking connect in a thread, which nothing can cancel.  Spread out, as
        # the ranks of an engine come at the same moment.
        await asyncio.sleep(min(pause * random.uniform(0.5, 1.0), left))
        pause = min(2 * pause, _LAST_CONNECT_PAUSE_S)


def _connect_now(path: str, allowed_uids: Collection[int] | None) -> socket.socket:
    """Connect without waiting: a Unix socket connects at once, or says EAGAIN where the backlog is full."""
    try:
        check_trusted(path, allowed_uids)
        sock = _new_socket()
        try:
            sock.connect(path)
            check_peer(peer_credentials(sock), allowed_uids)
        except BaseException:
            sock.close()
            raise
    except (BlockingIOError, FileNotFoundError, ConnectionRefusedError):
        raise
    except OSError as error:
        raise AddressError(path=path, reason=str(error.strerror)) from error
    return sock

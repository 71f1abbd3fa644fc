"""Binding, accepting, refusing and connecting."""

import asyncio
import contextlib
import errno
import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.sockets.wire import DEADLINE, client, received, until
from wcache_async.errors import (
    AddressError,
    AddressInUse,
    AddressNotTrusted,
    AddressTooLong,
    NotRunning,
    PeerNotAllowed,
    TooManyClients,
)
from wcache_async.protocol.connection import Connection, EndOfStream, Role
from wcache_async.protocol.messages import ErrorResponse, Hello
from wcache_async.sockets.address import MAX_PATH_NBYTES, SocketLock
from wcache_async.sockets.listen import Listener, bind_listener, connect, refuse
from wcache_async.sockets.peer import PeerCredentials
from wcache_async.sockets.stream import FdStream

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
STRANGER = 54_321


@pytest.fixture
def path(short_tmp: Path) -> str:
    return str(short_tmp / "s")


@pytest.fixture
def lock(path: str) -> Iterator[SocketLock]:
    with SocketLock(path) as lock:
        yield lock


def dial(path: str) -> socket.socket:
    """A connection from the test itself; raises what the kernel says."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        sock.connect(path)
    except BaseException:
        sock.close()
        raise
    return sock


# -------------------------------------------------------------------------------------- binding
def test_binding_makes_a_socket_for_this_user_that_accepts_at_once(path: str, lock: SocketLock) -> None:
    with bind_listener(path, lock) as sock, dial(path):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert not sock.getblocking()
        assert not sock.get_inheritable()
        sock.accept()[0].close()
    assert set(os.listdir(os.path.dirname(path))) == {"s", "s.lock"}


def test_the_mode_can_be_wider_on_purpose(path: str, lock: SocketLock) -> None:
    before = os.umask(0)
    try:
        with bind_listener(path, lock, mode=0o660):
            assert stat.S_IMODE(os.stat(path).st_mode) == 0o660
    finally:
        os.umask(before)


def test_binding_needs_the_lock_of_that_path(path: str, short_tmp: Path) -> None:
    with pytest.raises(ValueError, match="lock"):
        bind_listener(path, SocketLock(path))
    with SocketLock(str(short_tmp / "other")) as other, pytest.raises(ValueError, match="lock"):
        bind_listener(path, other)


def test_a_stale_socket_is_replaced_without_a_moment_of_nothing(path: str, lock: SocketLock) -> None:
    bind_listener(path, lock).close()
    answers: set[type[BaseException] | None] = set()
    done = threading.Event()

    def dial_on() -> None:
        while not done.is_set():
            try:
                dial(path).close()
                answers.add(None)
            except OSError as error:
                answers.add(type(error))

    thread = threading.Thread(target=dial_on)
    thread.start()
    try:
        for _ in range(200):
            with contextlib.suppress(AddressInUse):  # of those in between who are not stale yet
                bind_listener(path, lock).close()
    finally:
        done.set()
        thread.join()
    assert answers <= {None, ConnectionRefusedError, ConnectionResetError}
    assert ConnectionRefusedError in answers


def test_a_socket_that_somebody_without_the_lock_listens_on_is_left_alone(path: str, lock: SocketLock) -> None:
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind(path)
        theirs.listen(1)
        with pytest.raises(AddressInUse) as caught:
            bind_listener(path, lock)
        assert caught.value.pid == os.getpid()
        waiting = [dial(path)]
        with contextlib.suppress(BlockingIOError):
            waiting.append(dial(path))
        with pytest.raises(AddressInUse):
            bind_listener(path, lock)  # nor where its backlog is full
        theirs.accept()[0].close()
        for sock in waiting:
            sock.close()


def test_what_is_not_a_stale_socket_is_never_replaced(path: str, lock: SocketLock, short_tmp: Path) -> None:
    (short_tmp / "s").write_text("weights of a week")
    with pytest.raises(AddressError, match="not a socket"):
        bind_listener(path, lock)
    assert (short_tmp / "s").read_text() == "weights of a week"
    (short_tmp / "s").unlink()
    (short_tmp / "s").mkdir()
    with pytest.raises(AddressError, match="not a socket"):
        bind_listener(path, lock)
    (short_tmp / "s").rmdir()
    (short_tmp / "s").symlink_to("elsewhere")
    with pytest.raises(AddressError, match="not a socket"):
        bind_listener(path, lock)
    (short_tmp / "s").unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(path)
        with pytest.raises(AddressError, match="another socket"):
            bind_listener(path, lock)


@as_root
def test_a_socket_of_somebody_else_is_not_replaced(path: str, lock: SocketLock) -> None:
    bind_listener(path, lock).close()
    os.chown(path, STRANGER, STRANGER)
    with pytest.raises(AddressNotTrusted, match=str(STRANGER)):
        bind_listener(path, lock)


def test_what_a_killed_daemon_left_half_way_is_not_in_the_way(path: str, lock: SocketLock, short_tmp: Path) -> None:
    with socket.socket(socket.AF_UNIX) as half_way:
        half_way.bind(f"{path}.new")
    with bind_listener(path, lock):
        assert set(os.listdir(short_tmp)) == {"s", "s.lock"}


def test_the_longest_path_can_be_bound_and_connected_to(short_tmp: Path) -> None:
    """Though the temporary name beside it is too long for the kernel."""
    path = str(short_tmp / ("x" * (MAX_PATH_NBYTES - len(str(short_tmp)) - 1)))
    assert len(path) == MAX_PATH_NBYTES
    with SocketLock(path) as lock, bind_listener(path, lock), dial(path):
        assert os.path.exists(path)
    with pytest.raises(AddressTooLong), SocketLock(path + "x") as lock:
        bind_listener(path + "x", lock)


def test_the_longest_folder_can_be_bound_in(short_tmp: Path) -> None:
    """Where no other name in it has room for the kernel."""
    folder = short_tmp / ("f" * (MAX_PATH_NBYTES - len(str(short_tmp)) - 3))
    folder.mkdir(0o700)
    path = str(folder / "s")
    assert len(path) == MAX_PATH_NBYTES
    with SocketLock(path) as lock, bind_listener(path, lock), dial(path):
        assert set(os.listdir(folder)) == {"s", "s.lock"}


def test_a_folder_that_went_away_is_told(path: str, short_tmp: Path) -> None:
    folder = short_tmp / "folder"
    folder.mkdir()
    lock = SocketLock(str(folder / "s"))
    lock.acquire()
    os.unlink(folder / "s.lock")
    folder.rmdir()
    folder.touch()
    with pytest.raises(AddressError, match="Not a directory"):
        bind_listener(lock.path, lock)
    folder.unlink()
    with pytest.raises(AddressError, match="No such file"):
        bind_listener(lock.path, lock)
    lock.release()


def test_a_bind_that_fails_leaves_nothing(path: str, lock: SocketLock, short_tmp: Path) -> None:
    blocker = short_tmp / "s.new"
    blocker.mkdir()
    with pytest.raises(AddressError, match="cannot be bound"):
        bind_listener(path, lock)
    blocker.rmdir()
    assert os.listdir(short_tmp) == ["s.lock"]


# ------------------------------------------------------------------------------------ accepting
class House:
    """A listener, and whom it let in or turned away."""

    def __init__(self, path: str, lock: SocketLock, listening: socket.socket | None = None) -> None:
        self.inside: list[socket.socket] = []
        self.peers: list[PeerCredentials] = []
        self.refused = 0
        self.listener = Listener(listening or bind_listener(path, lock), self.on_connection, self.on_refused, lock=lock)

    def on_connection(self, sock: socket.socket, peer: PeerCredentials) -> None:
        self.inside.append(sock)
        self.peers.append(peer)

    def on_refused(self, sock: socket.socket) -> None:
        self.refused += 1
        refuse(sock, TooManyClients(limit=7))

    def close(self) -> None:
        self.listener.close()
        for sock in self.inside:
            sock.close()


@pytest.fixture
async def house(path: str, lock: SocketLock) -> AsyncIterator[House]:
    house = House(path, lock)
    yield house
    house.close()


async def test_a_connection_comes_with_its_peer_before_a_byte_is_read(house: House, path: str) -> None:
    with dial(path):
        await until(lambda: house.inside)
    assert house.peers == [PeerCredentials(os.getpid(), os.geteuid(), os.getegid())]
    assert not house.inside[0].getblocking()
    assert not house.inside[0].get_inheritable()


async def test_many_ranks_that_start_together_all_get_in(house: House, path: str) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(500):
            stack.enter_context(dial(path))
        await until(lambda: len(house.inside) == 500)


async def test_one_connections_failure_is_reported_and_the_next_is_served(
    path: str, lock: SocketLock, unhandled_loop_exceptions: list[str]
) -> None:
    served: list[socket.socket] = []

    def fail_first(sock: socket.socket, peer: PeerCredentials) -> None:
        served.append(sock)
        if len(served) == 1:
            raise ValueError("the first")

    listener = Listener(bind_listener(path, lock), fail_first, lambda sock: sock.close(), lock=lock)
    with contextlib.closing(listener), dial(path) as first, dial(path):
        await until(lambda: len(served) == 2)
        assert first.recv(1) == b""
        assert [text for text in unhandled_loop_exceptions if "the first" in text]
        unhandled_loop_exceptions.clear()
        served[1].close()


async def test_a_failure_after_the_socket_was_registered_harms_no_later_one(
    path: str, lock: SocketLock, unhandled_loop_exceptions: list[str]
) -> None:
    """A watched number that was closed makes uvloop's epoll call fail, and libuv then aborts."""

    def register_and_fail(sock: socket.socket, peer: PeerCredentials) -> None:
        asyncio.get_running_loop().add_reader(sock.fileno(), print)
        raise ValueError("too late")

    listener = Listener(bind_listener(path, lock), register_and_fail, lambda sock: sock.close(), lock=lock)
    with contextlib.closing(listener):
        for _ in range(3):
            with await connect(path, DEADLINE) as sock:
                await until(lambda: unhandled_loop_exceptions)
                assert sock.recv(1) == b""
            assert all("too late" in text for text in unhandled_loop_exceptions)
            unhandled_loop_exceptions.clear()


async def test_out_of_fds_the_waiting_are_told_and_accepting_resumes_by_itself(
    house: House, path: str, room_for_fds: Callable[[int], AbstractContextManager[None]]
) -> None:
    streams = [FdStream(dial(path), client()) for _ in range(3)]
    late = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) for _ in range(2)]
    with room_for_fds(0):
        async with asyncio.timeout(DEADLINE):
            for stream in streams:
                told = received(await stream.receive()).message
                assert told == ErrorResponse.of(TooManyClients(limit=7))
                assert await stream.receive() == EndOfStream()
        assert house.listener.paused
        late[0].connect(path)
        await until(lambda: house.refused == 4)  # again and again, as long as it lasts
    late[1].connect(path)
    await until(lambda: house.inside and not house.listener.paused)
    for stream in streams:
        stream.close()
    for sock in late:
        sock.close()


async def test_a_refused_connection_that_is_kept_for_a_while_only_delays_the_next(
    path: str, lock: SocketLock, room_for_fds: Callable[[int], AbstractContextManager[None]]
) -> None:
    kept: list[socket.socket] = []
    served: list[socket.socket] = []
    listener = Listener(bind_listener(path, lock), lambda sock, _: served.append(sock), kept.append, lock=lock)
    with contextlib.closing(listener), dial(path), dial(path):
        with room_for_fds(0):
            await until(lambda: kept)
            for _ in range(3):
                await asyncio.sleep(0.01)  # the listener's pause
            assert (len(kept), len(served)) == (1, 0)
            kept.pop().close()
            # Refused on the reserve, or served, if it is there first.
            await until(lambda: kept or served)
        for sock in (*kept, *served):
            sock.close()


async def test_after_one_shortage_the_next_is_told_too(
    path: str, lock: SocketLock, room_for_fds: Callable[[int], AbstractContextManager[None]]
) -> None:
    """The reserve, given away in the first, is taken again as soon as there is room."""
    kept: list[socket.socket] = []
    served: list[socket.socket] = []
    listener = Listener(bind_listener(path, lock), lambda sock, _: served.append(sock), kept.append, lock=lock)
    late = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    with contextlib.closing(listener), dial(path), late:
        with room_for_fds(0):
            await until(lambda: kept)
        await until(lambda: not listener.paused)
        with room_for_fds(0):
            late.connect(path)
            await until(lambda: len(kept) == 2)
        assert not served
        for sock in kept:
            sock.close()


async def test_without_fds_nobody_waiting_means_nothing_to_do(
    house: House, room_for_fds: Callable[[int], AbstractContextManager[None]]
) -> None:
    with room_for_fds(0):
        await asyncio.sleep(0)
    assert not house.listener.paused


class FailingSocket(socket.socket):
    """A listening socket whose next accepts fail with the given errors."""

    failures: list[int]

    def accept(self) -> tuple[socket.socket, object]:
        if self.failures:
            number = self.failures.pop(0)
            raise OSError(number, os.strerror(number))
        return super().accept()


@pytest.mark.parametrize(
    "number", [errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED, errno.EPERM, errno.EIO]
)
async def test_accepting_goes_on_after_any_error(
    path: str, lock: SocketLock, number: int, unhandled_loop_exceptions: list[str]
) -> None:
    """And those that are nobody's shortage are reported."""
    failing = FailingSocket(fileno=bind_listener(path, lock).detach())
    failing.setblocking(False)
    failing.failures = [number] * 3
    with contextlib.closing(House(path, lock, failing)) as house, dial(path):
        await until(lambda: house.inside or house.refused)
    reported = len(unhandled_loop_exceptions)
    unhandled_loop_exceptions.clear()
    assert reported == (3 if number in (errno.EPERM, errno.EIO) else 0)


# ---------------------------------------------------------------------------- the listener's end
async def test_closing_removes_the_socket_and_lets_those_in_who_have_connected(path: str, lock: SocketLock) -> None:
    house = House(path, lock)
    with dial(path), dial(path):
        house.listener.close()
        house.listener.close()
        assert len(house.inside) == 2
        assert not os.path.exists(path)
        house.close()


async def test_closing_leaves_a_newer_socket_at_the_path_alone(path: str, lock: SocketLock) -> None:
    house = House(path, lock)
    os.unlink(path)
    with socket.socket(socket.AF_UNIX) as newer:
        newer.bind(path)
        house.close()
        assert os.path.exists(path)


async def test_without_the_lock_the_socket_stays_until_the_lock_is_released(path: str, short_tmp: Path) -> None:
    lock = SocketLock(path)
    lock.acquire()
    listener = Listener(bind_listener(path, lock), lambda sock, _: sock.close(), lambda sock: sock.close())
    listener.close()
    with pytest.raises(NotRunning, match="refused"):
        await connect(path, 1)
    lock.release()
    assert not os.listdir(short_tmp)


async def test_closing_while_paused(
    house: House, path: str, room_for_fds: Callable[[int], AbstractContextManager[None]]
) -> None:
    with dial(path), room_for_fds(0):
        await until(lambda: house.listener.paused)
        house.close()
    await asyncio.sleep(0.02)  # longer than the pause: it must not resume


# -------------------------------------------------------------------------------------- refusing
async def test_a_refused_peer_reads_why_and_then_an_orderly_end(sockets: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = sockets
    peer = FdStream(theirs, client())
    peer.send(0, Hello(versions=(1, 1)))
    refuse(ours, PeerNotAllowed(uid=7, allowed=[8]))
    assert ours.fileno() == -1
    told = received(await peer.receive()).message
    assert told == ErrorResponse.of(PeerNotAllowed(uid=7, allowed=[8]))
    assert await peer.receive() == EndOfStream()
    peer.close()


def test_refusing_who_has_gone_is_nothing(sockets: tuple[socket.socket, socket.socket]) -> None:
    sockets[1].close()
    refuse(sockets[0], TooManyClients(limit=1))
    assert sockets[0].fileno() == -1


# ------------------------------------------------------------------------------------- connecting
async def test_connecting_gives_a_socket_of_a_checked_daemon(house: House, path: str) -> None:
    with await connect(path, DEADLINE) as sock:
        assert not sock.getblocking()
        assert not sock.get_inheritable()
        await until(lambda: house.inside)
    with await connect(path, None):
        pass


async def test_no_socket_is_not_running_at_once_with_the_path(path: str) -> None:
    with pytest.raises(NotRunning, match="No such file") as caught:
        await connect(path, 1000)
    assert caught.value.socket == path


async def test_a_stale_socket_is_not_running_at_once(path: str, lock: SocketLock) -> None:
    bind_listener(path, lock).close()
    with pytest.raises(NotRunning, match="refused"):
        await connect(path, 1000)


async def test_what_is_unusable_or_untrusted_is_told_before_connecting(path: str, short_tmp: Path) -> None:
    with pytest.raises(AddressTooLong):
        await connect("/" + "x" * 107, 1)
    (short_tmp / "file").touch()
    with pytest.raises(AddressError, match="not a socket"):
        await connect(str(short_tmp / "file"), 1)
    with pytest.raises(AddressError, match="Not a directory"):
        await connect(str(short_tmp / "file" / "s"), 1)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(path)
        sock.listen()
        short_tmp.chmod(0o777)
        with pytest.raises(AddressNotTrusted):
            await connect(path, 1)
        sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            sock.accept()


async def test_a_full_backlog_is_waited_for(path: str, lock: SocketLock) -> None:
    with bind_listener(path, lock, backlog=0) as listening, dial(path):
        connecting = asyncio.create_task(connect(path, DEADLINE))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not connecting.done()
        listening.accept()[0].close()
        async with asyncio.timeout(DEADLINE):
            (await connecting).close()


async def test_a_backlog_that_stays_full_is_not_running_after_the_timeout(path: str, lock: SocketLock) -> None:
    with bind_listener(path, lock, backlog=0), dial(path), pytest.raises(NotRunning, match=r"stayed full for 0\.02 s"):
        await connect(path, 0.02)


async def test_a_cancelled_connect_leaves_nothing(path: str, lock: SocketLock) -> None:
    with bind_listener(path, lock, backlog=0), dial(path):
        connecting = asyncio.create_task(connect(path, None))
        await asyncio.sleep(0)
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting


async def test_a_daemon_that_is_to_come_can_be_waited_for(path: str) -> None:
    connecting = asyncio.create_task(connect(path, DEADLINE, wait=True))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not connecting.done()
    with SocketLock(path) as lock, bind_listener(path, lock):
        async with asyncio.timeout(DEADLINE):
            (await connecting).close()
    with pytest.raises(NotRunning, match=r"No such file.* for 0\.01 s"):
        await connect(path, 0.01, wait=True)


STRANGERS_DAEMON = """
import os, socket, sys
os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
sock = socket.socket(socket.AF_UNIX)
sock.bind(sys.argv[1])
sock.listen()
print("listening", flush=True)
sys.stdin.read()
"""


@as_root
async def test_a_daemon_of_somebody_else_is_refused_by_who_it_is_and_not_by_its_file_alone(
    path: str, short_tmp: Path
) -> None:
    short_tmp.chmod(0o1777)
    command = [sys.executable, "-c", STRANGERS_DAEMON, path, str(STRANGER)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        with pytest.raises(AddressNotTrusted, match=str(STRANGER)):
            await connect(path, 1)
        os.chown(path, 0, 0)
        with pytest.raises(PeerNotAllowed) as caught:
            await connect(path, 1)
        assert (caught.value.uid, caught.value.allowed) == (STRANGER, [0])
        (await connect(path, 1, allowed_uids={STRANGER})).close()
        process.kill()


@as_root
async def test_the_listener_knows_a_client_of_somebody_else(house: House, path: str, short_tmp: Path) -> None:
    """Whom the file's mode did not keep out."""
    short_tmp.chmod(0o1777)
    os.chmod(path, 0o666)
    script = "import os, socket, sys; os.setuid(int(sys.argv[2])); s = socket.socket(1); s.connect(sys.argv[1])"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, path, str(STRANGER))
    assert await process.wait() == 0
    await until(lambda: house.peers)
    assert house.peers[0].uid == STRANGER


async def test_a_session_over_a_real_socket(house: House, path: str) -> None:
    async with asyncio.timeout(DEADLINE):
        asking = FdStream(await connect(path, DEADLINE), client())
        asking.send(0, Hello(versions=(1, 1)))
        await until(lambda: house.inside)
        answering = FdStream(house.inside.pop(), Connection(Role.DAEMON))
        assert received(await answering.receive()).message == Hello(versions=(1, 1))
        asking.close()
        assert await answering.receive() == EndOfStream()
        answering.close()

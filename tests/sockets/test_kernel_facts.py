"""What the kernel and the loops do, where this room's code leans on it."""

import array
import asyncio
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.sockets.wire import numbered
from wcache_async.sockets.fds import OwnedFd, own_received
from wcache_async.sockets.peer import peer_credentials

Sockets = tuple[socket.socket, socket.socket]
ROOM = socket.CMSG_SPACE(253 * 4)


def send(sock: socket.socket, data: bytes, fds: list[OwnedFd]) -> int:
    rights = array.array("i", [fd.fileno() for fd in fds])
    return sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])


def receive(sock: socket.socket, nbytes: int, room: int = ROOM, flags: int = 0) -> tuple[bytes, list[OwnedFd], int]:
    data, ancillary, got_flags, _ = sock.recvmsg(nbytes, room, socket.MSG_CMSG_CLOEXEC | flags)
    return data, own_received(ancillary), got_flags


def close(fds: list[OwnedFd]) -> None:
    for fd in fds:
        fd.close()


def eof_of(read_end: OwnedFd) -> bool:
    return os.read(read_end.fileno(), 1) == b""


# ------------------------------------------------------------------------------ fds in messages
def test_reading_without_a_control_buffer_makes_the_kernel_close_the_fds(sockets: Sockets) -> None:
    reader, writer = (OwnedFd(fd) for fd in os.pipe())
    with reader, writer:
        send(sockets[0], b"ab", [writer])
        writer.close()
        assert sockets[1].recv(1) == b"a"  # the first byte alone loses them
        assert eof_of(reader)
    _, fds, flags = receive(sockets[1], 10)
    assert not fds
    assert not flags & socket.MSG_CTRUNC  # and nothing tells


def test_a_control_buffer_too_small_lets_some_through_and_says_ctrunc(sockets: Sockets) -> None:
    sent = numbered(5)
    send(sockets[0], b"x", sent)
    _, fds, flags = receive(sockets[1], 10, socket.CMSG_LEN(3 * 4))
    assert 0 < len(fds) < 5
    assert flags & socket.MSG_CTRUNC
    close(sent + fds)


def test_a_control_buffer_for_one_lets_two_in(sockets: Sockets) -> None:
    sent = numbered(2)
    send(sockets[0], b"x", sent)
    _, fds, flags = receive(sockets[1], 10, socket.CMSG_SPACE(4))
    assert len(fds) == 2
    assert not flags & socket.MSG_CTRUNC
    close(sent + fds)


def test_at_the_fd_limit_some_arrive_and_only_ctrunc_tells(
    sockets: Sockets, room_for_fds: Callable[[int], AbstractContextManager[None]]
) -> None:
    sent = numbered(5)
    send(sockets[0], b"x", sent)
    with room_for_fds(2):
        data, fds, flags = receive(sockets[1], 10)
    assert data == b"x"
    assert len(fds) == 2
    assert flags & socket.MSG_CTRUNC
    close(sent + fds)


def test_253_fds_go_in_a_message_and_254_do_not(sockets: Sockets) -> None:
    sent = numbered(254)
    with pytest.raises(OSError, match="Invalid argument"):
        send(sockets[0], b"x", sent)
    send(sockets[0], b"x", sent[:253])
    _, fds, flags = receive(sockets[1], 10)
    assert len(fds) == 253
    assert not flags & socket.MSG_CTRUNC
    close(sent + fds)


def test_fds_come_with_the_first_byte_of_their_message(sockets: Sockets) -> None:
    sent = numbered(1)
    send(sockets[0], b"ab", sent)
    data, fds, _ = receive(sockets[1], 1)
    assert (data, len(fds)) == (b"a", 1)
    data, more, _ = receive(sockets[1], 1)
    assert (data, more) == (b"b", [])
    close(sent + fds)


def test_plain_bytes_and_a_message_with_fds_after_them_can_arrive_together(sockets: Sockets) -> None:
    sent = numbered(1)
    sockets[0].send(b"plain")
    send(sockets[0], b"with", sent)
    data, fds, _ = receive(sockets[1], 100)
    assert (data, len(fds)) == (b"plainwith", 1)
    close(sent + fds)


def test_two_messages_with_fds_never_arrive_together(sockets: Sockets) -> None:
    sent = numbered(2)
    send(sockets[0], b"one", sent[:1])
    send(sockets[0], b"two", sent[1:])
    data, fds, _ = receive(sockets[1], 100)
    assert (data, len(fds)) == (b"one", 1)
    data, more, _ = receive(sockets[1], 100)
    assert (data, len(more)) == (b"two", 1)
    close(sent + fds + more)


def test_a_partial_send_took_the_fds_along(sockets: Sockets) -> None:
    sent = numbered(1)
    sockets[0].setblocking(False)
    assert send(sockets[0], bytes(4 << 20), sent) < 4 << 20
    _, fds, _ = receive(sockets[1], 1)
    assert len(fds) == 1
    close(sent + fds)


def test_received_fds_are_inheritable_unless_cmsg_cloexec_is_asked_for(sockets: Sockets) -> None:
    sent = numbered(2)
    for fd in sent:
        send(sockets[0], b"x", [fd])
    _, ancillary, _, _ = sockets[1].recvmsg(1, ROOM)
    plain = own_received(ancillary)
    _, ours, _ = receive(sockets[1], 1)
    assert os.get_inheritable(plain[0].fileno())
    assert not os.get_inheritable(ours[0].fileno())
    close(sent + plain + ours)


# ------------------------------------------------------------------------------------- sockets
def test_a_duplicate_can_make_a_socket_block_and_msg_dontwait_never_does(sockets: Sockets) -> None:
    ours = sockets[0]
    ours.setblocking(False)
    with ours.dup() as duplicate:
        duplicate.setblocking(True)
        assert not fcntl.fcntl(ours.fileno(), fcntl.F_GETFL) & os.O_NONBLOCK
        with pytest.raises(BlockingIOError):
            ours.recv(1, socket.MSG_DONTWAIT)


def test_closing_over_unread_bytes_resets_after_what_was_written_is_read(sockets: Sockets) -> None:
    sockets[1].send(b"never read")
    sockets[0].send(b"last words")
    sockets[0].close()
    with pytest.raises(BrokenPipeError):
        sockets[1].send(b"x")
    assert sockets[1].recv(100) == b"last words"
    with pytest.raises(ConnectionResetError):
        sockets[1].recv(100)


def test_fchmod_before_bind_sets_the_mode_of_the_file(short_tmp: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        os.fchmod(sock.fileno(), 0o600)
        sock.bind(str(short_tmp / "s"))
    assert stat.S_IMODE((short_tmp / "s").stat().st_mode) == 0o600


@pytest.mark.parametrize("nbytes", [107, 108])
def test_a_path_has_107_bytes_at_most(short_tmp: Path, nbytes: int) -> None:
    name = "n" * (nbytes - len(str(short_tmp)) - 1)
    with socket.socket(socket.AF_UNIX) as sock:
        if nbytes == 107:
            sock.bind(str(short_tmp / name))
        else:
            with pytest.raises(OSError, match="too long"):
                sock.bind(str(short_tmp / name))


def test_a_long_path_can_be_bound_through_its_folder(short_tmp: Path) -> None:
    folder = short_tmp / ("f" * 150)
    folder.mkdir()
    with OwnedFd(os.open(folder, os.O_PATH)) as fd, socket.socket(socket.AF_UNIX) as sock:
        sock.bind(f"/proc/self/fd/{fd.fileno()}/s")
    assert os.listdir(folder) == ["s"]


def test_a_renamed_socket_answers_at_its_new_name(short_tmp: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as client:
        listening.bind(str(short_tmp / "new"))
        listening.listen()
        os.rename(short_tmp / "new", short_tmp / "s")
        client.connect(str(short_tmp / "s"))
        assert listening.getsockname().endswith("new")  # so never unlink by it


def test_a_full_backlog_answers_eagain_at_once(short_tmp: Path) -> None:
    clients = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) for _ in range(3)]
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(short_tmp / "s"))
        listening.listen(1)
        answers = [client.connect_ex(str(short_tmp / "s")) for client in clients]
    assert answers == [0, 0, errno.EAGAIN]
    for client in clients:
        client.close()


def test_peercred_is_known_before_a_byte_was_sent(sockets: Sockets) -> None:
    peer = peer_credentials(sockets[0])
    assert (peer.pid, peer.uid, peer.gid) == (os.getpid(), os.geteuid(), os.getegid())


def test_a_flock_outlives_the_name_of_its_file(short_tmp: Path) -> None:
    """So whoever got the lock must look whether the name still leads to what it locked."""
    path = short_tmp / "lock"
    flags = os.O_RDWR | os.O_CREAT
    with OwnedFd(os.open(path, flags)) as first, OwnedFd(os.open(path, flags)) as waiting:
        fcntl.flock(first.fileno(), fcntl.LOCK_EX)
        path.unlink()
        first.close()
        fcntl.flock(waiting.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        with OwnedFd(os.open(path, flags)) as third:
            fcntl.flock(third.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_an_inode_number_is_not_reused_while_its_socket_listens(short_tmp: Path) -> None:
    path = short_tmp / "s"
    with socket.socket(socket.AF_UNIX) as first:
        first.bind(str(path))
        inode = path.stat().st_ino
        path.unlink()
        for _ in range(20):
            with socket.socket(socket.AF_UNIX) as other:
                other.bind(str(path))
            assert path.stat().st_ino != inode
            path.unlink()


# --------------------------------------------------------------------------------------- loops
async def test_by_number_a_reader_ends_with_its_socket_and_the_next_of_that_number_works() -> None:
    loop = asyncio.get_running_loop()
    numbers = set()
    for _ in range(3):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            number = ours.fileno()
            numbers.add(number)
            ready = asyncio.Event()
            loop.add_reader(number, ready.set)
            theirs.send(b"x")
            async with asyncio.timeout(10):
                await ready.wait()
            assert ours.recv(1) == b"x"
            loop.remove_reader(number)
            ours.close()
            theirs.setblocking(False)
            assert theirs.recv(1) == b""  # the peer sees the end: nothing kept the fd open
    assert len(numbers) == 1

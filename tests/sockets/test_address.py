"""Where the socket lies, and who holds it."""

import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from wcache_async.errors import AddressError, AddressInUse, AddressNotTrusted, AddressTooLong
from wcache_async.sockets.address import (
    MAX_PATH_NBYTES,
    SocketLock,
    check_path,
    check_trusted,
    default_socket_path,
    prepare_folder,
)

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
STRANGER = 54_321


@pytest.fixture
def listening(short_tmp: Path) -> Iterator[str]:
    """The path of a socket in a private folder."""
    path = str(short_tmp / "s")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(path)
        yield path


# ---------------------------------------------------------------------------------- the address
@pytest.mark.parametrize(
    ("environ", "path"),
    [
        ({"WCACHE_SOCKET": "/a/b", "XDG_RUNTIME_DIR": "/run/user/7"}, "/a/b"),
        ({"WCACHE_SOCKET": "", "XDG_RUNTIME_DIR": "/run/user/7"}, "/run/user/7/wcache/wcache.sock"),
        ({"XDG_RUNTIME_DIR": "relative", "TMPDIR": "/var/tmp"}, "/var/tmp/wcache-{uid}/wcache.sock"),
        ({"XDG_RUNTIME_DIR": "", "TMPDIR": ""}, "/tmp/wcache-{uid}/wcache.sock"),
        ({}, "/tmp/wcache-{uid}/wcache.sock"),
    ],
)
def test_the_default_address(environ: dict[str, str], path: str) -> None:
    assert default_socket_path(environ) == path.format(uid=os.geteuid())


def test_the_default_address_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WCACHE_SOCKET", "/from/the/environment")
    assert default_socket_path() == "/from/the/environment"


def test_a_paths_length_is_counted_in_bytes() -> None:
    check_path("/" + "x" * (MAX_PATH_NBYTES - 1))
    with pytest.raises(AddressTooLong, match="108 bytes") as caught:
        check_path("/" + "x" * MAX_PATH_NBYTES)
    assert caught.value.length == 108
    with pytest.raises(AddressTooLong):
        check_path("/" + "ü" * 60)


@pytest.mark.parametrize("path", ["", "/a/folder/", "\0abstract", "/a\0b"])
def test_what_names_no_file_is_refused(path: str) -> None:
    with pytest.raises(AddressError):
        check_path(path)


# ----------------------------------------------------------------------------------- the folder
def test_a_missing_folder_is_made_for_this_user_alone(short_tmp: Path) -> None:
    prepare_folder(str(short_tmp / "new" / "s"))
    assert stat.S_IMODE((short_tmp / "new").stat().st_mode) == 0o700
    prepare_folder(str(short_tmp / "new" / "s"))


def test_only_the_last_folder_is_made(short_tmp: Path) -> None:
    """What is missing above it is more likely a typing error."""
    with pytest.raises(AddressError, match="cannot be made: No such file"):
        prepare_folder(str(short_tmp / "missing" / "new" / "s"))


def test_a_file_in_the_folders_place_is_refused(short_tmp: Path) -> None:
    (short_tmp / "file").touch()
    with pytest.raises(AddressError, match="not a folder"):
        prepare_folder(str(short_tmp / "file" / "s"))


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_may_write_is_refused(short_tmp: Path, mode: int) -> None:
    short_tmp.chmod(mode)
    with pytest.raises(AddressNotTrusted, match=f"{mode:04o}"):
        prepare_folder(str(short_tmp / "s"))


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o1777])
def test_a_folder_that_others_may_read_or_that_is_sticky_is_fine(short_tmp: Path, mode: int) -> None:
    short_tmp.chmod(mode)
    prepare_folder(str(short_tmp / "s"))


def test_the_temporary_directory_itself_will_do() -> None:
    prepare_folder("/tmp/some.sock")


@as_root
def test_a_folder_of_somebody_else_is_refused(short_tmp: Path) -> None:
    os.chown(short_tmp, STRANGER, STRANGER)
    with pytest.raises(AddressNotTrusted, match=f"belongs to uid {STRANGER}"):
        prepare_folder(str(short_tmp / "s"))


def test_a_link_of_this_users_to_a_folder_is_followed(short_tmp: Path) -> None:
    (short_tmp / "real").mkdir(0o700)
    (short_tmp / "link").symlink_to("real")
    prepare_folder(str(short_tmp / "link" / "s"))
    (short_tmp / "real").chmod(0o777)
    with pytest.raises(AddressNotTrusted):
        prepare_folder(str(short_tmp / "link" / "s"))
    (short_tmp / "dangling").symlink_to("nowhere")
    with pytest.raises(AddressError, match="No such file"):
        prepare_folder(str(short_tmp / "dangling" / "s"))


@as_root
def test_a_link_of_somebody_else_is_not_followed(short_tmp: Path) -> None:
    """Where anyone may put one, it could lead into any folder of this user's."""
    (short_tmp / "real").mkdir(0o700)
    (short_tmp / "link").symlink_to("real")
    os.chown(short_tmp / "link", STRANGER, STRANGER, follow_symlinks=False)
    with pytest.raises(AddressNotTrusted, match=f"made by uid {STRANGER}"):
        prepare_folder(str(short_tmp / "link" / "s"))


# --------------------------------------------------------------------------- what a client trusts
def test_a_private_socket_in_a_private_folder_is_trusted(listening: str) -> None:
    check_trusted(listening)


def test_nothing_there_is_the_systems_error(short_tmp: Path) -> None:
    with pytest.raises(FileNotFoundError):
        check_trusted(str(short_tmp / "s"))


def test_what_is_not_a_socket_is_refused(short_tmp: Path) -> None:
    (short_tmp / "s").touch()
    with pytest.raises(AddressError, match="not a socket"):
        check_trusted(str(short_tmp / "s"))


def test_a_socket_where_others_could_put_theirs_is_not_trusted(listening: str, short_tmp: Path) -> None:
    short_tmp.chmod(0o777)
    with pytest.raises(AddressNotTrusted, match="others may write"):
        check_trusted(listening)


@as_root
def test_a_socket_of_somebody_else_is_not_trusted_unless_that_user_is_allowed(listening: str) -> None:
    os.chown(listening, STRANGER, STRANGER)
    with pytest.raises(AddressNotTrusted, match=f"belongs to uid {STRANGER}"):
        check_trusted(listening)
    check_trusted(listening, {STRANGER})


@as_root
def test_a_link_of_somebody_else_to_a_socket_is_not_followed(listening: str, short_tmp: Path) -> None:
    (short_tmp / "link").symlink_to("s")
    check_trusted(str(short_tmp / "link"))
    os.chown(short_tmp / "link", STRANGER, STRANGER, follow_symlinks=False)
    with pytest.raises(AddressNotTrusted, match="symbolic link"):
        check_trusted(str(short_tmp / "link"))


# --------------------------------------------------------------------------------------- the lock
HOLDER = """
import sys, time
from wcache_async.sockets.address import SocketLock
lock = SocketLock(sys.argv[1])
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(short_tmp: Path) -> Iterator["subprocess.Popen[str]"]:
    """Another process that holds the lock of ``s``."""
    command = [sys.executable, "-c", HOLDER, str(short_tmp / "s")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_the_second_holder_is_refused_with_the_firsts_pid(short_tmp: Path, holder: "subprocess.Popen[str]") -> None:
    lock = SocketLock(str(short_tmp / "s"))
    with pytest.raises(AddressInUse, match=f"pid {holder.pid}") as caught:
        lock.acquire()
    assert caught.value.pid == holder.pid
    assert not lock.held


def test_a_killed_holders_lock_is_free_at_once(short_tmp: Path, holder: "subprocess.Popen[str]") -> None:
    holder.kill()
    holder.wait()
    assert (short_tmp / "s.lock").exists()
    with SocketLock(str(short_tmp / "s")) as lock:
        assert lock.held
        assert (short_tmp / "s.lock").read_text() == f"{os.getpid()}\n"
    assert not (short_tmp / "s.lock").exists()


def test_two_locks_of_one_process_exclude_each_other_too(short_tmp: Path) -> None:
    with SocketLock(str(short_tmp / "s")), pytest.raises(AddressInUse) as caught:
        SocketLock(str(short_tmp / "s")).acquire()
    assert caught.value.pid == os.getpid()


def test_taking_or_giving_up_twice_is_once(short_tmp: Path) -> None:
    lock = SocketLock(str(short_tmp / "s"))
    lock.acquire()
    lock.acquire()
    lock.release()
    lock.release()
    assert not os.listdir(short_tmp)


def test_a_holder_that_has_not_written_its_pid_yet_is_nobody_known(short_tmp: Path) -> None:
    with SocketLock(str(short_tmp / "s")):
        (short_tmp / "s.lock").write_text("")
        with pytest.raises(AddressInUse, match="another daemon"):
            SocketLock(str(short_tmp / "s")).acquire()


def test_a_lock_file_that_is_anothers_by_now_is_left_alone(short_tmp: Path) -> None:
    lock = SocketLock(str(short_tmp / "s"))
    lock.acquire()
    (short_tmp / "s.lock").unlink()
    with SocketLock(str(short_tmp / "s")):
        lock.release()
        assert (short_tmp / "s.lock").exists()


def test_a_lock_on_a_removed_file_is_no_lock(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last holder removes the file between the next one's open and flock."""
    path = str(short_tmp / "s")
    first, second = SocketLock(path), SocketLock(path)
    first.acquire()
    opened = SocketLock._open
    opens = 0

    def open_then_lose(lock: SocketLock) -> object:
        nonlocal opens
        fd = opened(lock)
        opens += 1
        if opens == 1:
            first.release()
        return fd

    monkeypatch.setattr(SocketLock, "_open", open_then_lose)
    with second:
        assert opens == 2
        monkeypatch.undo()
        with pytest.raises(AddressInUse):
            SocketLock(path).acquire()


def test_many_at_once_are_never_two_holders(short_tmp: Path) -> None:
    path = str(short_tmp / "s")
    inside = 0
    most = 0
    guard = threading.Lock()

    def work() -> None:
        nonlocal inside, most
        for _ in range(150):
            lock = SocketLock(path)
            try:
                lock.acquire()
            except AddressInUse:
                continue
            with guard:
                inside += 1
                most = max(most, inside)
            with guard:
                inside -= 1
            lock.release()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert not os.listdir(short_tmp)


def test_the_lock_is_not_inherited_by_a_program_that_is_started(short_tmp: Path) -> None:
    with SocketLock(str(short_tmp / "s")) as lock:
        assert lock._fd is not None
        assert not os.get_inheritable(lock._fd.fileno())


def test_a_link_or_a_folder_as_lock_file_is_refused(short_tmp: Path) -> None:
    (short_tmp / "precious").write_text("kept")
    (short_tmp / "s.lock").symlink_to("precious")
    with pytest.raises(AddressError):
        SocketLock(str(short_tmp / "s")).acquire()
    assert (short_tmp / "precious").read_text() == "kept"
    (short_tmp / "t.lock").mkdir()
    with pytest.raises(AddressError, match="Is a directory"):
        SocketLock(str(short_tmp / "t")).acquire()
    os.mkfifo(short_tmp / "u.lock")
    with pytest.raises(AddressNotTrusted):
        SocketLock(str(short_tmp / "u")).acquire()


@as_root
def test_a_lock_file_of_somebody_else_is_refused(short_tmp: Path) -> None:
    """Its owner could lock it for ever, or let it say any pid."""
    (short_tmp / "s.lock").touch()
    os.chown(short_tmp / "s.lock", STRANGER, STRANGER)
    with pytest.raises(AddressNotTrusted):
        SocketLock(str(short_tmp / "s")).acquire()


def test_a_missing_folder_is_told(short_tmp: Path) -> None:
    with pytest.raises(AddressError, match="No such file"):
        SocketLock(str(short_tmp / "missing" / "s")).acquire()


def test_the_holder_removes_its_socket_and_nobody_elses(short_tmp: Path) -> None:
    path = str(short_tmp / "s")
    with socket.socket(socket.AF_UNIX) as ours, socket.socket(socket.AF_UNIX) as theirs:
        with SocketLock(path) as lock:
            ours.bind(path)
            lock.adopt_socket()
        assert not os.listdir(short_tmp)
        with SocketLock(path) as lock:
            theirs.bind(path)
            lock.adopt_socket()
            os.unlink(path)
            with socket.socket(socket.AF_UNIX) as newer:
                newer.bind(path)
                lock.remove_socket()
                assert set(os.listdir(short_tmp)) == {"s", "s.lock"}
        assert os.listdir(short_tmp) == ["s"]

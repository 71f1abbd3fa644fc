"""memfd: what is sealed stays as it is, and what is not sealed is not taken."""

import errno
import fcntl
import mmap
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from wcache_async.backends.memfd import (
    SEALS,
    check_memfd,
    create_memfd,
    read_memfd,
    read_memfd_into,
    seal_memfd,
    sealed_memfd,
)
from wcache_async.errors import InvalidMemfd
from wcache_async.sockets.fds import OwnedFd


@pytest.mark.parametrize(
    "change",
    [
        lambda fd: os.pwrite(fd, b"x", 0),
        lambda fd: os.ftruncate(fd, 100),
        lambda fd: os.ftruncate(fd, 1),
        lambda fd: os.posix_fallocate(fd, 0, 100),
        lambda fd: mmap.mmap(fd, 6),
        lambda fd: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
        lambda fd: os.pwrite(os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_TRUNC), b"", 0),
    ],
    ids=["write", "grow", "shrink", "allocate", "map_writable", "seal", "truncate"],
)
def test_nothing_changes_sealed_memory(change: Callable[[int], object]) -> None:
    with sealed_memfd("test", b"weight") as fd:
        with pytest.raises(PermissionError):
            change(fd.fileno())
        assert read_memfd(fd, 6, "it") == b"weight"


def test_sealing_waits_for_no_writable_mapping() -> None:
    with create_memfd("test", 10) as fd:
        with mmap.mmap(fd.fileno(), 10), pytest.raises(OSError, match="busy") as caught:
            seal_memfd(fd)
        assert caught.value.errno == errno.EBUSY
        seal_memfd(fd)
        check_memfd(fd, 10, "it")


def test_a_memfd_is_closed_on_exec_and_not_executable() -> None:
    with create_memfd("test", 10) as fd:
        assert not os.get_inheritable(fd.fileno())
        assert os.fstat(fd.fileno()).st_mode & 0o111 == 0
        assert os.fstat(fd.fileno()).st_blocks == 0


def test_kernels_that_know_no_noexec_seal_are_asked_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    create = os.memfd_create
    asked: list[int] = []

    def older_kernel(name: str, flags: int) -> int:
        asked.append(flags)
        if flags & ~(os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING):
            raise OSError(errno.EINVAL, "Invalid argument")
        return create(name, flags)

    monkeypatch.setattr(os, "memfd_create", older_kernel)
    with sealed_memfd("test", b"x") as fd:
        check_memfd(fd, 1, "it")
    assert len(asked) == 2


def test_a_memfd_that_cannot_be_filled_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="No space"):
        sealed_memfd("test", b"x")
    assert os.listdir("/proc/self/fd") == before


def test_a_memfd_that_cannot_be_as_large_is_closed() -> None:
    before = os.listdir("/proc/self/fd")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            create_memfd("test", 1001)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir("/proc/self/fd") == before


def test_a_part_is_read_into_place_and_a_part_that_is_not_there_is_an_error() -> None:
    with sealed_memfd("test", bytes(range(100))) as fd:
        into = bytearray(10)
        read_memfd_into(fd, memoryview(into), 20)
        assert into == bytes(range(20, 30))
        read_memfd_into(fd, memoryview(b""), 500)
        with pytest.raises(OSError, match="5 bytes are missing at offset 100"):
            read_memfd_into(fd, memoryview(into), 95)


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 4096])
def test_what_was_sealed_is_read_back(data: bytes) -> None:
    with sealed_memfd("test", data) as fd:
        assert read_memfd(fd, len(data), "it") == data


@pytest.mark.parametrize(
    ("seal", "name"),
    [
        (fcntl.F_SEAL_WRITE, "F_SEAL_WRITE"),
        (fcntl.F_SEAL_GROW, "F_SEAL_GROW"),
        (fcntl.F_SEAL_SHRINK, "F_SEAL_SHRINK"),
        (fcntl.F_SEAL_SEAL, "F_SEAL_SEAL"),
    ],
)
def test_each_missing_seal_is_named(seal: int, name: str) -> None:
    with create_memfd("test", 10) as fd:
        fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, SEALS & ~seal)
        with pytest.raises(InvalidMemfd) as caught:
            check_memfd(fd, 10, "arena 3")
        assert caught.value.what == "arena 3"
        assert caught.value.reason == f"it lacks {name}"


def test_the_future_write_seal_does_not_stand_in_for_the_write_seal() -> None:
    # Under it a mapping made earlier still writes.
    with create_memfd("test", 10) as fd:
        fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, SEALS & ~fcntl.F_SEAL_WRITE | 0x0010)
        with pytest.raises(InvalidMemfd, match="F_SEAL_WRITE"):
            check_memfd(fd, 10, "arena 0")


@pytest.mark.parametrize("nbytes", [0, 9, 11])
def test_another_size_than_announced_is_refused(nbytes: int) -> None:
    with sealed_memfd("test", bytes(10)) as fd, pytest.raises(InvalidMemfd, match="10 bytes"):
        check_memfd(fd, nbytes, "arena 0")


def _pipe() -> int:
    read, write = os.pipe()
    os.close(write)
    return read


@pytest.mark.parametrize(
    "make",
    [
        lambda _: os.open("/dev/null", os.O_RDWR),
        lambda _: os.open("/dev/zero", os.O_RDWR),
        lambda _: _pipe(),
        lambda folder: os.open(folder, os.O_RDONLY),
        lambda folder: os.open(folder / "file", os.O_RDWR | os.O_CREAT),
        lambda folder: os.open("/proc/self/maps", os.O_RDONLY),
        lambda _: os.open("/proc/self/exe", os.O_PATH),
    ],
    ids=["null", "zero", "pipe", "folder", "file", "proc", "path_only"],
)
def test_what_is_no_memfd_is_refused(make: Callable[[Path], int], tmp_path: Path) -> None:
    with OwnedFd(make(tmp_path)) as fd, pytest.raises(InvalidMemfd) as caught:
        check_memfd(fd, 0, "arena 0")
    assert "no memfd" in caught.value.reason or "it lacks F_SEAL" in caught.value.reason

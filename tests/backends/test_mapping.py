"""mapping: pages live exactly as long as something looks at them."""

import ctypes
import errno
import gc
import mmap
import os
from collections.abc import Iterator

import pytest

from tests.backends.procfs import arena_mappings
from wcache_async.backends.mapping import Access, map_pages, populate
from wcache_async.backends.memfd import create_memfd, seal_memfd, write_memfd
from wcache_async.sockets.fds import OwnedFd

NBYTES = 8 * mmap.PAGESIZE


@pytest.fixture
def memfd() -> Iterator[OwnedFd]:
    with create_memfd("wcache-arena-test", NBYTES) as fd:
        write_memfd(fd, b"abc", 0)
        yield fd


def test_pages_stay_mapped_until_the_last_view_of_them_goes(memfd: OwnedFd) -> None:
    pages = map_pages(memfd.fileno(), NBYTES, Access.PRIVATE_WRITE)
    view = memoryview(pages).cast("B")
    part = view[1:3]
    del pages
    view.release()
    assert arena_mappings() == ["rw-p"]
    assert bytes(part) == b"bc"
    part.release()
    assert arena_mappings() == []


def test_pages_outlive_their_fd(memfd: OwnedFd) -> None:
    pages = map_pages(memfd.fileno(), NBYTES, Access.PRIVATE_WRITE)
    memfd.close()
    assert bytes(pages[:3]) == b"abc"


def test_a_private_write_does_not_reach_the_file_and_a_shared_one_does(memfd: OwnedFd) -> None:
    private = map_pages(memfd.fileno(), NBYTES, Access.PRIVATE_WRITE)
    shared = map_pages(memfd.fileno(), NBYTES, Access.SHARED_WRITE)
    private[0] = ord("x")
    shared[1] = ord("y")
    assert os.pread(memfd.fileno(), 3, 0) == b"ayc"
    assert bytes(private[:3]) == b"xbc"  # Its first page was copied before the other wrote.


@pytest.mark.parametrize(("access", "shown"), [(Access.SHARED_READ, "r--s"), (Access.PRIVATE_READ, "r--p")])
def test_read_access_is_read_only(memfd: OwnedFd, access: Access, shown: str) -> None:
    pages = map_pages(memfd.fileno(), NBYTES, access)
    assert arena_mappings() == [shown]
    assert bytes(pages[:3]) == b"abc"


@pytest.mark.parametrize("access", [Access.PRIVATE_WRITE, Access.PRIVATE_READ])
def test_private_pages_reserve_no_memory_for_copies(memfd: OwnedFd, access: Access) -> None:
    pages = map_pages(memfd.fileno(), NBYTES, access)
    with open("/proc/self/smaps") as smaps:
        ours = smaps.read().partition(f"{ctypes.addressof(pages):x}-")[2]
    flags = ours.partition("VmFlags:")[2].partition("\n")[0].split()
    assert "nr" in flags


def test_a_sealed_file_cannot_be_made_writable_through_a_shared_mapping(memfd: OwnedFd) -> None:
    seal_memfd(memfd)
    pages = map_pages(memfd.fileno(), NBYTES, Access.SHARED_READ)
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p(ctypes.addressof(pages))
    assert libc.mprotect(address, ctypes.c_size_t(NBYTES), mmap.PROT_READ | mmap.PROT_WRITE) == -1
    assert ctypes.get_errno() == errno.EACCES
    with pytest.raises(PermissionError):
        map_pages(memfd.fileno(), NBYTES, Access.SHARED_WRITE)


def test_a_mapping_that_fails_says_why() -> None:
    with pytest.raises(OSError, match="Bad file descriptor") as caught:
        map_pages(1 << 20, NBYTES, Access.PRIVATE_WRITE)
    assert caught.value.errno == errno.EBADF
    assert arena_mappings() == []


def test_populate_allocates_the_pages_asked_for_and_no_others() -> None:
    with create_memfd("wcache-arena-test", NBYTES) as fd:
        pages = map_pages(fd.fileno(), NBYTES, Access.SHARED_WRITE)
        assert os.fstat(fd.fileno()).st_blocks == 0
        populate(pages, 2 * mmap.PAGESIZE + 100, mmap.PAGESIZE)  # reaches into two pages
        assert os.fstat(fd.fileno()).st_blocks * 512 == 2 * mmap.PAGESIZE
        assert os.lseek(fd.fileno(), 0, os.SEEK_DATA) == 2 * mmap.PAGESIZE


def test_populate_reports_what_would_have_been_a_sigbus() -> None:
    with create_memfd("wcache-arena-test", NBYTES) as fd:
        pages = map_pages(fd.fileno(), 2 * NBYTES, Access.SHARED_WRITE)  # beyond the end of the file
        with pytest.raises(OSError, match="Bad address") as caught:
            populate(pages, NBYTES, mmap.PAGESIZE)
        assert caught.value.errno == errno.EFAULT


def test_dropped_pages_need_no_collector(memfd: OwnedFd) -> None:
    gc.disable()
    try:
        map_pages(memfd.fileno(), NBYTES, Access.PRIVATE_WRITE)
        assert arena_mappings() == []
    finally:
        gc.enable()

"""Pages of a shared file in this process: mapped through libc, unmapped once nothing looks at them.

Python's own `mmap` duplicates the fd it maps and knows neither MAP_NORESERVE nor
MADV_POPULATE_WRITE, and holds the GIL while it advises the kernel.
"""

import ctypes
import mmap
import os
import weakref
from enum import Enum

__all__ = ["Access", "Pages", "map_pages", "populate"]

Pages = ctypes.Array[ctypes.c_uint8]
"""Mapped bytes.  Whatever holds this object (a memoryview, a tensor made by `torch.frombuffer`)
keeps them mapped."""

_MAP_FAILED = ctypes.c_void_p(-1).value
_MAP_NORESERVE = 0x4000  # asm-generic/mman-common.h; Python's mmap names it from 3.13
_MADV_POPULATE_WRITE = 23  # asm-generic/mman-common.h, Linux 5.14

# The handle ctypes opened for itself, so that importing this opens nothing: a client may do it on its loop.
_libc = ctypes.CDLL("libc", handle=ctypes.pythonapi._handle, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_munmap = _libc.munmap
_munmap.restype = ctypes.c_int
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_madvise = _libc.madvise
_madvise.restype = ctypes.c_int
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Access(Enum):
    """How pages are mapped: ``(protection, flags)`` of mmap(2)."""

    SHARED_WRITE = (mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED)
    """Writes reach the file."""
    PRIVATE_WRITE = (mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_NORESERVE)
    """A write copies its page for this process.  NORESERVE: memory for copies that will hardly
    ever be made is not charged up front, which strict overcommit and hugetlb would do."""
    SHARED_READ = (mmap.PROT_READ, mmap.MAP_SHARED)
    """A write is SIGSEGV.  Refused (EPERM) for a write-sealed memfd by kernels before 6.7."""
    PRIVATE_READ = (mmap.PROT_READ, mmap.MAP_PRIVATE | _MAP_NORESERVE)
    """A write is SIGSEGV; long-term pinning (GPU registration) copies the pages."""
    ANONYMOUS = (mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    """Zeroed memory of this process alone; the fd is -1."""


def map_pages(fd: int, nbytes: int, access: Access) -> Pages:
    """Map the first `nbytes` (at least 1) of `fd`, which may be closed afterwards.  Raises OSError.

    They are unmapped when the last reference to the result goes, and left to the kernel at the
    interpreter's exit: threads outside Python may still read tensors then.
    """
    protection, flags = access.value
    address = _mmap(None, nbytes, protection, flags, fd, 0)
    if address == _MAP_FAILED or address is None:
        raise _error()
    pages = (ctypes.c_uint8 * nbytes).from_address(address)
    weakref.finalize(pages, _munmap, address, nbytes).atexit = False
    return pages


def populate(pages: Pages, offset: int, nbytes: int) -> None:
    """Allocate and map the pages under `nbytes` bytes (at least 1) at `offset`, writable.

    Memory that cannot be had is an OSError here (ENOMEM, EFAULT) rather than SIGBUS at the first
    write.  Raises OSError with EINVAL where the kernel is older than 5.14.
    """
    base = ctypes.addressof(pages)
    start = base + offset
    start -= start % mmap.PAGESIZE
    if _madvise(start, base + offset + nbytes - start, _MADV_POPULATE_WRITE):
        raise _error()


def _error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))

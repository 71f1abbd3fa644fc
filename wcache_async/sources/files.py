"""A source made of files: storages are byte ranges of them, read in chunks, cast on the way if asked."""

import os
import stat
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Self

from msgspec import Struct

from wcache_async.errors import SourceError
from wcache_async.identity.files import stamp_of
from wcache_async.manifest import DTYPE_ITEMSIZE, Config, FileStamp, StateSpec
from wcache_async.sources.base import Advance, Source

__all__ = ["CheckpointFile", "FileSource", "Runs", "StorageRange", "uniform_dtype"]

CHUNK = 8 << 20
"""Bytes read at a time: progress moves often, system calls cost nothing, and a cast's bounce buffer stays small."""


class Runs(Struct, frozen=True, kw_only=True):
    """A storage that is scattered over a file: in each of its periods of `period` bytes it has the same `pieces`.

    A piece is where it starts in its period, and its length, in bytes.
    """

    period: int
    pieces: tuple[tuple[int, int], ...]

    def spans(self, start: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """Where in the file, from the first period on, `nbytes` of the storage stand, from its byte `start` on.

        Each is an offset and a length; in between are bytes of others.
        """
        number, skip = divmod(start, sum(length for _, length in self.pieces))
        while nbytes:
            base = number * self.period
            for offset, length in self.pieces:
                if skip >= length:
                    skip -= length
                    continue
                take = min(length - skip, nbytes)
                yield base + offset + skip, take
                skip = 0
                nbytes -= take
                if not nbytes:
                    return
            number += 1


class StorageRange(Struct, frozen=True, kw_only=True):
    """Where the bytes of one storage stand: ``nbytes`` from ``offset`` on in file number ``file``.

    With `cast_to` they are elements of `dtype`, to be given as elements of `cast_to`; without,
    both are empty.  `tensor` is who the storage belongs to, for errors.  With `runs` they are
    `nbytes` in all, and `offset` is where the first period begins.
    """

    file: int
    offset: int
    nbytes: int
    tensor: str
    dtype: str = ""
    cast_to: str = ""
    runs: Runs | None = None

    @property
    def filled_nbytes(self) -> int:
        """Bytes of the storage as it is given."""
        return self.filled_offset(self.nbytes)

    def filled_offset(self, offset: int) -> int:
        """Where in the storage as it is given the element stands that is `offset` bytes into the range."""
        return offset // DTYPE_ITEMSIZE[self.dtype] * DTYPE_ITEMSIZE[self.cast_to] if self.cast_to else offset


class CheckpointFile:
    """One regular file held open for reading; owns its fd."""

    def __init__(self, path: str) -> None:
        """Raises SourceError where there is no such file, or it cannot be read."""
        self.path = path
        try:
            # Opening a FIFO or a device could block for ever, so that is asked first.
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise SourceError(path=path, reason="it is not a regular file")
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            advice = "Check the spelling; a daemon in a container has files of its own"
            raise SourceError(path=path, reason=_reason(error), advice=advice) from error
        except (OSError, ValueError) as error:
            raise SourceError(path=path, reason=_reason(error)) from error
        try:
            # Twice the read-ahead for one call; WILLNEED per chunk won nothing on top, and cost 3 % of a warm read.
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            status = os.fstat(self.fd)
        except OSError as error:
            self.close()
            raise SourceError(path=path, reason=_reason(error)) from error
        self.nbytes = status.st_size
        self.stamp = stamp_of(path, status)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; further calls do nothing."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def head(self, nbytes: int, offset: int = 0) -> bytes:
        """Up to `nbytes` bytes from `offset` on.  Raises SourceError."""
        try:
            return os.pread(self.fd, nbytes, offset)
        except OSError as error:
            raise SourceError(path=self.path, reason=_reason(error)) from error

    def fill(self, into: memoryview, offset: int, tensor: str) -> None:
        """Fill `into` with the bytes from `offset` on.  Raises SourceError where they are not there."""
        done = 0
        while done < len(into):
            try:
                count = os.preadv(self.fd, [into[done:]], offset + done)
            except OSError as error:
                raise SourceError(path=self.path, tensor=tensor, reason=_reason(error)) from error
            if not count:
                raise SourceError(
                    path=self.path,
                    tensor=tensor,
                    reason=f"the file ends at byte {offset + done}, {len(into) - done} bytes short; "
                    "it was cut after it was opened",
                )
            done += count

    def check_unchanged(self, tensor: str) -> None:
        """Raises SourceError if the file was written since it was opened: bytes of two versions would mix."""
        try:
            status = os.fstat(self.fd)
        except OSError as error:
            raise SourceError(path=self.path, tensor=tensor, reason=_reason(error)) from error
        if (status.st_size, status.st_mtime_ns) != (self.stamp.size, self.stamp.mtime_ns):
            raise SourceError(path=self.path, tensor=tensor, reason="the file was changed after it was opened")


class FileSource(Source):
    """A source whose storages are byte ranges of files."""

    def __init__(self, path: str, *, dtype: str = "") -> None:
        """`dtype` is one of `CASTABLE`, or empty for no cast."""
        self.path = path
        self._dtype = dtype
        self._files: list[CheckpointFile] = []
        self._ranges: Sequence[StorageRange] = ()
        self._spec: StateSpec | None = None

    @abstractmethod
    def _scan(self) -> tuple[StateSpec, Sequence[StorageRange]]:
        """Open every file with `_open_file` and tell what is where.  Raises SourceError."""

    def _open_file(self, path: str) -> CheckpointFile:
        file = CheckpointFile(path)
        self._files.append(file)
        return file

    def open(self) -> StateSpec:
        if self._spec is not None:
            return self._spec
        try:
            self._spec, self._ranges = self._scan()
        finally:
            if self._spec is None:
                self.close()
        return self._spec

    def config(self) -> Config:
        return {"source": self.kind, "dtype": uniform_dtype(self._opened())}

    def files(self) -> tuple[FileStamp, ...]:
        return tuple(file.stamp for file in self._files)

    def read(self, storage: int, into: memoryview, advance: Advance) -> None:
        self._opened()
        part = self._ranges[storage]
        if into.nbytes != part.filled_nbytes:
            raise ValueError(f"storage {storage} has {part.filled_nbytes} bytes, the memory to fill {into.nbytes}")
        if not into.nbytes:
            return
        file = self._files[part.file]
        with into.cast("B") as flat:
            if part.cast_to:
                _read_cast(file, part, flat, advance)
            else:
                _read_plain(file, part, flat, advance)
        file.check_unchanged(part.tensor)

    def close(self) -> None:
        self._spec = None
        self._ranges = ()
        while self._files:
            self._files.pop().close()

    def _opened(self) -> StateSpec:
        if self._spec is None:
            raise SourceError(path=self.path, reason="it is not open")
        return self._spec


def uniform_dtype(spec: StateSpec) -> str:
    """The one dtype of all floating-point tensors, or of all where none is floating-point; else ``mixed``."""
    dtypes = {tensor.dtype for tensor in spec.tensors}
    floating = {dtype for dtype in dtypes if dtype.startswith(("float", "bfloat"))}
    chosen = floating or dtypes
    return chosen.pop() if len(chosen) == 1 else "mixed"


def _read_plain(file: CheckpointFile, part: StorageRange, into: memoryview, advance: Advance) -> None:
    for start in range(0, part.nbytes, CHUNK):
        size = min(CHUNK, part.nbytes - start)
        # Released at once: a traceback keeping it would keep the caller from unmapping.
        with into[start : start + size] as piece:
            _fill(file, part, piece, start)
        advance(size)


def _fill(file: CheckpointFile, part: StorageRange, into: memoryview, start: int) -> None:
    """Fill `into` with the storage's bytes from its byte `start` on, as they stand in the file."""
    if part.runs is None:
        file.fill(into, part.offset + start, part.tensor)
        return
    done = 0
    for offset, size in part.runs.spans(start, len(into)):
        with into[done : done + size] as piece:
            file.fill(piece, part.offset + offset, part.tensor)
        done += size


def _read_cast(file: CheckpointFile, part: StorageRange, into: memoryview, advance: Advance) -> None:
    import torch

    source: torch.dtype = getattr(torch, part.dtype)
    target: torch.dtype = getattr(torch, part.cast_to)
    from_size, to_size = DTYPE_ITEMSIZE[part.dtype], DTYPE_ITEMSIZE[part.cast_to]
    bounce = bytearray(min(CHUNK, part.nbytes))
    with memoryview(bounce) as window:
        for start in range(0, part.nbytes, CHUNK):
            size = min(CHUNK, part.nbytes - start)
            with window[:size] as piece:
                _fill(file, part, piece, start)
            count, first = size // from_size, start // from_size
            read = torch.frombuffer(bounce, dtype=source, count=count)
            torch.frombuffer(into, dtype=target, count=count, offset=first * to_size).copy_(read)
            del read
            advance(count * to_size)


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)

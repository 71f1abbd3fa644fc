"""What a file written by `torch.save` holds, and where its storages' bytes stand, none of them read.

Unpickling is torch's own, with ``weights_only``.  Zip archives (torch >= 1.6) are mapped while
it runs, and in the older format the storages' bytes are skipped; so no tensor is in memory
before it is read into place, and a file cut short later gives a short read and not a SIGBUS.
"""

import bisect
import ctypes
import os
import re
import sys
import zipfile
from collections.abc import Iterator
from typing import NoReturn

from msgspec import Struct

from wcache_async.errors import SourceError
from wcache_async.sources.files import CheckpointFile
from wcache_async.sources.locate import LEGACY_MAGIC, ZIP_HEAD

__all__ = ["Regions", "Unpickled", "unpickle"]


class Regions:
    """Memory ranges that stand for ranges of a file: where in the file is what an address points at?"""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._regions: list[tuple[int, int, int]] = []

    def add(self, address: int, nbytes: int, offset: int) -> None:
        """The `nbytes` at `address` are the file's from `offset` on; the last word on an address counts."""
        at = bisect.bisect(self._starts, address)
        if at:
            start, size, before = self._regions[at - 1]
            if (start + size, before + size) == (address, offset):  # One storage can be read in several goes.
                self._regions[at - 1] = (start, size + nbytes, before)
                return
        self._starts.insert(at, address)
        self._regions.insert(at, (address, nbytes, offset))

    def offset_of(self, address: int, nbytes: int) -> int | None:
        """Where in the file the `nbytes` at `address` stand, or None if nothing says so."""
        at = bisect.bisect(self._starts, address) - 1
        if at < 0:
            return None
        start, size, offset = self._regions[at]
        return offset + address - start if address + nbytes <= start + size else None


class Unpickled(Struct, frozen=True):
    """The object the file holds; `regions` tells where its storages are, as long as it lives."""

    value: object
    regions: Regions


def unpickle(file: CheckpointFile) -> Unpickled:
    """Unpickle `file` without its tensors' bytes.  Raises SourceError, for pickled code too."""
    return _unpickle_archive(file) if file.head(len(ZIP_HEAD)) == ZIP_HEAD else _unpickle_legacy(file)


def _unpickle_archive(file: CheckpointFile) -> Unpickled:
    import torch

    # The very file that is held open, whatever its path names by now.
    path = f"/proc/self/fd/{file.fd}"
    _check_archive(file, path)
    try:
        value: object = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # Rubbish in a pickle comes out as any exception there is.
        _refuse(file, error)
    regions = Regions()
    for address, nbytes, offset in _own_mappings():
        regions.add(address, nbytes, offset)
    return Unpickled(value, regions)


def _check_archive(file: CheckpointFile, path: str) -> None:
    """Refuse archives torch would misread when mapped, and those it has no words for."""
    try:
        with zipfile.ZipFile(path) as archive:
            records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            packed = [name for name, info in records.items() if info.compress_type != zipfile.ZIP_STORED]
            if packed:
                raise SourceError(
                    path=file.path, reason=f"its record {packed[0]} is compressed; torch.save compresses none"
                )
            byteorder = archive.read(records["byteorder"]).decode() if "byteorder" in records else sys.byteorder
    except SourceError:
        raise
    except Exception as error:  # zipfile lets struct.error and others out for damaged archives.
        raise SourceError(path=file.path, reason=f"its zip archive is damaged or truncated: {_gist(error)}") from error
    if "constants.pkl" in records:
        raise SourceError(
            path=file.path,
            reason="it is a TorchScript archive, which is a program; save the module's state_dict() as safetensors",
        )
    if "data.pkl" not in records:
        raise SourceError(path=file.path, reason="it is a zip archive that torch.save did not write")
    if byteorder != sys.byteorder:
        raise SourceError(path=file.path, reason=f"its tensors are {byteorder}-endian, this machine {sys.byteorder}")


def _own_mappings() -> Iterator[tuple[int, int, int]]:
    """Address, bytes and file offset of each mapping of this process; see proc_pid_maps(5)."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            span, _, offset, _ = line.split(maxsplit=3)
            start, _, end = span.partition("-")
            yield int(start, 16), int(end, 16) - int(start, 16), int(offset, 16)


def _unpickle_legacy(file: CheckpointFile) -> Unpickled:
    import torch

    reader = _SkippingReader(file)
    try:
        value: object = torch.load(reader, map_location="cpu", weights_only=True, mmap=False)  # type: ignore[arg-type]
    except SourceError:
        raise
    except Exception as error:  # As above.
        _refuse(file, error)
    return Unpickled(value, reader.regions)


class _SkippingReader:
    """A binary file for `torch.load` that notes where storages would be read to, and reads none.

    torch reads pickles with `read` and `readline`, and a storage, of known size, with `readinto`
    straight into its memory, in which it then never looks.
    """

    SMALL = 4096
    """Reads up to this size are carried out: sizes of storages come that way too."""

    def __init__(self, file: CheckpointFile) -> None:
        self.regions = Regions()
        self._file = file
        self._position = 0

    def read(self, size: int = -1) -> bytes:
        left = max(self._file.nbytes - self._position, 0)
        data = self._file.head(left if size < 0 else min(size, left), self._position)
        self._position += len(data)
        return data

    def readline(self) -> bytes:
        line = bytearray()
        while chunk := self._file.head(256, self._position + len(line)):
            end = chunk.find(b"\n") + 1
            line += chunk[:end] if end else chunk
            if end:
                break
        self._position += len(line)
        return bytes(line)

    def readinto(self, into: memoryview) -> int:
        count = min(into.nbytes, max(self._file.nbytes - self._position, 0))
        if count <= self.SMALL:
            into[:count] = self.read(count)
            self._position -= count
        if count:
            # Sizes are read to the stack: noted too, and never asked for.
            address = ctypes.addressof(ctypes.c_char.from_buffer(into))
            self.regions.add(address, count, self._position)
        self._position += count
        return count

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._file.nbytes}[whence]
        self._position = max(origin + offset, 0)
        return self._position

    def tell(self) -> int:
        return self._position


def _refuse(file: CheckpointFile, error: Exception) -> NoReturn:
    """Raise SourceError for what `torch.load` raised, in words about the file."""
    if named := re.search(r"(?:GLOBAL:?|global) ([\w.]+)", str(error)):
        reason = (
            f"it holds pickled code or objects besides tensors ({named[1]}), which weights_only refuses to load; "
            "save the state_dict() alone, best as safetensors"
        )
    elif file.head(len(ZIP_HEAD)) != ZIP_HEAD and LEGACY_MAGIC not in file.head(64):
        reason = (
            "it is no torch checkpoint: it begins neither as a zip archive nor as torch.save's older format does; "
            "other pickles can run code and are refused, as by weights_only; save the tensors as safetensors"
        )
    else:
        reason = f"torch.load cannot read it with weights_only: {_gist(error)}"
    raise SourceError(path=file.path, reason=reason) from error


def _gist(error: Exception) -> str:
    """The line of torch's text that says what is wrong, without the advice around it."""
    advice = ("Weights only load failed", "Please file an issue", "Check the documentation")
    lines = [line for line in str(error).splitlines() if line and not line.startswith(advice)]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__

"""What the daemon loads from: the contract every source keeps.

A source first tells, from headers alone, what it holds (`open` → `StateSpec`), so that
arenas can be laid out; then it reads storage by storage straight into them.  All of it
blocks, and runs in an executor; what cannot be loaded raises SourceError.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Self

from wcache_async.manifest import Config, FileStamp, StateSpec

__all__ = ["Advance", "Source"]

Advance = Callable[[int], None]
"""Called with the bytes just filled, often enough for a progress bar; may raise to stop the read.

A storage is filled from its first byte to its last, so that whoever only compares need not
keep what it has seen, and whoever takes digests does so at once.  Over all storages the counts
add up to `StateSpec.nbytes`, whatever was cast on the way.
"""


class Source(ABC):
    """One checkpoint, opened for reading.  A context manager: leaving it closes files."""

    kind: ClassVar[str]
    """What users choose it by, e.g. ``--source safetensors``."""

    path: str
    """As the user gave it; what status shows.  Errors name the very file."""

    @abstractmethod
    def open(self) -> StateSpec:
        """Read headers and say what there is, dtype cast already applied.  Raises SourceError.

        Storages are numbered in the order they are read fastest.  Nothing stays open after a
        failure.
        """

    @abstractmethod
    def config(self) -> Config:
        """What the source knows of how the state was built; valid once open.

        ``source`` is `kind`; ``dtype`` is the one dtype of all floating-point tensors, or
        ``mixed``.
        """

    def files(self) -> tuple[FileStamp, ...]:
        """The files of this machine that it reads, as they are while it does; valid once open.

        None for a source that is no local checkpoint.
        """
        return ()

    @abstractmethod
    def read(self, storage: int, into: memoryview, advance: Advance) -> None:
        """Fill `into`, exactly as long as that storage, with its bytes.  Raises SourceError.

        Several threads may read different storages at a time, as `StateWriter` lets them fill
        different storages.  No reference to `into` is left behind, whatever the outcome.
        """

    @abstractmethod
    def close(self) -> None:
        """Close files and drop whatever is held of them; further calls do nothing.

        Not while a read is running: the file's number could be another file's by then.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

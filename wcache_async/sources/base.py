"""What the daemon loads from: the contract every source keeps, and how one is chosen.

A source first tells, from headers alone, what it holds (`open` → `StateSpec`), so that
arenas can be laid out; then it reads storage by storage straight into them.  All of it
blocks, and runs in an executor; what cannot be loaded raises SourceError.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self

from wcache_async.manifest import Config, StateSpec

__all__ = ["Advance", "Source"]

Advance = Callable[[int], None]
"""Called with the bytes just read, often enough for a progress bar; may raise to stop the read."""


class Source(ABC):
    """One checkpoint, opened for reading.  A context manager: leaving it closes files."""

    path: str
    """As the user gave it; what errors and status show."""

    @abstractmethod
    def open(self) -> StateSpec:
        """Read headers and say what there is, dtype cast already applied.  Raises SourceError."""

    @abstractmethod
    def config(self) -> Config:
        """What the source knows of how the state was built; valid once open."""

    @abstractmethod
    def read(self, storage: int, into: memoryview, advance: Advance) -> None:
        """Fill `into`, exactly as long as that storage, with its bytes.  Raises SourceError."""

    @abstractmethod
    def close(self) -> None:
        """Close files and drop whatever is held of them; further calls do nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

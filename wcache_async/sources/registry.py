"""Which source reads what is at a path: chosen by looking, or by the name of its kind."""

from collections.abc import Callable

from wcache_async.errors import SourceError
from wcache_async.sources.base import Source
from wcache_async.sources.cast import check_cast
from wcache_async.sources.locate import Checkpoint, locate_checkpoint
from wcache_async.sources.safetensors import SafetensorsSource
from wcache_async.sources.torch_file import TorchFileSource

__all__ = ["known_kinds", "open_source"]

AUTO = "auto"

_SOURCES: dict[str, Callable[[str, Checkpoint, str], Source]] = {
    source.kind: source for source in (SafetensorsSource, TorchFileSource)
}


def known_kinds() -> tuple[str, ...]:
    """What `open_source` takes as `kind`."""
    return (AUTO, *_SOURCES)


def open_source(path: str, *, kind: str = AUTO, dtype: str = "") -> Source:
    """The source for the checkpoint at `path`, a file or a folder; not yet opened.

    ``auto`` takes safetensors before torch files where a folder holds both.  `dtype` is what
    floating-point tensors are cast to (see `sources.cast`), empty for what they are.  Looks at
    the file system, so it blocks.  Raises SourceError.
    """
    if kind not in known_kinds():
        raise SourceError(path=path, reason=f"unknown kind of source {kind!r}; known are {', '.join(known_kinds())}")
    check_cast(path, dtype)
    checkpoint = locate_checkpoint(path, tuple(_SOURCES) if kind == AUTO else (kind,))
    return _SOURCES[checkpoint.kind](path, checkpoint, dtype)

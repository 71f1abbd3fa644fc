"""Which source reads what is at a path: chosen by looking, or by the name of its kind."""

import os
from collections.abc import Callable, Mapping

import msgspec

from wcache_async.errors import Scalar, SourceError
from wcache_async.sources.base import Source
from wcache_async.sources.cast import check_cast
from wcache_async.sources.locate import SAFETENSORS, Checkpoint, locate_checkpoint
from wcache_async.sources.safetensors import SafetensorsSource
from wcache_async.sources.sharded import ShardedSource, tensor_parallel
from wcache_async.sources.torch_file import TorchFileSource

__all__ = ["absolute_path", "known_kinds", "open_source"]

AUTO = "auto"
TRANSFORMERS = "transformers"

_SOURCES: dict[str, Callable[[str, Checkpoint, str], Source]] = {
    source.kind: source for source in (SafetensorsSource, TorchFileSource)
}


def known_kinds() -> tuple[str, ...]:
    """What `open_source` takes as `kind`."""
    return (AUTO, *_SOURCES, TRANSFORMERS)


def absolute_path(path: str, kind: str) -> str:
    """`path` as it reads from any folder; what ``transformers`` may find on a hub, and is no folder here, stays."""
    return path if kind == TRANSFORMERS and not os.path.exists(path) else os.path.abspath(path)


def open_source(path: str, *, kind: str = AUTO, dtype: str = "", options: Mapping[str, Scalar] | None = None) -> Source:
    """The source for the checkpoint at `path`, a file or a folder; not yet opened.

    ``auto`` takes safetensors before torch files where a folder holds both.  `dtype` is what
    floating-point tensors are cast to (see `sources.cast`), empty for what they are.  Looks at
    the file system, so it blocks.  `options` are the source's own, see `TransformersOptions` and,
    for safetensors, `TensorParallel`; torch files have none.  Raises SourceError.
    """
    if kind not in known_kinds():
        raise SourceError(path=path, reason=f"unknown kind of source {kind!r}; known are {', '.join(known_kinds())}")
    if kind == TRANSFORMERS:
        return _open_transformers(path, dtype, options or {})
    check_cast(path, dtype)
    if options:
        if kind not in (AUTO, SAFETENSORS):
            raise SourceError(path=path, reason=f"source {kind!r} takes no options, got {', '.join(options)}")
        share = tensor_parallel(path, options)
        return ShardedSource(path, locate_checkpoint(path, (SAFETENSORS,)), dtype, share)
    checkpoint = locate_checkpoint(path, tuple(_SOURCES) if kind == AUTO else (kind,))
    return _SOURCES[checkpoint.kind](path, checkpoint, dtype)


def _open_transformers(path: str, dtype: str, options: Mapping[str, Scalar]) -> Source:
    from wcache_async.sources.transformers import TransformersOptions, TransformersSource

    try:
        given = msgspec.convert(dict(options), TransformersOptions)
    except msgspec.ValidationError as error:
        known = ", ".join(TransformersOptions.__struct_fields__)
        raise SourceError(path=path, reason=f"options of source 'transformers': {error}; known are {known}") from error
    return TransformersSource(path, dtype, given)

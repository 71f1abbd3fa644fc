"""What the daemon loads from: checkpoints on disk, read storage by storage into arenas."""

from wcache_async.sources.base import Advance, Source
from wcache_async.sources.registry import absolute_path, known_kinds, open_source

__all__ = ["Advance", "Source", "absolute_path", "known_kinds", "open_source"]

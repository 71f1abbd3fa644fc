"""What travels with a state besides its arenas: its manifest, and the fds in order."""

import asyncio
from collections.abc import Sequence

from wcache_async.backends.collector import collector_held
from wcache_async.backends.memfd import read_memfd, sealed_memfd
from wcache_async.errors import FdsTruncated, FdsUndeclared, InvalidManifest
from wcache_async.manifest import StateManifest, decode_manifest, encode_manifest
from wcache_async.protocol.connection import MAX_RESPONSE_NBYTES
from wcache_async.sockets.fds import OwnedFd

__all__ = ["INLINE_MANIFEST_NBYTES", "CarriedFds", "pack_manifest", "receive_manifest"]

INLINE_MANIFEST_NBYTES = 32 << 10
"""A larger manifest travels as a sealed memfd, so that a fetch costs the same at any tensor count."""


class CarriedFds:
    """The fds of one message, handed out in order (a backend's ResponseReceiver)."""

    def __init__(self, fds: Sequence[OwnedFd]) -> None:
        self._fds = list(fds)
        self._expected = 0

    def take_fds(self, count: int) -> list[OwnedFd]:
        """The next `count`, now the caller's.  Raises FdsTruncated."""
        self._expected += count
        if len(self._fds) < count:
            raise FdsTruncated(expected=self._expected, got=self._expected - count + len(self._fds))
        taken, self._fds = self._fds[:count], self._fds[count:]
        return taken

    def finish(self) -> None:
        """Raises FdsUndeclared where the message came with more fds than its parts announce."""
        left = len(self._fds)
        if left:
            raise FdsUndeclared(expected=self._expected, got=self._expected + left)

    def close(self) -> None:
        """Close those that nobody took."""
        for fd in self._fds:
            fd.close()
        self._fds.clear()


def pack_manifest(manifest: StateManifest) -> tuple[bytes | None, OwnedFd | None, int]:
    """The manifest as it travels: inline or as a memfd, and how many bytes it has.  Blocks.  Raises OSError."""
    body = encode_manifest(manifest)
    if len(body) <= INLINE_MANIFEST_NBYTES:
        return body, None, len(body)
    return None, sealed_memfd("wcache-manifest", body), len(body)


async def receive_manifest(inline: bytes | None, nbytes: int, fds: CarriedFds) -> StateManifest:
    """The manifest that a message carried one way or the other.  Raises InvalidManifest, FdsTruncated, InvalidMemfd."""
    if inline is not None:
        return _decode(inline)
    if nbytes > MAX_RESPONSE_NBYTES:
        raise InvalidManifest(tensor="", reason=f"{nbytes} bytes, over {MAX_RESPONSE_NBYTES}")
    (fd,) = fds.take_fds(1)
    return await asyncio.to_thread(_read, fd, nbytes)


def _read(fd: OwnedFd, nbytes: int) -> StateManifest:
    with fd:
        return _decode(read_memfd(fd, nbytes, "the manifest"))


def _decode(body: bytes) -> StateManifest:
    with collector_held():
        return decode_manifest(body)

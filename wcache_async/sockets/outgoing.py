"""The bytes and fds that wait to be written to one socket: their order, and what may share a sendmsg."""

from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Final

from wcache_async.protocol.framing import Segment
from wcache_async.sockets.fds import OwnedFd

__all__ = ["MAX_BUFFERS_PER_SEND", "Outgoing"]

MAX_BUFFERS_PER_SEND: Final = 64
"""Small frames that share one sendmsg; far under IOV_MAX."""


class Outgoing:
    """Segments in the order they must be written, each with the fds that go with its first byte."""

    def __init__(self) -> None:
        self._segments: deque[tuple[bytes | memoryview, tuple[OwnedFd, ...]]] = deque()
        self.accepted = 0
        """Bytes ever queued."""
        self.written = 0
        """Bytes ever written."""
        self.pending = 0
        """Bytes still to be written."""

    def extend(self, segments: Iterable[Segment[OwnedFd]]) -> None:
        for segment in segments:
            self._segments.append((segment.data, segment.fds))
            self.accepted += len(segment.data)
            self.pending += len(segment.data)

    def batch(self) -> tuple[list[bytes | memoryview], tuple[OwnedFd, ...]]:
        """The buffers of the next sendmsg, and the fds for the first byte of the first of them."""
        data, fds = self._segments[0]
        buffers = [data]
        for following, its_fds in islice(self._segments, 1, MAX_BUFFERS_PER_SEND):
            if its_fds:
                break  # its fds must travel with its own first byte
            buffers.append(following)
        return buffers, fds

    def advance(self, nbytes: int) -> None:
        """`nbytes` of the batch were written, and with the first of them all its fds."""
        self.written += nbytes
        self.pending -= nbytes
        for fd in self._segments[0][1]:
            fd.close()
        while nbytes:
            data, _ = self._segments.popleft()
            if nbytes < len(data):
                self._segments.appendleft((memoryview(data)[nbytes:], ()))
                return
            nbytes -= len(data)

    def drop(self) -> None:
        for _, fds in self._segments:
            for fd in fds:
                fd.close()
        self._segments.clear()
        self.pending = 0

"""Frames: a fixed header, a body, and the file descriptors that belong to it.  Sans-IO.

::

    offset 0  magic        4 bytes, "WCAC"
           4  version      1 byte, of this header
           5  flags        1 byte
           6  nfds         2 bytes, little endian
           8  length       4 bytes, of the body
          12  request id   8 bytes

fds ride on the first byte of their frame (unix(7): ancillary data is a barrier in the byte
stream and comes with the first byte it was sent with), at most 253 a message (SCM_MAX_FD).
A frame that owns more is preceded by frames flagged FDS_ONLY, with the same request id and
no body, that carry the rest.  The decoder keeps received fds in a FIFO and hands each frame
as many as its header declares; it never looks at what an fd is, so that tests may use
anything for one.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Final, Generic, TypeVar

from wcache_async.errors import (
    BadMagic,
    FdsTruncated,
    FdsUndeclared,
    FrameTooLarge,
    MalformedMessage,
    ProtocolError,
    TruncatedFrame,
    VersionMismatch,
)

__all__ = [
    "FRAME_VERSION",
    "HEADER_NBYTES",
    "MAX_FDS_PER_FRAME",
    "MAX_FDS_PER_MESSAGE",
    "EndOfStream",
    "Frame",
    "FrameDecoder",
    "FrameFault",
    "Segment",
    "encode_frame",
]

F = TypeVar("F")

MAGIC: Final = b"WCAC"
FRAME_VERSION: Final = 1
FDS_ONLY: Final = 0x01
MAX_FDS_PER_MESSAGE: Final = 253
"""SCM_MAX_FD: the kernel answers EINVAL to one more."""
MAX_FDS_PER_FRAME: Final = 8192
"""What a client takes with one response; it bounds what a hostile peer can make it hold."""

_header = Struct("<4sBBHIQ")
HEADER_NBYTES: Final = _header.size


@dataclass(frozen=True, slots=True)
class Frame(Generic[F]):
    """One decoded frame: its body, and the fds that came with it."""

    request_id: int
    body: bytes
    fds: tuple[F, ...] = ()


@dataclass(frozen=True, slots=True)
class FrameFault:
    """The stream broke a rule; nothing after it can be read."""

    error: ProtocolError
    request_id: int = 0


@dataclass(frozen=True, slots=True)
class EndOfStream:
    """The peer closed its side between two frames."""


@dataclass(frozen=True, slots=True)
class Segment(Generic[F]):
    """Bytes to send in order, with `fds` attached to the first of them and to no other."""

    data: bytes
    fds: tuple[F, ...] = ()


def encode_frame(request_id: int, body: bytes, fds: Sequence[F] = ()) -> list[Segment[F]]:
    """The segments that carry one frame, more than one where it owns over 253 fds."""
    segments = []
    position = 0
    while len(fds) - position > MAX_FDS_PER_MESSAGE:
        batch = tuple(fds[position : position + MAX_FDS_PER_MESSAGE])
        position += MAX_FDS_PER_MESSAGE
        segments.append(Segment(_header.pack(MAGIC, FRAME_VERSION, FDS_ONLY, len(batch), 0, request_id), batch))
    last = tuple(fds[position:])
    segments.append(Segment(_header.pack(MAGIC, FRAME_VERSION, 0, len(last), len(body), request_id) + body, last))
    return segments


class FrameDecoder(Generic[F]):
    """Turns bytes and fds, however they are split, into frames.

    Never raises: what is wrong with a stream comes out as one FrameFault, after which
    everything received is dropped and every fd is left for `take_fds`.
    """

    def __init__(self, *, max_body: int, max_fds: int = MAX_FDS_PER_FRAME) -> None:
        self.max_body = max_body
        self.max_fds = max_fds
        self._buffer = bytearray()
        self._fds: deque[F] = deque()
        self._early: list[F] = []  # fds of FDS_ONLY frames, waiting for the frame with the body
        self._early_id = 0
        self._header: tuple[int, int, int, int] | None = None  # flags, nfds, length, request id
        self._eof = False
        self._fault: ProtocolError | None = None
        self._ended = False

    @property
    def begun(self) -> bool:
        """Whether a frame has come in part: what came of it, fds among it, is held for the rest."""
        return not self._ended and bool(self._header or self._buffer or self._early)

    def receive_data(self, data: bytes | bytearray | memoryview, fds: Iterable[F] = ()) -> None:
        """Take bytes, and the fds that arrived with them, off the stream."""
        self._fds.extend(fds)
        if not self._ended:
            self._buffer += data

    def receive_eof(self) -> None:
        """The peer will send no more."""
        self._eof = True

    def receive_fault(self, error: ProtocolError) -> None:
        """The transport below found the stream broken: the decoder ends as if it had found it."""
        self._fault = self._fault or error

    def next_event(self) -> Frame[F] | FrameFault | EndOfStream | None:
        """Decode one more frame; None until more is received.

        One at a time, so that `max_body` may be changed by what a frame said before the next
        one is looked at.
        """
        if self._ended:
            return None
        try:
            frame = self._next_frame()
            if frame is not None:
                return frame
            if self._fault is not None:
                raise self._fault
            if self._eof:
                self._check_end()
                self._ended = True
                return EndOfStream()
        except ProtocolError as error:
            request_id = self._header[3] if self._header else self._early_id if self._early else 0
            self.end()
            return FrameFault(error, request_id)
        return None

    def end(self) -> None:
        """Decode nothing more: what was received and what still comes is dropped, fds are kept for `take_fds`."""
        self._ended = True
        self._header = None
        self._buffer = bytearray()

    def take_fds(self) -> list[F]:
        """Hand over every fd no frame has claimed; for whoever closes the stream."""
        fds = [*self._early, *self._fds]
        self._early.clear()
        self._fds.clear()
        return fds

    def _next_frame(self) -> Frame[F] | None:
        while True:
            if self._header is None:
                if len(self._buffer) < HEADER_NBYTES:
                    self._check_prefix()
                    break
                self._read_header()
            if self._header is None or len(self._buffer) < self._header[2]:
                break
            flags, nfds, length, request_id = self._header
            body = bytes(memoryview(self._buffer)[:length])
            del self._buffer[:length]
            self._header = None
            fds = [self._fds.popleft() for _ in range(nfds)]
            if not flags & FDS_ONLY:
                frame = Frame(request_id, body, (*self._early, *fds))
                self._early.clear()
                return frame
            self._early += fds
            self._early_id = request_id
        self._check_fds()
        return None

    def _check_end(self) -> None:
        if self._header is not None or self._buffer or self._early:
            expected = self._header[2] if self._header else HEADER_NBYTES
            raise TruncatedFrame(expected=expected, got=len(self._buffer))

    def _read_header(self) -> None:
        magic, version, flags, nfds, length, request_id = _header.unpack_from(self._buffer)
        if magic != MAGIC:
            raise BadMagic(got=bytes(self._buffer[:16]).hex())
        if version != FRAME_VERSION:
            raise VersionMismatch(ours=[FRAME_VERSION, FRAME_VERSION], theirs=[version, version])
        del self._buffer[:HEADER_NBYTES]
        self._header = (flags, nfds, length, request_id)
        if length > self.max_body:
            raise FrameTooLarge(length=length, limit=self.max_body)
        if flags & ~FDS_ONLY or (flags & FDS_ONLY and (length or not nfds)):
            raise MalformedMessage(reason=f"frame flags {flags:#04x} with {length} bytes and {nfds} fds")
        if self._early and request_id != self._early_id:
            raise MalformedMessage(reason=f"fds of request {self._early_id} are followed by request {request_id}")
        if nfds > MAX_FDS_PER_MESSAGE or nfds + len(self._early) > self.max_fds:
            limit = min(self.max_fds - len(self._early), MAX_FDS_PER_MESSAGE)
            raise MalformedMessage(reason=f"a frame declares {nfds} fds where at most {limit} are taken")
        if nfds > len(self._fds):
            raise FdsTruncated(expected=nfds, got=len(self._fds))

    def _check_prefix(self) -> None:
        """Junk shorter than a header is told as soon as it cannot become one."""
        if not MAGIC.startswith(bytes(self._buffer[: len(MAGIC)])):
            raise BadMagic(got=bytes(self._buffer[:16]).hex())

    def _check_fds(self) -> None:
        """fds come with a frame's first byte: none can be here for a frame that has not begun."""
        begun = min(MAX_FDS_PER_MESSAGE, self.max_fds - len(self._early)) if self._buffer else 0
        declared = self._header[1] if self._header is not None else begun
        if len(self._fds) > declared:
            raise FdsUndeclared(expected=declared, got=len(self._fds))

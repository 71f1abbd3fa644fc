"""One side of one connection as a state machine: bytes and fds in, typed events out.  Sans-IO.

Four verbs, as in the websockets library: `receive_data` (and `receive_eof`) take what the
socket gave, `events_received` says what it meant, `send` queues a message, and
`data_to_send` gives the segments to write.  Nothing here raises on what a peer sent: a
`Violation` event says what was wrong; a fatal one has already queued the ErrorResponse that
tells the peer, and nothing received after it is looked at.

==========  ======================  =====================================
role        in this state           takes
==========  ======================  =====================================
daemon      EXPECT_HELLO            Hello → OPEN; anything else is fatal
daemon      OPEN                    every request but Hello
client      EXPECT_WELCOME          Welcome → OPEN, or ErrorResponse
client      OPEN                    every response but Welcome
either      CLOSED                  nothing
==========  ======================  =====================================
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Generic, TypeVar

from wcache_async.errors import (
    FrameTooLarge,
    MalformedMessage,
    ProtocolError,
    UnexpectedMessage,
    UnknownMessage,
    VersionMismatch,
)
from wcache_async.protocol.framing import (
    MAX_FDS_PER_FRAME,
    EndOfStream,
    FrameDecoder,
    FrameFault,
    Segment,
    encode_frame,
)
from wcache_async.protocol.messages import (
    PROTOCOL_VERSIONS,
    ErrorResponse,
    Hello,
    Message,
    Welcome,
    decode_request,
    decode_response,
    encode_message,
    type_of,
)

__all__ = [
    "MAX_HELLO_NBYTES",
    "MAX_REQUEST_NBYTES",
    "MAX_RESPONSE_NBYTES",
    "Connection",
    "EndOfStream",
    "Event",
    "Phase",
    "Received",
    "Role",
    "Violation",
    "choose_version",
]

F = TypeVar("F")

MAX_HELLO_NBYTES: Final = 4 << 10
MAX_REQUEST_NBYTES: Final = 64 << 10
MAX_RESPONSE_NBYTES: Final = 64 << 20
MAX_PUBLISHED_FDS: Final = 253
"""fds a request may carry: a manifest's, and as many arenas as fit into one message."""


class Role(Enum):
    DAEMON = "daemon"
    CLIENT = "client"


class Phase(Enum):
    EXPECT_HELLO = "expect_hello"
    EXPECT_WELCOME = "expect_welcome"
    OPEN = "open"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Received(Generic[F]):
    """A message, and the fds that came with it."""

    request_id: int
    message: Message
    fds: tuple[F, ...] = ()


@dataclass(frozen=True, slots=True)
class Violation(Generic[F]):
    """The peer broke a rule.  After a `fatal` one the connection takes nothing more."""

    request_id: int
    error: ProtocolError
    fatal: bool
    fds: tuple[F, ...] = ()
    """fds of the offending message, for the receiver to close."""


Event = Received[F] | Violation[F] | EndOfStream


def choose_version(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """The highest protocol version in both ranges.  Raises VersionMismatch."""
    version = min(ours[1], theirs[1])
    if version < max(ours[0], theirs[0]):
        raise VersionMismatch(ours=list(ours), theirs=list(theirs))
    return version


class Connection(Generic[F]):
    """One side of one connection; `F` is whatever stands for an fd.

    `max_request` and `max_response` cap a message's body in bytes, in both directions.
    """

    def __init__(
        self,
        role: Role,
        *,
        max_request: int = MAX_REQUEST_NBYTES,
        max_response: int = MAX_RESPONSE_NBYTES,
        versions: tuple[int, int] = PROTOCOL_VERSIONS,
    ) -> None:
        daemon = role is Role.DAEMON
        self.role = role
        self.phase = Phase.EXPECT_HELLO if daemon else Phase.EXPECT_WELCOME
        self.versions = versions
        self.version = 0
        """The protocol version agreed on; 0 before the handshake."""
        self._decode = decode_request if daemon else decode_response
        self._max_open = max_request if daemon else max_response
        self._max_send = max_response if daemon else max_request
        self._decoder: FrameDecoder[F] = FrameDecoder(
            max_body=min(MAX_HELLO_NBYTES, max_request) if daemon else max_response,
            max_fds=0 if daemon else MAX_FDS_PER_FRAME,
        )
        self._events: list[Event[F]] = []
        self._segments: list[Segment[F]] = []

    def receive_data(self, data: bytes | bytearray | memoryview, fds: Sequence[F] = ()) -> None:
        """Take bytes, and the fds that arrived with them, off the socket."""
        self._decoder.receive_data(data, fds)
        self._advance()

    def receive_eof(self) -> None:
        """The peer will send no more."""
        self._decoder.receive_eof()
        self._advance()

    def receive_fault(self, error: ProtocolError) -> None:
        """The socket found the stream broken: fds were lost (MSG_CTRUNC), the rest of a frame did not come."""
        self._decoder.receive_fault(error)
        self._advance()

    @property
    def frame_begun(self) -> bool:
        """Whether the peer still owes the rest of a frame."""
        return self._decoder.begun

    def events_received(self) -> list[Event[F]]:
        """What was received since the last call, in order."""
        events, self._events = self._events, []
        return events

    def send(self, request_id: int, message: Message, fds: Sequence[F] = ()) -> None:
        """Queue a message.

        Raises MalformedMessage if it cannot be encoded, and FrameTooLarge if the peer would
        drop the connection over it; nothing is queued then.
        """
        body = encode_message(message)
        limit = min(MAX_HELLO_NBYTES, self._max_send) if isinstance(message, Hello) else self._max_send
        if len(body) > limit:
            raise FrameTooLarge(length=len(body), limit=limit)
        self._segments += encode_frame(request_id, body, fds)

    def data_to_send(self) -> list[Segment[F]]:
        """What is to be written, in order; the caller owns the fds in it."""
        segments, self._segments = self._segments, []
        return segments

    def take_fds(self) -> list[F]:
        """Every fd no message has claimed; for whoever closes the connection."""
        return self._decoder.take_fds()

    def _advance(self) -> None:
        while self.phase is not Phase.CLOSED:
            item = self._decoder.next_event()
            if item is None:
                break
            if isinstance(item, EndOfStream):
                self.phase = Phase.CLOSED
                self._events.append(item)
            elif isinstance(item, FrameFault):
                self._violate(item.request_id, item.error, fatal=True)
            else:
                self._frame(item.request_id, item.body, item.fds)

    def _frame(self, request_id: int, body: bytes, fds: tuple[F, ...]) -> None:
        try:
            message = self._decode(body)
        except UnknownMessage as error:
            # Frames stay in step, so a type from a newer peer costs only its own request.
            return self._violate(request_id, error, fatal=self.phase is not Phase.OPEN, fds=fds)
        except MalformedMessage as error:
            return self._violate(request_id, error, fatal=True, fds=fds)
        if self.phase is Phase.OPEN:
            if isinstance(message, Hello | Welcome):
                return self._unexpected(request_id, message, "anything but a second handshake", fds)
        elif isinstance(message, Hello):
            return self._shake(request_id, message, message.versions, fds)
        elif isinstance(message, Welcome):
            self._max_send = message.limits.max_request_bytes or self._max_send
            return self._shake(request_id, message, (message.version, message.version), fds)
        elif not isinstance(message, ErrorResponse):
            return self._unexpected(request_id, message, "hello" if self.role is Role.DAEMON else "welcome", fds)
        self._events.append(Received(request_id, message, fds))
        return None

    def _shake(self, request_id: int, message: Message, theirs: Sequence[int], fds: tuple[F, ...]) -> None:
        try:
            self.version = choose_version(self.versions, theirs)
        except VersionMismatch as error:
            return self._violate(request_id, error, fatal=True, fds=fds)
        self.phase = Phase.OPEN
        self._decoder.max_body = self._max_open
        if self.role is Role.DAEMON:
            self._decoder.max_fds = MAX_PUBLISHED_FDS
        self._events.append(Received(request_id, message, fds))
        return None

    def _unexpected(self, request_id: int, message: Message, expected: str, fds: tuple[F, ...]) -> None:
        self._violate(request_id, UnexpectedMessage(type=type_of(message), expected=expected), fatal=True, fds=fds)

    def _violate(self, request_id: int, error: ProtocolError, *, fatal: bool, fds: tuple[F, ...] = ()) -> None:
        if self.role is Role.DAEMON:
            self._segments += encode_frame(request_id, encode_message(ErrorResponse.of(error)))
        if fatal:
            self.phase = Phase.CLOSED
            self._decoder.end()
        self._events.append(Violation(request_id, error, fatal, fds))

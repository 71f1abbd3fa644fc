"""connection: the state table, what each violation gets, and nothing raised or piled up by any peer."""

import tracemalloc
from collections.abc import Sequence
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec.msgpack import encode

from wcache_async.errors import (
    BadMagic,
    FdsTruncated,
    FdsUndeclared,
    FrameTooLarge,
    MalformedMessage,
    ProtocolError,
    StateNotFound,
    TruncatedFrame,
    UnexpectedMessage,
    UnknownMessage,
    VersionMismatch,
)
from wcache_async.protocol.connection import (
    MAX_HELLO_NBYTES,
    MAX_PUBLISHED_FDS,
    MAX_REQUEST_NBYTES,
    MAX_RESPONSE_NBYTES,
    Connection,
    EndOfStream,
    Event,
    Phase,
    Received,
    Role,
    Violation,
    choose_version,
)
from wcache_async.protocol.framing import Segment, encode_frame
from wcache_async.protocol.messages import (
    Abandon,
    AbandonResponse,
    BuildTicket,
    Claim,
    ErrorResponse,
    FetchDigests,
    FetchDigestsResponse,
    FetchState,
    FetchStateResponse,
    Hello,
    Limits,
    Load,
    LoadProgress,
    LoadResponse,
    Message,
    Pin,
    PinResponse,
    Publish,
    PublishResponse,
    Release,
    ReleaseResponse,
    StateStatus,
    Status,
    StatusResponse,
    Stop,
    StopResponse,
    Unload,
    UnloadResponse,
    Welcome,
    encode_message,
    type_of,
)

HELLO = Hello(versions=(1, 1), client="test")
WELCOME = Welcome(version=1, server="test")
REFUSED = ErrorResponse.of(StateNotFound(name="m", rank=0, available=[]))

MESSAGES: list[Message] = [
    HELLO,
    FetchState(name="m"),
    Release(lease=1),
    Status(),
    Load(path="p", name="m"),
    Unload(name="m"),
    Publish(name="m", manifest_nbytes=0, transport_backend="shm_fd"),
    Claim(name="m"),
    Abandon(ticket=1),
    Pin(name="m"),
    FetchDigests(lease=1),
    Stop(),
    WELCOME,
    LoadProgress(bytes_done=1, bytes_total=2),
    FetchStateResponse(name="m", rank=0, generation=1, lease=1, config={}, manifest_nbytes=0),
    ReleaseResponse(),
    StatusResponse(version="1", pid=1, socket="s", uptime_s=1.0, clients=1),
    LoadResponse(state=StateStatus(name="m", rank=0, phase="ready")),
    UnloadResponse(unloaded=("m:0",)),
    PublishResponse(state=StateStatus(name="m", rank=0, phase="ready")),
    BuildTicket(ticket=1),
    AbandonResponse(),
    PinResponse(),
    FetchDigestsResponse(),
    StopResponse(),
    REFUSED,
]

REQUESTS = {
    "fetch_state",
    "fetch_digests",
    "release",
    "status",
    "load",
    "unload",
    "publish",
    "claim",
    "abandon",
    "pin",
    "stop",
}

TABLE: dict[tuple[Role, Phase], tuple[set[str], set[str]]] = {
    # What is taken, and what is known but comes at the wrong time; anything else is unknown there.
    (Role.DAEMON, Phase.EXPECT_HELLO): (
        {"hello"},
        {
            "fetch_state",
            "release",
            "status",
            "load",
            "unload",
            "publish",
            "claim",
            "abandon",
            "pin",
            "fetch_digests",
            "stop",
        },
    ),
    (Role.DAEMON, Phase.OPEN): (
        {
            "fetch_state",
            "release",
            "status",
            "load",
            "unload",
            "publish",
            "claim",
            "abandon",
            "pin",
            "fetch_digests",
            "stop",
        },
        {"hello"},
    ),
    (Role.CLIENT, Phase.EXPECT_WELCOME): (
        {"welcome", "error"},
        {
            "load_progress",
            "fetch_state_response",
            "release_response",
            "status_response",
            "load_response",
            "unload_response",
            "publish_response",
            "build_ticket",
            "abandon_response",
            "pin_response",
            "fetch_digests_response",
            "stop_response",
        },
    ),
    (Role.CLIENT, Phase.OPEN): (
        {
            "load_progress",
            "fetch_state_response",
            "release_response",
            "status_response",
            "load_response",
            "unload_response",
            "publish_response",
            "build_ticket",
            "abandon_response",
            "pin_response",
            "fetch_digests_response",
            "stop_response",
            "error",
        },
        {"welcome"},
    ),
}


def wire(request_id: int, message: Message) -> bytes:
    return frame(request_id, encode_message(message))


def frame(request_id: int, body: bytes) -> bytes:
    segments: list[Segment[int]] = encode_frame(request_id, body)
    return b"".join(segment.data for segment in segments)


def fetch_of(nbytes: int) -> FetchState:
    """A request with a body of just that many bytes."""
    candidates = (FetchState(name="x" * (nbytes - spare)) for spare in range(40))
    return next(message for message in candidates if len(encode_message(message)) == nbytes)


def in_phase(
    role: Role, phase: Phase, *, max_request: int = MAX_REQUEST_NBYTES, max_response: int = MAX_RESPONSE_NBYTES
) -> Connection[int]:
    connection: Connection[int] = Connection(role, max_request=max_request, max_response=max_response)
    if phase is Phase.OPEN:
        connection.receive_data(wire(0, HELLO if role is Role.DAEMON else WELCOME))
        connection.events_received()
    assert connection.phase is phase
    return connection


def only(events: Sequence[Event[int]]) -> Event[int]:
    (event,) = events
    return event


def only_violation(events: Sequence[Event[int]]) -> Violation[int]:
    event = only(events)
    assert isinstance(event, Violation)
    return event


def answers(connection: Connection[int]) -> list[tuple[int, ErrorResponse]]:
    """What is queued to be sent, as the peer will read it: each an ErrorResponse."""
    peer: Connection[int] = in_phase(Role.CLIENT, Phase.OPEN)
    for segment in connection.data_to_send():
        peer.receive_data(segment.data, segment.fds)
    result = []
    for event in peer.events_received():
        assert isinstance(event, Received)
        assert isinstance(event.message, ErrorResponse)
        result.append((event.request_id, event.message))
    return result


# -------------------------------------------------------------------------------- state table
def test_the_table_knows_every_message() -> None:
    assert {type(message) for message in MESSAGES} == set(get_args(Message))
    for taken, mistimed in TABLE.values():
        assert taken | mistimed <= {type_of(message) for message in MESSAGES}


@pytest.mark.parametrize("message", MESSAGES, ids=type_of)
@pytest.mark.parametrize(("role", "phase"), TABLE, ids=lambda value: value.value)
def test_each_message_in_each_phase(role: Role, phase: Phase, message: Message) -> None:
    taken, mistimed = TABLE[role, phase]
    connection = in_phase(role, phase)
    connection.receive_data(wire(7, message))
    event = only(connection.events_received())
    if type_of(message) in taken:
        assert event == Received(7, message)
        shaken = isinstance(message, Hello | Welcome)
        assert connection.phase is (Phase.OPEN if shaken else phase)
        assert connection.data_to_send() == []
        return
    assert isinstance(event, Violation)
    assert event.request_id == 7
    if type_of(message) in mistimed:
        assert isinstance(event.error, UnexpectedMessage)
        assert event.error.type == type_of(message)
        assert event.fatal
    else:
        assert isinstance(event.error, UnknownMessage)
        assert event.fatal is (phase is not Phase.OPEN)
    assert connection.phase is (Phase.CLOSED if event.fatal else phase)
    assert [i for i, _ in answers(connection)] == ([7] if role is Role.DAEMON else [])


@pytest.mark.parametrize("message", MESSAGES, ids=type_of)
@pytest.mark.parametrize("role", Role)
def test_a_closed_connection_takes_nothing(role: Role, message: Message) -> None:
    connection: Connection[int] = Connection(role)
    connection.receive_eof()
    assert connection.events_received() == [EndOfStream()]
    connection.receive_data(wire(1, message))
    connection.receive_eof()
    assert connection.events_received() == []
    assert connection.data_to_send() == []
    assert connection.phase is Phase.CLOSED


# ---------------------------------------------------------------------------------- handshake
@pytest.mark.parametrize(
    ("ours", "theirs", "version"),
    [((1, 1), (1, 1), 1), ((1, 3), (2, 9), 3), ((2, 5), (1, 3), 3), ((1, 9), (4, 4), 4), ((3, 3), (1, 3), 3)],
)
def test_the_highest_common_version_is_chosen(ours: Sequence[int], theirs: Sequence[int], version: int) -> None:
    assert choose_version(ours, theirs) == choose_version(theirs, ours) == version


@pytest.mark.parametrize(("ours", "theirs"), [((1, 1), (2, 2)), ((3, 4), (1, 2)), ((1, 4), (3, 2))])
def test_no_common_version_is_told_with_both_ranges(ours: Sequence[int], theirs: Sequence[int]) -> None:
    with pytest.raises(VersionMismatch) as caught:
        choose_version(ours, theirs)
    assert (caught.value.ours, caught.value.theirs) == (list(ours), list(theirs))


def test_hello_settles_the_version_at_the_daemon() -> None:
    connection: Connection[int] = Connection(Role.DAEMON, versions=(1, 3))
    assert connection.version == 0
    connection.receive_data(wire(0, Hello(versions=(2, 9))))
    assert (connection.version, connection.phase) == (3, Phase.OPEN)


def test_a_client_too_new_is_told_and_dropped() -> None:
    connection: Connection[int] = Connection(Role.DAEMON, versions=(1, 1))
    connection.receive_data(wire(4, Hello(versions=(2, 3))))
    violation = only_violation(connection.events_received())
    assert violation.fatal
    request_id, response = answers(connection)[0]
    error = response.to_error()
    assert request_id == 4
    assert isinstance(error, VersionMismatch)
    assert (error.ours, error.theirs) == ([1, 1], [2, 3])
    assert (connection.version, connection.phase) == (0, Phase.CLOSED)


@pytest.mark.parametrize("version", [0, 2, -1, 2**63])
def test_a_daemon_that_chose_a_version_never_offered_is_not_believed(version: int) -> None:
    connection: Connection[int] = Connection(Role.CLIENT)
    connection.receive_data(wire(0, Welcome(version=version)))
    violation = only_violation(connection.events_received())
    assert isinstance(violation.error, VersionMismatch)
    assert violation.error.theirs == [version, version]
    assert connection.phase is Phase.CLOSED


def test_hello_and_first_requests_may_come_in_one_go() -> None:
    connection: Connection[int] = Connection(Role.DAEMON)
    connection.receive_data(wire(0, HELLO) + wire(1, FetchState(name="m")) + wire(2, Status()))
    assert connection.events_received() == [
        Received(0, HELLO),
        Received(1, FetchState(name="m")),
        Received(2, Status()),
    ]


def test_a_request_as_large_as_allowed_may_follow_hello_in_one_go() -> None:
    """The hello's cap must not be applied to the frame behind it."""
    large = FetchState(name="x" * (MAX_REQUEST_NBYTES - 100))
    connection: Connection[int] = Connection(Role.DAEMON)
    connection.receive_data(wire(0, HELLO) + wire(1, large))
    assert [event.message for event in connection.events_received() if isinstance(event, Received)] == [HELLO, large]


def test_an_error_in_place_of_welcome_leaves_the_handshake_open() -> None:
    """The daemon may answer a pipelined request before the hello; it will say so by closing."""
    connection: Connection[int] = Connection(Role.CLIENT)
    connection.receive_data(wire(0, REFUSED))
    assert only(connection.events_received()) == Received(0, REFUSED)
    assert connection.phase is Phase.EXPECT_WELCOME


# --------------------------------------------------------------------------------------- caps
@pytest.mark.parametrize(
    ("role", "phase", "limit"),
    [
        (Role.DAEMON, Phase.EXPECT_HELLO, MAX_HELLO_NBYTES),
        (Role.DAEMON, Phase.OPEN, MAX_REQUEST_NBYTES),
        (Role.CLIENT, Phase.EXPECT_WELCOME, MAX_RESPONSE_NBYTES),
        (Role.CLIENT, Phase.OPEN, MAX_RESPONSE_NBYTES),
    ],
)
def test_a_body_over_the_cap_of_its_phase_is_refused_by_its_header(role: Role, phase: Phase, limit: int) -> None:
    header = bytearray(frame(9, b""))
    header[8:12] = (limit + 1).to_bytes(4, "little")
    connection = in_phase(role, phase)
    connection.receive_data(header)
    violation = only_violation(connection.events_received())
    assert isinstance(violation.error, FrameTooLarge)
    assert (violation.error.length, violation.error.limit) == (limit + 1, limit)
    assert (violation.request_id, violation.fatal) == (9, True)

    header[8:12] = limit.to_bytes(4, "little")
    connection = in_phase(role, phase)
    connection.receive_data(header)
    assert connection.events_received() == []


def test_the_documented_caps() -> None:
    assert (MAX_HELLO_NBYTES, MAX_REQUEST_NBYTES, MAX_RESPONSE_NBYTES) == (4 << 10, 64 << 10, 64 << 20)


def test_caps_may_be_chosen() -> None:
    connection = in_phase(Role.DAEMON, Phase.OPEN, max_request=100)
    connection.receive_data(wire(1, FetchState(name="x" * 100)))
    assert isinstance(only_violation(connection.events_received()).error, FrameTooLarge)
    connection = in_phase(Role.CLIENT, Phase.OPEN, max_response=100)
    connection.receive_data(wire(1, UnloadResponse(unloaded=("x" * 100,))))
    assert isinstance(only_violation(connection.events_received()).error, FrameTooLarge)


# ------------------------------------------------------------------------------------ sending
def test_what_one_side_sends_the_other_receives_with_its_fds() -> None:
    client, daemon = in_phase(Role.CLIENT, Phase.OPEN), in_phase(Role.DAEMON, Phase.OPEN)
    client.send(3, FetchState(name="m"))
    daemon.receive_data(b"".join(segment.data for segment in client.data_to_send()))
    assert only(daemon.events_received()) == Received(3, FetchState(name="m"))
    response = FetchStateResponse(name="m", rank=0, generation=1, lease=1, config={}, manifest_nbytes=9)
    daemon.send(3, response, tuple(range(300)))
    segments = daemon.data_to_send()
    for segment in segments:
        client.receive_data(segment.data, segment.fds)
    assert only(client.events_received()) == Received(3, response, tuple(range(300)))
    assert client.take_fds() == []
    assert daemon.data_to_send() == []


@pytest.mark.parametrize("name", ["\ud800", "x" * MAX_REQUEST_NBYTES], ids=["surrogate", "too large"])
def test_a_request_that_would_cost_the_connection_is_refused_at_the_sender(name: str) -> None:
    connection = in_phase(Role.CLIENT, Phase.OPEN)
    connection.send(1, Status())
    with pytest.raises((MalformedMessage, FrameTooLarge)):
        connection.send(2, FetchState(name=name))
    assert [segment.data for segment in connection.data_to_send()] == [wire(1, Status())]


def test_a_hello_over_its_cap_is_refused_at_the_sender() -> None:
    connection: Connection[int] = Connection(Role.CLIENT)
    with pytest.raises(FrameTooLarge) as caught:
        connection.send(0, Hello(versions=(1, 1), client="x" * MAX_HELLO_NBYTES))
    assert caught.value.limit == MAX_HELLO_NBYTES
    connection.send(0, HELLO)
    assert connection.data_to_send()


@pytest.mark.parametrize(("told", "limit"), [(0, MAX_REQUEST_NBYTES), (100, 100), (1 << 20, 1 << 20)])
def test_a_client_keeps_to_the_limit_the_daemon_told(told: int, limit: int) -> None:
    connection: Connection[int] = Connection(Role.CLIENT)
    connection.receive_data(wire(0, Welcome(version=1, limits=Limits(max_request_bytes=told))))
    with pytest.raises(FrameTooLarge) as caught:
        connection.send(1, fetch_of(limit + 1))
    assert (caught.value.length, caught.value.limit) == (limit + 1, limit)
    connection.send(1, fetch_of(limit))


@pytest.mark.parametrize("role", Role)
def test_segments_are_handed_over_once_in_order(role: Role) -> None:
    connection = in_phase(role, Phase.OPEN)
    sent: list[Message] = (
        [Status(), Stop(), Status()] if role is Role.CLIENT else [ReleaseResponse(), REFUSED, StopResponse()]
    )
    for number, message in enumerate(sent):
        connection.send(number, message)
    assert connection.data_to_send() == [Segment(wire(number, message)) for number, message in enumerate(sent)]
    assert connection.data_to_send() == []


# --------------------------------------------------------------------------------- violations
BROKEN: dict[str, tuple[bytes, type[ProtocolError]]] = {
    "another protocol": (b"GET / HTTP/1.1\r\n\r\n", BadMagic),
    "another header version": (b"WCAC\x02" + bytes(15), VersionMismatch),
    "unknown flag": (b"WCAC\x01\x80" + bytes(14), MalformedMessage),
    "declared fd that did not come": (b"WCAC\x01\x00\x01\x00" + bytes(12), ProtocolError),
    "empty body": (frame(0, b""), MalformedMessage),
    "no map": (frame(0, b"\x93\x01\x02\x03"), MalformedMessage),
    "nested too deep": (frame(0, b"\x82\xa4type\xa6status\xa1x" + b"\x91" * 3000), MalformedMessage),
    "surrogate": (frame(0, b"\x81\xa4type\xa3\xed\xa0\x80"), MalformedMessage),
    "claims 4 GiB": (frame(0, b"\x82\xa4type\xa6status\xa1x\xdd\xff\xff\xff\xff"), MalformedMessage),
    "integer beyond 63 bits": (frame(0, encode({"type": "release", "lease": 2**64 - 1})), MalformedMessage),
}


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("phase", [Phase.EXPECT_HELLO, Phase.OPEN])
def test_a_daemon_tells_the_peer_what_it_broke_and_looks_at_nothing_more(phase: Phase, case: str) -> None:
    data, expected = BROKEN[case]
    connection = in_phase(Role.DAEMON, phase)
    connection.receive_data(data + wire(1, Status()))
    violation = only_violation(connection.events_received())
    assert violation.fatal
    assert isinstance(violation.error, expected)
    ((request_id, response),) = answers(connection)
    assert request_id == violation.request_id
    assert type(response.to_error()) is type(violation.error)
    assert str(response.to_error()) == str(violation.error)
    connection.receive_data(wire(2, Status()))
    connection.receive_eof()
    assert connection.events_received() == []
    assert connection.data_to_send() == []


@pytest.mark.parametrize("case", [case for case in BROKEN if case != "integer beyond 63 bits"])
@pytest.mark.parametrize("phase", [Phase.EXPECT_WELCOME, Phase.OPEN])
def test_a_client_keeps_a_violation_to_itself(phase: Phase, case: str) -> None:
    data, expected = BROKEN[case]
    connection = in_phase(Role.CLIENT, phase)
    connection.receive_data(data + wire(1, WELCOME))
    violation = only_violation(connection.events_received())
    assert violation.fatal
    assert isinstance(violation.error, expected)
    assert connection.data_to_send() == []
    assert connection.phase is Phase.CLOSED


def test_an_unknown_request_costs_only_itself() -> None:
    connection = in_phase(Role.DAEMON, Phase.OPEN)
    newer = frame(5, encode({"type": "teleport", "where": [1, 2]}))
    connection.receive_data(wire(4, Status()) + newer + wire(6, Stop()))
    before, violation, after = connection.events_received()
    assert (before, after) == (Received(4, Status()), Received(6, Stop()))
    assert isinstance(violation, Violation)
    assert not violation.fatal
    ((request_id, response),) = answers(connection)
    error = response.to_error()
    assert request_id == 5
    assert isinstance(error, UnknownMessage)
    assert error.type == "teleport"


def test_an_unknown_response_hands_its_fds_over_for_closing() -> None:
    connection = in_phase(Role.CLIENT, Phase.OPEN)
    (segment,) = encode_frame(5, encode({"type": "gift"}), (1, 2))
    connection.receive_data(segment.data, segment.fds)
    violation = only_violation(connection.events_received())
    assert isinstance(violation.error, UnknownMessage)
    assert (violation.request_id, violation.fatal, violation.fds) == (5, False, (1, 2))
    assert connection.phase is Phase.OPEN
    assert connection.take_fds() == []


@pytest.mark.parametrize(
    "body", [encode({"type": "status_response"}), encode({"type": "welcome", "version": 1}), b"junk"]
)
def test_fds_of_a_fatal_message_are_handed_over_with_it(body: bytes) -> None:
    connection = in_phase(Role.CLIENT, Phase.OPEN)
    (segment,) = encode_frame(5, body, (1, 2))
    connection.receive_data(segment.data, segment.fds)
    violation = only_violation(connection.events_received())
    assert (violation.fatal, violation.fds, connection.take_fds()) == (True, (1, 2), [])


def test_a_daemon_takes_no_fds_before_the_handshake_and_hands_them_over_for_closing() -> None:
    connection = in_phase(Role.DAEMON, Phase.EXPECT_HELLO)
    (segment,) = encode_frame(5, encode_message(Status()), (1,))
    connection.receive_data(segment.data[:3], segment.fds)
    assert isinstance(only_violation(connection.events_received()).error, FdsUndeclared)
    assert connection.take_fds() == [1]
    assert len(answers(connection)) == 1


def test_a_daemon_takes_fds_after_the_handshake_as_many_as_fit_into_one_message() -> None:
    connection = in_phase(Role.DAEMON, Phase.OPEN)
    (segment,) = encode_frame(5, encode_message(Status()), tuple(range(MAX_PUBLISHED_FDS)))
    connection.receive_data(segment.data, segment.fds)
    (received,) = connection.events_received()
    assert isinstance(received, Received)
    assert received.fds == tuple(range(MAX_PUBLISHED_FDS))
    for segment in encode_frame(6, encode_message(Status()), tuple(range(MAX_PUBLISHED_FDS + 1))):
        connection.receive_data(segment.data, segment.fds)
    only_violation(connection.events_received())
    assert len(connection.take_fds()) == MAX_PUBLISHED_FDS + 1


@pytest.mark.parametrize("role", Role)
def test_fds_lost_by_the_kernel_are_a_violation(role: Role) -> None:
    connection = in_phase(role, Phase.OPEN)
    connection.receive_fault(FdsTruncated(expected=2, got=1))
    violation = only_violation(connection.events_received())
    assert isinstance(violation.error, FdsTruncated)
    assert violation.fatal
    assert len(answers(connection)) == (role is Role.DAEMON)


@pytest.mark.parametrize("role", Role)
def test_the_end_of_the_stream_inside_a_frame_is_a_violation_naming_the_request(role: Role) -> None:
    connection = in_phase(role, Phase.OPEN)
    connection.receive_data(wire(6, Status())[:-1])
    connection.receive_eof()
    violation = only_violation(connection.events_received())
    assert isinstance(violation.error, TruncatedFrame)
    assert violation.request_id == 6


def test_requests_received_before_the_end_are_still_delivered() -> None:
    connection = in_phase(Role.DAEMON, Phase.OPEN)
    connection.receive_data(wire(1, Status()))
    connection.receive_eof()
    assert connection.events_received() == [Received(1, Status()), EndOfStream()]


def test_after_a_fatal_message_bytes_are_not_kept() -> None:
    """A message out of turn leaves the frames in step, so the decoder alone would go on collecting."""
    connection = in_phase(Role.DAEMON, Phase.OPEN)
    connection.receive_data(wire(1, HELLO))
    assert connection.phase is Phase.CLOSED
    chunk = bytes(1 << 16)
    tracemalloc.start()
    for _ in range(256):
        connection.receive_data(chunk)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < len(chunk)


def test_a_header_that_promises_much_takes_no_memory() -> None:
    header = bytearray(frame(9, b""))
    header[8:12] = MAX_RESPONSE_NBYTES.to_bytes(4, "little")
    connection = in_phase(Role.CLIENT, Phase.OPEN)
    tracemalloc.start()
    connection.receive_data(header)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 16


# --------------------------------------------------------------------------------------- fuzz
class Conversation(RuleBasedStateMachine):
    """Both sides talk over a lossless pipe, a third party puts in what it likes.

    Whatever happens, nothing raises, a closed side stays closed and silent, and what a side
    received until then is what the other sent, in order.
    """

    @initialize()
    def connect(self) -> None:
        self.sides: dict[Role, Connection[int]] = {role: Connection(role) for role in Role}
        self.sent: dict[Role, list[tuple[int, Message]]] = {role: [] for role in Role}
        self.got: dict[Role, list[tuple[int, Message]]] = {role: [] for role in Role}
        self.pipes: dict[Role, bytearray] = {role: bytearray() for role in Role}
        self.disturbed: set[Role] = set()

    def other(self, role: Role) -> Role:
        return Role.CLIENT if role is Role.DAEMON else Role.DAEMON

    @rule(role=st.sampled_from(Role), request_id=st.integers(0, 2**64 - 1), number=st.integers(0, len(MESSAGES) - 1))
    def send(self, role: Role, request_id: int, number: int) -> None:
        self.sides[role].send(request_id, MESSAGES[number])
        self.sent[role].append((request_id, MESSAGES[number]))

    @rule(role=st.sampled_from(Role), nbytes=st.integers(1, 400))
    def deliver(self, role: Role, nbytes: int) -> None:
        """Some bytes reach `role`."""
        pipe = self.pipes[self.other(role)]
        pipe += b"".join(segment.data for segment in self.sides[self.other(role)].data_to_send())
        was_closed = self.sides[role].phase is Phase.CLOSED
        self.sides[role].receive_data(bytes(pipe[:nbytes]))
        del pipe[:nbytes]
        self.note(role, was_closed)

    @rule(role=st.sampled_from(Role), junk=st.binary(min_size=1, max_size=30))
    def disturb(self, role: Role, junk: bytes) -> None:
        was_closed = self.sides[role].phase is Phase.CLOSED
        self.disturbed.add(role)
        self.sides[role].receive_data(junk)
        self.note(role, was_closed)

    @rule(role=st.sampled_from(Role))
    def hang_up(self, role: Role) -> None:
        was_closed = self.sides[role].phase is Phase.CLOSED
        self.sides[role].receive_eof()
        self.note(role, was_closed)

    def note(self, role: Role, was_closed: bool) -> None:
        events = self.sides[role].events_received()
        assert not (was_closed and events)
        for event in events:
            if isinstance(event, Received):
                self.got[role].append((event.request_id, event.message))
        ends = [e for e in events if isinstance(e, EndOfStream) or (isinstance(e, Violation) and e.fatal)]
        assert len(ends) == (self.sides[role].phase is Phase.CLOSED and not was_closed)
        if ends:
            assert events[-1] is ends[0]

    @invariant()
    def what_arrived_was_sent(self) -> None:
        for role, got in self.got.items():
            if role not in self.disturbed:
                sent = iter(self.sent[self.other(role)])
                # Not the errors: a daemon's own answers to violations come between what was sent.
                assert all(item in sent for item in got if not isinstance(item[1], ErrorResponse))


Conversation.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestConversation = Conversation.TestCase


@st.composite
def hostile_bodies(draw: st.DrawFn) -> bytes:
    return draw(
        st.one_of(
            st.sampled_from(MESSAGES).map(encode_message),
            st.binary(max_size=40),
            st.builds(
                lambda kind, extra: encode({"type": kind, "x": extra}),
                st.sampled_from([type_of(m) for m in MESSAGES]) | st.text(max_size=5),
                st.integers(0, 2**64 - 1) | st.floats() | st.binary(max_size=9) | st.lists(st.none(), max_size=3),
            ),
        )
    )


@given(
    role=st.sampled_from(Role),
    frames=st.lists(st.tuples(hostile_bodies(), st.integers(0, 3)), max_size=8),
    shaken=st.booleans(),
    step=st.integers(1, 100),
)
def test_any_frames_in_any_order_raise_nothing_and_lose_no_fd(
    role: Role, frames: list[tuple[bytes, int]], shaken: bool, step: int
) -> None:
    phase = {Role.DAEMON: Phase.EXPECT_HELLO, Role.CLIENT: Phase.EXPECT_WELCOME}[role]
    connection = in_phase(role, Phase.OPEN if shaken else phase)
    given_fds: list[int] = []
    events: list[Event[int]] = []
    for number, (body, nfds) in enumerate(frames):
        (segment,) = encode_frame(number, body, tuple(range(number * 10, number * 10 + nfds)))
        given_fds += segment.fds
        for start in range(0, len(segment.data), step):
            connection.receive_data(segment.data[start : start + step], segment.fds if start == 0 else ())
            events += connection.events_received()
    handed = [fd for event in events if not isinstance(event, EndOfStream) for fd in event.fds]
    assert sorted(handed + connection.take_fds()) == given_fds
    violations = [event for event in events if isinstance(event, Violation)]
    assert [violation.fatal for violation in violations[:-1]] == [False] * len(violations[:-1])
    if role is Role.DAEMON:
        told = [(request_id, response.to_error().code) for request_id, response in answers(connection)]
        assert told == [(violation.request_id, violation.error.code) for violation in violations]

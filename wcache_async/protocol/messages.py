"""The messages of the wire: one msgpack map each, told apart by their ``type``.

Requests go from client to daemon, responses and events back; a response carries its
request's id in the frame header.  Unknown fields are ignored, so that either side may be
newer; fields are only ever added, with defaults.
"""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from wcache_async.errors import (
    Detail,
    InvalidRequest,
    MalformedMessage,
    UnknownMessage,
    WeightCacheError,
    error_from_wire,
    wire_text,
)
from wcache_async.manifest import Config, NonNegative, Origin

__all__ = [
    "DIGEST_NBYTES",
    "PROTOCOL_VERSIONS",
    "Abandon",
    "AbandonResponse",
    "BuildTicket",
    "Claim",
    "ErrorResponse",
    "FetchDigests",
    "FetchDigestsResponse",
    "FetchState",
    "FetchStateResponse",
    "Health",
    "Hello",
    "Limits",
    "Load",
    "LoadProgress",
    "LoadResponse",
    "Message",
    "Pin",
    "PinResponse",
    "Publish",
    "PublishResponse",
    "Release",
    "ReleaseResponse",
    "Request",
    "Response",
    "StateStatus",
    "Status",
    "StatusResponse",
    "Stop",
    "StopResponse",
    "Unload",
    "UnloadResponse",
    "Welcome",
    "check_request",
    "decode_request",
    "decode_response",
    "encode_message",
    "type_of",
]

PROTOCOL_VERSIONS = (1, 1)
"""Lowest and highest protocol version this release speaks."""

DIGEST_NBYTES = 16
"""Bytes of a tensor's digest."""

Seconds = Annotated[float, Meta(ge=0)]


class _Message(Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    pass


# ---------------------------------------------------------------------------------- requests
class Hello(_Message, frozen=True, kw_only=True, tag="hello"):
    """First message of a client.

    `versions` is the lowest and highest protocol version it speaks, `client` what it calls
    itself, `backends` the transports it accepts, best first (empty: ``torch_ipc``).
    """

    versions: tuple[NonNegative, NonNegative]
    client: str = ""
    pid: int = 0
    backends: tuple[str, ...] = ()


class FetchState(_Message, frozen=True, kw_only=True, tag="fetch_state"):
    """Ask for a state; answered by FetchStateResponse once it is READY.

    Waits up to `timeout` seconds (None: as long as the connection lives) while it is LOADING.
    `expect` is compared field by field with the state's config.  With `progress` the daemon
    sends LoadProgress while the request waits.
    """

    name: str
    rank: NonNegative = 0
    expect: Config = {}
    timeout: Seconds | None = None
    backends: tuple[str, ...] | None = None
    """Overrides the accepted backends of the Hello for this request."""
    progress: bool = False


class FetchDigests(_Message, frozen=True, kw_only=True, tag="fetch_digests"):
    """Ask for the digests of the tensors of the state that `lease` holds."""

    lease: NonNegative


class Release(_Message, frozen=True, kw_only=True, tag="release"):
    """Give up a lease before the connection ends."""

    lease: NonNegative


class Status(_Message, frozen=True, kw_only=True, tag="status"):
    """Ask what the daemon holds."""


class Load(_Message, frozen=True, kw_only=True, tag="load"):
    """Have the daemon load `path` as a state; answered when it is READY, or at once without `wait`.

    `source` is ``auto`` or a source's name, `dtype` a torch dtype to cast to (empty: as
    stored), `replace` allows a new generation under a name in use.
    """

    path: str
    name: str
    rank: NonNegative = 0
    source: str = "auto"
    dtype: str = ""
    backend: str = "auto"
    config: Config = {}
    options: Config = {}
    """The source's own, e.g. a revision for ``transformers``."""
    replace: bool = False
    wait: bool = True
    progress: bool = False


class Unload(_Message, frozen=True, kw_only=True, tag="unload"):
    """Forget a state, every rank of it where `rank` is None; holders keep their memory."""

    name: str
    rank: NonNegative | None = None


class Publish(_Message, frozen=True, kw_only=True, tag="publish"):
    """Hand over a state the client has built; the daemon adopts the frame's fds once it has checked them.

    The fds and the fields are as in FetchStateResponse, the other way round.  `ticket` is a
    BuildTicket's, or 0 for a state nobody was told to build.
    """

    name: str
    rank: NonNegative = 0
    config: Config = {}
    manifest_nbytes: NonNegative
    transport_backend: str
    manifest: bytes | None = None
    payload: bytes = b""
    ticket: NonNegative = 0
    replace: bool = False
    source: str = ""


class Claim(_Message, frozen=True, kw_only=True, tag="claim"):
    """Ask for a state, or else to be the one who builds it.

    Answered by FetchStateResponse once it is READY, or by BuildTicket, which exactly one
    client holds at a time for a name and rank: when its holder goes, the next one gets it.
    `config` is compared as a whole.
    """

    name: str
    rank: NonNegative = 0
    config: Config = {}
    timeout: Seconds | None = None
    progress: bool = False


class Abandon(_Message, frozen=True, kw_only=True, tag="abandon"):
    """Give a BuildTicket back unused; who waits next gets it."""

    ticket: NonNegative


class Pin(_Message, frozen=True, kw_only=True, tag="pin"):
    """Keep a state (every rank without `rank`) from being evicted, or no longer."""

    name: str
    rank: NonNegative | None = None
    pinned: bool = True


class Stop(_Message, frozen=True, kw_only=True, tag="stop"):
    """Shut the daemon down as SIGTERM does."""


Request = Hello | FetchState | FetchDigests | Release | Status | Load | Unload | Publish | Claim | Abandon | Pin | Stop


# --------------------------------------------------------------------------------- responses
class Limits(Struct, frozen=True, kw_only=True):
    """What the daemon takes of one connection; 0: not told."""

    max_request_bytes: NonNegative = 0
    max_requests_in_flight: NonNegative = 0


class Welcome(_Message, frozen=True, kw_only=True, tag="welcome"):
    """Answer to Hello: the protocol version chosen, and who the daemon is.

    `instance` is a nonce that differs at every start of a daemon.
    """

    version: int
    server: str = ""
    pid: int = 0
    instance: str = ""
    limits: Limits = Limits()


class LoadProgress(_Message, frozen=True, kw_only=True, tag="load_progress"):
    """Sent while a request waits for a state that is LOADING; any number before the response."""

    bytes_done: NonNegative
    bytes_total: NonNegative


class FetchStateResponse(_Message, frozen=True, kw_only=True, tag="fetch_state_response"):
    """A state, and a lease on it.

    The frame's fds are, in this order: the manifest's memfd where `manifest` is None
    (`manifest_nbytes` long), then whatever the backend announces in `payload`, which only
    the backend named by `transport_backend` reads (missing or empty: ``torch_ipc``).
    """

    name: str
    rank: NonNegative
    generation: NonNegative
    lease: NonNegative
    config: Config
    manifest_nbytes: NonNegative
    transport_backend: str = ""
    manifest: bytes | None = None
    payload: bytes = b""
    resident_bytes: NonNegative = 0
    digest: str = ""
    """The whole state's, in hexadecimal; empty where the daemon does not know it."""
    origin: Origin | None = None
    """The files the state was read from; None for one that was built."""


class FetchDigestsResponse(_Message, frozen=True, kw_only=True, tag="fetch_digests_response"):
    """Each tensor's digest, DIGEST_NBYTES long, in the manifest's order, end to end; none where there are none."""

    digests: bytes = b""


class ReleaseResponse(_Message, frozen=True, kw_only=True, tag="release_response"):
    """The lease is given up."""


class StateStatus(Struct, frozen=True, kw_only=True):
    """One state in a status: `phase` is ``loading``, ``ready`` or ``failed``."""

    name: str
    rank: int
    phase: str
    generation: int = 0
    tensors: int = 0
    bytes: int = 0
    bytes_done: int = 0
    backends: tuple[str, ...] = ()
    leases: int = 0
    config: Config = {}
    error: str | None = None
    source: str = ""
    pinned: bool = False
    digest: str = ""
    stale: bool = False
    """The files it was loaded from have changed since."""


class Health(Struct, frozen=True, kw_only=True):
    """How the daemon's process fares; times in seconds, sizes in bytes."""

    fds: NonNegative = 0
    mappings: NonNegative = 0
    """Of memory that is or may be shared: arenas, and manifests of their own."""
    memory_bytes: NonNegative = 0
    tasks: NonNegative = 0
    """Of its event loop."""
    leases: NonNegative = 0
    """Also on states that were unloaded or replaced."""
    generations: NonNegative = 0
    """In memory, those among them that only their leases keep."""
    worst_loop_stall_s: Seconds = 0.0
    """The longest since the start that the event loop answered nobody."""
    worst_loop_stall_computing_s: Seconds = 0.0
    """Of that, what the loop itself computed; in the rest it waited for a processor or the kernel."""
    loop_stalls_beyond: tuple[tuple[Seconds, NonNegative], ...] = ()
    """Of each of some lengths, how many stalls since the start were longer."""


class StatusResponse(_Message, frozen=True, kw_only=True, tag="status_response"):
    """What the daemon is and holds; `uptime_s` in seconds."""

    version: str
    pid: int
    socket: str
    uptime_s: float
    clients: int
    states: tuple[StateStatus, ...] = ()
    draining: bool = False
    health: Health | None = None
    """None from a daemon too old to tell."""


class LoadResponse(_Message, frozen=True, kw_only=True, tag="load_response"):
    """The state as it is now: READY, or LOADING where the request did not wait."""

    state: StateStatus


class UnloadResponse(_Message, frozen=True, kw_only=True, tag="unload_response"):
    """What was unloaded, as ``name:rank``, and the bytes the daemon no longer holds."""

    unloaded: tuple[str, ...]
    bytes: NonNegative = 0


class PublishResponse(_Message, frozen=True, kw_only=True, tag="publish_response"):
    """The state as it was adopted: READY."""

    state: StateStatus


class BuildTicket(_Message, frozen=True, kw_only=True, tag="build_ticket"):
    """This client is to build the state, and publish it with `ticket`."""

    ticket: NonNegative


class AbandonResponse(_Message, frozen=True, kw_only=True, tag="abandon_response"):
    """The ticket is given back."""


class PinResponse(_Message, frozen=True, kw_only=True, tag="pin_response"):
    """The states that are pinned, or no longer, as ``name:rank``."""

    states: tuple[str, ...] = ()


class StopResponse(_Message, frozen=True, kw_only=True, tag="stop_response"):
    """The daemon begins to drain."""

    pid: int = 0


class ErrorResponse(_Message, frozen=True, kw_only=True, tag="error"):
    """A request, or the connection, failed: `code` names a class of `wcache_async.errors`."""

    code: str
    message: str
    hint: str = ""
    details: dict[str, Detail] = {}

    @classmethod
    def of(cls, error: WeightCacheError) -> "ErrorResponse":
        """The response that reports `error`; it can always be encoded."""
        return cls(
            code=error.code, message=wire_text(error.message), hint=wire_text(error.hint), details=error.details()
        )

    def to_error(self) -> WeightCacheError:
        """The error reported, as an instance of its own class where that is known here."""
        return error_from_wire(self.code, self.message, self.hint, self.details)


Response = (
    Welcome
    | LoadProgress
    | FetchStateResponse
    | FetchDigestsResponse
    | ReleaseResponse
    | StatusResponse
    | LoadResponse
    | UnloadResponse
    | PublishResponse
    | BuildTicket
    | AbandonResponse
    | PinResponse
    | StopResponse
    | ErrorResponse
)
Message = Request | Response


class _TypeOnly(Struct, frozen=True):
    type: str


_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_responses = msgspec.msgpack.Decoder(Response)
_type_only = msgspec.msgpack.Decoder(_TypeOnly)
_known = {
    kind: {str(cls.__struct_config__.tag) for cls in union.__args__}
    for kind, union in (("request", Request), ("response", Response))
}


def type_of(message: Message) -> str:
    """The message's ``type`` on the wire."""
    return str(message.__struct_config__.tag)


def encode_message(message: Message) -> bytes:
    """The message as a frame body.

    Raises MalformedMessage for what msgpack cannot carry: lone surrogates in a string, integers beyond 64 bits.
    """
    try:
        return _encoder.encode(message)
    except (UnicodeEncodeError, OverflowError, RecursionError) as error:
        raise MalformedMessage(reason=f"{type_of(message)} cannot be encoded: {error}") from error


def check_request(message: Message) -> None:
    """Refuse here what the daemon could not decode, which would end the connection and every lease on it.

    Callers' values come unchecked: a negative timeout, a torch.dtype in `expect`.  Raises
    InvalidRequest, which names the field.
    """
    try:
        _requests.decode(_encoder.encode(message))
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise _invalid(message, error) from error


def _invalid(message: Message, error: Exception) -> InvalidRequest:
    for field, value in msgspec.structs.asdict(message).items():
        for key, item in value.items() if isinstance(value, dict) else ():
            if item is not None and not isinstance(item, bool | int | float | str):
                kind = f"{type(item).__module__}.{type(item).__qualname__}".removeprefix("builtins.")
                reason = f"{_told(repr(item))} is a {kind}; it takes text, a number, a bool or None"
                return InvalidRequest(field=f"{field}[{key!r}]", reason=reason)
    # msgspec's words are "... - at `$.timeout`".
    reason, _, path = str(error).partition(" - at `$.")
    return InvalidRequest(field=path.rstrip("`") or "body", reason=_told(reason))


def decode_request(body: bytes) -> Request:
    """The request in `body`.  Raises UnknownMessage or MalformedMessage."""
    try:
        return _requests.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _undecodable(body, "request", error) from error


def decode_response(body: bytes) -> Response:
    """The response in `body`.  Raises UnknownMessage or MalformedMessage."""
    try:
        return _responses.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _undecodable(body, "response", error) from error


def _undecodable(body: bytes, direction: str, error: Exception) -> WeightCacheError:
    try:
        kind = _type_only.decode(body).type
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return MalformedMessage(reason=_told(error))
    if kind in _known[direction]:
        return MalformedMessage(reason=f"{kind}: {_told(error)}")
    return UnknownMessage(type=kind[:64])


def _told(error: object) -> str:
    """msgspec quotes the offending value whole, be it as long as the body."""
    text = str(error)
    return text if len(text) <= 200 else f"{text[:200]}…"

"""Every error this package raises, and how an error crosses the wire.

::

    WeightCacheError
    ├── DaemonUnavailable        no daemon to talk to, or not yet, or no longer
    │   ├── NotRunning           nothing listens on the socket
    │   ├── LoadingTimeout       the state is still being loaded
    │   └── Draining             the daemon is shutting down
    ├── RequestRefused           the daemon understood the request and says no
    │   ├── StateNotFound        no state by that name and rank
    │   ├── StateFailed          the state's load failed; says why
    │   ├── StateExists          that name and rank are taken
    │   ├── StateUnloaded        unloaded while the request waited for it
    │   ├── ConfigMismatch       the state was built otherwise than expected
    │   ├── BudgetExceeded       it does not fit into --max-bytes
    │   ├── BuildNotGranted      somebody else builds that state
    │   ├── PeerNotAllowed       the peer runs as another user
    │   ├── BackendNotAccepted   no transport both sides can use
    │   ├── LeaseNotFound        no such lease on this connection
    │   ├── InvalidRequest       a field of the request makes no sense
    │   ├── TooManyRequests      more requests in flight than allowed
    │   └── TooManyClients       the daemon serves as many clients as it may
    ├── ProtocolError            a peer broke the rules of the wire
    │   ├── BadMagic             not our protocol at all
    │   ├── VersionMismatch      no protocol version in common
    │   ├── FrameTooLarge        a frame over the length cap
    │   ├── TruncatedFrame       the stream ended inside a frame
    │   ├── FdsTruncated         fewer file descriptors arrived than declared
    │   ├── FdsUndeclared        more file descriptors arrived than declared
    │   ├── UnknownMessage       a message type this side does not know
    │   ├── MalformedMessage     a body that does not decode as its type
    │   ├── UnexpectedMessage    a known message at the wrong time
    │   ├── PeerTimeout          the peer was silent, or read nothing, for too long
    │   ├── InvalidManifest      a manifest that contradicts itself or its arenas
    │   └── InvalidMemfd         received memory that is not what was announced, or not safe to map
    ├── StreamError              the connection can no longer do what is asked of it
    │   ├── StreamClosed         this side closed it
    │   ├── StreamEnded          the peer closed its side, between two messages
    │   ├── StreamBroken         it was lost: the peer died, reset it, or broke a rule
    │   └── SendQueueFull        the peer reads more slowly than it asks
    ├── DaemonLost               the connection went away under a held state
    ├── GenerationChanged        a sleeping state's successor is what the daemon holds
    ├── StateReleased            a state used after it was released
    ├── StaleState               the files it was loaded from have changed since
    ├── ClientClosed             a client used after it was closed
    ├── ClientElsewhere          a client used in another process or event loop than its own
    ├── UnknownBackend           no transport backend by that name
    ├── BackendUnavailable       a known backend that cannot work here
    ├── ExportError              a tensor that a transport backend cannot carry
    ├── ModuleError              a module that cannot be kept exactly
    ├── BindError                module and state do not fit together
    ├── SourceError              what was to be loaded cannot be
    ├── InsufficientMemory       the state does not fit into memory
    ├── AddressError             the socket's path is unusable
    │   ├── AddressTooLong       over the kernel's 107 bytes
    │   ├── AddressNotTrusted    folder or socket belongs to, or is open to, others
    │   └── AddressInUse         another daemon holds the socket
    ├── RequestFailed            the daemon met what it was not made for
    ├── CudaDriverError          a CUDA driver call failed
    └── RemoteError              an error code this version does not know

Errors carry typed fields; the text is built from them: what happened, then what to do
(`hint`).  An error's `code` names its class on the wire, where `details()` carries the
fields and `error_from_wire` rebuilds the instance on the other side.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, ClassVar, Self, dataclass_transform

import msgspec
from msgspec import Meta

__all__ = [
    "AddressError",
    "AddressInUse",
    "AddressNotTrusted",
    "AddressTooLong",
    "BackendNotAccepted",
    "BackendUnavailable",
    "BadMagic",
    "BindError",
    "BudgetExceeded",
    "BuildNotGranted",
    "ClientClosed",
    "ClientElsewhere",
    "ConfigMismatch",
    "CudaDriverError",
    "DaemonLost",
    "DaemonUnavailable",
    "Detail",
    "Draining",
    "ExportError",
    "FdsTruncated",
    "FdsUndeclared",
    "FrameTooLarge",
    "GenerationChanged",
    "InsufficientMemory",
    "InvalidManifest",
    "InvalidMemfd",
    "InvalidRequest",
    "LeaseNotFound",
    "LoadingTimeout",
    "MalformedMessage",
    "ModuleError",
    "NotRunning",
    "PeerNotAllowed",
    "PeerTimeout",
    "ProtocolError",
    "RemoteError",
    "RequestFailed",
    "RequestRefused",
    "Scalar",
    "SendQueueFull",
    "SourceError",
    "StaleState",
    "StateExists",
    "StateFailed",
    "StateNotFound",
    "StateReleased",
    "StateUnloaded",
    "StreamBroken",
    "StreamClosed",
    "StreamEnded",
    "StreamError",
    "TooManyClients",
    "TooManyRequests",
    "TruncatedFrame",
    "UnexpectedMessage",
    "UnknownBackend",
    "UnknownMessage",
    "VersionMismatch",
    "WeightCacheError",
    "error_from_wire",
    "known_codes",
    "wire_text",
]

Scalar = None | bool | int | float | str
Pair = Annotated[list[Scalar], Meta(min_length=2, max_length=2)]
Detail = None | bool | int | float | str | list[Scalar] | dict[str, list[Scalar]]

_BY_CODE: dict[str, "type[WeightCacheError]"] = {}


@dataclass_transform(kw_only_default=True, eq_default=False)
class WeightCacheError(Exception):
    """Base of every error of this package.

    Each subclass is a keyword-only dataclass, and is filed under the `code` it must declare.
    `message` says what happened and what was expected; `hint` says what to do about it, and
    may be empty.
    """

    code: ClassVar[str] = "weight_cache_error"

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        dataclass(kw_only=True, eq=False, repr=False)(cls)
        code = cls.__dict__.get("code")
        if code is None:
            raise TypeError(f"{cls.__name__} declares no error code of its own")
        holder = _BY_CODE.setdefault(code, cls)
        if holder is not cls:
            raise TypeError(f"error code {code!r} of {cls.__name__} is taken by {holder.__name__}")

    @property
    def message(self) -> str:
        return "the weight cache failed"

    @property
    def hint(self) -> str:
        return ""

    def details(self) -> dict[str, Detail]:
        """The error's fields, as the wire carries them: any error can be sent.

        Integers beyond 64 bits are cut down to them, for text see `wire_text`.
        """
        return {name: _as_detail(value) for name, value in self._values().items()}

    def _values(self) -> dict[str, object]:
        return {f.name: getattr(self, f.name) for f in fields(self)} if is_dataclass(self) else {}

    def __str__(self) -> str:
        if not self.hint:
            return self.message
        # A reason taken from elsewhere may end in a full stop of its own.
        return f"{self.message.removesuffix('.')}. {self.hint}"

    def __repr__(self) -> str:
        inner = ", ".join(f"{name}={value!r}" for name, value in self._values().items())
        return f"{type(self).__name__}({inner})"

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self._values())

    @classmethod
    def _from_details(cls, details: Mapping[str, Detail]) -> Self:
        """Raises msgspec.ValidationError or TypeError where the fields do not fit the class."""
        known: dict[str, object] = {f.name: f.type for f in fields(cls)} if is_dataclass(cls) else {}
        # Fields a newer peer added are dropped, as unknown fields are everywhere on the wire.
        values = {k: msgspec.convert(v, known[k]) for k, v in details.items() if k in known}
        return cls(**values)


_BY_CODE[WeightCacheError.code] = WeightCacheError


def _as_detail(value: object) -> Detail:
    return msgspec.convert(_sendable(msgspec.to_builtins(value)), Detail)  # type: ignore[no-any-return]


def _sendable(value: object) -> object:
    if isinstance(value, str):
        return wire_text(value)
    if isinstance(value, int):
        return max(-(2**63), min(value, 2**64 - 1)) if not isinstance(value, bool) else value
    if isinstance(value, list):
        return [_sendable(item) for item in value]
    if isinstance(value, dict):
        return {_sendable(key): _sendable(item) for key, item in value.items()}
    return value


def wire_text(text: str) -> str:
    """`text` with lone surrogates escaped: Python reads a file name that is no UTF-8 into those, UTF-8 has none."""
    return text.encode("utf-8", "backslashreplace").decode()


def _rebuild(cls: type[WeightCacheError], values: dict[str, object]) -> WeightCacheError:
    return cls(**values)


def _state(name: str, rank: int) -> str:
    return f"state {name!r} rank {rank}"


def _load(name: str, rank: int) -> str:
    return f"`wcache load MODEL --name {name}{f' --rank {rank}' if rank else ''}`"


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB ({nbytes} bytes)"


# --------------------------------------------------------------------- the daemon cannot be had
class DaemonUnavailable(WeightCacheError):
    """No daemon answers, or it cannot answer yet, or no longer."""

    code: ClassVar[str] = "daemon_unavailable"

    @property
    def message(self) -> str:
        return "the weight-cache daemon cannot be had"


class NotRunning(DaemonUnavailable):
    """Nothing accepts connections on `socket`; `reason` is the system's word for why, `instead` a way to do without."""

    code: ClassVar[str] = "not_running"
    socket: str
    reason: str
    instead: str = ""

    @property
    def message(self) -> str:
        return f"no weight-cache daemon answers on {self.socket}: {self.reason}"

    @property
    def hint(self) -> str:
        return (
            (
                f"Start one with `wcache serve MODEL --socket {self.socket}`, "
                "or name another socket with --socket or $WCACHE_SOCKET"
            )
            if not self.instead
            else f"Start one with `wcache serve --socket {self.socket}`, or {self.instead}"
        )


class LoadingTimeout(DaemonUnavailable):
    """The state was still LOADING when the request's timeout, `waited_s` seconds, ran out."""

    code: ClassVar[str] = "loading_timeout"
    name: str
    rank: int
    waited_s: float
    bytes_done: int
    bytes_total: int

    @property
    def message(self) -> str:
        share = 100 * self.bytes_done / self.bytes_total if self.bytes_total else 0.0
        return (
            f"{_state(self.name, self.rank)} was still loading after {self.waited_s:g} s: "
            f"{share:.0f} % of {_gib(self.bytes_total)} done"
        )

    @property
    def hint(self) -> str:
        return "Ask again with a longer timeout; `wcache status` shows the progress"


class Draining(DaemonUnavailable):
    """The daemon is shutting down and takes no new requests."""

    code: ClassVar[str] = "draining"

    @property
    def message(self) -> str:
        return "the weight-cache daemon is shutting down"

    @property
    def hint(self) -> str:
        return "States already attached stay valid; reconnect once a new daemon is up"


# ------------------------------------------------------------------------- the daemon says no
class RequestRefused(WeightCacheError):
    """The daemon understood the request and refused it; nothing was changed by it."""

    code: ClassVar[str] = "request_refused"

    @property
    def message(self) -> str:
        return "the weight-cache daemon refused the request"


class StateNotFound(RequestRefused):
    """`available` lists what the daemon holds, as ``name:rank``."""

    code: ClassVar[str] = "state_not_found"
    name: str
    rank: int
    available: list[str]

    @property
    def message(self) -> str:
        held = ", ".join(self.available) if self.available else "nothing"
        return f"the daemon holds no {_state(self.name, self.rank)}; it holds {held}"

    @property
    def hint(self) -> str:
        return f"Load it with {_load(self.name, self.rank)}, or ask for one it holds"


class StateFailed(RequestRefused):
    """The state's load failed for `reason`; the daemon stays up."""

    code: ClassVar[str] = "state_failed"
    name: str
    rank: int
    reason: str

    @property
    def message(self) -> str:
        return f"loading {_state(self.name, self.rank)} failed: {self.reason}"

    @property
    def hint(self) -> str:
        return f"Mend the cause, then load it again: {_load(self.name, self.rank)}"


class StateExists(RequestRefused):
    """Something is already held, or being loaded, under that name and rank."""

    code: ClassVar[str] = "state_exists"
    name: str
    rank: int
    phase: str

    @property
    def message(self) -> str:
        return f"{_state(self.name, self.rank)} is taken (it is {self.phase})"

    @property
    def hint(self) -> str:
        return f"Choose another name, replace it (`--replace`), or `wcache unload {self.name}` first"


class StateUnloaded(RequestRefused):
    """The state was unloaded while the request waited for it."""

    code: ClassVar[str] = "state_unloaded"
    name: str
    rank: int

    @property
    def message(self) -> str:
        return f"{_state(self.name, self.rank)} was unloaded while this request waited for it"

    @property
    def hint(self) -> str:
        return f"Load it again with {_load(self.name, self.rank)}"


class ConfigMismatch(RequestRefused):
    """`differences` maps each field that differs to ``[expected, actual]``."""

    code: ClassVar[str] = "config_mismatch"
    name: str
    rank: int
    differences: dict[str, Pair]

    @property
    def message(self) -> str:
        parts = [
            f"{field}: expected {expected!r}, the state has {actual!r}"
            for field, (expected, actual) in sorted(self.differences.items())
        ]
        return f"{_state(self.name, self.rank)} was built otherwise than expected; {'; '.join(parts)}"

    @property
    def hint(self) -> str:
        return "Load a state built that way under another name, or change what you expect"


class BudgetExceeded(RequestRefused):
    """`needed` bytes do not fit: of `max_bytes`, `held` are taken, and `evictable` of those could be freed."""

    code: ClassVar[str] = "budget_exceeded"
    needed: int
    max_bytes: int
    held: int
    evictable: int

    @property
    def message(self) -> str:
        return (
            f"the state needs {_gib(self.needed)} of the daemon's {_gib(self.max_bytes)}, of which {_gib(self.held)} "
            f"are held, and {_gib(self.evictable)} of those by states that nobody holds or has pinned"
        )

    @property
    def hint(self) -> str:
        if self.needed > self.max_bytes:
            return f"It would not fit into an empty daemon either: start one with --max-bytes {self.needed} or more"
        return "Unload or unpin something, or start the daemon with a larger --max-bytes"


class BuildNotGranted(RequestRefused):
    """This connection is not the one that builds the state (any more)."""

    code: ClassVar[str] = "build_not_granted"
    name: str
    rank: int

    @property
    def message(self) -> str:
        return f"{_state(self.name, self.rank)} is not this client's to build"

    @property
    def hint(self) -> str:
        return "Ask again with fetch_or_publish"


class PeerNotAllowed(RequestRefused):
    """The peer's `uid` is none of `allowed`."""

    code: ClassVar[str] = "peer_not_allowed"
    uid: int
    allowed: list[int]

    @property
    def message(self) -> str:
        return f"a peer running as uid {self.uid} is not served; allowed: {self.allowed}"

    @property
    def hint(self) -> str:
        return "Run client and daemon as the same user"


class BackendNotAccepted(RequestRefused):
    """None of the backends the client accepts can carry the state."""

    code: ClassVar[str] = "backend_not_accepted"
    accepted: list[str]
    exportable: list[str]

    @property
    def message(self) -> str:
        return f"the state can be carried by {_listed(self.exportable)}, the client accepts {_listed(self.accepted)}"

    @property
    def hint(self) -> str:
        return "Accept one of the state's backends, or serve the state by another one (`--backend`)"


class LeaseNotFound(RequestRefused):
    """No lease by that number is held by this connection."""

    code: ClassVar[str] = "lease_not_found"
    lease: int

    @property
    def message(self) -> str:
        return f"this connection holds no lease {self.lease}"


class InvalidRequest(RequestRefused):
    """A request whose `field` cannot be meant, for `reason`."""

    code: ClassVar[str] = "invalid_request"
    field: str
    reason: str

    @property
    def message(self) -> str:
        return f"the request's {self.field} is not valid: {self.reason}"


class TooManyRequests(RequestRefused):
    """This connection already has `limit` requests in flight."""

    code: ClassVar[str] = "too_many_requests"
    limit: int

    @property
    def message(self) -> str:
        return f"this connection already has {self.limit} requests in flight, which is the limit"

    @property
    def hint(self) -> str:
        return "Wait for some of them, or open another connection"


class TooManyClients(RequestRefused):
    """The daemon serves `limit` connections, which is all it may, or has no fd left."""

    code: ClassVar[str] = "too_many_clients"
    limit: int

    @property
    def message(self) -> str:
        return f"the daemon already serves {self.limit} clients, as many as it can"

    @property
    def hint(self) -> str:
        return "Try again later, or raise --max-clients and `ulimit -n` for the daemon"


# -------------------------------------------------------------------- a peer broke the rules
class ProtocolError(WeightCacheError):
    """A peer broke the rules of the wire; the connection cannot go on."""

    code: ClassVar[str] = "protocol_error"

    @property
    def message(self) -> str:
        return "the peer broke the protocol"

    @property
    def hint(self) -> str:
        return "Check that both sides run the same release of wcache-async"


class BadMagic(ProtocolError):
    """The bytes are no frame of ours; `got` holds the first of them in hexadecimal."""

    code: ClassVar[str] = "bad_magic"
    got: str

    @property
    def message(self) -> str:
        return f"expected a wcache-async frame, got bytes that start with {self.got}"


class VersionMismatch(ProtocolError):
    """`ours` and `theirs` are ``[lowest, highest]`` protocol versions."""

    code: ClassVar[str] = "version_mismatch"
    ours: list[int]
    theirs: list[int]

    @property
    def message(self) -> str:
        return f"no protocol version in common: this side speaks {self.ours}, the peer {self.theirs}"

    @property
    def hint(self) -> str:
        return "Upgrade the older side"


class FrameTooLarge(ProtocolError):
    """A frame announced `length` bytes where at most `limit` are taken."""

    code: ClassVar[str] = "frame_too_large"
    length: int
    limit: int

    @property
    def message(self) -> str:
        return f"a frame of {self.length} bytes exceeds the limit of {self.limit}"

    @property
    def hint(self) -> str:
        return "Send less in one message, or raise the receiver's limit"


class TruncatedFrame(ProtocolError):
    """The stream ended with `got` of the `expected` bytes of a frame's header or body."""

    code: ClassVar[str] = "truncated_frame"
    expected: int
    got: int

    @property
    def message(self) -> str:
        return f"the stream ended inside a frame: {self.got} of {self.expected} bytes arrived"


class FdsTruncated(ProtocolError):
    """A frame declared `expected` file descriptors and `got` arrived."""

    code: ClassVar[str] = "fds_truncated"
    expected: int
    got: int

    @property
    def message(self) -> str:
        return f"{self.expected} file descriptors were expected, {self.got} arrived"

    @property
    def hint(self) -> str:
        return (
            "The receiver is probably at its fd limit: raise it with `ulimit -n`, or use shm_fd, "
            "which takes one fd for a whole state where torch_ipc takes one for each of its storages"
        )


class FdsUndeclared(ProtocolError):
    """`got` file descriptors arrived where the frame declared `expected`."""

    code: ClassVar[str] = "fds_undeclared"
    expected: int
    got: int

    @property
    def message(self) -> str:
        return f"{self.got} file descriptors arrived, the frame declared {self.expected}"


class UnknownMessage(ProtocolError):
    """A message of type `type` is unknown to this side; the connection goes on."""

    code: ClassVar[str] = "unknown_message"
    type: str

    @property
    def message(self) -> str:
        return f"message type {self.type!r} is unknown here"


class MalformedMessage(ProtocolError):
    """A body that does not decode, for `reason`."""

    code: ClassVar[str] = "malformed_message"
    reason: str

    @property
    def message(self) -> str:
        return f"a message does not decode: {self.reason}"


class UnexpectedMessage(ProtocolError):
    """A message of type `type` where `expected` was due."""

    code: ClassVar[str] = "unexpected_message"
    type: str
    expected: str

    @property
    def message(self) -> str:
        return f"message {self.type!r} came where {self.expected} was due"


class PeerTimeout(ProtocolError):
    """The peer did not `what` within `seconds`."""

    code: ClassVar[str] = "peer_timeout"
    what: str
    seconds: float

    @property
    def message(self) -> str:
        return f"the peer did not {self.what} within {self.seconds:g} s"

    @property
    def hint(self) -> str:
        return ""


class InvalidManifest(ProtocolError):
    """A manifest that contradicts itself, or reaches outside its arenas."""

    code: ClassVar[str] = "invalid_manifest"
    tensor: str
    reason: str

    @property
    def message(self) -> str:
        where = f"tensor {self.tensor!r}" if self.tensor else "the manifest"
        return f"{where} is described impossibly: {self.reason}"


class InvalidMemfd(ProtocolError):
    """The memfd received for `what` (``arena 0``, ``manifest``) was refused, for `reason`."""

    code: ClassVar[str] = "invalid_memfd"
    what: str
    reason: str

    @property
    def message(self) -> str:
        return f"the memory received for {self.what} is not safe to map: {self.reason}"

    @property
    def hint(self) -> str:
        return "Nothing was mapped; check that the peer is a wcache-async of the same release"


# ---------------------------------------------------------------------- one connection's end
class StreamError(WeightCacheError):
    """A connection can no longer do what is asked of it; which end it met shows in the class."""

    code: ClassVar[str] = "stream_error"

    @property
    def message(self) -> str:
        return "the connection cannot go on"


class StreamClosed(StreamError):
    """This side closed the connection."""

    code: ClassVar[str] = "stream_closed"

    @property
    def message(self) -> str:
        return "the connection was closed by this side"


class StreamEnded(StreamError):
    """The peer closed its side in order, between two messages."""

    code: ClassVar[str] = "stream_ended"

    @property
    def message(self) -> str:
        return "the connection was closed by the peer"


class StreamBroken(StreamError):
    """The connection was lost for `reason`: the peer died, reset it, or broke a rule."""

    code: ClassVar[str] = "stream_broken"
    reason: str

    @property
    def message(self) -> str:
        return f"the connection broke: {self.reason}"


class SendQueueFull(StreamError):
    """A message of `nbytes` would wait behind `queued` bytes the peer has not taken; `limit` may wait."""

    code: ClassVar[str] = "send_queue_full"
    nbytes: int
    queued: int
    limit: int

    @property
    def message(self) -> str:
        return (
            f"the peer has yet to take {self.queued} bytes; {self.nbytes} more would exceed "
            f"the {self.limit} that may wait for it"
        )


# ------------------------------------------------------------------------------ on the client
class DaemonLost(WeightCacheError):
    """The connection to the daemon on `socket` ended while something still needed it."""

    code: ClassVar[str] = "daemon_lost"
    socket: str
    reason: str

    @property
    def message(self) -> str:
        return f"the connection to the daemon on {self.socket} was lost: {self.reason}"

    @property
    def hint(self) -> str:
        return "Tensors on the CPU, and those attached through vmm_fd, stay valid; for anything new, `reconnect`"


class GenerationChanged(WeightCacheError):
    """A state slept as one generation, and the daemon holds another by now."""

    code: ClassVar[str] = "generation_changed"
    name: str
    rank: int
    expected: int
    actual: int

    @property
    def message(self) -> str:
        return (
            f"{_state(self.name, self.rank)} went to sleep as generation {self.expected}, "
            f"and the daemon holds generation {self.actual} now"
        )

    @property
    def hint(self) -> str:
        return "The old weights cannot be woken; release the state and fetch it anew"


class StateReleased(WeightCacheError):
    """The state was released; tensors imported before stay valid."""

    code: ClassVar[str] = "state_released"
    name: str
    rank: int

    @property
    def message(self) -> str:
        return f"{_state(self.name, self.rank)} was released"

    @property
    def hint(self) -> str:
        return "Fetch it again"


class StaleState(WeightCacheError):
    """The file at `path`, and the `others`, are not what the state was loaded from any more.

    `differences` maps what differs of the first one (``size``, ``mtime_ns``, ``inode``, …) to ``[then, now]``.
    """

    code: ClassVar[str] = "stale_state"
    name: str
    rank: int
    path: str
    differences: dict[str, Pair]
    others: list[str]

    @property
    def message(self) -> str:
        parts = [f"{field} was {then}, is {now}" for field, (then, now) in sorted(self.differences.items())]
        more = f"; also changed: {_first(self.others)}" if self.others else ""
        return (
            f"{_state(self.name, self.rank)} was loaded from a file that has changed since: "
            f"{self.path} ({', '.join(parts)}){more}"
        )

    @property
    def hint(self) -> str:
        return (
            f"Load it anew with `wcache load MODEL --name {self.name} --replace`, which disturbs no holder, "
            "or take it as it is with allow_stale=True (`--allow-stale`)"
        )


class ClientClosed(WeightCacheError):
    """The client is not connected: not entered yet, or closed already."""

    code: ClassVar[str] = "client_closed"

    @property
    def message(self) -> str:
        return "the client is not connected"

    @property
    def hint(self) -> str:
        return "Use it inside `async with Client(...) as client:`"


class ClientElsewhere(WeightCacheError):
    """A client is used where it does not belong: in a forked child, or in another event loop; `where` is which."""

    code: ClassVar[str] = "client_elsewhere"
    where: str

    @property
    def message(self) -> str:
        return f"a client's connection was used in {self.where}, not where it was opened"

    @property
    def hint(self) -> str:
        return "Open a client of its own there, or use `wcache_async.blocking`, whose clients every thread may share"


class UnknownBackend(WeightCacheError):
    """No transport backend is registered as `name`; `known` lists those that are."""

    code: ClassVar[str] = "unknown_backend"
    name: str
    known: list[str]

    @property
    def message(self) -> str:
        return f"no transport backend is called {self.name!r}; known: {_listed(self.known)}"

    @property
    def hint(self) -> str:
        return "Check the spelling, or install the package that brings the backend"


class BackendUnavailable(WeightCacheError):
    """Backend `name` exists and cannot work here, for `reason`."""

    code: ClassVar[str] = "backend_unavailable"
    name: str
    reason: str

    @property
    def message(self) -> str:
        return f"transport backend {self.name!r} cannot work here: {self.reason}"


class ExportError(WeightCacheError):
    """`tensor` cannot be carried by transport backend `backend`, for `reason`."""

    code: ClassVar[str] = "export_error"
    backend: str
    tensor: str
    reason: str

    @property
    def message(self) -> str:
        return f"tensor {self.tensor!r} cannot be shared by {self.backend}: {self.reason}"


class ModuleError(WeightCacheError):
    """What stands at `path` in a module (its own name, or a tensor's) cannot be `what`, for `reason`."""

    code: ClassVar[str] = "module_error"
    path: str
    reason: str
    what: str = "kept exactly"

    @property
    def message(self) -> str:
        return f"{self.path or 'the module'} cannot be {self.what}: {self.reason}"


class BindError(WeightCacheError):
    """Module and state do not fit.

    `missing`: the module has them, the state does not; `unexpected`: the other way round;
    `mismatched` maps a name to ``[what the module has, what the state has]``.
    """

    code: ClassVar[str] = "bind_error"
    missing: list[str]
    unexpected: list[str]
    mismatched: dict[str, Pair]

    @property
    def message(self) -> str:
        parts = []
        if self.missing:
            parts.append(f"missing from the state: {_first(self.missing)}")
        if self.unexpected:
            parts.append(f"not in the module: {_first(self.unexpected)}")
        if self.mismatched:
            pairs = [f"{n} (module {a}, state {b})" for n, (a, b) in sorted(self.mismatched.items())]
            parts.append(f"different: {_first(pairs)}")
        return f"module and state do not fit; {'; '.join(parts)}"

    @property
    def hint(self) -> str:
        return "The module is unchanged; build it from the configuration the state was made with"


class SourceError(WeightCacheError):
    """`path` (and there `tensor`, if not empty) cannot be loaded, for `reason`; `advice` is what to do, if known."""

    code: ClassVar[str] = "source_error"
    path: str
    reason: str
    tensor: str = ""
    advice: str = ""

    @property
    def message(self) -> str:
        where = f"{self.path}: tensor {self.tensor!r}" if self.tensor else self.path
        return f"cannot load {where}: {self.reason}"

    @property
    def hint(self) -> str:
        return self.advice


class InsufficientMemory(WeightCacheError):
    """`needed` bytes do not fit into the `available` ones, by the account of `limit`."""

    code: ClassVar[str] = "insufficient_memory"
    needed: int
    available: int
    limit: str

    @property
    def message(self) -> str:
        return f"the state needs {_gib(self.needed)} and {_gib(self.available)} are available ({self.limit})"

    @property
    def hint(self) -> str:
        return "Unload something, raise the limit, or load it with a smaller --dtype"


# --------------------------------------------------------------------------------- addresses
class AddressError(WeightCacheError):
    """The socket's path cannot be used."""

    code: ClassVar[str] = "address_error"
    path: str
    reason: str

    @property
    def message(self) -> str:
        return f"socket path {self.path} cannot be used: {self.reason}"


class AddressTooLong(AddressError):
    """The path has `length` bytes; the kernel takes 107 (unix(7), sun_path)."""

    code: ClassVar[str] = "address_too_long"
    length: int
    reason: str = "the kernel takes at most 107 bytes"

    @property
    def message(self) -> str:
        return f"socket path {self.path} is {self.length} bytes long; {self.reason}"

    @property
    def hint(self) -> str:
        return "Choose a shorter path with --socket or $WCACHE_SOCKET"


class AddressNotTrusted(AddressError):
    """Folder or socket belongs to another user, or lets others in."""

    code: ClassVar[str] = "address_not_trusted"

    @property
    def hint(self) -> str:
        return "Use a folder of your own with mode 0700"


class AddressInUse(AddressError):
    """The daemon with process id `pid` (0: not told) holds the socket's lock."""

    code: ClassVar[str] = "address_in_use"
    pid: int
    reason: str = "another daemon holds it"

    @property
    def message(self) -> str:
        who = f"the daemon with pid {self.pid}" if self.pid else "another daemon"
        return f"socket {self.path} is held by {who}"

    @property
    def hint(self) -> str:
        return (
            f"Use the running daemon (`wcache load MODEL --socket {self.path}`), stop it "
            f"(`wcache stop --socket {self.path}`), or choose another --socket"
        )


# ------------------------------------------------------------------------------------- others
class CudaDriverError(WeightCacheError):
    """CUDA driver call `call` returned `result` (`name`)."""

    code: ClassVar[str] = "cuda_driver_error"
    call: str
    result: int
    name: str

    @property
    def message(self) -> str:
        return f"{self.call} failed with {self.name} ({self.result})"


class RequestFailed(WeightCacheError):
    """The daemon met something that it was not made for while it answered `request`; it goes on."""

    code: ClassVar[str] = "request_failed"
    request: str
    reason: str

    @property
    def message(self) -> str:
        return f"the daemon failed to answer {self.request}: {self.reason}"

    @property
    def hint(self) -> str:
        return "The daemon's log has the traceback"


class RemoteError(WeightCacheError):
    """The peer reported an error whose code this version does not know."""

    code: ClassVar[str] = "remote_error"
    remote_code: str
    remote_message: str
    remote_hint: str

    @property
    def message(self) -> str:
        return f"{self.remote_message} ({self.remote_code})"

    @property
    def hint(self) -> str:
        return self.remote_hint


def _listed(names: list[str]) -> str:
    return ", ".join(names) if names else "none"


def _first(names: list[str], shown: int = 8) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def known_codes() -> dict[str, type[WeightCacheError]]:
    """Code to class, for every error defined so far."""
    return dict(_BY_CODE)


def error_from_wire(code: str, message: str, hint: str, details: Mapping[str, Detail]) -> WeightCacheError:
    """The error a peer reported; `RemoteError` where its code or fields are not known here."""
    cls = _BY_CODE.get(code)
    if cls is not None:
        try:
            return cls._from_details(details)
        except (msgspec.ValidationError, TypeError):
            pass  # A peer of another release: its own words are then the best there is.
    return RemoteError(remote_code=code, remote_message=message, remote_hint=hint)

"""The contract of a transport backend: how tensors cross the process boundary.

One instance of a backend stands for one state on one side, and serves it once: the daemon's
is filled by `prepare_export` or `begin_export`, the client's by `recv_fetch_state_response`.

========================== ======== ===========================================================
verb                       side     what
========================== ======== ===========================================================
prepare_export             daemon   tensors that already exist become arenas and a manifest
begin_export               daemon   arenas for tensors still to be read; filled through a writer
send_fetch_state_response  daemon   one response, with the fds the client needs
adopt                      daemon   a state that a client made and published
recv_fetch_state_response  client   takes those fds and opens the arenas
import_tensor(s)           client   tensors on the arenas
========================== ======== ===========================================================

`prepare_export`, `begin_export`, the writer, `import_tensor`, `import_tensors` and `close`
block, and run in an executor; the two `async` verbs never block the loop.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, get_args

from wcache_async.errors import BackendUnavailable
from wcache_async.manifest import StateManifest, StateSpec, TensorEntry
from wcache_async.protocol.messages import FetchStateResponse
from wcache_async.sockets.fds import OwnedFd

if TYPE_CHECKING:
    import torch

__all__ = [
    "SHM_FD_BACKEND",
    "TORCH_IPC_BACKEND",
    "VMM_FD_BACKEND",
    "BufferMode",
    "Capabilities",
    "ImportOptions",
    "MappingMode",
    "ResponseReceiver",
    "ResponseSender",
    "StateTensors",
    "StateWriter",
    "WeightCacheTransportBackend",
    "device_type_of",
]

TORCH_IPC_BACKEND = "torch_ipc"
VMM_FD_BACKEND = "vmm_fd"
SHM_FD_BACKEND = "shm_fd"

StateTensors = Mapping[str, "tuple[torch.Tensor, bool]"]
"""Name to ``(tensor, is_param)``."""


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What differs between backends, for choosing and for telling users."""

    survives_daemon_exit: bool
    """Imported tensors stay valid when the daemon dies."""
    read_only: bool
    """A client's write can never reach another process."""
    needs_shared_pid_namespace: bool
    devices: frozenset[str]
    """torch device types it carries, e.g. ``cpu``, ``cuda``."""


def device_type_of(device: str) -> str:
    """``cpu`` or ``cuda``, of a torch device such as ``cuda:1``, or a GPU's UUID."""
    return "cuda" if device.startswith("GPU-") else device.partition(":")[0]


MappingMode = Literal["private", "read_only"]
BufferMode = Literal["private", "shared"]


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """What a client may choose about its own view of a state.

    `mapping`, of `shm_fd`: ``private`` gives writable tensors whose writes stay in this process, a page
    copied at the first write to it; ``read_only`` gives tensors an in-place write to which
    kills the process (SIGSEGV: torch knows no read-only tensors), and which copy to a GPU at
    full speed where private writable pages do not.

    `buffers`, of `vmm_fd`, whose parameters are read-only: ``private`` copies every storage that
    a buffer lies on to memory of the process's own, as engines write them; ``shared`` leaves them
    in the arenas, where a kernel's write to them is an illegal access.
    """

    mapping: MappingMode = "private"
    buffers: BufferMode = "private"

    def __post_init__(self) -> None:
        if self.mapping not in get_args(MappingMode):
            raise ValueError(f"mapping is one of {', '.join(get_args(MappingMode))}, not {self.mapping!r}")


class ResponseSender(Protocol):
    """The daemon's end of one request: sends its one response."""

    async def send(self, response: FetchStateResponse, fds: Sequence[OwnedFd]) -> None:
        """Send it with `fds`, which are taken over and closed whether or not it succeeds."""


class ResponseReceiver(Protocol):
    """The client's end of one request: gives the fds that came with its response, in order."""

    def take_fds(self, count: int) -> list[OwnedFd]:
        """The next `count` fds, now the caller's.  Raises FdsTruncated."""


class StateWriter(ABC):
    """Fills the arenas of a state being loaded."""

    @abstractmethod
    def storage(self, number: int) -> AbstractContextManager[memoryview]:
        """Writable bytes of one storage; written through when the context is left.  Blocks.

        Storages are filled one at a time by a writer's thread; different threads may fill
        different storages.
        """

    @abstractmethod
    def finish(self) -> StateManifest:
        """Make the arenas final and unwritable, and tell what lies where.  Blocks."""

    @abstractmethod
    def abort(self) -> None:
        """Give everything back.  Does nothing after `finish`."""


class WeightCacheTransportBackend(ABC):
    """Base of every transport backend; registered by `name`."""

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    """What holds for tensors on every device it carries."""
    import_waits: ClassVar[bool] = True
    """Whether importing may wait for something, a device say.  Where it only computes, a few microseconds a
    tensor, few tensors are imported on the loop's thread: a switch to another costs more."""

    keep_trying: Callable[[], bool] | None = None
    """Whether somebody still waits: a backend may then ask again, for a bounded time, for memory it was refused."""

    def __init__(self, options: ImportOptions | None = None) -> None:
        """`options` matter to the client's half alone."""
        self.options = options or ImportOptions()

    # ------------------------------------------------------------------------- both sides
    @classmethod
    @abstractmethod
    def unavailable_reason(cls) -> str | None:
        """Why the backend cannot work in this process, or None if it can."""

    @classmethod
    def availability_waits(cls) -> bool:
        """Whether `unavailable_reason` may block here, by loading a library say."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Give up arenas and fds; tensors already imported stay valid.  Idempotent."""

    @classmethod
    def device_refusal(cls, device: str) -> str | None:
        """Why it cannot hold tensors on that torch device in this process, or None if it can."""
        if device_type_of(device) in cls.capabilities.devices:
            return None
        return f"it carries {', '.join(sorted(cls.capabilities.devices))} tensors, not {device_type_of(device)}"

    @classmethod
    def capabilities_on(cls, device_type: str) -> Capabilities:
        """`capabilities` for tensors on one torch device type, where they differ by that."""
        return cls.capabilities

    @property
    def survives_daemon_exit(self) -> bool:
        """Whether the tensors of this very state stay valid when the daemon dies."""
        return self.capabilities.survives_daemon_exit

    def when_unused(self, callback: Callable[[], None]) -> bool:
        """For a client that has closed it: whether the daemon may free the state's memory now.

        If not, `callback` is called, once and from any thread, when the last tensor is gone.
        """
        return True

    @property
    @abstractmethod
    def resident_bytes(self) -> int:
        """Bytes the state keeps resident, however many processes map them; 0 once closed."""

    # ----------------------------------------------------------------------------- daemon
    @classmethod
    @abstractmethod
    def can_export_state(cls, state_tensors: "StateTensors") -> bool:
        """Whether the backend can carry every one of these tensors."""

    @abstractmethod
    def prepare_export(
        self, state_tensors: "StateTensors", *, non_persistent: AbstractSet[str] = frozenset()
    ) -> StateManifest:
        """Copy the tensors into arenas, storage by storage; shared storages stay shared.

        `non_persistent` names the buffers that are no part of the state dict.  Raises
        ExportError naming a tensor that cannot be carried, InsufficientMemory.
        """

    @abstractmethod
    def begin_export(self, spec: StateSpec, *, device: str = "cpu") -> StateWriter:
        """Arenas on `device` for `spec`, to be filled.  Raises InsufficientMemory before taking any."""

    @abstractmethod
    async def send_fetch_state_response(
        self, stream: ResponseSender, response: FetchStateResponse, fds: Sequence[OwnedFd]
    ) -> None:
        """Send `response`, completed with what this backend's other half needs.

        `fds` (the manifest's) go first and are taken over, also where this raises; the backend
        adds its own.  Fills in `transport_backend`, `payload` and `resident_bytes`.  Raises
        StateUnloaded once closed.
        """

    def read_arena(self, number: int, offset: int, into: memoryview) -> None:
        """Fill `into`, host memory, with an exported arena's bytes from `offset` on.  Blocks.

        What lets another backend serve the same state.  Raises BackendUnavailable from a backend that
        cannot look into its own arenas, and ValueError once closed.
        """
        raise BackendUnavailable(name=self.name, reason="it cannot read back what it exported")

    async def adopt(self, stream: ResponseReceiver, payload: bytes, manifest: StateManifest) -> None:
        """Take over a state that a client made and sent as `send_fetch_state_response` would.

        Takes the fds that `payload` announces and checks everything that can be checked, and
        maps nothing.  All or nothing.  Raises a ProtocolError for arenas that are not what
        `manifest` says or not safe to map, BackendUnavailable where the backend cannot adopt.
        """
        raise BackendUnavailable(name=self.name, reason="states made by clients cannot be adopted through it")

    # ----------------------------------------------------------------------------- client
    def prepare_unmap(self) -> None:
        """Put the imported tensors to sleep: unmap their memory, and keep their addresses.  Blocks.

        Nothing may touch the tensors until `remap`.  Raises BackendUnavailable where the backend cannot.
        """
        raise BackendUnavailable(name=self.name, reason="its memory cannot be unmapped and mapped again in its place")

    def take_arena_fds(self, stream: ResponseReceiver, response: FetchStateResponse) -> list[OwnedFd]:
        """The fds that `remap` takes, from a further response for the same generation."""
        raise BackendUnavailable(name=self.name, reason="its memory cannot be unmapped and mapped again in its place")

    def remap(self, fds: Sequence[OwnedFd]) -> None:
        """Wake the tensors: map the same arenas where they were.  Takes `fds` over.  Blocks."""
        raise BackendUnavailable(name=self.name, reason="its memory cannot be unmapped and mapped again in its place")

    @abstractmethod
    async def recv_fetch_state_response(
        self, stream: ResponseReceiver, response: FetchStateResponse, manifest: StateManifest
    ) -> None:
        """Take the fds the response announced and open the arenas.  All or nothing.

        Raises a ProtocolError for arenas that are not what `manifest` says or not safe to map.
        """

    @abstractmethod
    def import_tensor(self, entry: TensorEntry) -> "torch.Tensor":
        """One tensor, new at each call; cheap once the arenas are open.

        It requires no grad: `bind` sets that.  Raises StateReleased once closed.
        """

    @abstractmethod
    def import_tensors(self) -> "dict[str, torch.Tensor]":
        """Every tensor by name in the manifest's order, then aliases, each its target's very object."""

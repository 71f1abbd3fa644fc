"""The verbs of a client: fetch a state, and ask the daemon to load, unload, report, stop."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Self, TypeVar

from wcache_async.backends.base import TORCH_IPC_BACKEND, ImportOptions, MappingMode
from wcache_async.backends.views import prepare_views
from wcache_async.client.fetch import FetchedState, accepted_backends
from wcache_async.client.publish import Turn, claim, fetch_or_publish, publish
from wcache_async.client.session import Progress, Session
from wcache_async.errors import ClientClosed, DaemonLost, Scalar
from wcache_async.protocol.messages import (
    FetchState,
    FetchStateResponse,
    Load,
    LoadResponse,
    Message,
    Pin,
    PinResponse,
    StateStatus,
    Status,
    StatusResponse,
    Stop,
    StopResponse,
    Unload,
    UnloadResponse,
)
from wcache_async.sockets.address import default_socket_path
from wcache_async.sockets.limits import raise_fd_limit

if TYPE_CHECKING:
    from wcache_async.client.publish import Built

__all__ = ["Client"]

M = TypeVar("M", bound=Message)


class Client:
    """A connection to the daemon on `socket_path` (None: the default address).

    An asynchronous context manager; the leases of every state fetched through it end with
    it.  `backends` are the transports to accept, best first (None: all that work in this
    process).  `connect_timeout` is in seconds.  `on_daemon_lost` is called once, on the loop, when
    the daemon is gone, which ends CUDA tensors of torch_ipc: what to do about it is the caller's
    to decide.  Accepting torch_ipc raises the process's soft limit on fds, one of which it takes
    for every storage.

    Entering raises NotRunning, PeerNotAllowed, AddressError; what the daemon has against
    this client (its protocol version, say) is raised by the first request.
    """

    def __init__(
        self,
        socket_path: str | os.PathLike[str] | None = None,
        *,
        backends: Sequence[str] | None = None,
        connect_timeout: float = 10.0,
        name: str = "",
        on_daemon_lost: Callable[[DaemonLost], object] | None = None,
    ) -> None:
        self.socket_path = os.fspath(socket_path) if socket_path is not None else default_socket_path()
        self.connect_timeout = connect_timeout
        self.name = name or f"pid {os.getpid()}"
        self._backends = None if backends is None else tuple(backends)
        self._on_daemon_lost = on_daemon_lost
        self._session: Session | None = None

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def connect(self) -> None:
        """Connect; does nothing while connected."""
        if self._session is None or self._session.ended.done() or self._session.inherited:
            backends = await accepted_backends() if self._backends is None else self._backends
            _make_room(backends)
            session = await Session.open(
                self.socket_path, backends=backends, client=self.name, timeout=self.connect_timeout
            )
            session.ended.add_done_callback(partial(self._session_ended, session))
            self._session = session

    def _session_ended(self, session: Session, _: "asyncio.Future[None]") -> None:
        error = session.lost
        if error is not None and self._on_daemon_lost is not None:
            self._on_daemon_lost(error)

    async def close(self) -> None:
        """Disconnect, which ends every lease; tensors imported through shm_fd or vmm_fd stay valid."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    @property
    def daemon_pid(self) -> int:
        """The daemon's pid by the kernel's word (SO_PEERCRED); 0 across PID namespaces.  Raises ClientClosed."""
        return self._open_session().daemon_pid

    async def fetch_state(
        self,
        name: str,
        *,
        rank: int = 0,
        expect: Mapping[str, Scalar] | None = None,
        timeout: float | None = None,
        backends: Sequence[str] | None = None,
        mapping: MappingMode = "private",
        allow_stale: bool = False,
        progress: Progress | None = None,
    ) -> FetchedState:
        """Attach to a state, waiting up to `timeout` seconds (None: without end) while it is LOADING.

        `expect` is compared field by field with the state's config, its ``digest`` with the
        state's; `progress` is called with bytes done and in all while it loads; `mapping` is
        explained at ImportOptions.  Raises StateNotFound, StateFailed, ConfigMismatch,
        BackendNotAccepted, LoadingTimeout, Draining, DaemonLost, and StaleState where this process
        can see that the files the state was loaded from have changed since, unless `allow_stale`.
        """
        session = self._open_session()
        request = FetchState(
            name=name,
            rank=rank,
            expect=dict(expect or {}),
            timeout=timeout,
            backends=None if backends is None else tuple(backends),
            progress=progress is not None,
        )
        # No names at all are an older client's, to the daemon too.
        accepted = (session.backends or (TORCH_IPC_BACKEND,)) if request.backends is None else request.backends
        _make_room(accepted)
        # It runs once the request is sent, while the daemon answers.
        asyncio.get_running_loop().call_soon(prepare_views)
        response, answer = await session.request(request, FetchStateResponse, progress)
        options = ImportOptions(mapping=mapping)
        return await FetchedState.attach(session, response, answer, options, accepted, allow_stale=allow_stale)

    async def load(
        self,
        path: str | os.PathLike[str],
        name: str,
        *,
        rank: int = 0,
        source: str = "auto",
        dtype: str = "",
        backend: str = "auto",
        options: Mapping[str, Scalar] | None = None,
        config: Mapping[str, Scalar] | None = None,
        replace: bool = False,
        wait: bool = True,
        progress: Progress | None = None,
    ) -> StateStatus:
        """Have the daemon load a checkpoint; returns once it is READY, or at once without `wait`.

        Raises StateExists, SourceError, InsufficientMemory, BackendUnavailable.
        """
        request = Load(
            path=_from_any_folder(os.fspath(path), source),
            name=name,
            rank=rank,
            source=source,
            dtype=dtype,
            backend=backend,
            options=dict(options or {}),
            config=dict(config or {}),
            replace=replace,
            wait=wait,
            progress=progress is not None,
        )
        return (await self._request(request, LoadResponse, progress)).state

    async def publish(
        self,
        name: str,
        module_or_tensors: "Built",
        *,
        rank: int = 0,
        config: Mapping[str, Scalar] | None = None,
        replace: bool = False,
        rebind: bool = False,
    ) -> StateStatus:
        """Hand a state built here to the daemon, for others to attach to: copied once, into sealed arenas.

        With `rebind` the module then moves onto those arenas itself, so that the machine holds
        one copy and not two.  Raises StateExists, BudgetExceeded, ModuleError, ExportError,
        InsufficientMemory, BackendUnavailable; a refused state leaves everything as it was.
        """
        return await publish(
            self._open_session(),
            name,
            module_or_tensors,
            rank=rank,
            config=dict(config or {}),
            replace=replace,
            rebind=rebind,
        )

    async def fetch_or_publish(
        self,
        name: str,
        build: "Callable[[], Built | Awaitable[Built]]",
        *,
        rank: int = 0,
        config: Mapping[str, Scalar] | None = None,
        stage: str = "",
        timeout: float | None = None,
        mapping: MappingMode = "private",
        progress: Progress | None = None,
    ) -> FetchedState:
        """Attach to a state, or build it with `build` and publish it, if this client's turn comes.

        Exactly one client builds at a time per name and rank; the others wait up to `timeout`
        seconds and attach.  If the builder dies, fails or is cancelled, the next one builds.
        `build` returns an nn.Module or named tensors, or awaits one; it runs in a thread unless it is a
        coroutine function, and what it raises is raised here alone.  An empty `name` is the
        automatic one, a digest of `config`, under which different configs live side by side.
        A `stage` tells states of one config apart by how far they are processed ("raw", "fused");
        it is part of the config.  The result's `built_here` says which way it went.  Raises ConfigMismatch where the
        name is held under another config, and what `publish` and `fetch_state` do.
        """
        claimed = await self.claim(
            name, rank=rank, config=config, stage=stage, timeout=timeout, mapping=mapping, progress=progress
        )
        return await fetch_or_publish(claimed, build)

    async def claim(
        self,
        name: str,
        *,
        rank: int = 0,
        config: Mapping[str, Scalar] | None = None,
        stage: str = "",
        timeout: float | None = None,
        mapping: MappingMode = "private",
        progress: Progress | None = None,
    ) -> FetchedState | Turn:
        """The first half of `fetch_or_publish`: the state, or this client's turn to build it where it likes.

        A Turn ends with its `publish` or its `abandon`, or with the connection.
        """
        return await claim(
            self._open_session(),
            name,
            rank=rank,
            config=_with_stage(config, stage),
            timeout=timeout,
            options=ImportOptions(mapping=mapping),
            progress=progress,
        )

    async def pin(self, name: str, *, rank: int | None = None, pinned: bool = True) -> tuple[str, ...]:
        """Keep a state (every rank without `rank`) from being evicted; returns what is pinned, as ``name:rank``."""
        return (await self._request(Pin(name=name, rank=rank, pinned=pinned), PinResponse)).states

    async def unpin(self, name: str, *, rank: int | None = None) -> tuple[str, ...]:
        """Let a state be evicted again when memory is needed and nobody holds it."""
        return await self.pin(name, rank=rank, pinned=False)

    async def unload(self, name: str, *, rank: int | None = None) -> UnloadResponse:
        """Have the daemon forget a state (every rank without `rank`); holders keep their memory."""
        return await self._request(Unload(name=name, rank=rank), UnloadResponse)

    async def status(self) -> StatusResponse:
        """What the daemon is and holds."""
        return await self._request(Status(), StatusResponse)

    async def stop(self) -> int:
        """Have the daemon shut down as SIGTERM does; returns its pid."""
        return (await self._request(Stop(), StopResponse)).pid

    def _open_session(self) -> Session:
        if self._session is None:
            raise ClientClosed
        return self._session

    async def _request(self, message: Message, expected: type[M], progress: Progress | None = None) -> M:
        response, answer = await self._open_session().request(message, expected, progress)
        answer.close()
        return response


def _make_room(accepted: Sequence[str]) -> None:
    # Now: fds for which there is no room are lost in the very call that receives them.
    if TORCH_IPC_BACKEND in accepted:
        raise_fd_limit()


def _from_any_folder(path: str, source: str) -> str:
    """`path` for a daemon with another working folder; a hub's name, which is no folder here, stays."""
    return path if source == "transformers" and not os.path.exists(path) else os.path.abspath(path)


def _with_stage(config: Mapping[str, Scalar] | None, stage: str) -> dict[str, Scalar]:
    return dict(config or {}) | ({"stage": stage} if stage else {})

"""The verbs of a client: fetch a state, and ask the daemon to load, unload, report, stop."""

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Self, TypeVar

from wcache_async.backends.base import TORCH_IPC_BACKEND, ImportOptions, MappingMode
from wcache_async.backends.views import prepare_views
from wcache_async.client.fetch import FetchedState, accepted_backends
from wcache_async.client.publish import Turn, claim, fetch_or_publish, publish
from wcache_async.client.reconnect import ReconnectPolicy, connect_again
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

    When the daemon is gone, every call that waits raises DaemonLost at once, and so does each later
    one, until `connect` or `reconnect`.  With `reconnect`, a policy, later calls look for a daemon
    again by themselves, as it says: nothing else is ever tried twice (see ReconnectPolicy).

    A client belongs to the process and the event loop that connected it, and takes calls from any
    number of its tasks at once.  Elsewhere they raise ClientElsewhere; a forked child may `connect` anew.

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
        reconnect: ReconnectPolicy | None = None,
    ) -> None:
        self.socket_path = os.fspath(socket_path) if socket_path is not None else default_socket_path()
        self.connect_timeout = connect_timeout
        self.name = name or f"pid {os.getpid()}"
        self._backends = None if backends is None else tuple(backends)
        self._on_daemon_lost = on_daemon_lost
        self._policy = reconnect
        self._session: Session | None = None
        self._gate: _Gate | None = None

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def connect(self) -> None:
        """Connect; does nothing while connected.  Raises NotRunning, PeerNotAllowed, AddressError, ClientElsewhere."""
        gate = self._gate_here()
        async with gate.connecting:
            if await self._is_gone():
                await self._open(gate)

    async def reconnect(self, policy: ReconnectPolicy | None = None) -> None:
        """Connect, again and again as `policy` says (None: the client's own, or else the default one).

        Does nothing while connected.  Returns once a daemon has answered, which may be loading its
        states still.  Raises what waiting does not mend, or the last try's error: NotRunning,
        DaemonLost, PeerTimeout, TooManyClients; ClientClosed if the client is closed meanwhile.
        """
        policy = policy or self._policy or ReconnectPolicy()
        gate = self._gate_here()

        async def attempt() -> None:
            async with gate.connecting:  # For each try alone: who comes later has a deadline of its own.
                if await self._is_gone():
                    await self._open(gate, greeted=True)

        await connect_again(attempt, policy, clock=gate.loop.time, sleep=gate.pause)

    def _gate_here(self) -> "_Gate":
        loop = asyncio.get_running_loop()
        if self._gate is None or self._gate.loop is not loop:
            self._gate = _Gate(loop)
        return self._gate

    async def _is_gone(self) -> bool:
        session = self._session
        if session is None or session.gone:
            return True
        session.check_here()
        await session.notice_end()
        return session.gone

    async def _open(self, gate: "_Gate", *, greeted: bool = False) -> None:
        """Connect, and with `greeted` wait for the daemon's answer."""
        if gate.closing.is_set():
            raise ClientClosed
        if self._session is not None and self._session.orphaned:
            await self._session.close()
        backends = await accepted_backends() if self._backends is None else self._backends
        _make_room(backends)
        session = await Session.open(
            self.socket_path, backends=backends, client=self.name, timeout=self.connect_timeout
        )
        try:
            if greeted:
                await session.welcomed(self.connect_timeout)
            if gate.closing.is_set():
                raise ClientClosed
        except BaseException:
            await session.close()
            raise
        session.ended.add_done_callback(partial(self._session_ended, session))
        self._session = session

    def _session_ended(self, session: Session, _: "asyncio.Future[None]") -> None:
        error = session.lost
        if error is not None and self._on_daemon_lost is not None:
            self._on_daemon_lost(error)

    async def close(self) -> None:
        """Disconnect, which ends every lease; tensors imported through shm_fd or vmm_fd stay valid.

        Raises ClientElsewhere in another event loop than the connection's.
        """
        session = self._session
        if session is not None and not session.gone:
            session.check_here()
        gate, self._session, self._gate = self._gate, None, None
        if gate is not None:
            gate.closing.set()
        if session is not None:
            await session.close()

    @property
    def daemon_pid(self) -> int:
        """The daemon's pid by the kernel's word (SO_PEERCRED); 0 across PID namespaces.  Raises ClientClosed."""
        if self._session is None:
            raise ClientClosed
        return self._session.daemon_pid

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
        session = await self._live_session()
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
            await self._live_session(),
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
            await self._live_session(),
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

    async def _live_session(self) -> Session:
        """The connection to ask over, made anew as the policy says where there is one."""
        if self._session is None:
            raise ClientClosed
        if self._policy is not None:
            await self._session.notice_end()
            if self._session is None:
                raise ClientClosed
            if self._session.ended.done():
                await self.reconnect()
        return self._session

    async def _request(self, message: Message, expected: type[M], progress: Progress | None = None) -> M:
        response, answer = await (await self._live_session()).request(message, expected, progress)
        answer.close()
        return response


class _Gate:
    """What connecting and closing wait for in one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.connecting = asyncio.Lock()
        self.closing = asyncio.Event()
        """Set once the client is closed: whoever is connecting just then gives up."""

    async def pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.closing.wait()


def _make_room(accepted: Sequence[str]) -> None:
    # Now: fds for which there is no room are lost in the very call that receives them.
    if TORCH_IPC_BACKEND in accepted:
        raise_fd_limit()


def _from_any_folder(path: str, source: str) -> str:
    """`path` for a daemon with another working folder; a hub's name, which is no folder here, stays."""
    return path if source == "transformers" and not os.path.exists(path) else os.path.abspath(path)


def _with_stage(config: Mapping[str, Scalar] | None, stage: str) -> dict[str, Scalar]:
    return dict(config or {}) | ({"stage": stage} if stage else {})

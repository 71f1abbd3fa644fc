"""The same verbs for code with no event loop: each call blocks until its answer is here.

One loop in one daemon thread serves every blocking client of the process; connections, and
so leases, live on it between calls.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

import uvloop

from wcache_async.backends.base import MappingMode, WeightCacheTransportBackend
from wcache_async.client import client as asynchronous
from wcache_async.client.fetch import FetchedState, default_dtype
from wcache_async.client.publish import Turn
from wcache_async.client.reconnect import ReconnectPolicy
from wcache_async.client.session import Progress
from wcache_async.errors import DaemonLost, Scalar
from wcache_async.manifest import Config, StateManifest
from wcache_async.protocol.messages import StateStatus, StatusResponse, UnloadResponse

if TYPE_CHECKING:
    import torch
    from torch import nn

    from wcache_async.client.publish import Built

__all__ = ["Client", "State", "fetch_state", "load", "status", "stop", "unload"]

T = TypeVar("T")
ModuleT = TypeVar("ModuleT", bound="nn.Module")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_loop_pid = 0


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()  # Another thread may have held it at the fork, and is not there any more.


os.register_at_fork(after_in_child=_renew_lock)


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run it on the background loop.  A KeyboardInterrupt here cancels it there."""
    global _loop, _loop_pid
    with _lock:
        # A forked child inherits the loop object but not its thread.
        if _loop is None or _loop_pid != os.getpid():
            _loop = uvloop.new_event_loop()
            _loop_pid = os.getpid()
            threading.Thread(target=_loop.run_forever, name="wcache-blocking", daemon=True).start()
        loop = _loop
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


class State:
    """A fetched state; see `wcache_async.client.fetch.FetchedState`.  A context manager that releases it."""

    def __init__(self, state: FetchedState, owner: asynchronous.Client | None) -> None:
        self._state = state
        self._owner = owner
        self.name = state.name
        self.rank = state.rank
        self.generation = state.generation
        self.config: Config = state.config
        self.manifest: StateManifest = state.manifest
        self.transport_backend = state.transport_backend
        self.resident_bytes = state.resident_bytes
        self.digest = state.digest
        self.daemon_pid = state.daemon_pid
        self.built_here = state.built_here

    @property
    def backend(self) -> WeightCacheTransportBackend:
        """The client's half of the transport, which keeps its memory.  Raises StateReleased, DaemonLost."""
        return self._state.backend

    def import_tensors(self) -> "dict[str, torch.Tensor]":
        """Every tensor by name, aliases included; nothing is copied."""
        return self._state.backend.import_tensors()

    def import_tensor(self, name: str) -> "torch.Tensor":
        """One tensor by its name or alias.  Raises KeyError."""
        return _run(self._state.import_tensor(name))

    def fetch_digests(self) -> dict[str, str]:
        """Each tensor's digest in hexadecimal by name; see `FetchedState.fetch_digests`."""
        return _run(self._state.fetch_digests())

    def bind(self, module: "nn.Module", *, strict: bool = True) -> None:
        """Put the tensors into `module`; all or nothing.  Raises BindError."""
        from wcache_async.client.bind import bind

        bind(module, self.import_tensors(), self.manifest, self._state.backend, strict=strict)

    def create_module(self, factory: "Callable[[], ModuleT]", *, dtype: "torch.dtype | None" = None) -> "ModuleT":
        """Build a module on meta with `factory`, and bind it; see `FetchedState.create_module`.  Raises BindError."""
        from wcache_async.client.bind import build_on_meta

        module = build_on_meta(factory, dtype or default_dtype(self.config))
        self.bind(module)
        return module

    def sleep(self) -> None:
        """Unmap the state's memory on this process's device until `wake`; see `FetchedState.sleep`."""
        _run(self._state.sleep())

    def wake(self) -> None:
        """Map the state's memory again where it was; see `FetchedState.wake`."""
        _run(self._state.wake())

    def __repr__(self) -> str:
        return repr(self._state).replace(type(self._state).__name__, type(self).__name__, 1)

    def release(self) -> None:
        """Give up the lease; tensors already imported stay valid."""
        owner, self._owner = self._owner, None
        _run(_release(self._state, owner))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


_closing: set["asyncio.Task[None]"] = set()


async def _release(state: FetchedState, owner: asynchronous.Client | None) -> None:
    """Release, and then close the connection that is the state's alone, which may have to hold the lease for longer."""
    await state.release()
    if owner is None:
        return
    if state.lease_ended.done():
        await owner.close()
    else:
        state.lease_ended.add_done_callback(partial(_close_soon, owner))


def _close_soon(owner: asynchronous.Client, _: object) -> None:
    task = asyncio.get_running_loop().create_task(owner.close())
    _closing.add(task)
    task.add_done_callback(_closing.discard)


async def _abandon(turn: Turn) -> None:
    turn.abandon()


class Client:
    """A connection to a daemon; arguments and verbs as `wcache_async.Client`'s.  A context manager.

    Any number of threads may call it at once.
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
        """`on_daemon_lost` is called in the thread that serves every blocking client, and must not block."""
        self._client = asynchronous.Client(
            socket_path,
            backends=backends,
            connect_timeout=connect_timeout,
            name=name,
            on_daemon_lost=on_daemon_lost,
            reconnect=reconnect,
        )

    def __enter__(self) -> Self:
        _run(self._client.connect())
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect, which ends every lease."""
        _run(self._client.close())

    def reconnect(self, policy: ReconnectPolicy | None = None) -> None:
        """Connect, again and again as `policy` says; see `wcache_async.Client.reconnect`."""
        _run(self._client.reconnect(policy))

    def fetch_state(
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
    ) -> State:
        """Attach to a state; see `wcache_async.Client.fetch_state`."""
        fetched = self._client.fetch_state(
            name,
            rank=rank,
            expect=expect,
            timeout=timeout,
            backends=backends,
            mapping=mapping,
            allow_stale=allow_stale,
            progress=progress,
        )
        return State(_run(fetched), None)

    def load(
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
        """Have the daemon load a checkpoint; see `wcache_async.Client.load`."""
        return _run(
            self._client.load(
                path,
                name,
                rank=rank,
                source=source,
                dtype=dtype,
                backend=backend,
                options=options,
                config=config,
                replace=replace,
                wait=wait,
                progress=progress,
            )
        )

    def publish(
        self,
        name: str,
        module_or_tensors: "nn.Module | Mapping[str, torch.Tensor]",
        *,
        rank: int = 0,
        config: Mapping[str, Scalar] | None = None,
        replace: bool = False,
        rebind: bool = False,
    ) -> StateStatus:
        """Hand a state built here to the daemon; see `wcache_async.Client.publish`."""
        return _run(
            self._client.publish(name, module_or_tensors, rank=rank, config=config, replace=replace, rebind=rebind)
        )

    def fetch_or_publish(
        self,
        name: str,
        build: "Callable[[], Built]",
        *,
        rank: int = 0,
        config: Mapping[str, Scalar] | None = None,
        stage: str = "",
        timeout: float | None = None,
        mapping: MappingMode = "private",
        progress: Progress | None = None,
    ) -> State:
        """Attach to a state, or build it and publish it; see `wcache_async.Client.fetch_or_publish`.

        `build` runs in the caller's thread: a model may have to be built in the one that made its CUDA context.
        """
        claimed = _run(
            self._client.claim(
                name, rank=rank, config=config, stage=stage, timeout=timeout, mapping=mapping, progress=progress
            )
        )
        if isinstance(claimed, FetchedState):
            return State(claimed, None)
        try:
            built = build()
        except BaseException:
            _run(_abandon(claimed))
            raise
        return State(_run(claimed.publish(built)), None)

    def pin(self, name: str, *, rank: int | None = None) -> tuple[str, ...]:
        """Keep a state from being evicted; see `wcache_async.Client.pin`."""
        return _run(self._client.pin(name, rank=rank))

    def unpin(self, name: str, *, rank: int | None = None) -> tuple[str, ...]:
        """Let a state be evicted again."""
        return _run(self._client.unpin(name, rank=rank))

    def unload(self, name: str, *, rank: int | None = None) -> UnloadResponse:
        """Have the daemon forget a state; holders keep their memory."""
        return _run(self._client.unload(name, rank=rank))

    def status(self) -> StatusResponse:
        """What the daemon is and holds."""
        return _run(self._client.status())

    def stop(self) -> int:
        """Have the daemon shut down; returns its pid."""
        return _run(self._client.stop())


def fetch_state(
    name: str,
    *,
    socket_path: str | os.PathLike[str] | None = None,
    rank: int = 0,
    expect: Mapping[str, Scalar] | None = None,
    timeout: float | None = None,
    backends: Sequence[str] | None = None,
    mapping: MappingMode = "private",
    allow_stale: bool = False,
    progress: Progress | None = None,
) -> State:
    """Attach to a state over a connection of its own, which lives until `State.release`."""
    client = asynchronous.Client(socket_path, backends=backends)

    async def attach() -> FetchedState:
        await client.connect()
        try:
            return await client.fetch_state(
                name,
                rank=rank,
                expect=expect,
                timeout=timeout,
                mapping=mapping,
                allow_stale=allow_stale,
                progress=progress,
            )
        except BaseException:
            await client.close()
            raise

    return State(_run(attach()), client)


def status(socket_path: str | os.PathLike[str] | None = None) -> StatusResponse:
    """What the daemon is and holds."""
    with Client(socket_path) as client:
        return client.status()


def load(path: str | os.PathLike[str], name: str, *, socket_path: str | os.PathLike[str] | None = None) -> StateStatus:
    """Have the daemon load a checkpoint under `name`, and wait until it is READY."""
    with Client(socket_path) as client:
        return client.load(path, name)


def unload(name: str, *, socket_path: str | os.PathLike[str] | None = None, rank: int | None = None) -> UnloadResponse:
    """Have the daemon forget a state."""
    with Client(socket_path) as client:
        return client.unload(name, rank=rank)


def stop(socket_path: str | os.PathLike[str] | None = None) -> int:
    """Have the daemon shut down; returns its pid."""
    with Client(socket_path) as client:
        return client.stop()

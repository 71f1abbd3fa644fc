"""A daemon's life: lock, bind, serve, load, drain, and leave no file behind.

The order matters.  The lock comes first, so that a second daemon notices before it loads
anything; the socket comes before the loads, so that clients find a LOADING state to wait for
rather than nothing.
"""

import asyncio
import logging
import os
import secrets
import signal
from collections.abc import Mapping
from functools import partial
from typing import Self

from wcache_async.backends.registry import choose_for_device
from wcache_async.daemon.exporter import Exporter, Progress
from wcache_async.daemon.server import Server, ServerLimits
from wcache_async.daemon.states import Generation, StateKey
from wcache_async.daemon.status import describe
from wcache_async.errors import InvalidRequest, Scalar
from wcache_async.protocol.messages import StateStatus, StatusResponse
from wcache_async.sockets.address import SocketLock, check_path, default_socket_path, prepare_folder
from wcache_async.sockets.listen import Listener, bind_listener
from wcache_async.sources import absolute_path, open_source
from wcache_async.sources.base import Source
from wcache_async.version import __version__

__all__ = ["Daemon"]

logger = logging.getLogger("wcache_async.daemon")


class Daemon:
    """A weight-cache daemon on `socket_path` (None: the default address).

    An asynchronous context manager: entering takes the lock and the socket, leaving drains
    and gives both up.  `backend` is a transport's name or ``auto``; `device` the torch device
    states are kept on; `drain_timeout` is in seconds.  With `max_bytes`, states that nobody holds or
    has pinned make room for new ones, least recently used first.

    Entering raises AddressInUse, AddressTooLong, AddressNotTrusted, UnknownBackend, BackendUnavailable.
    """

    def __init__(
        self,
        socket_path: str | os.PathLike[str] | None = None,
        *,
        backend: str = "auto",
        device: str = "cpu",
        limits: ServerLimits | None = None,
        drain_timeout: float = 30.0,
        reader_threads: int | None = None,
        max_bytes: int | None = None,
    ) -> None:
        self.socket_path = os.fspath(socket_path) if socket_path is not None else default_socket_path()
        self.instance = secrets.token_hex(8)
        """A nonce that differs at every start."""
        self.drain_timeout = drain_timeout
        self.cut_short = False
        """Whether a second signal ended it without waiting."""
        self._limits = limits or ServerLimits()
        self._backend = backend
        self._device = device
        self._reader_threads = reader_threads
        self._max_bytes = max_bytes
        self._lock: SocketLock | None = None
        self._listener: Listener | None = None
        self._server: Server | None = None
        self._draining: tuple[Server, Exporter] | None = None
        self._exporter: Exporter | None = None
        self._signals: list[signal.Signals] = []

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Take lock and socket, and accept clients."""
        exporter = Exporter(
            backend=self._backend,
            device=self._device,
            reader_threads=self._reader_threads,
            max_bytes=self._max_bytes,
        )
        server = Server(
            exporter,
            socket_path=self.socket_path,
            version=__version__,
            instance=self.instance,
            limits=self._limits,
        )
        check_path(self.socket_path)
        prepare_folder(self.socket_path)
        lock = SocketLock(self.socket_path)
        lock.acquire()
        try:
            # Imports the backend and asks its driver, in a thread, so that no later load does on
            # the loop; and a backend that cannot work is an error now.
            await asyncio.to_thread(choose_for_device, self._device, self._backend)
            sock = bind_listener(self.socket_path, lock)
            self._listener = Listener(sock, server.accept, server.refuse_for_lack_of_fds, lock=lock)
        except BaseException:
            lock.release()
            raise
        self._lock, self._server, self._exporter = lock, server, exporter
        logger.info("listening on %s (pid %d)", self.socket_path, os.getpid())

    def begin_load(
        self,
        source: Source | str | os.PathLike[str],
        *,
        name: str,
        rank: int = 0,
        kind: str = "auto",
        dtype: str = "",
        options: Mapping[str, Scalar] | None = None,
        config: Mapping[str, Scalar] | None = None,
        replace: bool = False,
    ) -> Generation:
        """Start loading a checkpoint; the state is LOADING at once.  Raises StateExists, BackendUnavailable."""
        if not name:
            raise InvalidRequest(field="name", reason="it is empty")
        if isinstance(source, Source):
            path, opener = source.path, partial(_given, source)
        else:
            path = absolute_path(os.fspath(source), kind)
            opener = partial(open_source, path, kind=kind, dtype=dtype, options=options)
        return self._running()[1].begin_load(
            StateKey(name, rank),
            path=path,
            open_source=opener,
            config=dict(config or {}),
            replace=replace,
        )

    async def load(
        self,
        source: Source | str | os.PathLike[str],
        *,
        name: str,
        rank: int = 0,
        kind: str = "auto",
        dtype: str = "",
        options: Mapping[str, Scalar] | None = None,
        config: Mapping[str, Scalar] | None = None,
        replace: bool = False,
        progress: Progress | None = None,
    ) -> StateStatus:
        """Load a checkpoint as a state and wait until it is READY.

        `source` is its path, or a Source such as ModuleSource; `kind` is a source's name or
        ``auto``, `dtype` a torch dtype to cast to, `options` the source's own.
        Raises StateExists, SourceError, InsufficientMemory, BackendUnavailable.
        """
        generation = self.begin_load(
            source, name=name, rank=rank, kind=kind, dtype=dtype, options=options, config=config, replace=replace
        )
        return await self.loaded(generation, progress)

    async def loaded(self, generation: Generation, progress: Progress | None = None) -> StateStatus:
        """Wait until a load begun with `begin_load` has ended.

        Raises SourceError, InsufficientMemory, StateUnloaded, Draining.
        """
        await self._running()[1].loaded(generation, progress)
        return describe(generation)

    def status(self) -> StatusResponse:
        """What `wcache status` shows."""
        return self._running()[0].status()

    def stop(self) -> None:
        """Have `serve_forever` return."""
        self._running()[0].stop_requested.set()

    async def serve_forever(self, *, handle_signals: bool = False) -> None:
        """Serve until `stop`, a client's Stop, or, with `handle_signals`, SIGTERM or SIGINT."""
        server, _ = self._running()
        loop = asyncio.get_running_loop()
        if handle_signals:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._on_signal, number)
                self._signals.append(number)
        await server.stop_requested.wait()

    async def close(self) -> None:
        """Drain, free every state and remove the socket; clients keep the memory they attached.

        Takes no longer than `drain_timeout`: requests that run are let end, new ones get Draining, loads
        are cancelled, and what does not end by then is waited for no more (Exporter.close).
        """
        server, exporter, listener, lock = self._server, self._exporter, self._listener, self._lock
        if server is None or exporter is None or listener is None or lock is None:
            return
        self._server = self._exporter = self._listener = self._lock = None
        self._draining = server, exporter
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.drain_timeout
        logger.info("draining; clients connected: %d", server.clients)
        exporter.stop_loading()
        try:
            # Who connects meanwhile is told that the daemon is going, and not that there is none.
            await server.drain(self.drain_timeout)
            await exporter.settle(max(deadline - loop.time(), 0.0))
            listener.close()
            await server.hang_up()
            await exporter.close(max(deadline - loop.time(), 0.0))
        finally:
            self._draining = None
            listener.close()
            lock.release()
            for number in self._signals:
                loop.remove_signal_handler(number)
            self._signals.clear()
        logger.info("stopped")

    def _on_signal(self, number: signal.Signals) -> None:
        if self._server is not None and not self._server.stop_requested.is_set():
            logger.info("%s: shutting down", number.name)
            self._server.stop_requested.set()
            return
        logger.warning("%s again: not waiting for what is still running", number.name)
        self.drain_timeout = 0.0
        self.cut_short = True
        if self._draining is not None:
            server, exporter = self._draining
            server.hurry()
            exporter.hurry()
        # Where even that does not end it, the next one does.
        asyncio.get_running_loop().remove_signal_handler(number)
        self._signals.remove(number)

    def _running(self) -> tuple[Server, Exporter]:
        if self._server is None or self._exporter is None:
            raise RuntimeError("the daemon is not running: use it inside `async with Daemon(...) as daemon:`")
        return self._server, self._exporter


def _given(source: Source) -> Source:
    return source

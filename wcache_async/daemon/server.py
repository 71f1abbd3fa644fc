"""Sessions: one task per connection that reads requests and answers them.

A session never makes another wait: what is READY is answered at once, what must wait for a
load waits in a task of its own, and every write has a deadline.  Whatever goes wrong is told
to the peer as an ErrorResponse where it can still hear it.
"""

import asyncio
import errno
import logging
import math
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from wcache_async.backends.base import TORCH_IPC_BACKEND
from wcache_async.backends.carried import CarriedFds
from wcache_async.backends.registry import choose_for_device
from wcache_async.daemon.exporter import Exporter, Progress
from wcache_async.daemon.health import LoopWatch, read_footprint
from wcache_async.daemon.publishing import Publishing
from wcache_async.daemon.states import Generation, StateKey
from wcache_async.daemon.status import describe, describe_all
from wcache_async.daemon.watching import FileWatch
from wcache_async.errors import (
    Draining,
    InvalidRequest,
    MalformedMessage,
    PeerNotAllowed,
    PeerTimeout,
    ProtocolError,
    RequestFailed,
    TooManyClients,
    TooManyRequests,
    UnexpectedMessage,
    WeightCacheError,
)
from wcache_async.protocol.connection import Connection, EndOfStream, Received, Role, Violation
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
    Health,
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
    Status,
    StatusResponse,
    Stop,
    StopResponse,
    Unload,
    UnloadResponse,
    Welcome,
    type_of,
)
from wcache_async.sockets.fds import OwnedFd
from wcache_async.sockets.listen import refuse
from wcache_async.sockets.peer import PeerCredentials, check_peer
from wcache_async.sockets.stream import FdStream
from wcache_async.sources import open_source

__all__ = ["Server", "ServerLimits"]

logger = logging.getLogger("wcache_async.daemon")


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """What one daemon takes; times in seconds, sizes in bytes."""

    max_clients: int = 1024
    max_request_bytes: int = 64 << 10
    max_requests_in_flight: int = 64
    handshake_timeout: float = 10.0
    frame_timeout: float = 30.0
    """For the rest of a message that has begun; a connection on which nothing has begun may be silent for ever."""
    write_timeout: float = 30.0
    farewell_timeout: float = 2.0
    """For a peer to read the error it is dropped with."""


class Server:
    """Every session of one daemon.  Belongs to one event loop."""

    def __init__(
        self, exporter: Exporter, *, socket_path: str, version: str, instance: str, limits: ServerLimits
    ) -> None:
        self.exporter = exporter
        self.publishing = Publishing(exporter)
        self.files = FileWatch(exporter.table)
        self.watch = LoopWatch(self._has_work)
        self.socket_path = socket_path
        self.version = version
        self.instance = instance
        self.limits = limits
        self.draining = False
        self.ended = False
        self.stop_requested = asyncio.Event()
        self._started = time.monotonic()
        self._sessions: dict[int, asyncio.Task[None]] = {}
        self._last = 0
        self._busy = 0  # requests being answered, over all sessions
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def clients(self) -> int:
        """Connections being served."""
        return len(self._sessions)

    def accept(self, sock: socket.socket, peer: PeerCredentials) -> None:
        """Serve a new connection, or tell it why not.  Not a byte of it has been read yet."""
        try:
            check_peer(peer)
        except PeerNotAllowed as error:
            return refuse(sock, error)
        if self.ended:
            return refuse(sock, Draining())
        if self.clients >= self.limits.max_clients:
            return refuse(sock, TooManyClients(limit=self.limits.max_clients))
        self._last += 1
        self.watch.attend()
        stream = self._stream(sock)
        session = Session(self, stream, self._last)
        task = asyncio.get_running_loop().create_task(session.run(), name=f"wcache-session-{self._last}")
        self._sessions[self._last] = task
        task.add_done_callback(partial(self._session_ended, self._last))
        return None

    def _session_ended(self, number: int, _: asyncio.Task[None]) -> None:
        del self._sessions[number]

    def refuse_for_lack_of_fds(self, sock: socket.socket) -> None:
        """Turn away a connection that was accepted on the last fd there was."""
        refuse(sock, TooManyClients(limit=self.clients))

    async def farewell(self, stream: FdStream, error: WeightCacheError | None = None) -> None:
        """Send a last error, if any, give the peer a moment to read it, and close."""
        try:
            if error is not None:
                stream.send(0, ErrorResponse.of(error))
            await stream.close_after_flush(self.limits.farewell_timeout)
        except WeightCacheError:
            pass  # The peer is gone, or read nothing: nobody is left to tell.
        finally:
            stream.close()

    def _stream(self, sock: socket.socket) -> FdStream:
        return FdStream(
            sock,
            Connection(Role.DAEMON, max_request=self.limits.max_request_bytes),
            frame_timeout=self.limits.frame_timeout,
        )

    def status(self, health: Health | None = None) -> StatusResponse:
        """The daemon as it is now."""
        return StatusResponse(
            version=self.version,
            pid=os.getpid(),
            socket=self.socket_path,
            uptime_s=time.monotonic() - self._started,
            clients=self.clients,
            states=describe_all(self.exporter.table),
            draining=self.draining,
            health=health,
        )

    async def examine(self) -> Health:
        """What the daemon's process holds now, and how its loop has fared."""
        footprint = await asyncio.to_thread(read_footprint)
        return Health(
            fds=footprint.fds,
            mappings=footprint.mappings,
            memory_bytes=footprint.memory_bytes,
            tasks=len(asyncio.all_tasks()),
            leases=self.exporter.leases,
            generations=self.exporter.generations,
            worst_loop_stall_s=self.watch.worst_stall_s,
            worst_loop_stall_computing_s=self.watch.worst_stall_computing_s,
            loop_stalls_beyond=tuple(self.watch.stalls_beyond.items()),
        )

    def _has_work(self) -> bool:
        return self._busy > 0 or self.exporter.busy

    def request_begun(self) -> None:
        self._busy += 1
        self._idle.clear()
        self.watch.attend()

    def request_ended(self) -> None:
        self._busy -= 1
        if not self._busy:
            self._idle.set()

    def hurry(self) -> None:
        """End a drain without waiting for running requests."""
        self._idle.set()

    async def drain(self, timeout: float) -> None:
        """Take no new requests, and let running ones end within `timeout` seconds."""
        self.draining = True
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            logger.warning("%d requests were still running when the drain timeout ended", self._busy)

    async def hang_up(self) -> None:
        """End every connection; who has connected by now and was not served yet is told Draining."""
        self.ended = True
        tasks = list(self._sessions.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self.watch.close()
        self.files.close()


@dataclass(slots=True)
class _Reply:
    """Where the one response to a request goes."""

    stream: FdStream
    request_id: int
    timeout: float

    async def send(self, response: FetchStateResponse, fds: Sequence[OwnedFd]) -> None:
        self.stream.send(self.request_id, response, fds)
        await self.stream.drain(self.timeout)


class Session:
    """One connection, from its first byte to its last lease."""

    def __init__(self, server: Server, stream: FdStream, number: int) -> None:
        self.server = server
        self.exporter = server.exporter
        self.stream = stream
        self.number = number
        self.backends: tuple[str, ...] = ()
        self._requests: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serve until the peer goes, breaks a rule, or the daemon ends."""
        try:
            if await self._handshake():
                await self._serve()
        except PeerTimeout as error:
            logger.warning("dropping client %d (pid %d): %s", self.number, self.stream.peer.pid, error)
        except WeightCacheError as error:
            logger.debug("client %d (pid %d) is gone: %s", self.number, self.stream.peer.pid, error)
        except asyncio.CancelledError:
            pass  # Only the drain cancels a session, and it waits for this to end.
        finally:
            for task in self._requests:
                task.cancel()
            if self._requests:
                await asyncio.wait(self._requests)
            self.server.publishing.drop(self.number)
            self.exporter.drop(self.number)
            self.stream.close()

    async def _handshake(self) -> bool:
        try:
            async with asyncio.timeout(self.server.limits.handshake_timeout):
                event = await self.stream.receive()
        except TimeoutError:
            silent = PeerTimeout(what="say hello", seconds=self.server.limits.handshake_timeout)
            await self.server.farewell(self.stream, silent)
            return False
        match event:
            case Received(request_id, Hello(backends=backends)):
                # An empty list is an older client, which knows only torch_ipc.
                self.backends = backends or (TORCH_IPC_BACKEND,)
                limits = self.server.limits
                welcome = Welcome(
                    version=1,
                    server=f"wcache-async {self.server.version}",
                    pid=os.getpid(),
                    instance=self.server.instance,
                    limits=Limits(
                        max_request_bytes=limits.max_request_bytes,
                        max_requests_in_flight=limits.max_requests_in_flight,
                    ),
                )
                self.stream.send(request_id, welcome)
                return True
            case Violation():
                await self.server.farewell(self.stream)
            case _:
                pass
        return False

    async def _serve(self) -> None:
        while True:
            match await self.stream.receive():
                case EndOfStream():
                    return None
                case Violation(fatal=True, error=error):
                    logger.warning("dropping client %d (pid %d): %s", self.number, self.stream.peer.pid, error)
                    return await self.server.farewell(self.stream)
                case Violation():
                    pass  # Already answered; the connection goes on.
                case Received(request_id, Publish() as message, fds):
                    self._spawn(request_id, message, fds)
                case Received(request_id, message, fds):
                    for fd in fds:
                        fd.close()
                    if fds:
                        wrong = MalformedMessage(reason=f"{type_of(message)} carries no fds, {len(fds)} came")
                        self.stream.send(request_id, ErrorResponse.of(wrong))
                        return await self.server.farewell(self.stream)
                    if self._must_wait(message):
                        self._spawn(request_id, message)
                    else:
                        await self._answer(request_id, message)

    def _must_wait(self, message: Message) -> bool:
        match message:
            case FetchState(name=name, rank=rank):
                return not self.exporter.serves_at_once(StateKey(name, rank), self._accepted(message))
            case Load() | Unload() | Claim():
                return True
            case _:
                return False

    def _accepted(self, request: FetchState) -> tuple[str, ...]:
        return self.backends if request.backends is None else request.backends

    def _spawn(self, request_id: int, message: Message, fds: Sequence[OwnedFd] = ()) -> None:
        limit = self.server.limits.max_requests_in_flight
        if len(self._requests) >= limit:
            for fd in fds:
                fd.close()
            self.stream.send(request_id, ErrorResponse.of(TooManyRequests(limit=limit)))
            return
        task = asyncio.get_running_loop().create_task(self._answer(request_id, message, fds))
        self._requests.add(task)
        task.add_done_callback(self._requests.discard)

    async def _answer(self, request_id: int, message: Message, fds: Sequence[OwnedFd] = ()) -> None:
        """Answer one request.  What fails the request is told; what fails the connection ends it."""
        self.server.request_begun()
        try:
            try:
                await self._handle(request_id, message, fds)
            except ProtocolError:
                raise
            except WeightCacheError as error:
                self.stream.send(request_id, ErrorResponse.of(error))
            except Exception as error:  # Whatever a request makes of the daemon, its client is not left waiting.
                self.stream.send(request_id, ErrorResponse.of(self._unexpected(message, error)))
            await self.stream.drain(self.server.limits.write_timeout)
        except WeightCacheError as error:
            logger.debug("client %d (pid %d) could not be answered: %s", self.number, self.stream.peer.pid, error)
            self.stream.close()
        finally:
            self.server.request_ended()

    def _unexpected(self, message: Message, error: Exception) -> WeightCacheError:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            return TooManyClients(limit=self.server.clients)
        logger.error(
            "client %d (pid %d): %s failed", self.number, self.stream.peer.pid, type_of(message), exc_info=error
        )
        return RequestFailed(request=type_of(message), reason=f"{type(error).__name__}: {error}")

    async def _handle(self, request_id: int, message: Message, fds: Sequence[OwnedFd]) -> None:
        if self.server.draining and not isinstance(message, Status | Release):
            for fd in fds:
                fd.close()
            raise Draining
        match message:
            case FetchState():
                await self._fetch_state(request_id, message)
            case FetchDigests(lease=lease):
                digests = self.exporter.tensor_digests(self.number, lease)
                self.stream.send(request_id, FetchDigestsResponse(digests=digests))
            case Release(lease=lease):
                await self.exporter.release(self.number, lease)
                self.stream.send(request_id, ReleaseResponse())
            case Status():
                await self.server.files.look()
                self.stream.send(request_id, self.server.status(await self.server.examine()))
            case Load():
                await self._load(request_id, message)
            case Unload(name=name, rank=rank):
                gone = await self.exporter.unload(name, rank)
                self.stream.send(
                    request_id,
                    UnloadResponse(unloaded=tuple(str(g.key) for g in gone), bytes=sum(g.nbytes for g in gone)),
                )
            case Publish():
                await self._publish(request_id, message, fds)
            case Claim():
                await self._claim(request_id, message)
            case Abandon(ticket=ticket):
                await self.server.publishing.abandon(self.number, ticket)
                self.stream.send(request_id, AbandonResponse())
            case Pin(name=name, rank=rank, pinned=pinned):
                states = self.exporter.pin(name, rank, pinned=pinned)
                self.stream.send(request_id, PinResponse(states=tuple(str(state.key) for state in states)))
            case Stop():
                self.stream.send(request_id, StopResponse(pid=os.getpid()))
                self.server.stop_requested.set()
            case _:
                raise UnexpectedMessage(type=type_of(message), expected="a request")

    async def _fetch_state(self, request_id: int, request: FetchState) -> None:
        _check_timeout(request.timeout)
        generation = await self.exporter.ready(
            StateKey(request.name, request.rank),
            expect=request.expect,
            timeout=request.timeout,
            progress=self._progress(request_id) if request.progress else None,
        )
        await self._send_state(request_id, generation, self._accepted(request))

    async def _send_state(self, request_id: int, generation: Generation, accepted: Sequence[str]) -> None:
        export, lease = await self.exporter.grant(self.number, generation, accepted)
        try:
            await export.send(_Reply(self.stream, request_id, self.server.limits.write_timeout), generation, lease)
        except BaseException:
            await self.exporter.release(self.number, lease)
            raise

    async def _claim(self, request_id: int, request: Claim) -> None:
        if not request.name:
            raise InvalidRequest(field="name", reason="it is empty")
        _check_timeout(request.timeout)
        generation, ticket = await self.server.publishing.claim(
            self.number,
            StateKey(request.name, request.rank),
            config=request.config,
            timeout=request.timeout,
            progress=self._progress(request_id) if request.progress else None,
        )
        if ticket:
            self.stream.send(request_id, BuildTicket(ticket=ticket))
        else:
            await self._send_state(request_id, generation, self.backends)

    async def _publish(self, request_id: int, request: Publish, fds: Sequence[OwnedFd]) -> None:
        carried = CarriedFds(fds)
        try:
            if not request.name:
                raise InvalidRequest(field="name", reason="it is empty")
            generation = await self.server.publishing.publish(self.number, request, carried)
        except ProtocolError as error:
            # The frames are in step: what the message says of itself is wrong, and costs only its request.
            self.stream.send(request_id, ErrorResponse.of(error))
            return
        finally:
            carried.close()
        self.stream.send(request_id, PublishResponse(state=describe(generation)))

    async def _load(self, request_id: int, request: Load) -> None:
        if not os.path.isabs(request.path) and request.source != "transformers":
            raise InvalidRequest(
                field="path", reason=f"{request.path!r} is not absolute; the daemon has its own folder"
            )
        if not request.name:
            raise InvalidRequest(field="name", reason="it is empty")
        if request.backend != "auto":
            # It may have to import.
            await self.exporter.in_thread(partial(choose_for_device, self.exporter.device, request.backend))
        generation = self.exporter.begin_load(
            StateKey(request.name, request.rank),
            path=request.path,
            open_source=partial(
                open_source, request.path, kind=request.source, dtype=request.dtype, options=request.options
            ),
            config=request.config,
            backend=request.backend,
            replace=request.replace,
        )
        if request.wait:
            await self.exporter.loaded(generation, self._progress(request_id) if request.progress else None)
        self.stream.send(request_id, LoadResponse(state=describe(generation)))

    def _progress(self, request_id: int) -> Progress:
        def tell(done: int, total: int) -> None:
            # A peer that reads nothing is told nothing more: progress is no reason to buffer.
            if not self.stream.queued_bytes:
                self.stream.send(request_id, LoadProgress(bytes_done=done, bytes_total=total))

        return tell


def _check_timeout(timeout: float | None) -> None:
    # msgspec's bounds let it through, and compared with a clock it is neither over nor to come.
    if timeout is not None and math.isnan(timeout):
        raise InvalidRequest(field="timeout", reason="it is not a number")

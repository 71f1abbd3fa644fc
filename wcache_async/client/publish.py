"""Handing over what was built here, and building what nobody has: `publish` and `fetch_or_publish`."""

import asyncio
import hashlib
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Union

import msgspec

from wcache_async.backends.base import ImportOptions, WeightCacheTransportBackend
from wcache_async.backends.carried import pack_manifest
from wcache_async.backends.registry import choose_for_device
from wcache_async.client.fetch import FetchedState
from wcache_async.client.session import Progress, Session
from wcache_async.errors import BindError, MalformedMessage, UnexpectedMessage
from wcache_async.manifest import Config
from wcache_async.modules.export import Described, export_state
from wcache_async.protocol.messages import (
    Abandon,
    BuildTicket,
    Claim,
    FetchState,
    FetchStateResponse,
    Publish,
    PublishResponse,
    StateStatus,
    type_of,
)
from wcache_async.sockets.fds import OwnedFd

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["Built", "Turn", "automatic_name", "claim", "fetch_or_publish", "publish"]

Built = Union["nn.Module", "Mapping[str, torch.Tensor]", Described]
"""What a client builds: a module, named tensors, or a module's pieces."""

Build = Callable[[], "Built | Awaitable[Built]"]


def automatic_name(config: Config) -> str:
    """A name that is the same for the same config and no other: a digest of it.

    Raises MalformedMessage for what no message can carry.
    """
    try:
        body = msgspec.msgpack.encode(sorted(config.items()))
    except (OverflowError, UnicodeEncodeError) as error:
        raise MalformedMessage(reason=f"the config cannot be encoded: {error}") from error
    return f"auto-{hashlib.blake2b(body, digest_size=12).hexdigest()}"


@dataclass(slots=True)
class _Parcel:
    """What a backend would send to a client, kept to be sent to the daemon (a ResponseSender)."""

    response: FetchStateResponse | None = None
    fds: list[OwnedFd] = field(default_factory=list)

    async def send(self, response: FetchStateResponse, fds: Sequence[OwnedFd]) -> None:
        self.response, self.fds = response, list(fds)


async def publish(
    session: Session,
    name: str,
    built: Built,
    *,
    rank: int,
    config: Config,
    replace: bool = False,
    rebind: bool = False,
    ticket: int = 0,
) -> StateStatus:
    """See `Client.publish`; `ticket` is a BuildTicket's."""
    backend, (inline, manifest_fd, manifest_nbytes) = await _exported(built)
    try:
        packed = _Parcel()
        response = FetchStateResponse(
            name=name,
            rank=rank,
            generation=0,
            lease=0,
            config=config,
            manifest=inline,
            manifest_nbytes=manifest_nbytes,
        )
        await backend.send_fetch_state_response(packed, response, [] if manifest_fd is None else [manifest_fd])
        sent = packed.response or response
        request = Publish(
            name=name,
            rank=rank,
            config=config,
            manifest=sent.manifest,
            manifest_nbytes=manifest_nbytes,
            transport_backend=sent.transport_backend,
            payload=sent.payload,
            ticket=ticket,
            replace=replace,
            source=built.source if isinstance(built, Described) else type(built).__qualname__,
        )
        adopted, answer = await session.request(request, PublishResponse, fds=packed.fds)
        answer.close()
    finally:
        backend.close()
    if rebind:
        await _rebind(session, name, rank, built)
    return adopted.state


_Exported = tuple[WeightCacheTransportBackend, tuple[bytes | None, OwnedFd | None, int]]
"""A backend with arenas that are filled, and their manifest as `pack_manifest` packs it."""


async def _exported(built: Built) -> _Exported:
    exporting = asyncio.ensure_future(asyncio.to_thread(_export, built))
    try:
        return await asyncio.shield(exporting)
    except asyncio.CancelledError:
        # The thread goes on; what it makes is then nobody's.
        exporting.add_done_callback(_discard)
        raise


def _export(built: Built) -> _Exported:
    backend = choose_for_device("cpu")
    try:
        return backend, pack_manifest(export_state(built, backend))
    except BaseException:
        backend.close()
        raise


def _discard(exporting: "asyncio.Future[_Exported]") -> None:
    if not exporting.cancelled() and exporting.exception() is None:
        backend, (_, manifest_fd, _) = exporting.result()
        backend.close()
        if manifest_fd is not None:
            manifest_fd.close()


async def _rebind(session: Session, name: str, rank: int, built: Built) -> None:
    from torch import nn

    if not isinstance(built, nn.Module):
        raise BindError(missing=[], unexpected=[], mismatched={name: ["named tensors", "a module to rebind"]})
    state = await _fetch(session, name, rank, ImportOptions())
    await state.bind(built)


async def _fetch(session: Session, name: str, rank: int, options: ImportOptions) -> FetchedState:
    response, answer = await session.request(FetchState(name=name, rank=rank), FetchStateResponse)
    return await FetchedState.attach(session, response, answer, options, session.backends)


@dataclass(frozen=True, slots=True)
class Turn:
    """This client's turn to build a state: end it with `publish`, or give it up with `abandon`."""

    session: Session
    name: str
    rank: int
    config: Config
    ticket: int
    options: ImportOptions

    async def publish(self, built: Built) -> FetchedState:
        """Hand over what was built, and attach to it.  What is refused passes the turn on."""
        try:
            await publish(self.session, self.name, built, rank=self.rank, config=self.config, ticket=self.ticket)
        except BaseException:
            self.abandon()
            raise
        state = await _fetch(self.session, self.name, self.rank, self.options)
        state.built_here = True
        return state

    def abandon(self) -> None:
        """Let the next one build; does nothing once the connection is gone, whose end said so."""
        self.session.post(Abandon(ticket=self.ticket))


async def claim(
    session: Session,
    name: str,
    *,
    rank: int,
    config: Config,
    timeout: float | None,
    options: ImportOptions,
    progress: Progress | None,
) -> FetchedState | Turn:
    """See `Client.claim`."""
    name = name or automatic_name(config)
    request = Claim(name=name, rank=rank, config=config, timeout=timeout, progress=progress is not None)
    response, answer = await session.request(request, (FetchStateResponse, BuildTicket), progress)
    if isinstance(response, FetchStateResponse):
        return await FetchedState.attach(session, response, answer, options, session.backends)
    answer.close()
    if not isinstance(response, BuildTicket):
        raise UnexpectedMessage(type=type_of(response), expected="a state or a build ticket")
    return Turn(session, name, rank, config, response.ticket, options)


async def fetch_or_publish(claimed: FetchedState | Turn, build: Build) -> FetchedState:
    """See `Client.fetch_or_publish`."""
    if isinstance(claimed, FetchedState):
        return claimed
    try:
        built = await _run(build)
    except BaseException:
        claimed.abandon()
        raise
    return await claimed.publish(built)


async def _run(build: Build) -> Built:
    if inspect.iscoroutinefunction(build):
        return await build()  # type: ignore[no-any-return]
    built = await asyncio.to_thread(build)
    return await built if inspect.isawaitable(built) else built

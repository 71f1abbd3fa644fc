"""What a publisher says, put together by hand, and what it is answered."""

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from wcache_async.manifest import StateManifest, StateSpec, TensorSpec, build_manifest, encode_manifest, plan_layout
from wcache_async.protocol.connection import Received
from wcache_async.protocol.messages import ErrorResponse, Message, Publish
from wcache_async.testing.scripted_peer import ScriptedPeer

__all__ = ["answer", "ask", "code_of", "eventually", "manifest_of", "payload_of", "publication"]


def manifest_of(nbytes: int = 64) -> StateManifest:
    """One tensor of bytes that fills one arena."""
    spec = StateSpec(storages=(nbytes,), tensors=(TensorSpec(name="w", dtype="uint8", shape=(nbytes,), storage=0),))
    return build_manifest(spec, plan_layout(spec.storages))


def payload_of(*nbytes: int) -> bytes:
    """What shm_fd says of its arenas."""
    return msgspec.msgpack.encode({"arenas": nbytes})


def publication(
    name: str = "m", *, manifest: StateManifest | None = None, payload: bytes | None = None, ticket: int = 0
) -> Publish:
    """A Publish through shm_fd, whose manifest is inline."""
    manifest = manifest or manifest_of()
    body = encode_manifest(manifest)
    sizes = (arena.nbytes for arena in manifest.arenas)
    return Publish(
        name=name,
        manifest=body,
        manifest_nbytes=len(body),
        transport_backend="shm_fd",
        payload=payload_of(*sizes) if payload is None else payload,
        ticket=ticket,
    )


async def answer(peer: ScriptedPeer) -> Message:
    """The next message."""
    event = await peer.hear()
    assert isinstance(event, Received), event
    return event.message


async def ask(peer: ScriptedPeer, message: Message, fds: Sequence[int] = ()) -> Message:
    """Say it and return the answer."""
    await peer.say(1, message, fds)
    return await answer(peer)


def code_of(message: Message) -> str:
    """The code of the error that was answered."""
    assert isinstance(message, ErrorResponse), message
    return message.code


async def eventually(condition: Callable[[], bool]) -> None:
    """Returns once it holds."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in the kernel and in other tasks
            await asyncio.sleep(0)

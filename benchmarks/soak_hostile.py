"""Peers of a soak that break the rules, one at a time."""

import asyncio
import contextlib
import os
import random
import socket
import time
from array import array
from collections import Counter
from typing import Final

import msgspec
from soak_states import MADE

from wcache_async.manifest import StateSpec, TensorSpec, build_manifest, encode_manifest, plan_layout
from wcache_async.protocol.framing import Segment, encode_frame
from wcache_async.protocol.messages import (
    PROTOCOL_VERSIONS,
    Abandon,
    Claim,
    FetchDigests,
    FetchState,
    Hello,
    Load,
    Message,
    Pin,
    Publish,
    Release,
    Status,
    Unload,
    encode_message,
)

__all__ = ["DEEDS", "Hostile"]

_PAUSE_S: Final = 0.35
"""Between two deeds of one peer, on average."""


def frame(request_id: int, message: Message) -> bytes:
    segments: list[Segment[int]] = encode_frame(request_id, encode_message(message))
    return b"".join(segment.data for segment in segments)


_HELLO: Final = frame(0, Hello(versions=PROTOCOL_VERSIONS, client="hostile", backends=("shm_fd", "torch_ipc")))
_LIE_NBYTES: Final = 1 << 20


def _lie() -> Publish:
    """A publication that nothing is wrong with but its memory."""
    tensor = TensorSpec(name="w", dtype="uint8", shape=(_LIE_NBYTES,), storage=0)
    spec = StateSpec(storages=(_LIE_NBYTES,), tensors=(tensor,))
    manifest = encode_manifest(build_manifest(spec, plan_layout(spec.storages)))
    payload = msgspec.msgpack.encode({"arenas": [_LIE_NBYTES]})
    return Publish(
        name="lie", manifest=manifest, manifest_nbytes=len(manifest), transport_backend="shm_fd", payload=payload
    )


_LIE: Final = frame(1, _lie())
_TALK: Final = b"".join(
    frame(number, message)
    for number, message in enumerate[Message](
        (
            FetchState(name=MADE[0], timeout=1),
            FetchDigests(lease=1),
            Claim(name=MADE[1], timeout=0),
            Abandon(ticket=1),
            Pin(name=MADE[2], pinned=False),
            Status(),
            Load(path="/nonexistent", name="absent"),
            Unload(name="absent"),
            Release(lease=1),
            _lie(),
        ),
        start=1,
    )
)
DEEDS: Final = ("silence", "junk", "garbled", "half", "descriptors", "deaf", "lies")


class Hostile:
    """A peer that breaks every rule, one at a time."""

    def __init__(self, address: str, done: Counter[str], chance: random.Random) -> None:
        self._address = address
        self._done = done
        self._chance = chance

    async def run(self, until: float) -> None:
        """One deed after the other until that time on the monotonic clock."""
        while time.monotonic() < until:
            await self.do(self._chance.choice(DEEDS), until)
            await asyncio.sleep(self._chance.expovariate(1 / _PAUSE_S))

    async def do(self, deed: str, until: float) -> None:
        """The method of that name, on a connection of its own."""
        # It is dropped for it, and may be, in the middle of it.
        with contextlib.suppress(BlockingIOError, ConnectionError), socket.socket(socket.AF_UNIX) as sock:
            sock.setblocking(False)
            sock.connect(self._address)
            await getattr(self, deed)(sock, until)
            self._done[f"hostile: {deed}"] += 1

    async def _linger(self, most_s: float, until: float) -> None:
        await asyncio.sleep(max(0.0, min(self._chance.random() * most_s, until - time.monotonic())))

    async def silence(self, sock: socket.socket, until: float) -> None:
        if self._chance.random() < 0.5:
            sock.send(_HELLO[: self._chance.randrange(len(_HELLO))])
        await self._linger(12, until)

    async def junk(self, sock: socket.socket, until: float) -> None:
        sock.send(self._chance.randbytes(self._chance.randrange(1, 4096)))
        await self._linger(0.1, until)

    async def garbled(self, sock: socket.socket, until: float) -> None:
        said = bytearray(_HELLO + _TALK)
        for _ in range(self._chance.randrange(1, 6)):
            said[self._chance.randrange(len(said))] = self._chance.randrange(256)
        sock.send(said)
        await self._linger(0.5, until)

    async def half(self, sock: socket.socket, until: float) -> None:
        said = _HELLO + _TALK
        sock.send(said[: self._chance.randrange(len(said))])
        if self._chance.random() < 0.5:
            sock.shutdown(socket.SHUT_WR)
        await self._linger(0.5, until)

    async def descriptors(self, sock: socket.socket, until: float) -> None:
        sock.send(_HELLO)
        given = [sock.fileno()] * self._chance.choice((1, 2, 100, 253))
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", given))
        sock.sendmsg([self._chance.choice((b"W", frame(1, Status()), _LIE))], [rights])
        await self._linger(0.5, until)

    async def deaf(self, sock: socket.socket, until: float) -> None:
        """Ask without end, and read nothing of the answers, fds among them."""
        sock.send(_HELLO)
        questions = frame(1, FetchState(name=self._chance.choice(MADE))) * 20 + frame(2, Status()) * 20
        for _ in range(self._chance.randrange(200)):
            with contextlib.suppress(BlockingIOError):
                sock.send(questions)
            await asyncio.sleep(0)
        await self._linger(self._chance.choice((1, 40)), until)

    async def lies(self, sock: socket.socket, until: float) -> None:
        """Publish memory that is not sealed, and change it while it is looked at."""
        sock.send(_HELLO)
        memfd = os.memfd_create("lie", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        try:
            os.ftruncate(memfd, _LIE_NBYTES)
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [memfd]))
            # The header's count of fds is its seventh byte.
            sock.sendmsg([_LIE[:6] + b"\x01" + _LIE[7:]], [rights])
            await self._linger(0.2, until)
            os.ftruncate(memfd, 0)
        finally:
            os.close(memfd)

"""The slow peers of `slow_peers.py`: ADDRESS SILENT TRICKLING.  Says ``ready`` when all are connected.

Written against the wire alone, as a client that behaves would not do what these do.
"""

import asyncio
import os
import socket
import sys

from serving import STATE_NAME

from wcache_async.protocol.framing import Segment, encode_frame
from wcache_async.protocol.messages import PROTOCOL_VERSIONS, FetchState, Hello, Message, encode_message


async def silent(address: str, sock: socket.socket) -> None:
    """Say nothing; connect again when dropped for it."""
    while True:
        with sock:
            while await asyncio.get_running_loop().sock_recv(sock, 4096):
                pass
        sock = _connect(address)


async def trickling(address: str, sock: socket.socket) -> None:
    """Ask without end, read one byte a second; connect again when dropped for it."""
    loop = asyncio.get_running_loop()
    while True:
        with sock:
            asking = loop.create_task(_ask(sock))
            try:
                while await loop.sock_recv(sock, 1):  # noqa: ASYNC110  (the pause is the point)
                    await asyncio.sleep(1.0)
            except OSError:
                pass  # Dropped.
            finally:
                asking.cancel()
                await asyncio.wait((asking,))
        sock = _connect(address)


async def _ask(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    hello = Hello(versions=PROTOCOL_VERSIONS, client="slow", pid=os.getpid(), backends=("shm_fd",))
    await loop.sock_sendall(sock, _frame(0, hello))
    number = 0
    while True:
        number += 1
        await loop.sock_sendall(sock, _frame(number, FetchState(name=STATE_NAME)))
        await asyncio.sleep(0.01)


def _frame(request_id: int, message: Message) -> bytes:
    segments: list[Segment[int]] = encode_frame(request_id, encode_message(message))
    return segments[0].data


def _connect(address: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(address)
    sock.setblocking(False)
    return sock


async def main(address: str, silent_count: int, trickling_count: int) -> None:
    async with asyncio.TaskGroup() as peers:
        for _ in range(silent_count):
            peers.create_task(silent(address, _connect(address)))
        for _ in range(trickling_count):
            peers.create_task(trickling(address, _connect(address)))
        print("ready", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))

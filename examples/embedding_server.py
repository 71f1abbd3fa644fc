"""An embedding server whose worker processes share one model.

    wcache serve &
    python examples/embedding_server.py --workers 4 --port 8000
    curl -s localhost:8000/embed -d '{"texts": ["a weight cache", "a cash weight"]}'

Every worker accepts on the same port and answers by itself.  The first to come builds the model
and publishes it; the others attach to that one copy, and so do the workers of the next start.
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from wcache_async import Client

CONFIG = {"model": "hashed-bigrams", "revision": "1", "dtype": "float32"}
BUCKETS, WIDTH = 16_384, 64


class Embedder(nn.Module):
    """Embeds texts by their pairs of letters: vectors of WIDTH numbers and length 1."""

    def __init__(self) -> None:
        super().__init__()
        self.bigrams = nn.EmbeddingBag(BUCKETS, WIDTH, mode="mean")
        self.mix = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, texts: Sequence[str]) -> torch.Tensor:
        bags = [[(ord(a) * 31 + ord(b)) % BUCKETS for a, b in pairwise(f" {text.lower()} ")] for text in texts]
        starts = torch.tensor([0, *(len(bag) for bag in bags)]).cumsum(0)[:-1]
        pooled = self.bigrams(torch.tensor([number for bag in bags for number in bag]), starts)
        return nn.functional.normalize(self.mix(pooled), dim=-1)


def build() -> nn.Module:
    """What takes long: here random weights, elsewhere a checkpoint that is read, converted, quantised."""
    torch.manual_seed(0)
    return Embedder().eval()


# ------------------------------------------------------------------------------------ a worker
async def serve(listener: socket.socket, cache: str | None) -> None:
    async with Client(cache) as client:
        state = await client.fetch_or_publish("embedder", build, config=CONFIG)
        model = await state.create_module(Embedder)  # On meta, then bound: nothing is allocated or computed.
        print(f"worker {os.getpid()} {'built' if state.built_here else 'attached'}", flush=True)
        server = await asyncio.start_server(lambda reader, writer: answer(model, reader, writer), sock=listener)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.close)
        async with server:
            await server.wait_closed()


async def answer(model: nn.Module, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One request of HTTP/1.1, and the connection closed."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        lengths = [line.partition(":")[2] for line in head.splitlines() if line.startswith("content-length:")]
        body = await reader.readexactly(int(lengths[0])) if lengths else b""
        status, said = await asyncio.to_thread(embed, model, body)
        content = json.dumps(said).encode()
        writer.write(f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n".encode())
        writer.write(f"content-length: {len(content)}\r\nconnection: close\r\n\r\n".encode() + content)
        await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass  # It hung up.
    finally:
        writer.close()


def embed(model: nn.Module, body: bytes) -> tuple[str, dict[str, object]]:
    try:
        texts = json.loads(body)["texts"]
        with torch.inference_mode():
            vectors = model([str(text) for text in texts]) if texts else torch.empty(0, WIDTH)
    except (ValueError, TypeError, KeyError) as error:
        return "400 Bad Request", {"error": repr(error)}
    return "200 OK", {"worker": os.getpid(), "vectors": vectors.tolist()}


# --------------------------------------------------------------------------------- all of them
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free")
    parser.add_argument("--socket", help="the daemon's (default: its default address)")
    parser.add_argument("--listener", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.listener is not None:
        torch.set_num_threads(1)
        asyncio.run(serve(socket.socket(fileno=chosen.listener), chosen.socket))
        return
    with socket.create_server(("127.0.0.1", chosen.port), backlog=128) as listener:
        print(f"listening on http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        command = [sys.executable, __file__, "--listener", str(listener.fileno())]
        command += ["--socket", chosen.socket] if chosen.socket else []
        workers = [subprocess.Popen(command, pass_fds=[listener.fileno()]) for _ in range(chosen.workers)]

    def stop(*_: object) -> None:
        for worker in workers:
            worker.terminate()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    sys.exit(max(abs(worker.wait()) for worker in workers))


if __name__ == "__main__":
    main()

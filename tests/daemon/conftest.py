"""Checkpoints and daemons for the daemon's tests."""

import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from wcache_async import Daemon
from wcache_async.daemon.server import ServerLimits

WriteCheckpoint = Callable[..., Path]


@pytest.fixture
def write_checkpoint(tmp_path: Path) -> WriteCheckpoint:
    """Writes a safetensors file of `tensors` tensors of `nbytes` bytes each; needs no torch."""

    def write(name: str = "model.safetensors", *, tensors: int = 3, nbytes: int = 64) -> Path:
        header = {
            f"layer.{i}.weight": {
                "dtype": "F32",
                "shape": [nbytes // 4],
                "data_offsets": [i * nbytes, (i + 1) * nbytes],
            }
            for i in range(tensors)
        }
        head = msgspec.json.encode(header)
        path = tmp_path / name
        data = b"".join(bytes([(i + j) % 251 for j in range(nbytes)]) for i in range(tensors))
        path.write_bytes(struct.pack("<Q", len(head)) + head + data)
        return path

    return write


@pytest.fixture
def limits() -> ServerLimits:
    """What the daemon under test takes; overridden by parametrizing."""
    return ServerLimits()


@pytest.fixture
async def daemon(short_tmp: Path, limits: ServerLimits) -> AsyncIterator[Daemon]:
    """A daemon that holds nothing yet."""
    async with Daemon(short_tmp / "wcache.sock", limits=limits, drain_timeout=5) as running:
        yield running

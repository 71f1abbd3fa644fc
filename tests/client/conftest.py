"""A daemon with states, for the client's tests."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from wcache_async import Daemon

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="session")
def tensors() -> Tensors:
    """A small checkpoint's tensors, several dtypes among them."""
    torch.manual_seed(0)
    return {
        "embed.weight": torch.randn(40, 16),
        "layer.weight": torch.randn(16, 16, dtype=torch.bfloat16),
        "layer.bias": torch.randn(16),
        "scale": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
        "steps": torch.arange(7),
    }


@pytest.fixture
def checkpoint(tmp_path: Path, tensors: Tensors) -> Path:
    """Those tensors as a safetensors file."""
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    return path


@pytest.fixture
async def daemon(short_tmp: Path) -> AsyncIterator[Daemon]:
    """A daemon that holds nothing yet."""
    async with Daemon(short_tmp / "wcache.sock", drain_timeout=5) as running:
        yield running

"""Small checkpoints, and the command to use them with."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.commands import Wcache
from tests.processes import Forge


@pytest.fixture
def wcache(forge: Forge, short_tmp: Path) -> Wcache:
    """The `wcache` command, with a socket in a folder of its own."""
    return Wcache(forge, short_tmp / "wcache.sock")


@pytest.fixture(scope="session")
def tensors() -> dict[str, torch.Tensor]:
    """A small checkpoint's tensors."""
    torch.manual_seed(0)
    return {
        "embed.weight": torch.randn(40, 16),
        "layer.weight": torch.randn(16, 16).bfloat16(),
        "scale": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
    }


@pytest.fixture
def checkpoint(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Those as a safetensors file called `tiny`."""
    path = tmp_path / "tiny.safetensors"
    save_file(tensors, path)
    return path

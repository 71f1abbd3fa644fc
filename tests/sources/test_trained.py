"""A real trained checkpoint: silero-vad's, as its wheel on PyPI carries it."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import safetensors.torch
import torch

if TYPE_CHECKING:
    from tests.sources.conftest import Load


@pytest.fixture
def trained() -> Path:
    """The safetensors file; the package is not imported, as it wants torchaudio."""
    package = importlib.util.find_spec("silero_vad")
    if package is None or package.origin is None:
        pytest.skip("silero-vad is not installed: pip install --no-deps silero-vad")
    return Path(package.origin).parent / "data" / "silero_vad_16k.safetensors"


def test_every_tensor_is_what_safetensors_reads(
    trained: Path, load: "Load", same: Callable[[torch.Tensor, torch.Tensor], bool]
) -> None:
    want = safetensors.torch.load_file(trained)
    loaded = load(trained)
    assert want
    assert loaded.tensors.keys() == want.keys()
    assert all(same(loaded.tensors[name], tensor) for name, tensor in want.items())
    assert loaded.config == {"source": "safetensors", "dtype": "float32"}

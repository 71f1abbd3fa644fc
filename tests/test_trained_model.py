"""A real trained checkpoint, from PyPI's silero-vad: served, attached, verified, and run."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from wcache_async import Client, Daemon

_spec = importlib.util.find_spec("silero_vad")
pytestmark = pytest.mark.skipif(_spec is None, reason="needs `pip install --no-deps silero-vad`")


class VoiceActivity(nn.Module):
    """Speech probability of one chunk of 16 kHz audio: ``(batch, 576)`` samples to ``(batch, 1)``.

    A convolution as STFT, four convolutions over its magnitudes, an LSTM cell, a final convolution.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stft_conv = nn.Conv1d(1, 258, 256, stride=128, bias=False)
        self.conv1 = nn.Conv1d(129, 128, 3, padding=1)
        self.conv2 = nn.Conv1d(128, 64, 3, stride=2, padding=1)
        self.conv3 = nn.Conv1d(64, 64, 3, stride=2, padding=1)
        self.conv4 = nn.Conv1d(64, 128, 3, padding=1)
        self.lstm_cell = nn.LSTMCell(128, 128)
        self.final_conv = nn.Conv1d(128, 1, 1)

    def forward(
        self, samples: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        spectrum = self.stft_conv(F.pad(samples, (0, 64), "reflect").unsqueeze(1))
        x = (spectrum[:, :129].square() + spectrum[:, 129:].square()).sqrt()
        for conv in (self.conv1, self.conv2, self.conv3, self.conv4):
            x = F.relu(conv(x))
        hidden, cell = self.lstm_cell(x.squeeze(-1), state)
        return torch.sigmoid(self.final_conv(F.relu(hidden).unsqueeze(-1))).squeeze(-1), (hidden, cell)


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    if _spec is None or _spec.origin is None:
        raise RuntimeError("the package has no folder")
    return Path(_spec.origin).parent / "data" / "silero_vad_16k.safetensors"


@pytest.fixture(scope="module")
def audio() -> torch.Tensor:
    """Two seconds in chunks: noise, then a buzzing vowel-like sum of harmonics.  Shape (50, 576)."""
    torch.manual_seed(0)
    t = torch.arange(50 * 576) / 16_000
    buzz = torch.stack([torch.sin(2 * torch.pi * 120 * k * t) / k for k in range(1, 12)]).sum(0)
    return (0.2 * buzz * (t > 0.6) + 0.01 * torch.randn_like(t)).reshape(50, 576)


def run(model: VoiceActivity, audio: torch.Tensor) -> torch.Tensor:
    state = None
    chances = []
    with torch.inference_mode():
        for chunk in audio:
            chance, state = model(chunk.unsqueeze(0), state)
            chances.append(chance)
    return torch.cat(chances)


@pytest.mark.parametrize("device", ["cpu", "meta"])
async def test_bound_from_the_cache_it_computes_bit_for_bit_what_it_computes_from_the_file(
    short_tmp: Path, checkpoint: Path, audio: torch.Tensor, device: str
) -> None:
    from_file = VoiceActivity()
    from_file.load_state_dict(load_file(checkpoint))
    with torch.device(device):
        from_cache = VoiceActivity()
    async with Daemon(short_tmp / "wcache.sock") as daemon:
        await daemon.load(checkpoint, name="vad")
        async with Client(daemon.socket_path) as client:
            state = await client.fetch_state("vad", expect={"dtype": "float32"})
            assert {entry.name for entry in state.manifest.tensors} == from_file.state_dict().keys()
            await state.bind(from_cache)
    expected = run(from_file, audio)
    assert torch.equal(run(from_cache, audio), expected)
    assert 0 < expected.min() < 0.5 * expected.max()  # It tells the two halves apart: the weights mean something.


@pytest.mark.filterwarnings("ignore:`torch.jit.load` is deprecated:DeprecationWarning")
def test_the_module_is_the_architecture_the_weights_were_trained_in(checkpoint: Path, audio: torch.Tensor) -> None:
    """The package's own TorchScript holds another training of it: with those weights both give the same."""
    reference = torch.jit.load(checkpoint.parent / "silero_vad.jit")  # type: ignore[no-untyped-call]
    model = VoiceActivity()
    names = model.state_dict().keys()
    model.load_state_dict(dict(zip(names, reference._model.state_dict().values(), strict=True)))
    samples = audio[30:31, 64:]
    with torch.inference_mode():
        ours, _ = model(F.pad(samples, (64, 0)))  # The reference puts the last chunk's end before it: zeros, at first.
        theirs = reference(samples, 16_000)
    torch.testing.assert_close(ours, theirs)


def test_wcache_verify_finds_every_byte_of_it_in_the_cache(short_tmp: Path, checkpoint: Path) -> None:
    path = str(short_tmp / "wcache.sock")
    command = [sys.executable, "-m", "wcache_async"]
    with subprocess.Popen(
        [*command, "serve", f"vad={checkpoint}", "--socket", path], stdout=subprocess.PIPE, text=True
    ) as daemon:
        assert daemon.stdout is not None
        assert daemon.stdout.readline() == f"ready socket={path} states=1\n"
        verified = subprocess.run(
            [*command, "verify", str(checkpoint), "--name", "vad", "--socket", path, "--json"],
            stdout=subprocess.PIPE,
            check=False,
        )
        daemon.terminate()
        assert daemon.wait(60) == 0
    assert verified.returncode == 0
    assert json.loads(verified.stdout)["tensors"] == 15

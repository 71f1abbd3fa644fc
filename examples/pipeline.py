"""A pipeline of several modules, as diffusers has them, each of which is cached under a name of its own.

    wcache serve &
    python examples/pipeline.py

All of its modules attach over one connection at the same time.  What two pipelines have in common
(here the text encoder and the decoder of the second, ``--variant inpaint``) is in memory once.
"""

import argparse
import asyncio
import threading
import zlib
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from wcache_async import Client, FetchedState

WORDS, WIDTH, SIDE = 256, 32, 8

Part = TypeVar("Part", bound=nn.Module)

_seeding = threading.Lock()  # Modules are built in threads, and the seed is the process's.


class TextEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=64, batch_first=True)

    def forward(self, prompt: str) -> torch.Tensor:
        encoded: torch.Tensor = self.layer(self.words(torch.tensor([list(prompt.encode())])))
        return encoded.mean(dim=1)


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.condition = nn.Linear(WIDTH + 1, WIDTH)
        self.convolutions = nn.Sequential(
            nn.Conv2d(4, WIDTH, 3, padding=1), nn.SiLU(), nn.Conv2d(WIDTH, 4, 3, padding=1)
        )
        self.scale = nn.Linear(WIDTH, 4)

    def forward(self, latent: torch.Tensor, text: torch.Tensor, time: float) -> torch.Tensor:
        condition = torch.relu(self.condition(torch.cat([text, torch.full((len(text), 1), time)], dim=1)))
        noise: torch.Tensor = self.convolutions(latent) * self.scale(condition)[:, :, None, None]
        return noise


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 3, kernel_size=4, stride=4)

    def forward(self, latent: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.up(latent))


@dataclass
class Pipeline:
    text_encoder: TextEncoder
    denoiser: Denoiser
    decoder: Decoder

    @torch.inference_mode()
    def __call__(self, prompt: str, *, steps: int = 4) -> torch.Tensor:
        """An image of 3 x 32 x 32 numbers from 0 to 1."""
        text = self.text_encoder(prompt)
        latent = torch.randn(1, 4, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
        for step in range(steps, 0, -1):
            latent = latent - self.denoiser(latent, text, step / steps) / steps
        image: torch.Tensor = self.decoder(latent)[0]
        return image


async def from_cache(client: Client, name: str, part: type[Part], seed: int) -> tuple[Part, FetchedState]:
    """One module on the cache's memory, and the state it is of."""

    def build() -> Part:
        """What makes it for real: here random weights by a seed, elsewhere its `from_pretrained`."""
        with _seeding, torch.random.fork_rng():
            torch.manual_seed(seed)
            return part().eval()

    state = await client.fetch_or_publish(name, build, config={"revision": "1"})
    return await state.create_module(part), state


async def pipeline_from_cache(client: Client, variant: str) -> tuple[Pipeline, list[FetchedState]]:
    """The pipeline, and the states it is made of."""
    (text_encoder, *one), (denoiser, *two), (decoder, *three) = await asyncio.gather(
        from_cache(client, "tiny/text_encoder", TextEncoder, 1),
        from_cache(client, f"tiny/denoiser-{variant}", Denoiser, {"base": 2, "inpaint": 3}[variant]),
        from_cache(client, "tiny/decoder", Decoder, 4),
    )
    return Pipeline(text_encoder, denoiser, decoder), [*one, *two, *three]


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--socket", help="the daemon's (default: its default address)")
    parser.add_argument("--variant", choices=["base", "inpaint"], default="base")
    parser.add_argument("prompt", nargs="?", default="a lighthouse in the fog")
    chosen = parser.parse_args()
    async with Client(chosen.socket) as client:
        pipeline, states = await pipeline_from_cache(client, chosen.variant)
        for state in states:
            print(f"{state.name} {'built' if state.built_here else 'attached'} {state.resident_bytes} bytes")
        image = pipeline(chosen.prompt)
    print(f"image {tuple(image.shape)} {zlib.crc32((image * 255).byte().numpy().tobytes()):08x}")


if __name__ == "__main__":
    asyncio.run(main())

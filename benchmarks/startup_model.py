"""The model that `startup.py` starts: a random Llama, and what engines do to a model after loading it.

Each processing works on a model with values and, in no time, on one on the meta device, as a
client of the cache needs it: the structure without the work.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

__all__ = ["VARIANTS", "Variant", "build_structure", "load", "write_checkpoint"]

Model = Any  # A LlamaForCausalLM; transformers is not typed.


class FusedQKV(nn.Module):
    """The three projections of an attention in one product; stands for the first of them."""

    def __init__(self, projections: list[nn.Linear]) -> None:
        super().__init__()
        self.sizes = [projection.out_features for projection in projections]
        weight = torch.cat([projection.weight.detach() for projection in projections])
        self.projection = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.projection.weight = nn.Parameter(weight, requires_grad=False)
        self.kept: list[torch.Tensor] = []

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        first, *later = torch.split(self.projection(hidden), self.sizes, -1)
        self.kept = later
        return first


class FusedBefore(nn.Module):
    """Stands for a projection that the first one has computed with its own."""

    def __init__(self, fused: FusedQKV) -> None:
        super().__init__()
        self._fused = [fused]  # In a list, so that it is no submodule of two.

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        return self._fused[0].kept.pop(0)


class Int8Linear(nn.Module):
    """A linear layer's weight as int8 with a scale per row."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        if weight.is_meta:
            self.register_buffer("scale", weight.new_empty(len(weight), 1))
            self.register_buffer("weight", torch.empty_like(weight, dtype=torch.int8))
            return
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("weight", (weight / scale).round().to(torch.int8))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scale = self.get_buffer("scale")
        return functional.linear(hidden, self.get_buffer("weight").to(scale.dtype) * scale)


def fuse_qkv(model: Model) -> None:
    """Put the query, key and value projections of every layer into one."""
    for layer in model.model.layers:
        attention = layer.self_attn
        fused = FusedQKV([attention.q_proj, attention.k_proj, attention.v_proj])
        attention.q_proj, attention.k_proj, attention.v_proj = fused, FusedBefore(fused), FusedBefore(fused)


def quantise(model: Model) -> None:
    """Put every linear layer of the decoder into int8."""
    for part in list(model.model.modules()):
        for name, child in list(part.named_children()):
            if isinstance(child, nn.Linear):
                setattr(part, name, Int8Linear(child))


def fuse_and_quantise(model: Model) -> None:
    """Both, in this order."""
    fuse_qkv(model)
    quantise(model)


@dataclass(frozen=True)
class Variant:
    """What is done to the stored model: a cast as it is loaded, and processing after that."""

    title: str
    dtype: torch.dtype = torch.bfloat16
    process: Callable[[Model], None] | None = None

    @property
    def source(self) -> str:
        """Whether transformers alone makes it (``transformers``), or code of the engine's own (``module``)."""
        return "transformers" if self.process is None else "module"


VARIANTS = {
    "stored": Variant("as stored (bfloat16)"),
    "cast": Variant("cast to float16", dtype=torch.float16),
    "fused": Variant("QKV fused", process=fuse_qkv),
    "int8": Variant("quantised to int8", process=quantise),
    "all": Variant("cast to float16, QKV fused, quantised to int8", dtype=torch.float16, process=fuse_and_quantise),
}


def load(folder: Path, variant: Variant) -> Model:
    """Load the checkpoint and process it, as an engine does without a cache."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=variant.dtype).eval()
    if variant.process is not None:
        with torch.inference_mode(False), torch.no_grad():
            variant.process(model)
    return model


def build_structure(folder: Path, variant: Variant) -> Model:
    """The same without values: on meta, the structure processed alike."""
    from transformers.initialization import no_init_weights

    from wcache_async.client.bind import build_on_meta

    def build() -> Model:
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder)).eval()
        if variant.process is not None:
            variant.process(model)
        return model

    with no_init_weights():
        return build_on_meta(build, variant.dtype)


def config_of(nbytes: int) -> LlamaConfig:
    """A Llama of about that many bytes in bfloat16: TinyLlama's layers, or a 64th of them, as many as it takes."""
    scale = 1 if nbytes >= 256 << 20 else 8
    hidden, intermediate, vocabulary = 2048 // scale, 5632 // scale, 32_000 // scale
    heads, key_value_heads = 32 // scale, 4 // (1 if scale == 1 else 2)
    attention = 2 * hidden * hidden + 2 * hidden * hidden * key_value_heads // heads
    layer = attention + 3 * hidden * intermediate
    layers = max(round((nbytes / 2 - 2 * vocabulary * hidden) / layer), 1)
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )


def write_checkpoint(folder: Path, nbytes: int) -> None:
    """Write a random model of about `nbytes` into `folder`; its pages are in the page cache then."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    LlamaForCausalLM(config_of(nbytes)).save_pretrained(folder)


if __name__ == "__main__":
    write_checkpoint(Path(sys.argv[1]), int(sys.argv[2]))

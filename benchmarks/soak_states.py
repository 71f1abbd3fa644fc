"""The states of a soak: their bytes follow from their config, so that whoever attaches can check every one."""

from functools import lru_cache
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file
from torch import nn

__all__ = ["FILES", "MADE", "Config", "Model", "is_right", "tensors", "write_checkpoints"]

Config = dict[str, bool | int | float | str | None]

COLUMNS: Final = 64
FILES: Final = {
    f"file-{number}": {"seed": number, "rows": rows} for number, rows in enumerate((256, 4096, 4096, 32768))
}
"""By name, the config of each checkpoint: 64 KiB, 1 MiB twice, 8 MiB."""
MADE: Final = tuple(f"made-{number}" for number in range(6))
"""What clients build and publish, with whatever config."""


@lru_cache(maxsize=16)
def tensors(seed: int, rows: int) -> dict[str, torch.Tensor]:
    """What a state with that config holds; not to be written to."""
    weight = torch.arange(rows * COLUMNS, dtype=torch.float32).reshape(rows, COLUMNS)
    return {"layer.weight": weight + seed, "layer.bias": torch.arange(rows, dtype=torch.float32) - seed}


def is_right(config: Config, got: dict[str, torch.Tensor]) -> bool:
    """Whether every byte is what the config says."""
    expected = tensors(int(config["seed"] or 0), int(config["rows"] or 0))
    return got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in expected)


class Model(nn.Module):
    """A module on meta that a state of so many rows can be bound to."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.layer = nn.Linear(COLUMNS, rows, device="meta")


def write_checkpoints(folder: Path) -> None:
    """Every state of FILES as ``NAME.safetensors``."""
    for name, config in FILES.items():
        save_file(tensors(**config), folder / f"{name}.safetensors")

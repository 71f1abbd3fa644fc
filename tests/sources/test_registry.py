"""Choosing a source by kind, and what is refused before anything is read."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from wcache_async.errors import SourceError
from wcache_async.sources import known_kinds, open_source
from wcache_async.sources.cast import CASTABLE


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors"


def test_an_unknown_kind_lists_the_known_ones(checkpoint: Path) -> None:
    with pytest.raises(SourceError, match=f"'gguf'.*{', '.join(known_kinds())}"):
        open_source(str(checkpoint), kind="gguf")
    assert {"auto", "safetensors", "torch"} <= set(known_kinds())


@pytest.mark.parametrize(
    ("dtype", "reason"), [("int8", "a cast gives no"), ("bf16", "there is no"), ("F32", "there is no")]
)
def test_a_dtype_no_cast_gives_lists_those_it_gives(checkpoint: Path, dtype: str, reason: str) -> None:
    with pytest.raises(SourceError, match=f"{dtype!r}.*{reason}.*{', '.join(CASTABLE)}"):
        open_source(str(checkpoint), dtype=dtype)


def test_the_kind_asked_for_is_the_kind_tried(checkpoint: Path) -> None:
    with pytest.raises(SourceError, match="no torch checkpoint"), open_source(str(checkpoint), kind="torch") as source:
        source.open()
    with open_source(str(checkpoint), kind="safetensors") as source:
        assert source.kind == "safetensors"
        assert source.path == str(checkpoint)


def test_importing_sources_imports_neither_torch_nor_other_rooms() -> None:
    code = """
import sys, wcache_async.sources
rooms = {name.split(".")[1] for name in sys.modules if name.startswith("wcache_async.")}
others = rooms & {"protocol", "sockets", "backends", "daemon", "client", "integrations", "cli", "testing"}
print(sorted(others), [name for name in ("torch", "numpy", "safetensors", "asyncio", "cuda") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] []"

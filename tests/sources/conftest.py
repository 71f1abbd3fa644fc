"""Checkpoints read the way the daemon reads them, and safetensors files written byte by byte."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from wcache_async.errors import Scalar
from wcache_async.manifest import Config, StateSpec, contiguous_stride
from wcache_async.sources import open_source


@dataclass(frozen=True)
class Loaded:
    """A whole checkpoint: what the source said, and its tensors on the storages it filled."""

    spec: StateSpec
    config: Config
    tensors: dict[str, torch.Tensor]
    advanced: list[int]


Load = Callable[..., Loaded]
WriteSafetensors = Callable[..., Path]


def _load(
    path: Path | str, *, kind: str = "auto", dtype: str = "", options: Mapping[str, Scalar] | None = None
) -> Loaded:
    advanced: list[int] = []
    storages: list[torch.UntypedStorage] = []
    with open_source(str(path), kind=kind, dtype=dtype, options=options) as source:
        spec = source.open()
        config = source.config()
        for number, nbytes in enumerate(spec.storages):
            storage = torch.zeros(nbytes, dtype=torch.uint8)
            source.read(number, storage.numpy().data, advanced.append)
            storages.append(storage.untyped_storage())
    tensors = {}
    for tensor in spec.tensors:
        dtype_ = getattr(torch, tensor.dtype)
        assert tensor.offset % dtype_.itemsize == 0
        stride = tensor.stride or contiguous_stride(tensor.shape)
        tensors[tensor.name] = torch.empty(0, dtype=dtype_).set_(
            storages[tensor.storage], tensor.offset // dtype_.itemsize, tensor.shape, stride
        )
    return Loaded(spec, config, tensors, advanced)


@pytest.fixture
def load() -> Load:
    """Opens a checkpoint and reads every storage."""
    return _load


@pytest.fixture
def write_safetensors(tmp_path: Path) -> WriteSafetensors:
    """Writes header, as it is or as JSON, and data; `length` may lie about the header's."""

    def write(
        header: Mapping[str, object] | bytes,
        data: bytes = b"",
        *,
        name: str = "x.safetensors",
        length: int | None = None,
    ) -> Path:
        body = header if isinstance(header, bytes) else json.dumps(header).encode()
        path = tmp_path / name
        path.write_bytes((len(body) if length is None else length).to_bytes(8, "little") + body + data)
        return path

    return write


def equal(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Same dtype, shape and bytes; NaNs and dtypes that torch cannot compare included."""
    return (
        got.dtype == want.dtype
        and got.shape == want.shape
        and torch.equal(got.contiguous().view(torch.uint8), want.detach().contiguous().view(torch.uint8))
        if want.dim()
        else got.dtype == want.dtype and not got.dim() and equal(got.reshape(1), want.reshape(1))
    )


@pytest.fixture
def same() -> Callable[[torch.Tensor, torch.Tensor], bool]:
    """Whether two tensors have the same dtype, shape and bytes."""
    return equal

"""The backends under test, and what their tensors are made of."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from tests.emulated_gpu.emulator import emulated, stand_in
from wcache_async.backends import cuda_driver
from wcache_async.backends.base import SHM_FD_BACKEND, TORCH_IPC_BACKEND, VMM_FD_BACKEND, WeightCacheTransportBackend
from wcache_async.backends.registry import get_transport_backend_class
from wcache_async.manifest import DTYPE_ITEMSIZE

__all__ = ["CASES", "BackendCase", "StateBuilder", "by_name", "raw_bytes", "tensor_of"]

StateBuilder = Callable[[str], "dict[str, tuple[torch.Tensor, bool]]"]
"""Tensors on the device given; the same ones in whatever process it runs."""


@dataclass(frozen=True)
class BackendCase:
    """One backend, and how it is to be tried."""

    name: str
    device: str
    """Where exported tensors are."""

    def backend(self) -> WeightCacheTransportBackend:
        return get_transport_backend_class(self.name)()


CASES: tuple[BackendCase, ...] = (
    BackendCase(SHM_FD_BACKEND, "cpu"),
    BackendCase(TORCH_IPC_BACKEND, "cpu"),
)
if emulated():
    stand_in()
    CASES = (BackendCase(VMM_FD_BACKEND, "cpu"),)
elif torch.version.cuda and cuda_driver.missing_reason() is None:
    CASES = (*CASES, BackendCase(VMM_FD_BACKEND, "cuda"))
by_name: Mapping[str, BackendCase] = {case.name: case for case in CASES}


def tensor_of(dtype: str, count: int, device: str, *, seed: int = 0) -> torch.Tensor:
    """`count` elements of arbitrary bytes, the same for the same `seed`."""
    nbytes = count * DTYPE_ITEMSIZE[dtype]
    ramp = (torch.arange(nbytes, dtype=torch.int64) * 31 + seed * 17) % (2 if dtype == "bool" else 251)
    return ramp.to(torch.uint8).to(device).view(getattr(torch, dtype))


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The bytes of a contiguous tensor of any dtype."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(torch.uint8).cpu().numpy().tobytes()

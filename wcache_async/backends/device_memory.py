"""The one seam to torch's own view of devices: tensors made of memory that torch did not allocate.

The owner hangs on the storage's Python object, which torch keeps for as long as the storage lives,
whoever holds it: a view, a slice, an autograd graph.  DLPack's deleter was tried and is no owner:
written in Python it is called by whatever thread drops the last view, also while an exception
unwinds (and then fails: ctypes does not set the exception aside) and after the interpreter is
gone (and then crashes).  torch drops a storage's Python object correctly in all of these.
"""

import sys
from typing import TYPE_CHECKING

from wcache_async.backends.base import VMM_FD_BACKEND
from wcache_async.errors import BackendUnavailable

if TYPE_CHECKING:
    import torch

__all__ = ["empty_torch_cache", "tensor_at", "torch_device"]


def tensor_at(address: int, nbytes: int, device: "torch.device", owner: object) -> "torch.Tensor":
    """`nbytes` at `address` on `device` as a one-dimensional uint8 tensor; the memory is not touched.

    `owner` is kept for as long as anything uses the tensor's storage, and should free the memory
    when it is dropped: its finaliser may run in any thread.
    """
    import torch

    with torch.inference_mode(False):
        storage = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
        storage._wcache_owner = owner  # type: ignore[attr-defined]
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def torch_device(kind: str, ordinal: int) -> "torch.device":
    """torch's name for the driver's device.  Raises BackendUnavailable where this torch has no CUDA."""
    import torch

    if kind == "cuda" and not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        raise BackendUnavailable(name=VMM_FD_BACKEND, reason=f"torch {torch.__version__} is built without CUDA")
    # Both number the devices that CUDA_VISIBLE_DEVICES lets through, in its order.
    return torch.device(kind, ordinal) if kind == "cuda" else torch.device(kind)


def empty_torch_cache() -> bool:
    """Have torch give back the device memory it caches, in a process that uses it; False where it does not."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    torch.cuda.empty_cache()
    return True

"""States that the conformance suite carries; each builds the same tensors in any process."""

import torch

from tests.conformance.cases import tensor_of
from wcache_async.manifest import DTYPE_ITEMSIZE

State = dict[str, tuple[torch.Tensor, bool]]


def every_dtype(device: str) -> State:
    """A tensor of every dtype, parameters where torch lets them be."""
    return {dtype: (tensor_of(dtype, 24, device).reshape(2, 12), False) for dtype in DTYPE_ITEMSIZE}


def shapes(device: str) -> State:
    """No dimension, none of some dimension, one element, odd counts, many dimensions."""
    sizes: list[tuple[int, ...]] = [(), (0,), (0, 3), (3, 0, 2), (1,), (7,), (5, 1, 3), (1, 1, 1, 1, 2)]
    state: State = {}
    for number, size in enumerate(sizes):
        count = torch.Size(size).numel()
        for dtype in ("float32", "bfloat16", "int64"):
            state[f"{dtype}.{number}"] = (tensor_of(dtype, count, device, seed=number).reshape(size), number % 2 == 0)
    return state


def tied(device: str) -> State:
    """One parameter under three names, beside one that only equals it."""
    embedding = torch.nn.Parameter(tensor_of("float32", 40, device).reshape(8, 5))
    return {
        "embed.weight": (embedding, True),
        "other.weight": (embedding.detach().clone(), True),
        "head.weight": (embedding, True),
        "head2.weight": (embedding, True),
    }


def shared_storages(device: str) -> State:
    """Views of one storage: halves, overlapping parts, another dtype, and one that stands alone."""
    fused = tensor_of("float32", 96, device).reshape(12, 8)
    return {
        "fused": (fused, True),
        "q": (fused[:4], True),
        "kv": (fused[4:], True),
        "bits": (fused.view(torch.int32), False),
        "alone": (tensor_of("float32", 12, device, seed=5), True),
    }


def strided(device: str) -> State:
    """Transposed, stepped, expanded, permuted and offset tensors."""
    base = tensor_of("float32", 240, device).reshape(4, 6, 10)
    return {
        "transposed": (base.transpose(0, 2), True),
        "stepped": (base[1:, ::2, 3:], True),
        "expanded": (tensor_of("float32", 3, device).reshape(3, 1).expand(3, 4), False),
        "channels_last": (
            tensor_of("float32", 120, device).reshape(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
            True,
        ),
        "offset": (tensor_of("float32", 50, device)[17:], True),
        "diagonal": (base[0].as_strided((6,), (11,), 2), False),
    }


def thousand(device: str) -> State:
    """1,000 tensors of various sizes."""
    return {f"layers.{i}.weight": (tensor_of("bfloat16", 64 + i % 7, device, seed=i), i % 3 != 0) for i in range(1000)}


def weights(device: str) -> State:
    """A parameter, a buffer, and a parameter that requires no grad; several pages in all."""
    frozen = torch.nn.Parameter(tensor_of("float32", 5000, device, seed=2), requires_grad=False)
    return {
        "weight": (torch.nn.Parameter(tensor_of("float32", 5000, device, seed=1)), True),
        "frozen": (frozen, True),
        "running_mean": (tensor_of("float32", 5000, device, seed=3), False),
    }

"""Random modules, the same for the same seed, and a portrait of one that tells every difference."""

import hashlib
import random
from typing import ClassVar

import torch
from torch import nn

from wcache_async.manifest import DTYPE_ITEMSIZE
from wcache_async.modules.walk import Held, walk

__all__ = ["build", "portrait", "scramble"]

_FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64]
_ALL = [getattr(torch, name) for name in DTYPE_ITEMSIZE]


class Part(nn.Module):
    """A module with two scalars that are exported."""

    wcache_scalars: ClassVar[tuple[str, ...]] = ("gain", "label")

    gain: float
    label: str | None


def build(seed: int) -> nn.Module:
    """A module decided by `seed` alone; under `torch.device("meta")` the same without its values."""
    rng = random.Random(seed)
    made: list[torch.Tensor] = []
    root = _part(rng, made, depth=0)
    for module in root.modules():
        module.training = rng.random() < 0.5
    return root


def _part(rng: random.Random, made: list[torch.Tensor], depth: int) -> Part:
    part = Part()
    part.gain = rng.choice([0.0, -1.5, 1e300])
    part.label = rng.choice([None, "", "täg"])
    for i in range(rng.randrange(5)):
        _hold(rng, part, made, f"t{i}")
    if depth < 3:
        for i in range(rng.randrange(4)):
            child = _part(rng, made, depth + 1)
            part.add_module(f"c{i}", child)
            if rng.random() < 0.2:
                part.add_module(f"c{i}_again", child)
    return part


def _hold(rng: random.Random, part: Part, made: list[torch.Tensor], key: str) -> None:
    how = rng.choice(["parameter", "tied", "buffer", "hidden", "attribute", "view", "same"])
    earlier = rng.choice(made) if made else None
    if how == "tied" and isinstance(earlier, nn.Parameter):
        part.register_parameter(key, earlier)
        return
    if how == "view" and earlier is not None and earlier.dim() and earlier.shape[0]:
        view = earlier.detach()[rng.randrange(earlier.shape[0]) :]
        part.register_buffer(key, view.transpose(0, -1), persistent=rng.random() < 0.5)
        return
    if how == "same" and earlier is not None and not isinstance(earlier, nn.Parameter):
        setattr(part, key, earlier)
        return
    if how in ("parameter", "tied"):
        parameter = nn.Parameter(_tensor(rng, rng.choice(_FLOATS)), requires_grad=rng.random() < 0.7)
        part.register_parameter(key, parameter)
        made.append(parameter)
        return
    tensor = _tensor(rng, rng.choice(_ALL))
    made.append(tensor)
    if how == "attribute":
        setattr(part, key, tensor)
    else:
        part.register_buffer(key, tensor, persistent=how == "buffer")


def _tensor(rng: random.Random, dtype: torch.dtype) -> torch.Tensor:
    """Random bytes in a random shape and stride."""
    shape = [rng.choice([0, 1, 2, 3, 5, 8]) if rng.random() < 0.9 else 0 for _ in range(rng.randrange(4))]
    count = 1
    for size in shape:
        count *= size
    spare = rng.randrange(3)
    raw = torch.tensor([rng.randrange(256) for _ in range((2 * count + spare) * dtype.itemsize)], dtype=torch.uint8)
    flat = raw.view(dtype) if raw.numel() else torch.empty(0, dtype=dtype)
    odd = rng.choice(["contiguous", "transposed", "offset", "strided", "expanded"])
    if odd == "transposed" and len(shape) > 1:
        return flat[:count].view(shape[::-1]).permute(*range(len(shape) - 1, -1, -1))
    if odd == "offset" and count:
        return flat[spare : spare + count].view(shape)
    if odd == "strided" and len(shape) == 1 and count:
        return flat[: 2 * count : 2]
    if odd == "expanded" and len(shape) == 1 and count:
        return flat[:1].expand(shape)
    return flat[:count].view(shape)


def scramble(module: nn.Module) -> None:
    """Undo what a bind must bring back: modes, scalars, requires_grad, ties and shared memory."""
    for part in module.modules():
        part.training = not part.training
        if isinstance(part, Part):
            part.gain, part.label = 7.0, "scrambled"
    for held in walk(module).tensors.values():
        own = torch.empty_like(held.tensor)
        if isinstance(held.tensor, nn.Parameter):
            held.owner._parameters[held.key] = nn.Parameter(own, requires_grad=not held.tensor.requires_grad)
        elif held.key in held.owner._buffers:
            held.owner._buffers[held.key] = own
        else:
            setattr(held.owner, held.key, own)


def portrait(module: nn.Module) -> dict[str, str]:
    """Everything that tells two modules apart, by name, as text."""
    walked = walk(module)
    told: dict[str, str] = {}
    names: dict[int, str] = {}
    for name, held in walked.tensors.items():
        tensor = held.tensor
        first = names.setdefault(id(tensor), name)
        told[name] = (
            f"{type(tensor).__name__} {held.kind.name} {tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} "
            f"grad={tensor.requires_grad} leaf={tensor.is_leaf} on={tensor.device} is={first} "
            f"bytes={_digest(tensor)} overlaps={_overlaps(held, walked.tensors)}"
        )
    for path, part in walked.modules.items():
        told[f"{path}()"] = (
            f"training={part.training} gain={getattr(part, 'gain', '')!r} {getattr(part, 'label', '')!r}"
        )
    told["state_dict"] = " ".join(module.state_dict())
    return told


def _digest(tensor: torch.Tensor) -> str:
    data = b""
    if tensor.numel():
        # Bytes in logical order; no kernel of an odd dtype is needed.
        flat = torch.as_strided(tensor.detach(), (tensor.numel(),), (1,)) if tensor.is_contiguous() else None
        if flat is None:
            raw = _raw(tensor)
            data = b"".join(raw[i : i + tensor.itemsize] for i in _offsets(tensor))
        else:
            data = bytes(_raw(tensor)[: tensor.nbytes])
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _raw(tensor: torch.Tensor) -> bytes:
    end = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    flat = torch.empty(0, dtype=torch.uint8)
    flat.set_(tensor.untyped_storage(), int(tensor.storage_offset()) * tensor.itemsize, (end * tensor.itemsize,), (1,))
    return bytes(flat.numpy())


def _offsets(tensor: torch.Tensor) -> list[int]:
    offsets = [0]
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = [offset + i * step * tensor.itemsize for offset in offsets for i in range(size)]
    return offsets


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    if not tensor.numel():
        return 0, 0
    end = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + end * tensor.itemsize


def _overlaps(held: Held, others: dict[str, Held]) -> dict[str, int]:
    """Which tensors share memory with this one, and how many bytes further they start."""
    low, high = _span(held.tensor)
    found = {}
    for name, other in others.items():
        start, end = _span(other.tensor)
        if other.tensor is not held.tensor and start < high and low < end:
            found[name] = start - low
    return found

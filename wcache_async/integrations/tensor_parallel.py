"""This rank's share of a transformers model, cut by the model's own plan, out of the cache.

    torchrun --nproc-per-node 2 engine.py

    from wcache_async.integrations.tensor_parallel import from_cache

    model = from_cache("./llama-8b", "llama-8b")      # in engine.py, in every rank

The states are those of ``wcache serve ./llama-8b --name llama-8b --tp-size 2``.  What is built
is what ``from_pretrained("./llama-8b", tp_plan="auto")`` builds, a model whose parameters are
DTensors; no weight is read from disk.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from wcache_async.client import blocking
from wcache_async.errors import ModuleError
from wcache_async.sources.transformers import model_class

if TYPE_CHECKING:
    import torch

__all__ = ["build_model", "from_cache"]


def from_cache(
    model: str | os.PathLike[str],
    name: str,
    *,
    socket_path: str | os.PathLike[str] | None = None,
    timeout: float | None = None,
    backends: Sequence[str] | None = None,
    allow_stale: bool = False,
) -> Any:  # Any: a PreTrainedModel, which is not typed
    """The model of which this process is a rank, in eval mode, bound to the cache's memory.

    `model` is the folder with its ``config.json``; torch.distributed is started as torchrun says
    if it is not running.  The other arguments are `wcache_async.blocking.fetch_state`'s, and the
    lease is held as `wcache_async.integrations.transformers.from_cache` holds it.  Raises what
    `fetch_state` does, ConfigMismatch where the daemon cut the model for another number of ranks,
    ModuleError where transformers cannot build it, and BindError where it builds something else.
    """
    built, rank, size = build_model(os.fspath(model))
    state = blocking.fetch_state(
        name,
        socket_path=socket_path,
        rank=rank,
        expect={"tp_size": size, "tp_rank": rank},
        timeout=timeout,
        backends=backends,
        allow_stale=allow_stale,
    )
    try:
        state.bind(built)
    except BaseException:
        state.release()
        raise
    built.weight_cache_state = state
    return built


def build_model(folder: str) -> tuple[Any, int, int]:
    """The model with its parameters on meta, distributed over all processes; its rank here, and how many there are.

    What the constructor computes, as rotary frequencies, is real.  Raises ModuleError.
    """
    import torch
    import transformers

    try:
        from accelerate import init_empty_weights
        from transformers.distributed import DistributedConfig

        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        (architecture, *_) = config.architectures or ("",)
        cls = model_class(architecture)
        distributed, device, meshes = cls.prepare_distribute_model(DistributedConfig(tp_plan="auto"))
        with init_empty_weights(), torch.device(device or "cpu"), _default_dtype(config.dtype):
            model = cls(config)
        model = cls.maybe_distribute_model(model, distributed, meshes).eval()
    except (OSError, ValueError, TypeError, KeyError, ImportError, RuntimeError, AttributeError) as error:
        # What transformers raises; AttributeError and ImportError where it distributes models in another way.
        raise ModuleError(
            path="", reason=f"transformers {transformers.__version__} cannot distribute {folder} here: {error}"
        ) from error
    # Each name of a tied weight was distributed by itself.
    model.tie_weights()
    if model.can_generate() and os.path.exists(os.path.join(folder, "generation_config.json")):
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    mesh = None if meshes is None else meshes.get_mesh("tp")
    return model, mesh.get_local_rank() if mesh is not None else 0, mesh.size() if mesh is not None else 1


@contextmanager
def _default_dtype(dtype: "torch.dtype | None") -> Iterator[None]:
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)

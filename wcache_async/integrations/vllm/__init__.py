"""vLLM starts from the cache: the load format ``wcache``, which installing this package beside vLLM registers.

    vllm serve MODEL --load-format wcache
    vllm serve MODEL --load-format wcache --model-loader-extra-config '{"socket": "/run/wcache.sock"}'

The first engine loads as it always does and publishes its weights; every later one, and every
other rank that waits beside it, attaches.  `options.Options` lists what the extra config may say.
"""

__all__ = ["LOAD_FORMAT", "register"]

LOAD_FORMAT = "wcache"


def register() -> None:
    """What vLLM calls in each of its processes (entry point ``vllm.general_plugins``); harmless when repeated."""
    from vllm.model_executor import model_loader

    from wcache_async.integrations.vllm.loader import WeightCacheModelLoader

    if LOAD_FORMAT not in model_loader._LOAD_FORMAT_TO_MODEL_LOADER:  # It warns about a second time.
        model_loader.register_model_loader(LOAD_FORMAT)(WeightCacheModelLoader)

"""One engine of benchmarks/engines.py: loads a model in vLLM, says what that took, and holds on until told to end.

Runs under the Python of vLLM's environment, as ``engines_process.py REPLY_FD MODEL [SOCKET]``: with the
daemon's socket through the cache, without as vLLM does by itself.  ``engines_process.py REPLY_FD --make
FOLDER MIB`` writes the model.
"""

import json
import os
import sys
import time
from typing import Any

PROMPT = [1, 5, 9, 13]


def make(folder: str, mib: int) -> int:
    """Write a random Llama of about `mib` MiB of bfloat16 weights; its exact size in bytes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, heads, vocabulary = 20, 12, 32_000
    # A layer has 2 + 2/3 w² of attention and 8 w² of feed-forward weights.
    width = 768
    while (2 * vocabulary * width + layers * 11 * width**2) * 2 < mib << 20:
        width += 12 * 64
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=8 * width // 3,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 3,
        max_position_embeddings=256,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder, max_shard_size="512MB")
    return sum(tensor.nbytes for tensor in model.parameters())


def load(model: str, socket: str) -> "tuple[dict[str, Any], Any]":
    """Load it; seconds and how, and the engine, which goes when it is dropped."""
    import vllm.v1.worker.cpu_model_runner as runner
    from vllm import LLM, SamplingParams
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    get_model, load_weights = runner.get_model, DefaultModelLoader.load_weights
    said: dict[str, Any] = {"built_here": False, "weights_s": 0.0, "load_model_s": 0.0}

    def timed_get_model(**arguments: Any) -> Any:
        started = time.perf_counter()
        loaded = get_model(**arguments)
        said["load_model_s"] = time.perf_counter() - started
        loader = getattr(loaded, "weight_cache_loader", None)
        if loader is not None:
            said["weights_s"], said["built_here"] = loader.outcome.seconds, loader.outcome.built_here
        return loaded

    def timed_load_weights(loader: Any, *arguments: Any) -> None:
        started = time.perf_counter()
        load_weights(loader, *arguments)
        said["weights_s"] = time.perf_counter() - started

    runner.get_model = timed_get_model
    DefaultModelLoader.load_weights = timed_load_weights
    through = {"load_format": "wcache", "model_loader_extra_config": {"socket": socket}} if socket else {}
    llm = LLM(
        model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
        max_model_len=128,
        **through,
    )
    parameters = SamplingParams(temperature=0, max_tokens=4, detokenize=False)
    [output] = llm.generate([{"prompt_token_ids": PROMPT}], parameters, use_tqdm=False)
    return said | {"tokens": list(output.outputs[0].token_ids)}, llm


def main() -> None:
    with os.fdopen(int(sys.argv[1]), "w") as reply:
        if sys.argv[2] == "--make":
            print(json.dumps(make(sys.argv[3], int(sys.argv[4]))), file=reply, flush=True)
            return
        said, llm = load(sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else "")
        print(json.dumps(said), file=reply, flush=True)
        sys.stdin.read()
        del llm


if __name__ == "__main__":
    main()

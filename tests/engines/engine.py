"""An engine process for the tests: vLLM's own LLM, told what to do by lines of JSON.

Runs under the Python of vLLM's environment, as ``engine.py COMMANDS_FD ANSWERS_FD``: vLLM writes
to both standard streams as it likes.
"""

import gc
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch

SETTINGS = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 64 << 20,
    "max_model_len": 128,
}


class Stopped(Exception):
    """The test has hung up."""


class Engine:
    """At most one LLM at a time, and its request in progress."""

    def __init__(self, answer: Any, tell: Any) -> None:
        self.llm: Any = None
        self.answer = answer
        self.tell = tell

    def prepare(self) -> None:
        """Import what takes long."""
        import vllm.entrypoints.llm  # noqa: F401

    def models(self, *, folder: str) -> dict[str, str]:
        """Write small random models into `folder`; their paths by name."""
        return make_models(folder)

    def start(self, **arguments: Any) -> list[dict[str, Any] | None]:
        """Make the LLM; how each of its ranks' weights came, None for a loader that does not say."""
        from vllm import LLM

        self.llm = LLM(**SETTINGS | arguments)
        return list(self.llm.apply_model(outcome_of))

    def refused(self, **arguments: Any) -> dict[str, Any]:
        """Try to make the LLM, which must fail; with which error, whatever its cause."""
        try:
            self.start(**arguments)
        except Exception as error:
            return {"type": type(error).__name__, "text": str(error), "hint": getattr(error, "hint", "")}
        raise RuntimeError("the engine started")

    def generate(self, *, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """Greedy tokens for prompts of token ids."""
        return self._generate(prompts, max_tokens, pause_after=None)

    def generate_with_pause(self, *, prompts: list[list[int]], max_tokens: int, pause_after: int) -> list[list[int]]:
        """The same, with an answer after so many tokens and a wait for the next command, ``go_on``."""
        return self._generate(prompts, max_tokens, pause_after)

    def _generate(self, prompts: list[list[int]], max_tokens: int, pause_after: int | None) -> list[list[int]]:
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        parameters = SamplingParams(temperature=0, max_tokens=max_tokens, detokenize=False)
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), {"prompt_token_ids": prompt}, parameters)
        tokens: dict[int, list[int]] = {}
        steps = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
            steps += 1
            if steps == pause_after:
                self.tell("paused")
        return [tokens[number] for number in range(len(prompts))]

    def external_memory(self) -> int:
        """What the loader tells vLLM of memory that the daemon holds already."""
        from vllm.model_executor.model_loader import get_model_loader

        config = self.llm.llm_engine.vllm_config
        return int(get_model_loader(config.load_config).get_external_weight_memory(config))

    def memory(self) -> dict[str, int]:
        """This process's proportional and private memory, in bytes."""
        values = {}
        with open("/proc/self/smaps_rollup") as lines:
            for line in lines:
                key, _, rest = line.partition(":")
                if key in ("Pss", "Private_Dirty", "Private_Clean"):
                    values[key] = int(rest.split()[0]) << 10
        return values

    def stop(self) -> None:
        """End the LLM, for another."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        if self.llm is not None:
            self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        cleanup_dist_env_and_memory()
        gc.collect()

    def tell_before_loading(self) -> None:
        """From now on, answer when the loader is about to ask the daemon."""
        from wcache_async.client import blocking

        fetch_or_publish = blocking.Client.fetch_or_publish

        def tell_and_fetch(client: Any, *arguments: Any, **named: Any) -> Any:
            self.answer("loading")
            return fetch_or_publish(client, *arguments, **named)

        blocking.Client.fetch_or_publish = tell_and_fetch  # type: ignore[method-assign, assignment]

    def pause_when_loaded(self) -> None:
        """From now on, answer once weights are read from disk, and wait, instead of handing them on."""
        from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

        load_weights = DefaultModelLoader.load_weights

        def load_and_pause(loader: Any, *arguments: Any) -> None:
            load_weights(loader, *arguments)
            self.tell("paused")

        DefaultModelLoader.load_weights = load_and_pause


def outcome_of(model: torch.nn.Module) -> dict[str, Any] | None:
    """What the loader says of how the weights came, and whether any tensor was left behind on meta."""
    import dataclasses

    from wcache_async.integrations.vllm.loader import Outcome

    loader: Any = getattr(model, "weight_cache_loader", None)
    if loader is None or not isinstance(loader.outcome, Outcome):
        return None
    tensors = [*model.parameters(), *model.buffers()]
    return dataclasses.asdict(loader.outcome) | {"on_meta": sum(tensor.is_meta for tensor in tensors)}


def make_models(folder: str) -> dict[str, str]:
    """A Llama, a Qwen with tied embeddings and a Mixtral, random, some 100 kB of bfloat16 each."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        MixtralConfig,
        MixtralForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
    )

    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        # So large that a tied model does not merely repeat its last token.
        "initializer_range": 0.2,
    }
    models = {
        "llama": LlamaForCausalLM(LlamaConfig(**shape)),
        "llama-other": LlamaForCausalLM(LlamaConfig(**shape)),
        "qwen": Qwen2ForCausalLM(Qwen2Config(**shape, tie_word_embeddings=True)),
        "mixtral": MixtralForCausalLM(MixtralConfig(**shape, num_local_experts=4, num_experts_per_tok=2)),
    }
    paths = {}
    for name, model in models.items():
        paths[name] = os.path.join(folder, name)
        model.bfloat16().save_pretrained(paths[name])
    return paths


def main() -> None:
    commands = os.fdopen(int(sys.argv[1]))
    answers = os.fdopen(int(sys.argv[2]), "w")

    def lines() -> Iterator[dict[str, Any]]:
        for line in commands:
            yield json.loads(line)

    given = lines()

    def answer(value: object) -> None:
        answers.write(json.dumps({"value": value}) + "\n")
        answers.flush()

    def tell(word: str) -> None:
        answer(word)
        if next(given, None) is None:
            raise Stopped

    engine = Engine(answer, tell)
    for command in given:
        verb = getattr(engine, command.pop("do"))
        try:
            answer(verb(**command))
        except Stopped:
            return
        except Exception as error:
            answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
            answers.flush()
            raise


if __name__ == "__main__":
    main()

"""The plan for tensor parallelism that transformers has for a checkpoint's model."""

import functools
import os

import msgspec

from wcache_async.errors import SourceError
from wcache_async.sources.tp_plan import Rule, TpPlan, patterns_that_name

__all__ = ["MODEL_CONFIG", "plan_of_model"]

MODEL_CONFIG = "config.json"
"""Beside a checkpoint it says which model it is of."""


@functools.lru_cache(maxsize=8)  # Every rank of a model asks.
def plan_of_model(file: str, _text: str) -> TpPlan:
    """The plan of the class that a ``config.json`` names.

    It is what ``from_pretrained(..., tp_plan="auto")`` cuts by: `base_model_tp_plan` of the
    configuration, and what its model classes add for embeddings and head.  The model is built on
    meta to find out.  `_text` is what is in the file: another text is another plan.  Blocks.
    Raises SourceError.
    """
    try:
        import transformers
    except ImportError as error:
        raise SourceError(
            path=file,
            reason="the model's plan comes from transformers, which is not installed; "
            "`pip install wcache-async[transformers]`",
        ) from error
    import torch

    from wcache_async.sources.transformers import model_class

    try:
        config = transformers.AutoConfig.from_pretrained(os.path.dirname(file), local_files_only=True)
        (architecture, *_) = getattr(config, "architectures", None) or ("",)
        cls = model_class(architecture)
        with torch.device("meta"):
            model = cls(config)
    except (OSError, ValueError, TypeError, KeyError, ImportError, RuntimeError, AttributeError) as error:
        # What transformers raises for a configuration it cannot make a model of.
        raise SourceError(path=file, reason=f"transformers: {error}") from error
    styles: dict[str, str] = dict(model.tp_plan or {})
    if not styles:
        raise SourceError(path=file, reason=f"transformers has no plan for {architecture}")
    plan = TpPlan(
        origin=f"transformers' plan for {architecture}",
        rules=tuple(_rule(pattern, style, config) for pattern, style in styles.items()),
        prefix=f"{model.base_model_prefix}." if model.base_model_prefix else "",
    )
    # What names none of its parameters says how a module computes, or is the head of a model
    # that ties it to its embeddings: no checkpoint has it.
    named = patterns_that_name(plan, [name for name, _ in model.named_parameters()])
    rules = tuple(msgspec.structs.replace(rule, required=rule.pattern in named and rule.cuts) for rule in plan.rules)
    return msgspec.structs.replace(plan, rules=rules)


def _rule(pattern: str, style: str, config: object) -> Rule:
    rule = Rule(pattern=pattern, style=style)
    return msgspec.structs.replace(rule, unit=_head_size(config)) if rule.has_units else rule


def _head_size(config: object) -> int:
    """In elements, as transformers' own cutting finds it; 0 where the configuration does not tell."""
    told = getattr(config, "head_dim", None)
    heads = getattr(config, "num_attention_heads", None)
    width = getattr(config, "hidden_size", None)
    if isinstance(told, int) and told > 0:
        return told
    return width // heads if isinstance(width, int) and isinstance(heads, int) and heads > 0 else 0

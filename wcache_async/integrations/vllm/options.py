"""What ``--model-loader-extra-config`` may say under ``--load-format wcache``."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from wcache_async.errors import InvalidRequest

__all__ = ["Options", "Stage", "parse_options"]

Stage = Literal["raw", "processed"]


class Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The extra config, each key optional."""

    socket: str | None = None
    """The daemon's socket; without it the default address, as `wcache serve` has it."""
    name: str = ""
    """What the state is asked for by; without it a digest of all that the weights depend on."""
    stage: Stage = "raw"
    """Cache the weights as loaded, which suits every model, or as vLLM has post-processed them,
    which saves that work too, where the result is plain tensors."""
    timeout: Annotated[float, Meta(gt=0)] | None = None
    """Seconds to wait for whoever loads these weights already; without it for as long as that takes."""
    on_missing: Literal["load_and_publish", "error"] = "load_and_publish"
    """What to do where nobody has these weights: be the one that loads them, or do not start."""


def parse_options(extra_config: object) -> Options:
    """The options.  Raises InvalidRequest naming the key that is unknown or has a value that makes no sense."""
    try:
        return msgspec.convert(extra_config or {}, Options)
    except msgspec.ValidationError as error:
        known = ", ".join(Options.__struct_fields__)
        raise InvalidRequest(
            field="model_loader_extra_config", reason=f"{error}; load format wcache knows {known}"
        ) from error

"""The arguments that several commands share, and the values users write as ``key=value`` and ``NAME=PATH``."""

import json
import os
from collections.abc import Iterable
from typing import Annotated

import typer

__all__ = [
    "AsJson",
    "BackendName",
    "ConfigItems",
    "DtypeName",
    "ModelPath",
    "OptionItems",
    "Rank",
    "SocketPath",
    "SourceKind",
    "StateName",
    "model_name",
    "one_of",
    "parse_items",
    "parse_size",
    "split_model",
]

Scalar = None | bool | int | float | str


def _known_kind(value: str) -> str:
    if value != "auto":
        from wcache_async.sources import known_kinds

        one_of(value, known_kinds())
    return value


def _known_dtype(value: str) -> str:
    if value:
        from wcache_async.sources.cast import CASTABLE

        one_of(value, CASTABLE)
    return value


def _known_backend(value: str) -> str:
    if value != "auto":
        from wcache_async.backends.registry import known_backends

        one_of(value, ("auto", *known_backends()))
    return value


def one_of(value: str, known: Iterable[str]) -> None:
    """Raises typer.BadParameter unless `value` is one of `known`."""
    known = list(known)
    if value not in known:
        raise typer.BadParameter(f"{value!r} is none of {', '.join(known)}")


SocketPath = Annotated[
    str | None,
    typer.Option(
        "--socket",
        metavar="PATH",
        show_default=False,
        help="The daemon's socket. Default: $WCACHE_SOCKET, else $XDG_RUNTIME_DIR/wcache/wcache.sock, "
        "else wcache-UID/wcache.sock in the temporary directory.",
    ),
]
StateName = Annotated[str, typer.Argument(metavar="NAME", show_default=False, help="The state's name.")]
ModelPath = Annotated[
    str, typer.Argument(metavar="MODEL", show_default=False, help="A checkpoint: a file, or a folder of shards.")
]
Rank = Annotated[int, typer.Option("--rank", min=0, metavar="R", help="The state's rank.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document, for machines; an error is one too.")]
SourceKind = Annotated[
    str,
    typer.Option(
        "--source",
        metavar="KIND",
        callback=_known_kind,
        help="What MODEL is: auto (look), safetensors, torch, "
        "or transformers (loaded with from_pretrained, and cached as it then is).",
    ),
]
DtypeName = Annotated[
    str,
    typer.Option(
        "--dtype",
        metavar="DTYPE",
        callback=_known_dtype,
        show_default=False,
        help="Cast floating-point tensors on load: float16, bfloat16, float32 or float64. Default: as stored.",
    ),
]
BackendName = Annotated[
    str,
    typer.Option(
        "--backend",
        metavar="BACKEND",
        callback=_known_backend,
        help="How tensors are shared: auto, or one that `wcache doctor` lists.",
    ),
]
ConfigItems = Annotated[
    list[str] | None,
    typer.Option(
        "--config",
        metavar="KEY=VALUE",
        show_default=False,
        help="What the state was built with, for clients to compare (repeatable). "
        "VALUE is a number, true, false or null where it reads as one, else text.",
    ),
]


OptionItems = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="KEY=VALUE",
        show_default=False,
        help="One of the source's own options (repeatable). For transformers: revision, attn_implementation, "
        "quantization (a quantization config as JSON), class_name.",
    ),
]


def model_name(path: str) -> str:
    """What a state is called after its checkpoint: a folder's name, or a file's without its suffix."""
    absolute = os.path.abspath(path)
    name = os.path.basename(absolute)
    if os.path.isdir(absolute):
        return name
    return os.path.splitext(name.removesuffix(".index.json"))[0]


def split_model(argument: str) -> tuple[str, str]:
    """Name and path in ``NAME=PATH`` or ``PATH``.  What exists as it stands is a path."""
    name, equals, path = argument.partition("=")
    if not equals or os.path.exists(argument):
        return model_name(argument), argument
    if not name or not path:
        raise typer.BadParameter(f"{argument!r} is no NAME=PATH", param_hint="MODEL")
    return name, path


def parse_items(items: Iterable[str] | None, option: str) -> dict[str, Scalar]:
    """``key=value`` items as a config, values typed as JSON reads them (``x="1"`` is text)."""
    config: dict[str, Scalar] = {}
    for item in items or ():
        key, equals, text = item.partition("=")
        if not equals or not key:
            raise typer.BadParameter(f"{item!r} is no KEY=VALUE", param_hint=option)
        if key in config:
            raise typer.BadParameter(f"{key!r} is given twice", param_hint=option)
        config[key] = _scalar(text, option)
    return config


_UNITS = {"": 1, "B": 1, **{f"{letter}iB": 1024 ** (i + 1) for i, letter in enumerate("KMGT")}}


def parse_size(text: str, option: str) -> int | None:
    """Bytes of a size such as ``512MiB`` or ``40GiB``; None for no text."""
    if not text:
        return None
    number = text.rstrip("BiKMGT ")
    unit = text[len(number) :].strip()
    try:
        size = float(number) * _UNITS[unit]
    except (ValueError, KeyError):
        raise typer.BadParameter(f"{text!r} is no size; write e.g. 512MiB or 40GiB", param_hint=option) from None
    if not 0 < size < 2**63:
        raise typer.BadParameter(f"{text!r} is out of range", param_hint=option)
    return int(size)


def _scalar(text: str, option: str) -> Scalar:
    try:
        # NaN equals nothing, not even itself: as text it can be compared.
        value: object = json.loads(text, parse_constant=str)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise typer.BadParameter(f"{text} does not fit into 64 bits", param_hint=option)
    return value if value is None or isinstance(value, bool | int | float | str) else text

"""A Hugging Face model as transformers itself loads it, quantisation and all.

What is cached is the finished model: its tensors after `from_pretrained` has cast, converted
and quantised them, and the two texts it takes to build it again without them, its
``config.json`` and ``generation_config.json``.
"""

import json
import os
import re
from typing import TYPE_CHECKING, Any, ClassVar, cast

import msgspec

from wcache_async.errors import SourceError
from wcache_async.identity.config import quantization_hash
from wcache_async.identity.files import stamp_file
from wcache_async.manifest import Config, FileStamp, StateSpec
from wcache_async.sources.module import ModuleSource

if TYPE_CHECKING:
    from torch import nn

__all__ = ["CONFIG_DOCUMENT", "GENERATION_DOCUMENT", "TransformersOptions", "TransformersSource"]

CONFIG_DOCUMENT = "config.json"
GENERATION_DOCUMENT = "generation_config.json"

_READ = re.compile(
    r"(adapter_|generation_)?config\.json|(model|pytorch_model|adapter_model)\b.*\.(safetensors|bin)(\.index\.json)?"
)
"""Names of the files that `from_pretrained` may read a model from, those of its tokenizer not among them."""


class TransformersOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is passed on to `from_pretrained`.

    `quantization` is the JSON of a quantization config (an object with ``quant_method``);
    `class_name` a model class of transformers to load with, empty for the checkpoint's own.
    """

    revision: str = ""
    attn_implementation: str = ""
    quantization: str = ""
    class_name: str = ""


class TransformersSource(ModuleSource):
    """Loads `path`, a folder or a hub id, with `from_pretrained`.  Never runs code that comes with a model."""

    kind: ClassVar[str] = "transformers"

    def __init__(self, path: str, dtype: str, options: TransformersOptions) -> None:
        super().__init__(self._load, name=path, documents=_documents)
        self._dtype = dtype
        self._options = options
        self._files: tuple[FileStamp, ...] = ()
        self._quantization_hash = ""

    def open(self) -> StateSpec:
        self._files = _stamp_folder(self.path)
        spec = super().open()
        if _stamp_folder(self.path) != self._files:
            raise SourceError(path=self.path, reason="its files were changed while they were loaded")
        self._config |= self._settings()
        return spec

    def files(self) -> tuple[FileStamp, ...]:
        return self._files

    def _settings(self) -> Config:
        """How the state was built, taken from what was asked for: loading changes a model's own config."""
        asked = msgspec.structs.asdict(self._options)
        given = {name: value for name, value in asked.items() if value and name != "class_name"}
        return {"source": self.kind, "quantization_hash": self._quantization_hash} | given

    def _load(self) -> "nn.Module":
        try:
            import transformers
        except ImportError as error:
            raise SourceError(
                path=self.path, reason="transformers is not installed; `pip install wcache-async[transformers]`"
            ) from error
        options = self._options
        arguments: dict[str, Any] = {"dtype": self._dtype or "auto"}  # Any: from_pretrained's own
        if options.revision:
            arguments["revision"] = options.revision
        if options.attn_implementation:
            arguments["attn_implementation"] = options.attn_implementation
        try:
            if options.quantization:
                arguments["quantization_config"] = _quantization(options.quantization)
            config = transformers.AutoConfig.from_pretrained(self.path, **_only(arguments, "revision"))
            cls = model_class(options.class_name or _architecture(config))
            # Before from_pretrained, which changes what it is given.
            asked = options.quantization or getattr(config, "quantization_config", None)
            self._quantization_hash = quantization_hash(asked)
            model = cls.from_pretrained(self.path, **arguments)
        except (OSError, ValueError, TypeError, KeyError, ImportError, RuntimeError) as error:
            # What transformers raises for a folder it cannot make a model of.
            raise SourceError(path=self.path, reason=f"transformers: {error}") from error
        return cast("nn.Module", model.eval())


def model_class(name: str) -> Any:  # Any: transformers' classes, which are not typed
    """The model class of that name among transformers' own.  Raises ValueError."""
    import transformers

    cls = getattr(transformers, name, None)
    if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
        raise ValueError(f"{name!r} is no model class of transformers {transformers.__version__}")
    return cls


def _architecture(config: Any) -> str:
    architectures = getattr(config, "architectures", None)
    if not architectures:
        raise ValueError("config.json names no architecture; say which with the option class_name")
    return str(architectures[0])


def _quantization(text: str) -> Any:
    from transformers.quantizers.auto import AutoQuantizationConfig

    return AutoQuantizationConfig.from_dict(json.loads(text))


def _only(arguments: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: arguments[name] for name in names if name in arguments}


def _stamp_folder(path: str) -> tuple[FileStamp, ...]:
    """The files of the folder a model is read from; none where `path` is a hub's name for it."""
    try:
        with os.scandir(path) as entries:
            names = sorted(entry.name for entry in entries if _READ.fullmatch(entry.name) and entry.is_file())
        return tuple(stamp_file(os.path.join(path, name)) for name in names)
    except (OSError, ValueError):
        return ()


def _documents(model: "nn.Module") -> dict[str, str]:
    any_model = cast(Any, model)
    config = any_model.config
    # The class it was loaded with is the one to build again; a config may name another.
    config.architectures = [type(model).__name__]
    documents = {CONFIG_DOCUMENT: config.to_json_string(use_diff=False)}
    generation = getattr(any_model, "generation_config", None)
    if generation is not None:
        documents[GENERATION_DOCUMENT] = json.dumps(generation.to_dict())
    return documents

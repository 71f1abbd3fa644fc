"""Which files make up the checkpoint at a path: one file, or a folder's shards and their index.

The folder's file names are Hugging Face's, as `save_pretrained` writes them.
"""

import os
import re
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from wcache_async.errors import SourceError
from wcache_async.sources.files import CheckpointFile

__all__ = ["LEGACY_MAGIC", "SAFETENSORS", "TORCH", "ZIP_HEAD", "Checkpoint", "check_against_index", "locate_checkpoint"]

SAFETENSORS = "safetensors"
TORCH = "torch"

ZIP_HEAD = b"PK\x03\x04"
"""First bytes of what `torch.save` writes."""
LEGACY_MAGIC = b"l\xfc\x9cF\xf9 j\xa8P\x19"
"""The number it wrote near the start, pickled, before it wrote zip archives (torch < 1.6)."""

_SUFFIXES = {SAFETENSORS: (".safetensors",), TORCH: (".pt", ".pth", ".bin", ".ckpt")}
_WHOLE = {SAFETENSORS: "model.safetensors", TORCH: "pytorch_model.bin"}
_INDEX = {SAFETENSORS: "model.safetensors.index.json", TORCH: "pytorch_model.bin.index.json"}
_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.[a-z]+")


class Checkpoint(Struct, frozen=True, kw_only=True):
    """The files of one checkpoint, in the order they are read.

    Where there is an index, `weight_map` says which file each tensor is in.
    """

    kind: str
    files: tuple[str, ...]
    index: str = ""
    weight_map: dict[str, str] = {}


class _Index(Struct):
    weight_map: dict[str, str]


_index_decoder = msgspec.json.Decoder(_Index)


def locate_checkpoint(path: str, kinds: Sequence[str]) -> Checkpoint:
    """The checkpoint of one of `kinds` at `path`; the first kind found wins.

    In a folder that is, per kind: ``model.safetensors.index.json`` and its shards, or
    ``model.safetensors``, or the only index or file of that kind, or one complete set of
    ``*-00001-of-0000N`` files.  Raises SourceError where there is none, or more than one.
    """
    if os.path.isdir(path):
        return _locate_in_folder(path, kinds)
    with CheckpointFile(path) as file:
        for kind in kinds:
            if any(path.endswith(f"{suffix}.index.json") for suffix in _SUFFIXES[kind]):
                return _read_index(file, kind)
            if len(kinds) == 1 or path.endswith(_SUFFIXES[kind]):
                return Checkpoint(kind=kind, files=(path,))
        return Checkpoint(kind=_sniff(file, kinds), files=(path,))


def check_against_index(checkpoint: Checkpoint, found: Mapping[str, str]) -> None:
    """Compare the index with `found`, the file each tensor is really in.  Raises SourceError."""
    if not checkpoint.index:
        return
    for tensor, file in checkpoint.weight_map.items():
        if found.get(tensor) != file:
            where = f"is in {found[tensor]}" if tensor in found else "is not"
            raise SourceError(
                path=file, tensor=tensor, reason=f"{checkpoint.index} says it is in this file, and it {where}"
            )
    for tensor, file in found.items():
        if tensor not in checkpoint.weight_map:
            raise SourceError(path=file, tensor=tensor, reason=f"{checkpoint.index} does not list it")


def _sniff(file: CheckpointFile, kinds: Sequence[str]) -> str:
    """The kind of a file whose name does not tell, e.g. a content-addressed blob."""
    head = file.head(64)
    kind = ""
    if head[8:9] == b"{":
        kind = SAFETENSORS
    elif head.startswith(ZIP_HEAD) or LEGACY_MAGIC in head:
        kind = TORCH
    if kind not in kinds:
        suffixes = ", ".join(suffix for each in kinds for suffix in _SUFFIXES[each])
        raise SourceError(
            path=file.path, reason=f"it is not a checkpoint: neither its name ({suffixes}) nor its bytes say so"
        )
    return kind


def _locate_in_folder(folder: str, kinds: Sequence[str]) -> Checkpoint:
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.is_file())
    except OSError as error:
        raise SourceError(path=folder, reason=f"the folder cannot be listed: {error.strerror}") from error
    for kind in kinds:
        suffixes = _SUFFIXES[kind]
        indexes = [name for name in names if name.endswith(tuple(f"{suffix}.index.json" for suffix in suffixes))]
        weights = [name for name in names if name.endswith(suffixes)]
        if _INDEX[kind] in indexes and _WHOLE[kind] in weights:
            raise _ambiguous(folder, [_INDEX[kind], _WHOLE[kind]])
        if _INDEX[kind] in indexes:
            return _open_index(os.path.join(folder, _INDEX[kind]), kind)
        if _WHOLE[kind] in weights:
            return Checkpoint(kind=kind, files=(os.path.join(folder, _WHOLE[kind]),))
        if len(indexes) > 1:
            raise _ambiguous(folder, indexes)
        if indexes:
            return _open_index(os.path.join(folder, indexes[0]), kind)
        if weights:
            if len(weights) > 1:
                _check_numbered(folder, weights)
            return Checkpoint(kind=kind, files=tuple(os.path.join(folder, name) for name in weights))
    wanted = ", ".join(f"{_INDEX[kind]}, {_WHOLE[kind]}, *{', *'.join(_SUFFIXES[kind])}" for kind in kinds)
    raise SourceError(path=folder, reason=f"the folder holds no checkpoint; looked for {wanted}")


def _check_numbered(folder: str, names: Sequence[str]) -> None:
    """Raises SourceError unless the files are one complete set of numbered shards."""
    matches = [_NUMBERED.fullmatch(name) for name in names]
    sets = {(m["stem"], int(m["total"])) if m else (name, 0) for m, name in zip(matches, names, strict=True)}
    if len(sets) > 1:
        raise _ambiguous(folder, names)
    ((_, total),) = sets
    numbers = {int(m["number"]) for m in matches if m}
    missing = sorted(set(range(1, total + 1)) - numbers)
    if missing or len(numbers) != total:
        raise SourceError(
            path=folder,
            reason=f"{len(names)} of {total} shards are there; missing are {missing}, and there is no index",
        )


def _ambiguous(folder: str, names: Sequence[str]) -> SourceError:
    return SourceError(
        path=folder, reason=f"the folder holds more than one checkpoint: {', '.join(names)}; give the one file's path"
    )


def _open_index(path: str, kind: str) -> Checkpoint:
    with CheckpointFile(path) as file:
        return _read_index(file, kind)


def _read_index(file: CheckpointFile, kind: str) -> Checkpoint:
    path = file.path
    try:
        index = _index_decoder.decode(file.head(file.nbytes))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SourceError(path=path, reason=f"it is no index of shards: {error}") from error
    if not index.weight_map:
        raise SourceError(path=path, reason="the index lists no tensor")
    folder = os.path.dirname(path)
    tensors_of: dict[str, list[str]] = {}
    for tensor, shard in index.weight_map.items():
        tensors_of.setdefault(shard, []).append(tensor)
    for shard, tensors in tensors_of.items():
        # An index is data from elsewhere: it names files beside itself, never others of the machine.
        if not shard or os.path.isabs(shard) or ".." in shard.split("/") or "\0" in shard:
            raise SourceError(path=path, tensor=tensors[0], reason=f"its shard {shard!r} is not in the index's folder")
        if not os.path.isfile(os.path.join(folder, shard)):
            raise SourceError(
                path=os.path.join(folder, shard),
                tensor=tensors[0],
                reason=f"no such shard; {path} says it holds this and {len(tensors) - 1} more tensors",
            )
    return Checkpoint(
        kind=kind,
        files=tuple(os.path.join(folder, shard) for shard in sorted(tensors_of)),
        index=path,
        weight_map={tensor: os.path.join(folder, shard) for tensor, shard in index.weight_map.items()},
    )

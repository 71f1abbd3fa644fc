"""Compares a state with the one that a source would make: everything that a model built from either would show.

Names, shapes, dtypes and bytes are `cli.compare`'s; here are strides, kinds, persistence, ties,
shared storages, how tensor subclasses are put together, and the daemon's digests.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from wcache_async.cli.compare import Comparison, Difference, What, compare_with_spec
from wcache_async.identity.digests import StateDigester
from wcache_async.manifest import Kind, StateManifest, StateSpec, TensorSpec, contiguous_stride, spec_of
from wcache_async.sources.base import Source

if TYPE_CHECKING:
    import torch

__all__ = ["Attached", "compare_exactly", "structural_differences"]

_NONE = "none"
_BUFFERS = (Kind.BUFFER, Kind.NON_PERSISTENT_BUFFER)


@dataclass(frozen=True, kw_only=True)
class Attached:
    """A state as a client has it: `digest` and `digests`, by name, are the daemon's, in hexadecimal."""

    manifest: StateManifest
    tensors: "Mapping[str, torch.Tensor]"
    digest: str
    digests: Mapping[str, str]


def compare_exactly(
    source: Source, attached: Attached, progress: Callable[[int, int], None], *, threads: int | None = None
) -> Comparison:
    """Compare `attached` with what `source` makes of its checkpoint.  Blocks.

    `progress` is called with bytes compared and in all.  Raises SourceError.
    """
    spec = source.open()
    digester = StateDigester(spec)
    comparison = compare_with_spec(source, spec, attached.tensors, progress, threads=threads, digester=digester)
    theirs, _ = spec_of(attached.manifest)
    found = [*comparison.differences, *structural_differences(spec, theirs)]
    for tensor, digest in zip(spec.tensors, digester.digests, strict=True):
        told = attached.digests.get(tensor.name)
        if digest and told is not None and digest.hex() != told:
            found.append(_difference(tensor.name, "digest", digest.hex(), told))
    if not found:
        # Every tensor was compared, so all of its digests are there.
        state = digester.finish().state
        if attached.digest != state:
            found.append(_difference("(state)", "digest", state, attached.digest or "not known"))
    found.sort(key=lambda difference: difference.tensor)
    return replace(comparison, differences=found)


def structural_differences(ours: StateSpec, theirs: StateSpec) -> Iterator[Difference]:
    """How the tensors that both have under a name differ, their dtypes, shapes and bytes aside.  Pure."""
    sides = [_Side.of(spec) for spec in (ours, theirs)]
    common = sorted(sides[0].tensors.keys() & sides[1].tensors.keys())
    shared = set(common)
    ties, storages = ([view(side, shared) for side in sides] for view in (_Side.ties, _Side.storages))
    for name in common:
        a, b = (side.tensors[name] for side in sides)
        kinds = [side.kinds[name] for side in sides]
        if kinds[0] is not kinds[1]:
            both_buffers = all(kind in _BUFFERS for kind in kinds)
            yield _difference(name, "persistence" if both_buffers else "kind", *map(_words, kinds))
        if a.shape == b.shape and _stride(a) != _stride(b):
            yield _difference(name, "stride", str(list(_stride(a))), str(list(_stride(b))))
        if a.requires_grad is not b.requires_grad:
            yield _difference(name, "requires_grad", str(a.requires_grad), str(b.requires_grad))
        if ties[0][name] != ties[1][name]:
            yield _difference(name, "ties", *(side[name] for side in ties))
        if storages[0][name] != storages[1][name]:
            yield _difference(name, "storage", *(side[name] for side in storages))
    wrapped = [spec.module.wrapped if spec.module is not None else {} for spec in (ours, theirs)]
    for name in sorted(wrapped[0].keys() | wrapped[1].keys()):
        texts = [msgspec.json.encode(side[name]).decode() if name in side else _NONE for side in wrapped]
        if texts[0] != texts[1]:
            yield _difference(name, "wrapped", *texts)


@dataclass(frozen=True, slots=True)
class _Side:
    """A spec by every name it has, aliases included."""

    tensors: dict[str, TensorSpec]
    kinds: dict[str, Kind]

    @classmethod
    def of(cls, spec: StateSpec) -> "_Side":
        tensors = {tensor.name: tensor for tensor in spec.tensors}
        tensors |= {alias: tensors[target] for alias, target in spec.aliases.items()}
        kinds = {name: tensor.kind for name, tensor in tensors.items()}
        return cls(tensors, kinds | (spec.module.alias_kinds if spec.module is not None else {}))

    def ties(self, names: set[str]) -> dict[str, str]:
        """For each name the others, among `names`, of the same object."""
        groups: dict[str, list[str]] = {}
        for name in sorted(names):
            groups.setdefault(self.tensors[name].name, []).append(name)
        return {
            name: ", ".join(other for other in group if other != name) or _NONE
            for group in groups.values()
            for name in group
        }

    def storages(self, names: set[str]) -> dict[str, str]:
        """For each name where it lies from the first, among `names`, of its storage; tied names are as one."""
        first: dict[int, TensorSpec] = {}
        members: dict[int, set[str]] = {}
        called: dict[str, str] = {}
        for name in sorted(names):
            tensor = self.tensors[name]
            called.setdefault(tensor.name, name)
            if 0 not in tensor.shape:
                first.setdefault(tensor.storage, tensor)
                members.setdefault(tensor.storage, set()).add(tensor.name)
        found = {}
        for name in names:
            tensor = self.tensors[name]
            if len(members.get(tensor.storage, ())) < 2 or 0 in tensor.shape:
                found[name] = _NONE
            else:
                start = first[tensor.storage]
                found[name] = f"{tensor.offset - start.offset:+d} bytes from {called[start.name]}"
        return found


def _difference(tensor: str, what: What, checkpoint: str, client: str) -> Difference:
    return Difference(tensor=tensor, what=what, checkpoint=checkpoint, client=client)


def _stride(tensor: TensorSpec) -> tuple[int, ...]:
    return tensor.stride or contiguous_stride(tensor.shape)


def _words(kind: Kind) -> str:
    return kind.name.lower().replace("_", " ")

"""One rank's share of a safetensors checkpoint under tensor parallelism; what the others have is not read."""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from wcache_async.errors import Scalar, SourceError
from wcache_async.manifest import DTYPE_ITEMSIZE, Config, Cut, StateSpec, TensorSpec
from wcache_async.sources.files import Runs, StorageRange
from wcache_async.sources.locate import Checkpoint
from wcache_async.sources.safetensors import SafetensorsSource
from wcache_async.sources.tp_plan import TpPlan, cut_tensors, parse_plan

__all__ = ["ShardedSource", "TensorParallel", "tensor_parallel"]


class TensorParallel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of source ``safetensors``: the share of rank number `tp_rank` of `tp_size`.

    `tp_plan` is the absolute path of a plan (see `sources.tp_plan.parse_plan`); empty: the one
    that transformers has for the ``config.json`` beside the checkpoint.
    """

    tp_size: Annotated[int, Meta(ge=1)]
    tp_rank: Annotated[int, Meta(ge=0)]
    tp_plan: str = ""


def tensor_parallel(path: str, options: Mapping[str, Scalar]) -> TensorParallel:
    """Those options, checked; `path` is the checkpoint's, for errors.  Raises SourceError."""
    try:
        share = msgspec.convert(dict(options), TensorParallel)
    except msgspec.ValidationError as error:
        known = ", ".join(TensorParallel.__struct_fields__)
        raise SourceError(path=path, reason=f"options of source 'safetensors': {error}; known are {known}") from error
    if share.tp_rank >= share.tp_size:
        raise SourceError(path=path, reason=f"there is no tp_rank {share.tp_rank} of tp_size {share.tp_size}")
    if share.tp_plan and not os.path.isabs(share.tp_plan):
        raise SourceError(path=share.tp_plan, reason="the plan's path is not absolute; the daemon has its own folder")
    return share


class ShardedSource(SafetensorsSource):
    """A safetensors checkpoint of which each tensor that the plan cuts is read in part."""

    def __init__(self, path: str, checkpoint: Checkpoint, dtype: str, share: TensorParallel) -> None:
        super().__init__(path, checkpoint, dtype)
        self._share = share

    def config(self) -> Config:
        return super().config() | {"tp_size": self._share.tp_size, "tp_rank": self._share.tp_rank}

    def _scan(self) -> tuple[StateSpec, Sequence[StorageRange]]:
        whole, ranges = super()._scan()
        share = self._share
        if share.tp_size == 1:
            return whole, ranges
        shapes = {tensor.name: tensor.shape for tensor in whole.tensors}
        cuts = cut_tensors(self.path, self._plan(), shapes, rank=share.tp_rank, ranks=share.tp_size)
        tensors: list[TensorSpec] = []
        parts: list[StorageRange] = []
        for tensor in whole.tensors:
            part, cut = ranges[tensor.storage], cuts.get(tensor.name)
            if cut is not None:
                itemsize = DTYPE_ITEMSIZE[part.dtype or tensor.dtype]
                part = _share_of(part, tensor.shape, itemsize, cut)
                tensor = msgspec.structs.replace(tensor, shape=_shape_of(tensor.shape, cut))
            tensors.append(tensor)
            parts.append(part)
        return (
            msgspec.structs.replace(
                whole, storages=tuple(part.filled_nbytes for part in parts), tensors=tuple(tensors), cuts=cuts
            ),
            parts,
        )

    def _plan(self) -> TpPlan:
        # Opened like the checkpoint's own files: with another plan it is another state.
        if self._share.tp_plan:
            file = self._open_file(self._share.tp_plan)
            return parse_plan(file.path, file.head(file.nbytes))
        from wcache_async.sources.transformers_plan import MODEL_CONFIG, plan_of_model

        folder = self.path if os.path.isdir(self.path) else os.path.dirname(self.path)
        try:
            file = self._open_file(os.path.join(folder, MODEL_CONFIG))
            return plan_of_model(file.path, file.head(file.nbytes).decode())
        except (SourceError, UnicodeDecodeError) as error:
            reason = error.reason
            raise SourceError(
                path=os.path.join(folder, MODEL_CONFIG),
                reason=f"no plan to cut by could be had ({reason}); give a --tp-plan",
            ) from error


def _shape_of(shape: tuple[int, ...], cut: Cut) -> tuple[int, ...]:
    return (*shape[: cut.dim], shape[cut.dim] // cut.ranks, *shape[cut.dim + 1 :])


def _share_of(whole: StorageRange, shape: tuple[int, ...], itemsize: int, cut: Cut) -> StorageRange:
    """Where the bytes of a cut stand; `whole` is where those of the contiguous tensor of that shape do."""
    row = math.prod(shape[cut.dim + 1 :]) * itemsize
    pieces: list[tuple[int, int]] = []
    start = 0
    for part in cut.parts:
        size = part // cut.ranks * row
        if size:
            pieces.append((start + cut.rank * size, size))
        start += part * row
    nbytes = whole.nbytes // cut.ranks
    if len(pieces) == 1 and math.prod(shape[: cut.dim]) == 1:
        return msgspec.structs.replace(whole, offset=whole.offset + pieces[0][0], nbytes=nbytes)
    return msgspec.structs.replace(whole, nbytes=nbytes, runs=Runs(period=start, pieces=tuple(pieces)))

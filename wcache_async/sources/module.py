"""A live nn.Module as a source: what a factory has built in this process, after whatever processing."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

import msgspec

from wcache_async.errors import ModuleError, SourceError
from wcache_async.identity.config import device_capability
from wcache_async.manifest import Config, Kind, StateSpec
from wcache_async.modules.export import copy_region, describe_module
from wcache_async.sources.base import Advance, Source

if TYPE_CHECKING:
    from torch import nn

    from wcache_async.backends.storages import StorageRegion

__all__ = ["ModuleSource"]


class ModuleSource(Source):
    """Reads from the module that `factory` gives, called when the source is opened, in a thread.

    `name` is what status shows for a path; `documents` tells the texts that go with the module
    (`ModuleRecord.documents`).  The module is let go storage by storage as it is
    read, if the factory kept no reference to it, so that memory peaks at little over one state.
    """

    kind: ClassVar[str] = "module"

    def __init__(
        self,
        factory: "Callable[[], nn.Module]",
        *,
        name: str = "",
        config: Config | None = None,
        documents: "Callable[[nn.Module], dict[str, str]] | None" = None,
    ) -> None:
        self.path = name or f"module {getattr(factory, '__qualname__', type(factory).__name__)}"
        self._factory = factory
        self._config = dict(config or {})
        self._documents = documents
        self._regions: list[StorageRegion | None] = []

    def open(self) -> StateSpec:
        """Build the module and take it to pieces.  Raises SourceError naming what cannot be kept."""
        module = self._factory()
        try:
            spec, regions = describe_module(module, backend=self.kind, devices=("cpu", "cuda"))
        except ModuleError as error:
            raise SourceError(path=self.path, tensor=error.path, reason=error.reason) from error
        self._regions = list(regions)
        if self._documents is not None and spec.module is not None:
            record = msgspec.structs.replace(spec.module, documents=self._documents(module))
            spec = msgspec.structs.replace(spec, module=record)
        self._config = _describe(module, spec, regions) | self._config
        return spec

    def config(self) -> Config:
        return self._config

    def read(self, storage: int, into: memoryview, advance: Advance) -> None:
        region = self._regions[storage]
        if region is None:
            raise SourceError(path=self.path, reason=f"storage {storage} was read before, and let go")
        copy_region(region, into, advance)
        self._regions[storage] = None

    def close(self) -> None:
        self._regions.clear()


def _describe(module: "nn.Module", spec: StateSpec, regions: "Sequence[StorageRegion]") -> Config:
    import torch

    devices = {region.tensors[0].device for region in regions}
    # What a checkpoint of it would have: a constructor's own buffers keep their dtype under any cast.
    stored = [t.dtype for t in spec.tensors if t.kind not in (Kind.NON_PERSISTENT_BUFFER, Kind.ATTRIBUTE)]
    dtypes = {dtype for dtype in stored if getattr(torch, dtype).is_floating_point}
    return {
        "source": ModuleSource.kind,
        "dtype": dtypes.pop() if len(dtypes) == 1 else "mixed",
        "module": type(module).__qualname__,
        "torch_version": str(torch.__version__),
        "device_capability": ", ".join(sorted({device_capability(device) for device in devices})),
    }

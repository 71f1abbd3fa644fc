"""One fetched state: what it is, its tensors, and the lease that holds it."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from wcache_async.backends.base import ImportOptions, WeightCacheTransportBackend
from wcache_async.backends.carried import CarriedFds, receive_manifest
from wcache_async.backends.registry import (
    get_client_transport_backend,
    import_built_in,
    usable_backends,
    usable_backends_waits,
)
from wcache_async.client.session import Answer, Session
from wcache_async.errors import (
    BackendNotAccepted,
    DaemonLost,
    GenerationChanged,
    MalformedMessage,
    StaleState,
    StateReleased,
)
from wcache_async.identity.files import changed_files
from wcache_async.manifest import Config, Origin, StateManifest
from wcache_async.protocol.messages import (
    DIGEST_NBYTES,
    FetchDigests,
    FetchDigestsResponse,
    FetchState,
    FetchStateResponse,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["FetchedState", "accepted_backends", "default_dtype"]

ModuleT = TypeVar("ModuleT", bound="nn.Module")

import_built_in()

_AT_ONCE: Final = 512
"""Tensors imported on the loop's thread, by a backend that only computes: half a millisecond, where a thread's
start and two switches take that too in a process's first attach."""

_FILES_AT_ONCE: Final = 64
"""Files of local file systems looked at on the loop's thread, 2 µs each."""

_accepted: tuple[str, ...] = () if usable_backends_waits() else usable_backends()


async def accepted_backends() -> tuple[str, ...]:
    """The transports that work in this process, found out once: that asks the CUDA driver."""
    global _accepted
    if not _accepted:
        _accepted = await asyncio.to_thread(usable_backends) if usable_backends_waits() else usable_backends()
    return _accepted


async def _backend(name: str, options: ImportOptions) -> WeightCacheTransportBackend:
    if name in _accepted:
        return get_client_transport_backend(name, options)
    # Not looked at yet: it has to be imported, or searched among the installed packages.
    return await asyncio.to_thread(get_client_transport_backend, name, options)


class FetchedState:
    """A state attached to this process, and a lease on it until `release` or the client's end.

    Tensors already imported stay valid after both: their memory lives as long as they do.  Only
    where the backend's `survives_daemon_exit` says no (CUDA tensors of torch_ipc) must the client and
    the daemon go on for as long as a tensor is used; the lease is then held until the last is gone.
    """

    def __init__(
        self,
        session: Session,
        response: FetchStateResponse,
        manifest: StateManifest,
        backend: WeightCacheTransportBackend,
    ) -> None:
        self._session = session
        self._backend: WeightCacheTransportBackend | None = backend
        self.name = response.name
        self.rank = response.rank
        self.generation = response.generation
        self.config: Config = response.config
        self.manifest = manifest
        self.transport_backend = backend.name
        self.resident_bytes = response.resident_bytes
        """Bytes the state keeps resident, once for all that attach."""
        self.manifest_nbytes = response.manifest_nbytes
        self.digest = response.digest
        """Of its names, layout and bytes, in hexadecimal; empty where it is not known."""
        self.daemon_pid = session.daemon_pid
        self.built_here = False
        """Whether this client built it (`fetch_or_publish`), rather than found it in the cache."""
        self._lease = response.lease
        self.lease_ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once `release` has given the lease back, which may be after it returned."""
        self._survives = backend.survives_daemon_exit

    @classmethod
    async def attach(
        cls,
        session: Session,
        response: FetchStateResponse,
        answer: Answer,
        options: ImportOptions,
        accepted: Sequence[str],
        *,
        allow_stale: bool = False,
    ) -> "FetchedState":
        """Open what the response announced; on any error nothing stays open and the lease is given back.

        Raises InvalidManifest, FdsTruncated, FdsUndeclared, UnknownBackend, BackendUnavailable,
        StaleState unless `allow_stale`, and BackendNotAccepted where the daemon chose a backend
        that is none of `accepted`.
        """
        backend: WeightCacheTransportBackend | None = None
        fds = CarriedFds(answer.take_fds())
        try:
            backend = await _backend(response.transport_backend, options)
            if backend.name not in accepted:
                raise BackendNotAccepted(accepted=list(accepted), exportable=[backend.name])
            if response.origin is not None and not allow_stale:
                await _check_files(response, response.origin)
            manifest = await receive_manifest(response.manifest, response.manifest_nbytes, fds)
            await backend.recv_fetch_state_response(fds, response, manifest)
            fds.finish()
        except BaseException:
            fds.close()
            if backend is not None:
                backend.close()
            session.release(response.lease)
            raise
        return cls(session, response, manifest, backend)

    @property
    def backend(self) -> WeightCacheTransportBackend:
        """The client's half of the transport.  Raises StateReleased, or DaemonLost where that ends it."""
        if self._backend is None:
            raise StateReleased(name=self.name, rank=self.rank)
        if self._session.ended.done() and not self._survives:
            raise DaemonLost(
                socket=self._session.socket_path,
                reason=f"{self.transport_backend} memory does not outlive the daemon",
            )
        return self._backend

    @property
    def lost(self) -> Awaitable[None]:
        """Completes once the connection that holds the lease is gone."""
        return asyncio.shield(self._session.ended)

    async def import_tensors(self) -> "dict[str, torch.Tensor]":
        """Every tensor by name, aliases included, as views of the shared arenas; nothing is copied."""
        backend = self.backend
        if not backend.import_waits and len(self.manifest.tensors) <= _AT_ONCE:
            return backend.import_tensors()
        return await asyncio.to_thread(backend.import_tensors)

    async def import_tensor(self, name: str) -> "torch.Tensor":
        """One tensor by its name or alias.  Raises KeyError."""
        backend = self.backend
        target = self.manifest.aliases.get(name, name)
        for entry in self.manifest.tensors:
            if entry.name == target:
                return await asyncio.to_thread(backend.import_tensor, entry)
        raise KeyError(name)

    async def fetch_digests(self) -> dict[str, str]:
        """Each tensor's digest in hexadecimal by name, aliases included; empty where the daemon has none.

        A tensor's is the XXH3-128 of its elements' bytes in C order.  Raises StateReleased, DaemonLost.
        """
        if self._backend is None:
            raise StateReleased(name=self.name, rank=self.rank)
        response, answer = await self._session.request(FetchDigests(lease=self._lease), FetchDigestsResponse)
        answer.close()
        tensors, digests = self.manifest.tensors, response.digests
        if digests and len(digests) != DIGEST_NBYTES * len(tensors):
            raise MalformedMessage(reason=f"{len(digests)} bytes of digests for {len(tensors)} tensors")
        each = [digests[i : i + DIGEST_NBYTES].hex() for i in range(0, len(digests), DIGEST_NBYTES)]
        found = {entry.name: digest for entry, digest in zip(tensors, each, strict=False)}
        return found | {alias: found[target] for alias, target in self.manifest.aliases.items() if found}

    async def bind(self, module: "nn.Module", *, strict: bool = True) -> None:
        """Put the state's tensors into `module`, on meta or materialised, in place of its own.

        All or nothing.  With `strict` every name must match; without, tensors the module does
        not have are left out, and a materialised module keeps what the state does not have.
        Raises BindError with the module unchanged.
        """
        from wcache_async.client.bind import bind

        tensors = await self.import_tensors()
        # On the loop's thread: a module is its user's, and must not change under them from another.
        bind(module, tensors, self.manifest, self.backend, strict=strict)

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.name}:{self.rank} generation {self.generation}, "
            f"{self.transport_backend}, {self.resident_bytes} bytes>"
        )

    async def create_module(self, factory: "Callable[[], ModuleT]", *, dtype: "torch.dtype | None" = None) -> "ModuleT":
        """Build a module on meta with `factory`, and bind it: no weight is allocated or computed.

        `dtype` is torch's default dtype while it is built (None: the state's own, where it has
        one).  Raises BindError where the factory builds something else.
        """
        from wcache_async.client.bind import build_on_meta

        module = build_on_meta(factory, dtype or default_dtype(self.config))
        await self.bind(module)
        return module

    async def sleep(self) -> None:
        """Unmap the state's memory on this process's device, and keep every tensor's address.

        The lease stays, and so does the daemon's memory; nothing may touch the tensors until `wake`.
        Raises BackendUnavailable on a backend other than vmm_fd, StateReleased, CudaDriverError.
        """
        await asyncio.to_thread(self.backend.prepare_unmap)

    async def wake(self) -> None:
        """Map the state's memory again where it was.

        Raises GenerationChanged where the daemon holds another generation by now, StateNotFound,
        InsufficientMemory, DaemonLost, CudaDriverError; the state then sleeps on.
        """
        backend = self.backend
        request = FetchState(name=self.name, rank=self.rank, backends=(backend.name,))
        response, answer = await self._session.request(request, FetchStateResponse)
        fds = CarriedFds(answer.take_fds())
        try:
            if response.generation != self.generation:
                raise GenerationChanged(
                    name=self.name, rank=self.rank, expected=self.generation, actual=response.generation
                )
            if response.manifest is None:
                for manifest_fd in fds.take_fds(1):  # It is what it was.
                    manifest_fd.close()
            arenas = backend.take_arena_fds(fds, response)
            fds.finish()
            await asyncio.to_thread(backend.remap, arenas)
        except BaseException:
            fds.close()
            self._session.release(response.lease)
            raise
        slept, self._lease = self._lease, response.lease
        self._session.release(slept)

    async def release(self) -> None:
        """Give up the lease; tensors already imported stay valid.  Further calls do nothing."""
        backend, self._backend = self._backend, None
        if backend is None:
            return
        backend.close()
        if backend.when_unused(partial(_call_soon, asyncio.get_running_loop(), self._end_lease)):
            self._end_lease()

    def _end_lease(self) -> None:
        self._session.release(self._lease)
        if not self.lease_ended.done():
            self.lease_ended.set_result(None)


async def _check_files(response: FetchStateResponse, origin: Origin) -> None:
    if origin.local and len(origin.files) <= _FILES_AT_ONCE:
        changed = changed_files(origin)
    else:
        changed = await asyncio.to_thread(changed_files, origin)
    if changed:
        (path, differences), *others = changed.items()
        raise StaleState(
            name=response.name,
            rank=response.rank,
            path=path,
            differences=differences,
            others=[other for other, _ in others],
        )


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    # Called when the last tensor goes, in whatever thread that is; the loop may be gone by then.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback)


def default_dtype(config: Config) -> "torch.dtype | None":
    """The dtype that a state's modules are built with, where its config names one."""
    import torch

    named = getattr(torch, str(config.get("dtype", "")), None)
    return named if isinstance(named, torch.dtype) and named.is_floating_point else None

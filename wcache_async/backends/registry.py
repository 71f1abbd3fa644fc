"""Which transport backends there are, and which one carries a state.

Built-in ones are named here and imported when first asked for.  Others come from the entry-point
group `wcache_async.backends`, whose entries load to a `WeightCacheTransportBackend` subclass
whose `name` is the entry's; they are looked up, which costs milliseconds, and run only where
somebody names one.  A choice is only ever made among what both sides accept.
"""

import contextlib
import functools
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Final

from wcache_async.backends.base import (
    SHM_FD_BACKEND,
    TORCH_IPC_BACKEND,
    VMM_FD_BACKEND,
    ImportOptions,
    StateTensors,
    WeightCacheTransportBackend,
    device_type_of,
)
from wcache_async.errors import BackendNotAccepted, BackendUnavailable, UnknownBackend

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = [
    "ENTRY_POINT_GROUP",
    "choose_accepted",
    "choose_daemon_transport_backend",
    "choose_for_device",
    "get_client_transport_backend",
    "get_transport_backend_class",
    "import_built_in",
    "known_backends",
    "usable_backends",
    "usable_backends_waits",
]

ENTRY_POINT_GROUP: Final = "wcache_async.backends"

_BUILT_IN: Final = {
    VMM_FD_BACKEND: ("wcache_async.backends.vmm_fd", "VmmFdTransportBackend"),
    TORCH_IPC_BACKEND: ("wcache_async.backends.torch_ipc", "TorchIpcTransportBackend"),
    SHM_FD_BACKEND: ("wcache_async.backends.shm_fd", "ShmFdTransportBackend"),
}

_AUTOMATIC_ORDER: Final = {
    "cuda": (VMM_FD_BACKEND, TORCH_IPC_BACKEND),
    "cpu": (SHM_FD_BACKEND, TORCH_IPC_BACKEND),
}


def known_backends() -> list[str]:
    """Names of every registered backend, whether or not it can work here."""
    return [*_BUILT_IN, *sorted(_entry_points().keys() - _BUILT_IN.keys())]


def import_built_in() -> None:
    """Import every built-in backend now, in a program's start, lest its first attach does: that is 5 to 15 ms."""
    for name in _BUILT_IN:
        with contextlib.suppress(BackendUnavailable):
            _load(name)


def usable_backends() -> tuple[str, ...]:
    """The built-in backends that can work in this process: what a client accepts by default."""
    return tuple(name for name in _BUILT_IN if _usable(name))


def usable_backends_waits() -> bool:
    """Whether `usable_backends` may block, by loading the CUDA driver."""
    for name in _BUILT_IN:
        with contextlib.suppress(BackendUnavailable):
            if _load(name).availability_waits():
                return True
    return False


def get_transport_backend_class(name: str) -> type[WeightCacheTransportBackend]:
    """The backend called `name`.  Raises UnknownBackend, or BackendUnavailable where it cannot work here."""
    backend = _load(name)
    reason = backend.unavailable_reason()
    if reason is not None:
        raise BackendUnavailable(name=name, reason=reason)
    return backend


def get_client_transport_backend(name: str, options: ImportOptions | None = None) -> WeightCacheTransportBackend:
    """The client's half of the backend a response names; an empty name, an older daemon's, is `torch_ipc`.

    Raises UnknownBackend, BackendUnavailable.
    """
    return get_transport_backend_class(name or TORCH_IPC_BACKEND)(options)


def choose_daemon_transport_backend(
    state_tensors: StateTensors, accepted: Sequence[str]
) -> WeightCacheTransportBackend:
    """A new daemon's half of the best backend that can export these tensors and that the client accepts.

    An empty `accepted`, an older client's, is `torch_ipc`.  Names in it that are unknown here are
    a newer client's, and passed over.  Raises BackendNotAccepted.
    """
    accepted = accepted or (TORCH_IPC_BACKEND,)
    device_types = {tensor.device.type for tensor, _ in state_tensors.values()}
    order = _AUTOMATIC_ORDER["cuda" if "cuda" in device_types else "cpu"]
    others = [name for name in accepted if name not in _BUILT_IN]
    candidates = _all_usable([*order, *others])
    exportable = [backend for backend in candidates if backend.can_export_state(state_tensors)]
    for backend in exportable:
        if backend.name in accepted:
            return backend()
    raise BackendNotAccepted(accepted=list(accepted), exportable=[backend.name for backend in exportable])


def choose_for_device(device: str, requested: str = "auto") -> WeightCacheTransportBackend:
    """A new daemon's half for a state still to be loaded onto `device`, a torch device such as ``cuda:1``.

    ``auto`` is the best that works here; a backend asked for by name is that one or an error.
    Raises UnknownBackend, BackendUnavailable.
    """
    if requested != "auto":
        backend = get_transport_backend_class(requested)
        reason = backend.device_refusal(device)
        if reason is not None:
            raise BackendUnavailable(name=requested, reason=reason)
        return backend()
    order = _order(device)
    reasons = []
    for backend in _all_usable(order):
        reason = backend.device_refusal(device)
        if reason is None:
            return backend()
        reasons.append(f"{backend.name}: {reason}")
    raise BackendUnavailable(
        name="auto",
        reason=f"none of {', '.join(order)} works here for {device} tensors"
        + (f" ({'; '.join(reasons)})" if reasons else ""),
    )


def choose_accepted(device: str, accepted: Sequence[str]) -> type[WeightCacheTransportBackend]:
    """The best backend for tensors on a torch device, or on a GPU told by UUID, that the client accepts.

    Names in `accepted` that are unknown here are a newer client's, and passed over.  Blocks where
    one is no built-in's.  Raises BackendNotAccepted.
    """
    order = _order(device)
    others = [name for name in accepted if name not in _BUILT_IN]
    able = [backend for backend in _all_usable([*order, *others]) if backend.device_refusal(device) is None]
    for backend in able:
        if backend.name in accepted:
            return backend
    raise BackendNotAccepted(accepted=list(accepted), exportable=[backend.name for backend in able])


def _order(device: str) -> Sequence[str]:
    order = _AUTOMATIC_ORDER.get(device_type_of(device))
    return known_backends() if order is None else order


def _all_usable(names: Iterable[str]) -> list[type[WeightCacheTransportBackend]]:
    return [backend for backend in map(_usable, names) if backend is not None]


def _usable(name: str) -> type[WeightCacheTransportBackend] | None:
    try:
        return get_transport_backend_class(name)
    except (UnknownBackend, BackendUnavailable):
        return None


@functools.cache
def _load(name: str) -> type[WeightCacheTransportBackend]:
    try:
        if name in _BUILT_IN:
            module, attribute = _BUILT_IN[name]
            loaded: object = getattr(import_module(module), attribute)
        elif name in _entry_points():
            loaded = _entry_points()[name].load()
        else:
            raise UnknownBackend(name=name, known=known_backends())
    except (ImportError, AttributeError) as error:
        raise BackendUnavailable(name=name, reason=f"it cannot be imported: {error}") from error
    if not (isinstance(loaded, type) and issubclass(loaded, WeightCacheTransportBackend)):
        raise BackendUnavailable(name=name, reason=f"{loaded!r} is no WeightCacheTransportBackend")
    if loaded.name != name:
        raise BackendUnavailable(name=name, reason=f"{loaded.__name__} calls itself {loaded.name!r}")
    return loaded


@functools.cache
def _entry_points() -> "dict[str, EntryPoint]":
    from importlib.metadata import entry_points  # 40 ms of imports.

    return {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}

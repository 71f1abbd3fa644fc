"""Which transport backends there are, and which one carries a state.

Built-in ones are named here and imported when first asked for; others come from the entry-point
group `wcache_async.backends`, whose entries load to a `WeightCacheTransportBackend` subclass
whose `name` is the entry's.  A choice is only ever made among what both sides accept.
"""

import functools
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from wcache_async.backends.base import (
    SHM_FD_BACKEND,
    TORCH_IPC_BACKEND,
    VMM_FD_BACKEND,
    ImportOptions,
    StateTensors,
    WeightCacheTransportBackend,
)
from wcache_async.errors import BackendNotAccepted, BackendUnavailable, UnknownBackend

__all__ = [
    "ENTRY_POINT_GROUP",
    "available_backends",
    "choose_daemon_transport_backend",
    "choose_for_device",
    "get_client_transport_backend",
    "get_transport_backend_class",
    "known_backends",
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


def available_backends() -> list[str]:
    """Names of the backends that can work in this process, in the order of `known_backends`."""
    return [name for name in known_backends() if _usable(name)]


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
) -> type[WeightCacheTransportBackend]:
    """The best backend that can export these tensors and that the client accepts.

    An empty `accepted`, an older client's, is `torch_ipc`.  Names in it that are unknown here are
    a newer client's, and passed over.  Raises BackendNotAccepted.
    """
    device_types = {tensor.device.type for tensor, _ in state_tensors.values()}
    order = _order(next(iter(sorted(device_types, key=_host_last)), "cpu"))
    candidates = [backend for backend in map(_usable, order) if backend and backend.can_export_state(state_tensors)]
    return _first_accepted(candidates, accepted or (TORCH_IPC_BACKEND,))


def choose_for_device(device: str, requested: Sequence[str] = ()) -> type[WeightCacheTransportBackend]:
    """The best of the `requested` backends (none: of all) for a state still to be loaded onto `device`.

    `device` is a torch device such as ``cpu`` or ``cuda:1``.  Where one backend alone is
    requested, it is that one or an error: UnknownBackend, BackendUnavailable.  Raises
    BackendNotAccepted where none of several can carry the device.
    """
    device_type = device.partition(":")[0]
    if len(requested) == 1:
        backend = get_transport_backend_class(requested[0])
        if device_type not in backend.capabilities.devices:
            raise BackendUnavailable(
                name=backend.name,
                reason=f"it carries {', '.join(sorted(backend.capabilities.devices))} tensors, not {device_type}",
            )
        return backend
    unknown = [name for name in requested if name not in known_backends()]
    if unknown:
        raise UnknownBackend(name=unknown[0], known=known_backends())
    candidates = [
        backend
        for backend in map(_usable, _order(device_type))
        if backend and device_type in backend.capabilities.devices
    ]
    return _first_accepted(candidates, requested or known_backends())


def _first_accepted(
    candidates: Sequence[type[WeightCacheTransportBackend]], accepted: Sequence[str]
) -> type[WeightCacheTransportBackend]:
    for backend in candidates:
        if backend.name in accepted:
            return backend
    raise BackendNotAccepted(accepted=list(accepted), exportable=[backend.name for backend in candidates])


def _host_last(device_type: str) -> tuple[bool, str]:
    return device_type == "cpu", device_type


def _order(device_type: str) -> list[str]:
    automatic = _AUTOMATIC_ORDER.get(device_type, ())
    return [*automatic, *(name for name in known_backends() if name not in _BUILT_IN)]


def _usable(name: str) -> type[WeightCacheTransportBackend] | None:
    try:
        return get_transport_backend_class(name)
    except BackendUnavailable:
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
def _entry_points() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}

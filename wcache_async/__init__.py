"""A weight cache for PyTorch inference: one daemon keeps a model's tensors, engines attach in milliseconds.

`Client` attaches, `Daemon` serves, `blocking` has the client's verbs for code with no event
loop, `errors` holds every exception.  Importing this package imports neither torch nor CUDA,
and its names are loaded when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from wcache_async.version import __version__

if TYPE_CHECKING:
    from wcache_async import errors as errors
    from wcache_async.client import blocking as blocking
    from wcache_async.client.client import Client as Client
    from wcache_async.client.fetch import FetchedState as FetchedState
    from wcache_async.client.reconnect import ReconnectPolicy as ReconnectPolicy
    from wcache_async.daemon.lifecycle import Daemon as Daemon
    from wcache_async.errors import WeightCacheError as WeightCacheError
    from wcache_async.identity.config import standard_config as standard_config

__all__ = [
    "Client",
    "Daemon",
    "FetchedState",
    "ReconnectPolicy",
    "WeightCacheError",
    "__version__",
    "blocking",
    "errors",
    "standard_config",
]

_WHERE = {
    "Client": "wcache_async.client.client",
    "Daemon": "wcache_async.daemon.lifecycle",
    "FetchedState": "wcache_async.client.fetch",
    "ReconnectPolicy": "wcache_async.client.reconnect",
    "WeightCacheError": "wcache_async.errors",
    "blocking": "wcache_async.client",
    "errors": "wcache_async",
    "standard_config": "wcache_async.identity.config",
}


def __getattr__(name: str) -> object:
    where = _WHERE.get(name)
    if where is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("blocking", "errors"):
        return import_module(f"{where}.{name}")
    return getattr(import_module(where), name)


def __dir__() -> list[str]:
    return sorted(__all__)

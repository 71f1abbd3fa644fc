"""Attaches to a state for `fetch` and `verify`, and measures each step."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING

from wcache_async.cli.progress import progress_display
from wcache_async.client.client import Client
from wcache_async.client.fetch import FetchedState, accepted_backends
from wcache_async.errors import Scalar, StateFailed, StateNotFound

if TYPE_CHECKING:
    import torch

__all__ = ["Attachment", "attached"]


@dataclass(slots=True)
class Attachment:
    """A state, its tensors, and the seconds that each step took, in order.

    ``prepare`` is importing torch and the transports, which a process that wants tensors has
    done; ``fetch`` holds the wait for a state that is LOADING.
    """

    state: FetchedState
    tensors: "dict[str, torch.Tensor]"
    seconds: dict[str, float] = field(default_factory=dict)


@asynccontextmanager
async def attached(
    socket_path: str | None,
    name: str,
    *,
    rank: int,
    client: str,
    expect: Mapping[str, Scalar] | None = None,
    timeout: float | None = None,
    backends: Sequence[str] | None = None,
    allow_stale: bool = False,
) -> AsyncIterator[Attachment]:
    """The state, fetched, and every tensor of it; the lease ends with the context.

    Raises what `Client.connect`, `Client.fetch_state` and `FetchedState.import_tensors` raise.
    """
    seconds: dict[str, float] = {}
    last = time.perf_counter()

    def lap(step: str) -> None:
        nonlocal last
        now = time.perf_counter()
        seconds[step] = now - last
        last = now

    await _check_held(socket_path, name, rank, client)
    last = time.perf_counter()
    await asyncio.to_thread(import_module, "torch")
    if backends is None:
        backends = await accepted_backends()
    lap("prepare")
    async with Client(socket_path, backends=backends, name=client) as connected:
        lap("connect")
        with progress_display() as display:
            update = display.track(f"waiting for {name}:{rank}")
            state = await connected.fetch_state(
                name, rank=rank, expect=expect, timeout=timeout, allow_stale=allow_stale, progress=update
            )
        lap("fetch")
        tensors = await state.import_tensors()
        lap("import")
        yield Attachment(state, tensors, seconds)


async def _check_held(socket_path: str | None, name: str, rank: int, client: str) -> None:
    """Raise StateNotFound or StateFailed at once, before torch is imported for nothing."""
    async with Client(socket_path, backends=(), name=client) as connected:
        states = (await connected.status()).states
    found = [state for state in states if (state.name, state.rank) == (name, rank)]
    if not found:
        raise StateNotFound(name=name, rank=rank, available=[f"{state.name}:{state.rank}" for state in states])
    if found[0].phase == "failed":
        raise StateFailed(name=name, rank=rank, reason=found[0].error or "")

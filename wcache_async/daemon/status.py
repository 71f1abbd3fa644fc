"""What the daemon tells of itself.  Pure."""

from collections.abc import Iterable

from wcache_async.daemon.states import Generation
from wcache_async.protocol.messages import StateStatus

__all__ = ["describe", "describe_all"]


def describe(generation: Generation) -> StateStatus:
    """One state as `wcache status` shows it; `bytes` is the arenas' size, or the total while LOADING."""
    return StateStatus(
        name=generation.key.name,
        rank=generation.key.rank,
        phase=generation.phase.value,
        generation=generation.number,
        tensors=generation.tensors,
        bytes=generation.nbytes or generation.bytes_total,
        bytes_done=generation.nbytes or generation.bytes_done,
        backends=generation.backends,
        leases=generation.leases,
        config=generation.config,
        error=None if generation.error is None else str(generation.error),
        source=generation.source,
        pinned=generation.pinned,
        digest=generation.digest,
        stale=generation.stale,
    )


def describe_all(generations: Iterable[Generation]) -> tuple[StateStatus, ...]:
    """Every state, in the table's order."""
    return tuple(describe(generation) for generation in generations)

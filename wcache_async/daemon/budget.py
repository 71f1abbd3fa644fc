"""Which states make room for another.  Pure."""

from collections.abc import Iterable

from wcache_async.daemon.states import Generation
from wcache_async.errors import BudgetExceeded

__all__ = ["plan_eviction"]


def plan_eviction(states: Iterable[Generation], needed: int, max_bytes: int, *, taken: int = 0) -> list[Generation]:
    """The READY states to unload, least recently used first, so that `needed` bytes more fit into `max_bytes`.

    A state that is leased or pinned is never among them.  `taken` are bytes promised or held
    besides those of `states`.  Raises BudgetExceeded where it would not be enough.
    """
    states = list(states)
    held = taken + sum(state.nbytes for state in states)
    idle = sorted((s for s in states if not s.leases and not s.pinned), key=lambda s: s.last_used)
    evicted: list[Generation] = []
    excess = held + needed - max_bytes
    for state in idle:
        if excess <= 0:
            break
        evicted.append(state)
        excess -= state.nbytes
    if excess > 0:
        evictable = sum(state.nbytes for state in idle)
        raise BudgetExceeded(needed=needed, max_bytes=max_bytes, held=held, evictable=evictable)
    return evicted

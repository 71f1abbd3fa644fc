"""Who holds which generation: leases by connection.  Pure.

A lease lives exactly as long as its connection, unless it is released earlier, so that no
pid, heartbeat or expiry is needed to know that its holder is gone.
"""

from dataclasses import dataclass, field

from wcache_async.daemon.states import Generation
from wcache_async.errors import LeaseNotFound

__all__ = ["LeaseTable"]


@dataclass(slots=True)
class LeaseTable:
    """Leases by connection number and lease number."""

    _held: dict[int, dict[int, Generation]] = field(default_factory=dict)
    _last: int = 0

    def grant(self, connection: int, generation: Generation) -> int:
        """A new lease; its number is never used again."""
        self._last += 1
        self._held.setdefault(connection, {})[self._last] = generation
        return self._last

    def find(self, connection: int, lease: int) -> Generation:
        """What that lease of that connection holds.  Raises LeaseNotFound, also for another's lease."""
        held = self._held.get(connection, {})
        if lease not in held:
            raise LeaseNotFound(lease=lease)
        return held[lease]

    def release(self, connection: int, lease: int) -> Generation:
        """End one lease of that connection.  Raises LeaseNotFound, also for another's lease."""
        generation = self.find(connection, lease)
        held = self._held[connection]
        del held[lease]
        if not held:
            del self._held[connection]
        return generation

    def drop(self, connection: int) -> list[Generation]:
        """End every lease of a connection that is gone."""
        return list(self._held.pop(connection, {}).values())

    def __len__(self) -> int:
        return sum(len(held) for held in self._held.values())

"""Which states the daemon holds, in which phase, and what each change demands.  Pure.

Every method either raises, having changed nothing, or changes the table and returns the
effects its caller must perform, in order.

========== ============================ ============================= =====================
from       event                        to                            effects
========== ============================ ============================= =====================
(nothing)  begin                        LOADING
FAILED     begin                        LOADING (new generation)
READY      begin with replace           READY, a LOADING one pending
LOADING    ready                        READY                         Wake
LOADING    ready, another was READY     READY                         Discard old, Wake
LOADING    fail                         FAILED                        Wake
LOADING    fail, another was READY      (nothing), READY stays        Wake
LOADING    unload                       (nothing)                     Cancel, Wake
LOADING    withdraw                     what was before it            Wake
READY      evict                        (nothing), or LOADING stays   Discard, Wake
READY      unload                       (nothing)                     Discard, Wake
FAILED     unload                       (nothing)
========== ============================ ============================= =====================

Discard is held back while leases stand on a generation: the last one's end gives it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from wcache_async.errors import StateExists, StateFailed, StateNotFound, WeightCacheError
from wcache_async.manifest import Config, Origin

__all__ = ["Cancel", "Discard", "Effect", "Generation", "Phase", "StateKey", "StateTable", "Wake"]


class Phase(StrEnum):
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"


class StateKey(NamedTuple):
    """What a state is asked for by."""

    name: str
    rank: int

    def __str__(self) -> str:
        return f"{self.name}:{self.rank}"


@dataclass(slots=True, eq=False)
class Generation:
    """One version of a state: from the start of its load to the end of its last lease."""

    key: StateKey
    number: int
    source: str
    config: Config
    phase: Phase = Phase.LOADING
    tensors: int = 0
    nbytes: int = 0
    bytes_done: int = 0
    bytes_total: int = 0
    backends: tuple[str, ...] = ()
    error: WeightCacheError | None = None
    """Why it is FAILED; on a READY one, why the generation meant to replace it failed."""
    leases: int = 0
    builder: int | None = None
    """The connection that builds it, while a client does."""
    is_build: bool = False
    """Whether clients build it, not this daemon."""
    pinned: bool = False
    last_used: float = 0.0
    """When it was last leased or let go, on the monotonic clock in seconds."""
    held: bool = True
    """Whether the table still names it."""
    digest: str = ""
    """Of the whole state, in hexadecimal; empty until it is known."""
    tensor_digests: bytes = b""
    """Each tensor's, in the manifest's order, end to end."""
    origin: Origin | None = None
    stale: bool = False
    """Whether the files it was read from had changed when they were last looked at."""


@dataclass(frozen=True, slots=True)
class Wake:
    """Whoever waits for this key looks again."""

    key: StateKey


@dataclass(frozen=True, slots=True)
class Discard:
    """Nobody can reach this generation any more: free what it holds."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop loading this generation."""

    generation: Generation


Effect = Wake | Discard | Cancel


@dataclass(slots=True)
class _Slot:
    current: Generation
    pending: Generation | None = None
    failed: Generation | None = None
    """Whose place `current` took; it has it back where `current` is withdrawn."""


@dataclass(slots=True)
class StateTable:
    """Every state the daemon holds, by key."""

    _slots: dict[StateKey, _Slot] = field(default_factory=dict)
    _numbers: dict[StateKey, int] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Generation]:
        """The generation each key stands for now, by name and rank."""
        for key in sorted(self._slots):
            yield self._slots[key].current

    def ready_states(self) -> list[Generation]:
        """Every generation that is READY, for a budget to count."""
        return [slot.current for slot in self._slots.values() if slot.current.phase is Phase.READY]

    def loading(self) -> list[Generation]:
        """Every generation being loaded, pending replacements included."""
        found = [g for slot in self._slots.values() for g in (slot.current, slot.pending) if g is not None]
        return [g for g in found if g.phase is Phase.LOADING]

    def begin(self, key: StateKey, *, source: str, config: Config, replace: bool = False) -> Generation:
        """A new generation starts to load.  Raises StateExists where one is held or being loaded."""
        slot = self._slots.get(key)
        if slot is not None:
            busy = slot.pending or slot.current
            if busy.phase is Phase.LOADING or (busy.phase is Phase.READY and not replace):
                raise StateExists(name=key.name, rank=key.rank, phase=busy.phase.value)
        number = self._numbers[key] = self._numbers.get(key, 0) + 1
        generation = Generation(key, number, source, config)
        if slot is None or slot.current.phase is Phase.FAILED:
            if slot is not None:
                slot.current.held = False
            self._slots[key] = _Slot(generation, failed=None if slot is None else slot.current)
        else:
            slot.pending = generation
        return generation

    def ready(self, generation: Generation) -> list[Effect]:
        """A load ended well.  A generation no longer held (unloaded meanwhile) is discarded."""
        if not generation.held:
            return [Discard(generation)]
        slot = self._slots[generation.key]
        slot.failed = None
        generation.phase = Phase.READY
        effects: list[Effect] = []
        if slot.pending is generation:
            effects += self._let_go(slot.current)
            slot.current, slot.pending = generation, None
        effects.append(Wake(generation.key))
        return effects

    def fail(self, generation: Generation, error: WeightCacheError) -> list[Effect]:
        """A load ended badly; a READY generation it was to replace stays."""
        generation.phase = Phase.FAILED
        generation.error = error
        if not generation.held:
            return []
        slot = self._slots[generation.key]
        slot.failed = None
        if slot.pending is generation:
            slot.pending = None
            generation.held = False
            slot.current.error = error
        return [Wake(generation.key)]

    def withdraw(self, generation: Generation) -> list[Effect]:
        """A generation that was begun will not be made after all: as if it had never been."""
        if not generation.held:
            return []
        generation.held = False
        slot = self._slots[generation.key]
        if slot.pending is generation:
            slot.pending = None
        elif slot.failed is not None:
            slot.failed.held = True
            self._slots[generation.key] = _Slot(slot.failed)
        else:
            del self._slots[generation.key]
        return [Wake(generation.key)]

    def find(self, key: StateKey) -> Generation | None:
        """What a key stands for now, in whatever phase."""
        slot = self._slots.get(key)
        return None if slot is None else slot.current

    def unload(self, name: str, rank: int | None) -> tuple[list[Generation], list[Effect]]:
        """Forget one rank, or every rank, of a state.  Raises StateNotFound if there is none."""
        keys = [key for key in sorted(self._slots) if key.name == name and rank in (None, key.rank)]
        if not keys:
            raise self._not_found(StateKey(name, rank or 0))
        gone: list[Generation] = []
        effects: list[Effect] = []
        for key in keys:
            slot = self._slots.pop(key)
            for generation in (slot.current, slot.pending):
                if generation is None:
                    continue
                effects += self._let_go(generation)
                gone.append(generation)
            effects.append(Wake(key))
        return gone, effects

    def evict(self, generation: Generation) -> list[Effect]:
        """Let a READY generation go, and only it: one being loaded in its place goes on."""
        slot = self._slots[generation.key]
        if slot.pending is None:
            del self._slots[generation.key]
        else:
            slot.current, slot.pending = slot.pending, None
        return [*self._let_go(generation), Wake(generation.key)]

    def lookup(self, key: StateKey) -> Generation:
        """The generation to serve, or to wait for while it is LOADING.

        Raises StateNotFound, or StateFailed with the load's reason.
        """
        slot = self._slots.get(key)
        if slot is None:
            raise self._not_found(key)
        if slot.current.phase is Phase.FAILED:
            raise StateFailed(name=key.name, rank=key.rank, reason=str(slot.current.error))
        return slot.current

    def lease_granted(self, generation: Generation) -> None:
        """One more lease stands on the generation."""
        generation.leases += 1

    def lease_ended(self, generation: Generation) -> list[Effect]:
        """One lease fewer; the last one on a generation no longer held discards it."""
        generation.leases -= 1
        return [] if generation.held or generation.leases else [Discard(generation)]

    def _let_go(self, generation: Generation) -> list[Effect]:
        generation.held = False
        if generation.phase is Phase.LOADING:
            return [] if generation.is_build else [Cancel(generation)]
        if generation.phase is Phase.READY and not generation.leases:
            return [Discard(generation)]
        return []

    def _not_found(self, key: StateKey) -> StateNotFound:
        return StateNotFound(name=key.name, rank=key.rank, available=[str(key) for key in sorted(self._slots)])

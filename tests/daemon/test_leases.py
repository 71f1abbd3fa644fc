"""Leases live and die with their connection."""

import pytest

from wcache_async.daemon.leases import LeaseTable
from wcache_async.daemon.states import Generation, StateKey
from wcache_async.errors import LeaseNotFound


def generation(name: str = "llama") -> Generation:
    return Generation(StateKey(name, 0), 1, "/models", {})


def test_a_lease_is_released_once() -> None:
    leases, held = LeaseTable(), generation()
    lease = leases.grant(1, held)
    assert leases.release(1, lease) is held
    with pytest.raises(LeaseNotFound) as caught:
        leases.release(1, lease)
    assert caught.value.lease == lease
    assert len(leases) == 0


def test_another_connections_lease_cannot_be_released() -> None:
    leases = LeaseTable()
    lease = leases.grant(1, generation())
    with pytest.raises(LeaseNotFound):
        leases.release(2, lease)
    assert len(leases) == 1


def test_a_lost_connection_ends_all_its_leases_and_no_other() -> None:
    leases = LeaseTable()
    first, second, other = generation("a"), generation("b"), generation("c")
    leases.grant(1, first)
    leases.grant(1, second)
    leases.grant(2, other)
    assert leases.drop(1) == [first, second]
    assert leases.drop(1) == []
    assert len(leases) == 1


def test_lease_numbers_are_never_used_again() -> None:
    leases = LeaseTable()
    first = leases.grant(1, generation())
    leases.release(1, first)
    assert leases.grant(1, generation()) != first

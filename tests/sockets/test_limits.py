"""The limit on fds: raised as far as is of use, never lowered, and known when it is reached."""

import os
import resource

import pytest

from tests.processes import Forge, Peer
from wcache_async.sockets.limits import fd_room, raise_fd_limit

INFINITY = resource.RLIM_INFINITY


def limits_after(peer: Peer, soft: int, hard: int) -> None:
    """Child: raise the limit, and say what there is then."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    peer.send((raise_fd_limit(), resource.getrlimit(resource.RLIMIT_NOFILE)))


@pytest.mark.parametrize(("soft", "hard"), [(64, 300), (300, 300)])
def test_the_soft_limit_becomes_the_hard_one(forge: Forge, soft: int, hard: int) -> None:
    with forge.start(limits_after, soft, hard) as child:
        assert child.receive() == (300, (300, 300))


@pytest.mark.parametrize(
    ("soft", "hard", "told", "set_to"),
    [
        (1024, 1 << 30, 65_536, (65_536, 1 << 30)),  # Children may close every number below the limit.
        (1024, INFINITY, 65_536, (65_536, INFINITY)),
        (1 << 20, 1 << 30, 1 << 20, None),  # Never lowered.
        (INFINITY, INFINITY, 1 << 30, None),
    ],
)
def test_it_is_raised_no_further_than_is_of_use(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, told: int, set_to: tuple[int, int] | None
) -> None:
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: calls.append(limits))
    assert raise_fd_limit() == told
    assert calls == ([] if set_to is None else [set_to])


def test_where_it_must_not_be_raised_it_is_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 300))
    monkeypatch.setattr(resource, "setrlimit", forbidden)
    assert raise_fd_limit() == 64


def test_room_is_what_is_left() -> None:
    before = fd_room()
    fds = [os.dup(0) for _ in range(5)]
    after = fd_room()
    for fd in fds:
        os.close(fd)
    assert after.used == before.used + 5
    assert before.left - after.left == 5
    assert before.left == before.limit - before.used


def room_with_no_fd_left(peer: Peer) -> None:
    """Child: ask for room where not even the asking has an fd."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
    fds = []
    try:
        while True:
            fds.append(os.dup(0))
    except OSError:
        peer.send((fd_room().left, fd_room().limit))


def test_no_room_at_all_is_known_too(forge: Forge) -> None:
    with forge.start(room_with_no_fd_left) as child:
        assert child.receive() == (0, 40)

"""Descriptors with an owner."""

import array
import gc
import os
import socket

import pytest

from wcache_async.sockets.fds import OwnedFd, own_received


def is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def test_it_closes_once() -> None:
    number = os.eventfd(0)
    fd = OwnedFd(number)
    assert fd.fileno() == number
    fd.close()
    reused = os.eventfd(0)
    fd.close()
    assert reused == number
    assert is_open(reused)
    os.close(reused)


def test_leaving_its_context_or_collecting_it_closes() -> None:
    with OwnedFd(os.eventfd(0)) as fd:
        number = fd.fileno()
    assert not is_open(number)
    forgotten = OwnedFd(os.eventfd(0))
    number = forgotten.fileno()
    del forgotten
    gc.collect()
    assert not is_open(number)


def test_taking_it_hands_over_the_duty() -> None:
    fd = OwnedFd(os.eventfd(0))
    number = fd.take()
    assert fd.closed
    fd.close()
    assert is_open(number)
    os.close(number)
    with pytest.raises(ValueError, match="closed or was taken"):
        fd.fileno()
    with pytest.raises(ValueError, match="closed or was taken"):
        fd.take()


def test_a_duplicate_is_its_own_and_not_inheritable() -> None:
    with OwnedFd(os.eventfd(0)) as fd, fd.duplicate() as other:
        assert other.fileno() != fd.fileno()
        assert not os.get_inheritable(other.fileno())


def test_its_text_says_which() -> None:
    fd = OwnedFd(os.eventfd(0))
    assert str(fd.fileno()) in repr(fd)
    fd.close()
    assert repr(fd) == "OwnedFd(closed)"


def test_received_fds_are_owned_block_by_block_even_where_one_was_cut() -> None:
    numbers = [os.eventfd(0) for _ in range(3)]
    whole = array.array("i", numbers[:2]).tobytes()
    cut = array.array("i", numbers[2:]).tobytes() + b"\x07\x00"
    ancillary = [
        (socket.SOL_SOCKET, socket.SCM_RIGHTS, whole),
        (socket.SOL_SOCKET, socket.SCM_CREDENTIALS, bytes(12)),
        (socket.SOL_SOCKET, socket.SCM_RIGHTS, cut),
    ]
    fds = own_received(ancillary)
    assert [fd.fileno() for fd in fds] == numbers
    for fd in fds:
        fd.close()

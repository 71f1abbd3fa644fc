"""Who is at the other end."""

import os
import socket

import pytest

from wcache_async.errors import PeerNotAllowed
from wcache_async.sockets.peer import PeerCredentials, check_peer, peer_credentials


def test_the_kernel_names_the_peer(sockets: tuple[socket.socket, socket.socket]) -> None:
    assert peer_credentials(sockets[0]) == PeerCredentials(os.getpid(), os.geteuid(), os.getegid())


def test_an_unconnected_socket_has_no_peer_and_nobody_is_allowed() -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        nobody = peer_credentials(sock)
    assert nobody.pid == 0
    with pytest.raises(PeerNotAllowed):
        check_peer(nobody)


def test_only_this_processs_user_is_allowed_by_default() -> None:
    check_peer(PeerCredentials(1, os.geteuid(), 0))
    with pytest.raises(PeerNotAllowed) as caught:
        check_peer(PeerCredentials(1, os.geteuid() + 1, 0))
    assert caught.value.uid == os.geteuid() + 1
    assert caught.value.allowed == [os.geteuid()]


def test_the_allowed_users_can_be_named() -> None:
    check_peer(PeerCredentials(1, 4711, 0), {4711})
    with pytest.raises(PeerNotAllowed):
        check_peer(PeerCredentials(1, os.geteuid(), 0), {4711})

"""Who is at the other end of a Unix socket, as the kernel tells it."""

import os
import socket
from collections.abc import Collection
from dataclasses import dataclass
from struct import Struct

from wcache_async.errors import PeerNotAllowed

__all__ = ["PeerCredentials", "check_peer", "peer_credentials"]

_ucred = Struct("iII")  # struct ucred: pid_t, uid_t, gid_t


@dataclass(frozen=True, slots=True)
class PeerCredentials:
    """What the peer was when it connected (or, for a daemon, when it called listen).

    `pid` is 0 for a peer in a PID namespace not visible here; `uid` and `gid` show as 65534
    for a user this user namespace has no number for (user_namespaces(7)).
    """

    pid: int
    uid: int
    gid: int


def peer_credentials(sock: socket.socket) -> PeerCredentials:
    """The peer's credentials (SO_PEERCRED, unix(7)).  An unconnected socket's are pid 0 and uid 2**32 - 1."""
    return PeerCredentials(*_ucred.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _ucred.size)))


def check_peer(peer: PeerCredentials, allowed_uids: Collection[int] | None = None) -> None:
    """Raises PeerNotAllowed unless the peer runs as one of `allowed_uids` (None: as this process does)."""
    allowed = (os.geteuid(),) if allowed_uids is None else allowed_uids
    if peer.uid not in allowed:
        raise PeerNotAllowed(uid=peer.uid, allowed=sorted(allowed))

"""Finding a daemon again: `ReconnectPolicy` decides when to try, `connect_again` tries.

The pauses are exponential with full jitter ("Exponential Backoff And Jitter", AWS Architecture Blog,
2015): each is drawn evenly between nothing and a bound that doubles, so that the clients of a
daemon that died come back spread out and not all in one moment.
"""

import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from wcache_async.errors import DaemonLost, DaemonUnavailable, NotRunning, PeerTimeout, TooManyClients, WeightCacheError

__all__ = ["ReconnectPolicy", "connect_again"]

T = TypeVar("T")

_MOST_DOUBLINGS = 60  # Beyond every bound, and below where a float ends.


@dataclass(frozen=True, kw_only=True)
class ReconnectPolicy:
    """How long to look for a daemon that has gone, and at which pace; all in seconds.

    The pause after the first try is at most `first_pause`, and each further one's bound twice the
    last one's, up to `longest_pause`.  No try begins after `deadline` (None: for ever); the last
    one's error is raised then.  A single try takes as long as the client's `connect_timeout`.
    Raises ValueError for what is no such policy.

    **Tried again** is connecting, and only that: where no daemon listens yet, where it hangs up or
    says nothing, and where it has no room for one more client.  What waiting does not mend is raised
    at once: a socket or daemon not to be trusted, or one that speaks another protocol.

    **Never sent again** is a request.  One that was waiting when the daemon died raises DaemonLost at
    once, whatever it was: the daemon may have done it, and the caller knows whether it may be done
    twice.  **Never carried over** is what the old connection had: leases, and turns to build
    (`Turn.publish` raises DaemonLost), as a restarted daemon knows neither.  States attached
    before go on without a lease (CUDA tensors of torch_ipc excepted, which end with the daemon); what
    asks their daemon (`fetch_digests`, `wake`) raises DaemonLost: fetch the state again.
    """

    first_pause: float = 0.02
    longest_pause: float = 2.0
    deadline: float | None = 60.0

    def __post_init__(self) -> None:
        if not 0 < self.first_pause <= self.longest_pause < math.inf:
            raise ValueError(f"expected 0 < first_pause <= longest_pause, not {self.first_pause}, {self.longest_pause}")
        if self.deadline is not None and not self.deadline >= 0:
            raise ValueError(f"expected a deadline of at least 0 s, not {self.deadline}")

    def pause(self, failures: int, elapsed: float, chance: float) -> float | None:
        """Seconds to wait after `failures` (at least 1) failed tries, `elapsed` seconds after the first; None: give up.

        `chance` is drawn evenly from [0, 1).
        """
        left = math.inf if self.deadline is None else self.deadline - elapsed
        if left <= self.first_pause:
            return None
        bound = min(self.longest_pause, math.ldexp(self.first_pause, min(failures - 1, _MOST_DOUBLINGS)), left)
        return chance * bound


async def connect_again(
    connect: Callable[[], Awaitable[T]],
    policy: ReconnectPolicy,
    *,
    clock: Callable[[], float],
    sleep: Callable[[float], Awaitable[object]],
    chance: Callable[[], float] = random.random,
) -> T:
    """What `connect` returns, tried as `policy` says.

    Raises what no further try would mend, or the last error once the policy gives up.
    """
    began = clock()
    failures = 0
    while True:
        try:
            return await connect()
        except (DaemonUnavailable, DaemonLost, PeerTimeout, TooManyClients) as error:
            failures += 1
            elapsed = clock() - began
            pause = policy.pause(failures, elapsed, chance())
            if pause is None:
                raise _after(error, failures, elapsed) from None
        await sleep(pause)


def _after(error: WeightCacheError, failures: int, elapsed: float) -> WeightCacheError:
    if isinstance(error, NotRunning) and failures > 1:
        reason = f"{error.reason}, at each of {failures} tries in {elapsed:.3g} s"
        return NotRunning(socket=error.socket, reason=reason, instead=error.instead)
    return error

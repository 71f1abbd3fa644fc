"""FrameTimer: half a frame has so long, and nothing else has."""

import asyncio

import pytest

from tests.sockets.wire import DEADLINE
from wcache_async.errors import PeerTimeout
from wcache_async.sockets.frame_timer import FrameTimer

TIMEOUT = 0.02


@pytest.fixture
def late() -> list[PeerTimeout]:
    return []


@pytest.fixture
async def timer(late: list[PeerTimeout]) -> FrameTimer:
    return FrameTimer(asyncio.get_running_loop(), TIMEOUT, late.append)


async def a_timeout_later() -> None:
    """Until whatever was timed before has had its time."""
    over = asyncio.Event()
    asyncio.get_running_loop().call_later(TIMEOUT, over.set)
    async with asyncio.timeout(DEADLINE):
        await over.wait()


async def test_half_a_frame_is_late_once(timer: FrameTimer, late: list[PeerTimeout]) -> None:
    timer.expect(True, another=False)
    await a_timeout_later()
    await a_timeout_later()
    (error,) = late
    assert (error.what, error.seconds) == ("send the rest of a message it began", TIMEOUT)


@pytest.mark.parametrize("turn", ["whole", "stopped"])
async def test_a_frame_that_came_whole_is_not_late(timer: FrameTimer, late: list[PeerTimeout], turn: str) -> None:
    timer.expect(True, another=False)
    if turn == "whole":
        timer.expect(False, another=True)
    else:
        timer.stop()
    await a_timeout_later()
    assert late == []


@pytest.mark.parametrize("another", [True, False])
async def test_another_frame_has_its_own_time_and_more_bytes_of_the_same_gain_none(another: bool) -> None:
    order: list[str] = []
    loop = asyncio.get_running_loop()
    timer = FrameTimer(loop, TIMEOUT, lambda _: order.append("late"))
    timer.expect(True, another=False)
    loop.call_later(TIMEOUT, order.append, "the first one's time is over")
    timer.expect(True, another=another)
    await a_timeout_later()
    assert order.index("late") == (1 if another else 0)


async def test_without_a_timeout_nothing_is_late(late: list[PeerTimeout]) -> None:
    timer = FrameTimer(asyncio.get_running_loop(), None, late.append)
    timer.expect(True, another=False)
    await a_timeout_later()
    assert late == []

"""FdStream under cancellation from all sides: every message, byte and fd arrives once, in order."""

import asyncio
import random
from collections.abc import Coroutine

import pytest

from tests.sockets.wire import DEADLINE, received, response, take_numbers
from tests.sockets.wire import numbered as numbered_fds
from wcache_async.errors import SendQueueFull
from wcache_async.sockets.stream import FdStream

MESSAGES = 1500


async def cancelled_at_random(dice: random.Random, coroutine: Coroutine[None, None, object]) -> object:
    """Its result, or None where it was cancelled first."""
    task = asyncio.create_task(coroutine)
    for _ in range(dice.randrange(4)):
        await asyncio.sleep(0)
    task.cancel()
    try:
        return await task
    except asyncio.CancelledError:
        return None


async def send_all(stream: FdStream, dice: random.Random) -> None:
    for number in range(MESSAGES):
        while True:
            # About one in twenty is larger than what the kernel takes at once.
            payload = bytes(dice.choice([0] * 19 + [300_000]))
            try:
                stream.send(number, response(payload), numbered_fds(number % 4))
                break
            except SendQueueFull:
                await stream.drain(DEADLINE)
        if dice.random() < 0.3:
            await cancelled_at_random(dice, stream.drain())
    await stream.drain(DEADLINE)


async def receive_all(stream: FdStream, dice: random.Random) -> None:
    for number in range(MESSAGES):
        event = None
        while event is None:
            event = await cancelled_at_random(dice, stream.receive())
        assert received(event).request_id == number  # type: ignore[arg-type]
        assert take_numbers(event) == list(range(number % 4))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(2))
async def test_a_storm_of_cancellations_loses_nothing(pair: tuple[FdStream, FdStream], seed: int) -> None:
    one, other = pair
    async with asyncio.timeout(5 * DEADLINE), asyncio.TaskGroup() as tasks:
        for number, (sender, receiver) in enumerate(((one, other), (other, one))):
            tasks.create_task(send_all(sender, random.Random(2 * seed + number)))
            tasks.create_task(receive_all(receiver, random.Random(1000 + 2 * seed + number)))
    assert one.queued_bytes == other.queued_bytes == 0

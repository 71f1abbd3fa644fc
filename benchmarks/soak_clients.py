"""One process of a soak's crowd: clients that behave, in random order, and peers that do not.

Everything it finds wrong, and every second how often it did what, goes down a pipe as one line of JSON.
"""

import asyncio
import contextlib
import os
import random
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import msgspec
import torch
import uvloop
from soak_hostile import Hostile
from soak_states import FILES, MADE, Config, Model, is_right, tensors

from wcache_async import Client
from wcache_async.client.fetch import FetchedState
from wcache_async.client.publish import Turn
from wcache_async.errors import DaemonLost, ProtocolError, RequestFailed, WeightCacheError

__all__ = ["Line", "run_process"]

_PAUSE_S: Final = 0.35
"""Between two deeds of one client, on average."""
_HANG_S: Final = 90.0
"""No deed takes so long, whatever the others do."""
_HELD: Final = 3


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One report up the pipe."""

    done: dict[str, int] = {}
    refused: dict[str, int] = {}
    problem: str = ""
    ended: bool = False
    """All held bytes were right to the end, and the process goes by itself."""


class Reporter:
    """Counts, and tells."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self.done: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()

    def tell(self, *, problem: str = "", ended: bool = False) -> None:
        line = Line(done=dict(self.done), refused=dict(self.refused), problem=problem[-3000:], ended=ended)
        # At most PIPE_BUF, and so whole or not at all, also where SIGKILL comes (pipe(7)).
        os.write(self._pipe, msgspec.json.encode(line)[:4095] + b"\n")
        self.done.clear()
        self.refused.clear()


def run_process(address: str, folder: Path, pipe: int, *, seed: int, honest: int, hostile: int, until: float) -> None:
    """Be `honest` clients and `hostile` peers until that time on the monotonic clock."""
    torch.set_num_threads(1)
    reporter = Reporter(pipe)
    runner = uvloop.run if seed % 2 else asyncio.run
    try:
        runner(_crowd(address, folder, reporter, seed, honest, hostile, until))
    except BaseException:
        reporter.tell(problem=traceback.format_exc())
        raise
    reporter.tell(ended=True)


async def _crowd(
    address: str, folder: Path, reporter: Reporter, seed: int, honest: int, hostile: int, until: float
) -> None:
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: reporter.tell(problem=f"reached a client's loop: {context!r}")
    )
    telling = asyncio.create_task(_tell_now_and_then(reporter))
    async with asyncio.TaskGroup() as crowd:
        for number in range(honest):
            crowd.create_task(Honest(address, folder, reporter, random.Random(f"{seed}-{number}")).run(until))
        for number in range(hostile):
            crowd.create_task(Hostile(address, reporter.done, random.Random(f"{seed}-hostile-{number}")).run(until))
    telling.cancel()


async def _tell_now_and_then(reporter: Reporter) -> None:
    while True:
        await asyncio.sleep(1.0)
        reporter.tell()


# ------------------------------------------------------------------------------------ behaving
class Honest:
    """A client that does what the documentation allows, whatever comes to its mind."""

    def __init__(self, address: str, folder: Path, reporter: Reporter, chance: random.Random) -> None:
        self._folder = folder
        self._address = address
        self._reporter = reporter
        self._chance = chance
        self._client = Client(address)
        self._held: list[tuple[FetchedState, dict[str, torch.Tensor]]] = []
        self._deeds: dict[Callable[[], Awaitable[None]], int] = {
            self.fetch: 30,
            self.touch: 20,
            self.bind: 8,
            self.publish: 10,
            self.fetch_or_publish: 8,
            self.claim_and_think_again: 3,
            self.release: 12,
            self.load: 8,
            self.unload: 4,
            self.give_up: 6,
            self.scribble: 4,
            self.digests: 3,
            self.status: 2,
            self.pin: 1,
            self.block: 1,
            self.reconnect: 4,
        }

    async def run(self, until: float) -> None:
        await self._client.connect()
        while time.monotonic() < until:
            (deed,) = self._chance.choices(list(self._deeds), list(self._deeds.values()))
            name = deed.__name__
            try:
                async with asyncio.timeout(_HANG_S):
                    await deed()
                self._reporter.done[name] += 1
            except (ProtocolError, RequestFailed, DaemonLost) as error:
                self._reporter.tell(problem=f"{name}: {error!r}\n{traceback.format_exc()}")
                await self._client.connect()
            except WeightCacheError as error:
                self._reporter.refused[error.code] += 1
            except TimeoutError:
                self._reporter.tell(problem=f"{name} did not end within {_HANG_S:g} s")
            await asyncio.sleep(self._chance.expovariate(1 / _PAUSE_S))
        for state, held in self._held:
            self._check(state, held)
        await self._client.close()
        for state, held in self._held:  # Their lease is gone, and the memory is not.
            self._check(state, held)

    def _check(self, state: FetchedState, held: dict[str, torch.Tensor]) -> None:
        if not is_right(dict(state.config), held):
            raise AssertionError(f"wrong bytes in {state!r}")

    def _any_name(self) -> str:
        return self._chance.choice([*FILES, *MADE])

    def _new_config(self) -> Config:
        return {"seed": self._chance.randrange(100, 110), "rows": self._chance.choice((16, 512, 2048))}

    async def _attach(self, name: str) -> tuple[FetchedState, dict[str, torch.Tensor]]:
        backends = ["torch_ipc"] if self._chance.random() < 0.1 else None
        state = await self._client.fetch_state(name, timeout=5, backends=backends)
        got = await state.import_tensors()
        self._check(state, got)
        return state, got

    async def fetch(self) -> None:
        self._held.append(await self._attach(self._any_name()))
        if len(self._held) > _HELD:
            await self.release()

    async def touch(self) -> None:
        for state, held in self._held:
            self._check(state, held)

    async def bind(self) -> None:
        state = await self._client.fetch_state(self._any_name(), timeout=5)
        try:
            model = Model(int(state.config["rows"] or 0))
            await state.bind(model)
            self._check(state, dict(model.state_dict()))
        finally:
            await state.release()

    async def publish(self) -> None:
        config = self._new_config()
        built = tensors(int(config["seed"] or 0), int(config["rows"] or 0))
        await self._client.publish(self._chance.choice(MADE), built, config=config, replace=True)

    async def fetch_or_publish(self) -> None:
        config = self._new_config()
        seed, rows = int(config["seed"] or 0), int(config["rows"] or 0)
        name = self._chance.choice((*MADE, ""))
        state = await self._client.fetch_or_publish(name, lambda: tensors(seed, rows), config=config, timeout=5)
        self._check(state, await state.import_tensors())
        await state.release()

    async def claim_and_think_again(self) -> None:
        claimed = await self._client.claim(self._chance.choice(MADE), config=self._new_config(), timeout=5)
        if isinstance(claimed, Turn):
            await asyncio.sleep(self._chance.random())
            claimed.abandon()
        else:
            await claimed.release()

    async def release(self) -> None:
        if self._held:
            state, held = self._held.pop(self._chance.randrange(len(self._held)))
            await state.release()
            self._check(state, held)

    async def load(self) -> None:
        name = self._chance.choice(list(FILES))
        path = self._folder / f"{name}.safetensors"
        if self._chance.random() < 0.1:
            path = path.with_name("absent")
        replace, wait = self._chance.random() < 0.3, self._chance.random() < 0.7
        await self._client.load(path, name, config=dict(FILES[name]), replace=replace, wait=wait)

    async def unload(self) -> None:
        await self._client.unload(self._any_name())

    async def give_up(self) -> None:
        """Whatever it is, do not wait for its end."""
        deed = self._chance.choice((self.fetch, self.bind, self.publish, self.fetch_or_publish, self.load))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._chance.choice((0, 0.001, 0.01))):
                await deed()

    async def scribble(self) -> None:
        """A private page is the writer's alone: whoever else holds the state checks that."""
        state = await self._client.fetch_state(self._any_name(), timeout=5, backends=["shm_fd"])
        for tensor in (await state.import_tensors()).values():
            tensor.fill_(-1.0)
        await state.release()

    async def digests(self) -> None:
        if self._held:
            with contextlib.suppress(WeightCacheError):
                await self._chance.choice(self._held)[0].fetch_digests()

    async def status(self) -> None:
        await self._client.status()

    async def pin(self) -> None:
        name = self._any_name()
        await self._client.pin(name)
        await self._client.unpin(name)

    async def block(self) -> None:
        """A client whose own loop hangs, and all of its process's with it."""
        time.sleep(self._chance.random())  # noqa: ASYNC251

    async def reconnect(self) -> None:
        await self._client.close()
        self._client = Client(self._address, backends=self._chance.choice((None, ["shm_fd"], ["shm_fd", "torch_ipc"])))
        await self._client.connect()

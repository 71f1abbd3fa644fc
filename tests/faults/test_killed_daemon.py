"""kill -9 of a daemon at every step of what it does: who holds a state goes on, who waits is told, the next one starts.

The daemon is a real one in a process of its own.  It is told at which step to die, and does so by a
SIGKILL to itself: no handler, no clean-up, and no race with a killer outside.
"""

import asyncio
import functools
import importlib
import inspect
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch
import uvloop
from safetensors.torch import save_file

from tests.processes import Child, Forge, Peer
from wcache_async import Client, Daemon, ReconnectPolicy
from wcache_async.client.publish import Turn
from wcache_async.errors import DaemonLost, Draining

HELD = {"w": torch.arange(5000), "b": torch.ones(3)}
OTHER = {"v": torch.arange(9000)}

Step = tuple[str, str, int]
"""A function of the package as ``module:name``, whether before or after its call, and at which one."""


NEVER: Step = ("daemon.server:Server.refuse_for_lack_of_fds", "before", 1)


def die_at(step: Step) -> None:
    """Have this process killed at that step."""
    where, when, call = step
    module, _, name = where.partition(":")
    *owners, name = name.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(f"wcache_async.{module}"))
    original = getattr(owner, name)
    calls = 0

    def passed(moment: str) -> None:
        nonlocal calls
        calls += moment == "before"
        if moment == when and calls == call:
            os.kill(os.getpid(), signal.SIGKILL)

    if inspect.iscoroutinefunction(original):

        async def wrapped(*args: Any, **kwargs: Any) -> Any:
            passed("before")
            result = await original(*args, **kwargs)
            passed("after")
            return result

        setattr(owner, name, wrapped)
    else:

        def wrapped_too(*args: Any, **kwargs: Any) -> Any:
            passed("before")
            result = original(*args, **kwargs)
            passed("after")
            return result

        setattr(owner, name, wrapped_too)


def daemon_process(peer: Peer, path: str, checkpoint: str, at_start: Step | None = None) -> None:
    """Child: a daemon with one state, which dies at the step that it is told."""
    if at_start is not None:
        die_at(at_start)

    async def main() -> None:
        async with Daemon(path, drain_timeout=1) as daemon:
            await daemon.load(checkpoint, name="held")
            peer.send("ready")
            die_at(await asyncio.to_thread(peer.receive))
            peer.send("armed")
            await daemon.serve_forever()

    uvloop.run(main())


@pytest.fixture
def path(short_tmp: Path) -> str:
    return str(short_tmp / "run" / "w.sock")


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    save_file(HELD, tmp_path / "held.safetensors")
    save_file(OTHER, tmp_path / "other.safetensors")
    return str(tmp_path / "held.safetensors")


def same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in expected)


async def hear(child: Child) -> object:
    return await asyncio.to_thread(child.receive)


async def killed(child: Child) -> None:
    assert await asyncio.to_thread(lambda: child.exit_status) == -signal.SIGKILL


Trigger = Callable[[Client, Client, Path], Coroutine[None, None, list["asyncio.Task[object]"]]]


async def _load(client: Client, other: Client, folder: Path) -> list["asyncio.Task[object]"]:
    await other.claim("built")
    waiting = asyncio.create_task(client.fetch_state("built"))
    await client.status()
    return [asyncio.create_task(client.load(folder / "other.safetensors", "other")), waiting]


async def _export_once_more(client: Client, other: Client, folder: Path) -> list["asyncio.Task[object]"]:
    return [asyncio.create_task(each.fetch_state("held", backends=["torch_ipc"])) for each in (client, other)]


async def _fetch(client: Client, other: Client, folder: Path) -> list["asyncio.Task[object]"]:
    return [asyncio.create_task(client.fetch_state("held"))]


async def _publish(client: Client, other: Client, folder: Path) -> list["asyncio.Task[object]"]:
    turn = await client.claim("other")
    assert isinstance(turn, Turn)
    waiting = [asyncio.create_task(other.claim("other")), asyncio.create_task(other.fetch_state("other"))]
    await other.status()
    return [asyncio.create_task(turn.publish(OTHER)), *waiting]


async def _stop(client: Client, other: Client, folder: Path) -> list["asyncio.Task[object]"]:
    await other.claim("built")
    waiting = asyncio.create_task(client.claim("built"))
    await client.status()
    await other.stop()
    return [waiting]


LOAD: list[Step] = [
    ("daemon.exporter:Exporter.begin_load", "before", 1),
    ("sources.files:CheckpointFile.__init__", "after", 1),
    ("daemon.loading:Load.advance", "before", 1),
    ("backends.shm_fd:ShmFdTransportBackend.begin_export", "after", 1),
    ("sources.files:CheckpointFile.fill", "before", 1),
    ("sources.files:CheckpointFile.fill", "after", 1),
    ("backends.shm_fd:seal_memfd", "before", 1),
    ("backends.shm_fd:seal_memfd", "after", 1),
    ("daemon.exporter:run_load", "after", 1),
    ("daemon.exporter:Exporter._hold", "after", 1),
    ("daemon.exporter:Exporter.perform", "before", 1),
]
EXPORT: list[Step] = [
    ("daemon.exporter:copy_export", "before", 1),
    ("backends.shm_fd:ShmFdTransportBackend.read_arena", "after", 1),
    ("daemon.exporter:copy_export", "after", 1),
    ("daemon.exporter:Exporter._make_export", "after", 1),
]
SEND: list[Step] = [
    ("daemon.exporter:Exporter.grant", "before", 1),
    ("daemon.exporter:Exporter.grant", "after", 1),
    ("sockets.stream:FdStream.send", "before", 1),
    ("sockets.sender:Outgoing.batch", "after", 1),
]
ADOPT: list[Step] = [
    ("daemon.server:Session._publish", "before", 1),
    ("daemon.publishing:Publishing._receive", "before", 1),
    ("daemon.publishing:Publishing._receive", "after", 1),
    ("daemon.publishing:digest_export", "after", 1),
    ("daemon.exporter:Exporter.admit", "after", 1),
    ("daemon.exporter:Exporter.adopt", "before", 1),
    ("daemon.exporter:Exporter._hold", "after", 1),
]
STOP: list[Step] = [
    ("sockets.listen:Listener.close", "before", 1),
    ("sockets.listen:Listener.close", "after", 1),
    ("daemon.exporter:Exporter.stop_loading", "before", 1),
]
CASES = [
    pytest.param(trigger, step, id=f"{trigger.__name__[1:]}-{step[1]}-{step[0].rpartition(':')[2]}")
    for trigger, steps in ((_load, LOAD), (_export_once_more, EXPORT), (_fetch, SEND), (_publish, ADOPT), (_stop, STOP))
    for step in steps
]


@pytest.mark.asyncio(loop_factories=["uvloop"])  # It is the daemon's steps that differ; tests/client has both loops.
@pytest.mark.parametrize(("trigger", "step"), CASES)
async def test_killed_there_it_takes_nobody_along(
    forge: Forge, path: str, checkpoint: str, trigger: Trigger, step: Step
) -> None:
    with forge.start(daemon_process, path, checkpoint) as first:
        assert await hear(first) == "ready"
        async with Client(path) as holder, Client(path) as client, Client(path) as other:
            state = await holder.fetch_state("held")
            early = await state.import_tensors()
            for each in (client, other):
                await each.status()
            first.send(step)
            assert await hear(first) == "armed"
            # One that was shutting down has told them first.
            told = (DaemonLost, Draining) if trigger is _stop and "Listener" in step[0] else DaemonLost
            waiting = await trigger(client, other, Path(checkpoint).parent)
            await killed(first)
            async with asyncio.timeout(20):
                for result in await asyncio.gather(*waiting, return_exceptions=True):
                    assert isinstance(result, told), result
                await state.lost
            assert same(early, HELD)
            assert same(await state.import_tensors(), HELD)
            with forge.start(daemon_process, path, checkpoint) as second:
                assert await hear(second) == "ready"
                second.send(NEVER)
                await holder.reconnect(ReconnectPolicy(deadline=20))
                assert same(await (await holder.fetch_state("held")).import_tensors(), HELD)
                await holder.load(Path(checkpoint).with_name("other.safetensors"), "other")
                assert same(await (await holder.fetch_state("other")).import_tensors(), OTHER)
                await holder.stop()
                assert await asyncio.to_thread(lambda: second.exit_status) == 0
    assert os.listdir(os.path.dirname(path)) == []


START: list[Step] = [
    ("sockets.address:SocketLock.acquire", "after", 1),
    ("sockets.listen:_bind", "after", 1),
    ("sockets.address:SocketLock.adopt_socket", "before", 1),
    ("daemon.lifecycle:bind_listener", "after", 1),
]


@pytest.mark.asyncio(loop_factories=["uvloop"])
@pytest.mark.parametrize("step", START, ids=lambda step: f"{step[1]}-{step[0].rpartition(':')[2]}")
async def test_killed_while_it_starts_it_is_in_nobodys_way(
    forge: Forge, path: str, checkpoint: str, step: Step
) -> None:
    with forge.start(daemon_process, path, checkpoint, step) as first:
        await killed(first)
    with forge.start(daemon_process, path, checkpoint) as second:
        assert await hear(second) == "ready"
        second.send(NEVER)
        async with Client(path) as client:
            assert same(await (await client.fetch_state("held")).import_tensors(), HELD)
            await client.stop()
        assert await asyncio.to_thread(lambda: second.exit_status) == 0
    assert os.listdir(os.path.dirname(path)) == []

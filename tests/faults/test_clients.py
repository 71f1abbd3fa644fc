"""Clients in trouble: callbacks that raise, forks, a daemon that dies, nonsense asked for."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from wcache_async import Client, Daemon
from wcache_async.errors import BudgetExceeded, WeightCacheError


async def test_a_progress_callback_that_raises_fails_its_own_request_alone(daemon: Daemon) -> None:
    def progress(done: int, total: int) -> None:
        raise ValueError("no bar today")

    async with Client(daemon.socket_path) as builder, Client(daemon.socket_path) as client:
        turn = await builder.claim("m")
        async with asyncio.timeout(20):
            with pytest.raises(ValueError, match="no bar today"):
                await client.fetch_state("m", progress=progress)
            assert (await client.status()).states
            other = asyncio.create_task(client.fetch_state("m"))
            await client.status()
            await turn.publish({"w": torch.ones(2)})  # type: ignore[union-attr]
            assert torch.equal((await (await other).import_tensors())["w"], torch.ones(2))


# --------------------------------------------------------------------------------------- budgets
async def test_a_state_is_not_evicted_for_its_own_replacement_unfinished(short_tmp: Path) -> None:
    async with Daemon(short_tmp / "wcache.sock", max_bytes=3000) as daemon, Client(daemon.socket_path) as client:
        await client.publish("m", {"w": torch.ones(500)})
        with contextlib.suppress(BudgetExceeded):
            await client.publish("m", {"w": torch.zeros(500)}, replace=True)
        (state,) = daemon.status().states
        assert state.phase == "ready"
        assert (await client.fetch_state("m")).generation == state.generation


async def test_evictions_race_unloads(short_tmp: Path) -> None:
    """Whatever is unloaded while room is made, the publication is taken or refused for its own sake."""
    async with (
        Daemon(short_tmp / "wcache.sock", max_bytes=10_000) as daemon,
        Client(daemon.socket_path) as client,
        Client(daemon.socket_path) as other,
    ):
        for round_ in range(3):
            for number in range(4):
                await client.publish(f"m{number}", {"w": torch.ones(500)})
            results = await asyncio.gather(
                client.publish(f"big{round_}", {"w": torch.ones(2000)}),
                *(other.unload(f"m{number}") for number in range(4)),
                return_exceptions=True,
            )
            assert not isinstance(results[0], BaseException), results[0]
            await client.unload(f"big{round_}")
            for number in range(4):
                with contextlib.suppress(WeightCacheError):
                    await client.unload(f"m{number}")


# ------------------------------------------------------------------------------------- odd models
class Nested(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        module: nn.Module = nn.Linear(1, 1)
        for _ in range(depth):
            module = nn.Sequential(module)
        self.inner = module


async def test_a_module_nested_two_thousand_deep(daemon: Daemon) -> None:
    model = Nested(300)
    deep = Nested(0)
    for _ in range(1700):
        deep = nn.Sequential(deep)  # type: ignore[assignment]
    async with Client(daemon.socket_path) as client:
        for name, module in (("some", model), ("deep", deep)):
            try:
                await client.publish(name, module)
            except WeightCacheError:
                continue
            state = await client.fetch_state(name)
            await state.bind(module)


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"": torch.ones(1)},
        {"a/b\n\0\x1b[31m": torch.ones(1)},
        {"x" * 100_000: torch.ones(1)},
        {"s": torch.tensor(1.0)},
        {f"t{i}": torch.tensor(float(i)) for i in range(10_000)},
        {"e": torch.empty(0), "f": torch.empty(0, 3)},
    ],
    ids=["none", "no name", "control characters", "a long name", "a scalar", "10,000 scalars", "no elements"],
)
async def test_odd_named_tensors_come_back(daemon: Daemon, tensors: dict[str, torch.Tensor]) -> None:
    async with Client(daemon.socket_path) as client:
        await client.publish("m", tensors)
        got = await (await client.fetch_state("m")).import_tensors()
        assert list(got) == list(tensors)
        assert all(torch.equal(got[name], tensor) for name, tensor in tensors.items())


async def test_a_name_that_is_no_text_is_refused(daemon: Daemon) -> None:
    async with Client(daemon.socket_path) as client:
        with pytest.raises(WeightCacheError):
            await client.publish("m", {"\ud800": torch.ones(1)})
        with pytest.raises(WeightCacheError):
            await client.publish("\ud800", {"w": torch.ones(1)})
        with pytest.raises(WeightCacheError):
            await client.fetch_state("n" * 100_000)
        assert (await client.status()).states == ()


@pytest.mark.parametrize("value", [float("nan"), 2**64, -(2**63) - 1])
async def test_odd_configs(daemon: Daemon, value: float) -> None:
    async with Client(daemon.socket_path) as client:
        with contextlib.suppress(WeightCacheError):
            await client.publish("m", {"w": torch.ones(1)}, config={"x": value})
        with contextlib.suppress(WeightCacheError):
            await client.fetch_or_publish("", lambda: {"w": torch.ones(1)}, config={"x": value})
        await client.status()


# ------------------------------------------------------------------------------------ checkpoints
def odd_files(folder: Path) -> Iterator[Path]:
    os.mkfifo(folder / "fifo.safetensors")
    yield folder / "fifo.safetensors"
    (folder / "loop").symlink_to(folder / "loop")
    yield folder / "loop"
    (folder / "zero.safetensors").symlink_to("/dev/zero")
    yield folder / "zero.safetensors"
    yield Path("/dev/zero")
    (folder / "model").mkdir()
    os.mkfifo(folder / "model" / "model.safetensors.index.json")
    os.mkfifo(folder / "model" / "config.json")
    os.mkfifo(folder / "model" / "model.safetensors")
    yield folder / "model"
    (folder / "self").mkdir()
    (folder / "self" / "self").symlink_to(folder / "self")
    yield folder / "self"
    yield Path("/proc/self/mem")
    yield Path("/proc/kmsg")
    (folder / "nul").write_bytes(b"\xff" * 8 + b"{")
    yield folder / "nul"


async def test_checkpoints_that_are_none_fail_and_hold_nothing_up(daemon: Daemon, tmp_path: Path) -> None:
    async with Client(daemon.socket_path) as client:
        for number, path in enumerate(odd_files(tmp_path)):
            for kind in ("auto", "safetensors", "torch"):
                async with asyncio.timeout(30):
                    with pytest.raises(WeightCacheError):
                        await client.load(path, f"m{number}-{kind}", source=kind)


# ------------------------------------------------------------------------------------------ forks
FORKED = """
import os, sys, threading
from wcache_async import blocking
from wcache_async.errors import WeightCacheError
path = sys.argv[1]
client = blocking.Client(path)
client.__enter__()
state = client.fetch_state("m")
before = state.import_tensors()["w"].clone()
pid = os.fork()
if not pid:
    try:
        client.status()
        print("child asked over its parent's connection", flush=True)
    except WeightCacheError as error:
        print("refused", error.code, flush=True)
    assert (state.import_tensors()["w"] == before).all()
    state.release()
    client.close()
    with blocking.Client(path) as own:
        assert own.status().states[0].leases == 1, own.status()
        own.fetch_state("m").import_tensors()
    print("child done", flush=True)
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
assert client.status().states[0].leases == 1, client.status()
state.release()
assert client.status().states[0].leases == 0
client.close()
print("parent done", flush=True)
"""


async def test_a_forked_child_leaves_its_parents_connection_alone(daemon: Daemon) -> None:
    async with Client(daemon.socket_path) as client:
        await client.publish("m", {"w": torch.ones(2)})
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", FORKED, daemon.socket_path], capture_output=True, text=True, timeout=40
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["refused client_elsewhere", "child done", "parent done"], done.stderr


# ------------------------------------------------------------------------------- ends of processes
ENDING = """
import sys
from wcache_async import blocking
client = blocking.Client(sys.argv[1])
client.__enter__()
held = [client.fetch_state("m"), blocking.fetch_state("m", socket_path=sys.argv[1])]
tensors = held[0].import_tensors()
"""


async def test_a_process_that_ends_with_states_alive_ends_in_silence(daemon: Daemon) -> None:
    async with Client(daemon.socket_path) as client:
        await client.publish("m", {"w": torch.ones(2)})
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-X", "dev", "-W", "error", "-c", ENDING, daemon.socket_path],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


INTERRUPTED = """
import os, signal, sys, threading
from wcache_async import blocking
with blocking.Client(sys.argv[1]) as client:
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        client.fetch_state("m")
    except KeyboardInterrupt:
        print(client.status().clients)
"""


async def test_the_keyboard_interrupts_a_blocking_wait_and_the_connection_goes_on(daemon: Daemon) -> None:
    async with Client(daemon.socket_path) as client:
        await client.claim("m")
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", INTERRUPTED, daemon.socket_path],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr

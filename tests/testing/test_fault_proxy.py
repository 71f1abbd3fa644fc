"""A fetch through a proxy that goes wrong at a named place: a typed error each time, and nothing left behind.

The tests' own guard counts descriptors, so that one lost on any of these paths fails here.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from wcache_async import Client, Daemon
from wcache_async.errors import DaemonLost, ProtocolError
from wcache_async.testing.fault_proxy import Direction, Fault, FaultProxy, Fds

BACKENDS = ["shm_fd", "torch_ipc"]


@pytest.fixture
async def daemon(short_tmp: Path, tmp_path: Path) -> AsyncIterator[Daemon]:
    """A daemon with a small state `m`, and one in many storages and with a manifest of its own memfd, `n`."""
    save_file({"w": torch.arange(5), "b": torch.ones(2)}, tmp_path / "m.safetensors")
    save_file({f"layer.{i}.weight.long_enough": torch.full((2,), i) for i in range(1000)}, tmp_path / "n.safetensors")
    async with Daemon(short_tmp / "d.sock", drain_timeout=5) as running:
        for name in ("m", "n"):
            await running.load(tmp_path / f"{name}.safetensors", name=name)
        yield running


async def fetch(path: str, backend: str, name: str = "m") -> dict[str, torch.Tensor]:
    async with asyncio.timeout(30), Client(path, backends=[backend]) as client:
        state = await client.fetch_state(name)
        tensors = await state.import_tensors()
        await client.status()  # What came too much is noticed behind the message it came with.
        return tensors


async def assert_serves(daemon: Daemon) -> None:
    assert torch.equal((await fetch(daemon.socket_path, "shm_fd"))["w"], torch.arange(5))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("direction", Direction)
async def test_cut_at_every_byte_it_is_a_typed_error(
    daemon: Daemon, short_tmp: Path, backend: str, direction: Direction
) -> None:
    async with FaultProxy(short_tmp / "p.sock", daemon.socket_path, Fault()) as proxy:
        await fetch(proxy.path, backend)
        whole = proxy.passed[direction]
    assert whole > 50
    for cut in range(whole):
        fault = Fault(direction=direction, cut_after=cut)
        async with FaultProxy(short_tmp / "p.sock", daemon.socket_path, fault) as proxy:
            with pytest.raises((DaemonLost, ProtocolError)):
                await fetch(proxy.path, backend)
    await assert_serves(daemon)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("name", ["m", "n"])
async def test_byte_by_byte_it_arrives_all_the_same(
    daemon: Daemon, short_tmp: Path, backend: str, direction: Direction, name: str
) -> None:
    fault = Fault(direction=direction, split=True)
    async with FaultProxy(short_tmp / "p.sock", daemon.socket_path, fault) as proxy:
        assert len(await fetch(proxy.path, backend, name)) == (2 if name == "m" else 1000)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fds", [Fds.STRIP, Fds.DOUBLE, Fds.REPLACE])
@pytest.mark.parametrize("name", ["m", "n"])
async def test_descriptors_that_are_not_those_sent_are_refused(
    daemon: Daemon, short_tmp: Path, backend: str, fds: Fds, name: str
) -> None:
    async with FaultProxy(short_tmp / "p.sock", daemon.socket_path, Fault(fds=fds)) as proxy:
        # Doubled, they may be more than one message takes, which ends the proxy's connection.
        with pytest.raises((ProtocolError, DaemonLost)):
            await fetch(proxy.path, backend, name)
    await assert_serves(daemon)


async def test_descriptors_in_another_order_are_refused(daemon: Daemon, short_tmp: Path) -> None:
    """The manifest's and the arena's change places: neither is what the other was announced to be."""
    async with FaultProxy(short_tmp / "p.sock", daemon.socket_path, Fault(fds=Fds.SWAP)) as proxy:
        with pytest.raises(ProtocolError):
            await fetch(proxy.path, "shm_fd", "n")
    await assert_serves(daemon)


@pytest.mark.parametrize("turns", range(25))
async def test_cancelled_anywhere_nothing_is_left(daemon: Daemon, turns: int) -> None:
    """A fetch and import is given so many turns of the loop, then cancelled."""
    async with Client(daemon.socket_path) as client:

        async def attach() -> None:
            state = await client.fetch_state("n")
            try:
                await state.import_tensors()
            finally:
                await state.release()

        task = asyncio.create_task(attach())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait((task,))
        if not task.cancelled():
            task.result()
        await client.status()  # The connection goes on.
        async with asyncio.timeout(20):
            while sum(state.leases for state in daemon.status().states):
                await client.status()
    await assert_serves(daemon)

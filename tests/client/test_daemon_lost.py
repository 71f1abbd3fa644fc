"""When the daemon dies: what goes on, what is lost, and who is told."""

import asyncio
import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.backends.fake_cuda import FakeCudaIpc
from tests.processes import Child, Forge, Peer
from wcache_async import Client, Daemon, blocking
from wcache_async.backends.torch_ipc import TorchIpcTransportBackend
from wcache_async.client.fetch import FetchedState
from wcache_async.errors import DaemonLost

Tensors = dict[str, torch.Tensor]


def daemon_process(peer: Peer, path: str, checkpoint: str, backend: str, folder: str | None) -> None:
    """Child: a daemon with one state, on GPUs made of files if there is a folder for them."""
    if folder is not None:
        TorchIpcTransportBackend.cuda = FakeCudaIpc(Path(folder))

    async def main() -> None:
        device = "cpu" if folder is None else "cuda:0"
        async with Daemon(path, backend=backend, device=device, drain_timeout=1) as daemon:
            await daemon.load(checkpoint, name="m")
            peer.send("ready")
            while (word := await asyncio.to_thread(peer.receive)) != "stop":
                if word == "unload":
                    async with Client(path) as client:
                        await client.unload("m")
                peer.send(sum(state.leases for state in daemon.status().states))

    asyncio.run(main())


@pytest.fixture
def path(short_tmp: Path) -> str:
    return str(short_tmp / "w.sock")


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCudaIpc:
    folder = tmp_path / "gpus"
    folder.mkdir()
    fake = FakeCudaIpc(folder)
    monkeypatch.setattr(TorchIpcTransportBackend, "cuda", fake)
    return fake


@pytest.fixture
def gpu_daemon(forge: Forge, path: str, checkpoint: Path, gpus: FakeCudaIpc) -> Iterator[Child]:
    """A daemon on GPUs, in a process of its own."""
    child = forge.start(daemon_process, path, str(checkpoint), "torch_ipc", str(gpus.folder))
    try:
        assert child.receive() == "ready"
        yield child
    finally:
        child.close()


async def ask(child: Child, word: str) -> int:
    """How many leases the daemon counts once it has done what it was told."""
    child.send(word)
    count = await asyncio.to_thread(child.receive)
    assert isinstance(count, int)
    return count


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in another process
            await asyncio.sleep(0.01)


def same(got: Tensors, expected: Tensors) -> bool:
    return got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in expected)


async def kill(child: Child) -> None:
    child.kill()
    assert await asyncio.to_thread(lambda: child.exit_status) == -9


async def lost(state: FetchedState) -> None:
    async with asyncio.timeout(20):
        await state.lost


async def test_tensors_on_a_gpu_end_with_the_daemon_and_the_next_use_says_so(
    gpu_daemon: Child, path: str, tensors: Tensors
) -> None:
    told: list[DaemonLost] = []
    async with Client(path, on_daemon_lost=told.append) as client:
        state = await client.fetch_state("m")
        assert state.transport_backend == "torch_ipc"
        assert same(await state.import_tensors(), tensors)
        await kill(gpu_daemon)
        await lost(state)
        for use in (
            state.import_tensors,
            lambda: state.import_tensor("layer.bias"),
            lambda: state.bind(torch.nn.Linear(2, 2)),
            lambda: client.fetch_state("m"),
        ):
            with pytest.raises(DaemonLost):
                await use()
        await asyncio.sleep(0)
        (error,) = told
        assert error.socket == path
        await state.release()


@pytest.mark.parametrize("backend", ["shm_fd", "torch_ipc"])
async def test_tensors_on_the_cpu_go_on(
    forge: Forge, path: str, checkpoint: Path, tensors: Tensors, backend: str
) -> None:
    told: list[DaemonLost] = []
    with forge.start(daemon_process, path, str(checkpoint), backend, None) as child:
        assert await asyncio.to_thread(child.receive) == "ready"
        async with Client(path, on_daemon_lost=told.append) as client:
            state = await client.fetch_state("m")
            assert state.transport_backend == backend
            early = await state.import_tensors()
            await kill(child)
            await lost(state)
            assert same(early, tensors)
            assert same(await state.import_tensors(), tensors)
            await asyncio.sleep(0)
            assert len(told) == 1  # The connection is gone all the same, and with it the lease.


async def test_who_hangs_up_has_lost_nothing(daemon: Daemon, checkpoint: Path) -> None:
    await daemon.load(checkpoint, name="m")
    told: list[DaemonLost] = []
    async with Client(daemon.socket_path, on_daemon_lost=told.append) as client:
        state = await client.fetch_state("m")
    await lost(state)
    await asyncio.sleep(0)
    assert told == []


async def test_a_daemon_that_ends_in_order_is_lost_too(short_tmp: Path, checkpoint: Path) -> None:
    told: list[DaemonLost] = []
    async with Daemon(short_tmp / "w.sock") as daemon:
        await daemon.load(checkpoint, name="m")
        client = Client(daemon.socket_path, on_daemon_lost=told.append)
        await client.connect()
        state = await client.fetch_state("m")
    await lost(state)
    await asyncio.sleep(0)
    assert len(told) == 1
    await client.close()
    assert len(told) == 1


def test_code_without_a_loop_is_told_too(forge: Forge, path: str, checkpoint: Path) -> None:
    told: list[DaemonLost] = []
    with forge.start(daemon_process, path, str(checkpoint), "shm_fd", None) as child:
        assert child.receive() == "ready"
        with blocking.Client(path, on_daemon_lost=told.append) as client:
            client.fetch_state("m")
            child.kill()
            assert child.exit_status == -9
            with pytest.raises(DaemonLost):
                client.status()
        assert len(told) == 1


# ------------------------------------------------------------------------------ while it lives
async def test_a_released_state_keeps_its_lease_until_its_last_tensor_on_a_gpu_is_gone(
    gpu_daemon: Child, path: str, tensors: Tensors, gpus: FakeCudaIpc
) -> None:
    async with Client(path) as client:
        state = await client.fetch_state("m")
        got = await state.import_tensors()
        await state.release()
        await state.release()
        assert await ask(gpu_daemon, "unload") == 0  # Nothing is served under the name any more,
        assert len(gpus.allocations()) == 1
        assert same(got, tensors)  # and what was attached is intact.
        del got
        gc.collect()
        await eventually(lambda: gpus.allocations() == [])


def test_a_connection_of_the_states_own_lasts_as_long_as_its_last_tensor(
    gpu_daemon: Child, path: str, tensors: Tensors, gpus: FakeCudaIpc
) -> None:
    state = blocking.fetch_state("m", socket_path=path)
    got = state.import_tensors()
    state.release()
    gpu_daemon.send("unload")
    assert gpu_daemon.receive() == 0
    assert len(gpus.allocations()) == 1
    assert same(got, tensors)
    del got, state
    gc.collect()
    asyncio.run(eventually(lambda: gpus.allocations() == []))


async def test_a_state_released_unused_gives_its_lease_back_at_once(gpu_daemon: Child, path: str) -> None:
    async with Client(path) as client:
        state = await client.fetch_state("m")
        assert await ask(gpu_daemon, "leases") == 1
        await state.release()
        gc.collect()
        await client.status()  # The answer comes after the lease has gone.
        assert await ask(gpu_daemon, "leases") == 0


async def test_the_last_tensor_may_go_after_the_connection(gpu_daemon: Child, path: str) -> None:
    async with Client(path) as client:
        state = await client.fetch_state("m")
        got = await state.import_tensors()
        await state.release()
    del got
    gc.collect()
    await asyncio.sleep(0)
    assert await ask(gpu_daemon, "leases") == 0


async def test_a_killed_client_holds_a_gpus_memory_no_longer(
    gpu_daemon: Child, path: str, forge: Forge, gpus: FakeCudaIpc
) -> None:
    with forge.start(hold, path, str(gpus.folder)) as child:
        assert await asyncio.to_thread(child.receive) == "held"
        assert await ask(gpu_daemon, "unload") == 0
        assert len(gpus.allocations()) == 1
        await kill(child)
    await eventually(lambda: gpus.allocations() == [])


def hold(peer: Peer, path: str, folder: str) -> None:
    """Child: attach, and hold on."""
    TorchIpcTransportBackend.cuda = FakeCudaIpc(Path(folder))
    with blocking.Client(path) as client:
        tensors = client.fetch_state("m").import_tensors()
        peer.send("held")
        peer.receive()
        del tensors

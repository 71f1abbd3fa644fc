"""The whole path over vmm_fd: checkpoint, daemon, socket, client."""

import asyncio
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.conformance.cases import tensor_of
from tests.emulated_gpu.suite.rig import Emulator, contents, until
from tests.processes import Forge, Peer
from wcache_async import Client, Daemon, ReconnectPolicy, blocking
from wcache_async.errors import BackendUnavailable, DaemonLost, GenerationChanged, InsufficientMemory, WeightCacheError

GPU = "GPU-46414b45-4355-4441-0000-000000000000"


def weights() -> dict[str, torch.Tensor]:
    return {
        "embed.weight": tensor_of("bfloat16", 1 << 20, "cpu", seed=1).reshape(1024, 1024),
        "norm.weight": tensor_of("float32", 1000, "cpu", seed=2),
        "head.weight": tensor_of("float32", 3 << 18, "cpu", seed=3).reshape(768, 1024),
    }


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file(weights(), path)
    return path


async def test_a_checkpoint_is_served_from_the_gpu_and_outlives_the_daemon(
    checkpoint: Path, short_tmp: Path, emulator: Emulator
) -> None:
    path = short_tmp / "w.sock"
    before = emulator.used(0)
    async with Daemon(path, backend="vmm_fd", device="cuda:0", drain_timeout=5) as daemon:
        await daemon.load(str(checkpoint), name="m")
        async with Client(path) as client:
            state = await client.fetch_state("m")
            assert state.transport_backend == "vmm_fd"
            assert {arena.device for arena in state.manifest.arenas} == {GPU}
            assert state.resident_bytes == state.manifest.tensor_bytes == emulator.used(0) - before
            tensors = await state.import_tensors()
            assert contents(tensors) == contents(weights())
            second = await client.fetch_state("m")
            await second.release()
            await state.release()
    assert contents(tensors) == contents(weights())


async def test_a_state_larger_than_the_gpu_fails_with_the_sizes(
    checkpoint: Path, short_tmp: Path, emulator: Emulator
) -> None:
    path = short_tmp / "w.sock"
    async with Daemon(path, backend="vmm_fd", device="cuda:0", drain_timeout=5) as daemon:
        emulator.fail("cuMemCreate:*:OUT_OF_MEMORY")
        with pytest.raises(InsufficientMemory) as caught:
            await daemon.load(str(checkpoint), name="m")
        assert GPU in caught.value.limit
        emulator.fail("")
        await daemon.load(str(checkpoint), name="n")
        async with Client(path) as client:
            state = await client.fetch_state("n")
            assert contents(await state.import_tensors()) == contents(weights())
            await state.release()


async def test_what_the_daemon_cannot_do_is_an_error_at_its_start(short_tmp: Path) -> None:
    with pytest.raises(BackendUnavailable, match="cuda:7"):
        async with Daemon(short_tmp / "w.sock", backend="vmm_fd", device="cuda:7"):
            pass
    with pytest.raises(BackendUnavailable, match="not cpu"):
        async with Daemon(short_tmp / "w.sock", backend="vmm_fd", device="cpu"):
            pass


async def test_a_driver_error_while_sending_is_told_and_the_next_request_served(
    checkpoint: Path, short_tmp: Path, emulator: Emulator
) -> None:
    path = short_tmp / "w.sock"
    async with Daemon(path, backend="vmm_fd", device="cuda:0", drain_timeout=5) as daemon:
        await daemon.load(str(checkpoint), name="m")
        async with Client(path) as client:
            emulator.fail("cuMemExportToShareableHandle:1:SYSTEM_NOT_READY")
            with pytest.raises(WeightCacheError, match="SYSTEM_NOT_READY"):
                await client.fetch_state("m")
            state = await client.fetch_state("m")
            assert contents(await state.import_tensors()) == contents(weights())
            await state.release()


def serve(peer: Peer, path: str, checkpoint: str) -> None:
    """Child: a daemon on the emulator."""

    async def main() -> None:
        async with Daemon(path, backend="vmm_fd", device="cuda:0", drain_timeout=5) as daemon:
            await daemon.load(checkpoint, name="m")
            peer.send("ready")
            await daemon.serve_forever(handle_signals=True)

    asyncio.run(main())


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_an_engine_goes_on_when_the_daemon_is_gone(
    end: signal.Signals, checkpoint: Path, short_tmp: Path, forge: Forge
) -> None:
    path = str(short_tmp / "w.sock")
    with forge.start(serve, path, str(checkpoint)) as daemon:
        assert daemon.receive() == "ready"
        with blocking.Client(path) as client:
            tensors = client.fetch_state("m").import_tensors()
            daemon.kill(end)
            assert daemon.exit_status == (-9 if end is signal.SIGKILL else 0)
            assert contents(tensors) == contents(weights())


def serve_until(peer: Peer, path: str, checkpoint: str) -> None:
    """Child: a daemon that holds a state, and then meets the driver's faults that it is told."""

    async def main() -> None:
        async with Daemon(path, backend="vmm_fd", device="cuda:0", drain_timeout=5) as daemon:
            await daemon.load(checkpoint, name="m")
            peer.send("ready")
            Emulator().fail(await asyncio.to_thread(peer.receive))
            peer.send("armed")
            await daemon.serve_forever()

    asyncio.run(main())


@pytest.mark.parametrize(
    "fault",
    [
        *("cuMemCreate:1:kill", "cuMemAddressReserve:1:kill", "cuMemMap:1:kill", "cuMemSetAccess:1:kill"),
        *("cuMemcpy:1:kill", "cuCtxSynchronize:1:kill", "cuMemExportToShareableHandle:1:kill"),
    ],
)
async def test_a_daemon_killed_at_any_call_of_the_driver_takes_nobody_along(
    fault: str, checkpoint: Path, short_tmp: Path, forge: Forge
) -> None:
    path = str(short_tmp / "w.sock")
    with forge.start(serve_until, path, str(checkpoint)) as first:
        assert await asyncio.to_thread(first.receive) == "ready"
        async with Client(path) as client, Client(path) as other:
            state = await client.fetch_state("m")
            tensors = await state.import_tensors()
            await other.status()
            first.send(fault)
            assert await asyncio.to_thread(first.receive) == "armed"
            waiting = [asyncio.create_task(other.load(checkpoint, "n")), asyncio.create_task(other.claim("n"))]
            await asyncio.sleep(0)
            if "Export" in fault:
                waiting.append(asyncio.create_task(other.fetch_state("m")))
            for result in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(result, DaemonLost), result
            assert await asyncio.to_thread(lambda: first.exit_status) == -9
            await state.lost
            assert contents(tensors) == contents(weights())
            assert contents(await state.import_tensors()) == contents(weights())
            with forge.start(serve_until, path, str(checkpoint)) as second:
                assert await asyncio.to_thread(second.receive) == "ready"
                second.send("")
                await client.reconnect(ReconnectPolicy(deadline=20))
                again = await client.fetch_state("m")
                assert contents(await again.import_tensors()) == contents(weights())
                await state.sleep()
                with pytest.raises(DaemonLost):
                    await state.wake()  # Its lease ended with the daemon that gave it.
                await client.stop()
                assert await asyncio.to_thread(lambda: second.exit_status) == 0
            await again.release()
            await state.release()


async def test_a_state_sleeps_and_wakes_with_every_tensor_where_it_was(
    checkpoint: Path, short_tmp: Path, emulator: Emulator
) -> None:
    path = short_tmp / "w.sock"
    async with Daemon(path, backend="vmm_fd", device="cuda:0", drain_timeout=5) as daemon:
        await daemon.load(str(checkpoint), name="m")
        async with Client(path) as client:
            state = await client.fetch_state("m")
            tensors = await state.import_tensors()
            addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
            await state.sleep()
            await state.wake()
            assert {name: tensor.data_ptr() for name, tensor in tensors.items()} == addresses
            assert contents(tensors) == contents(weights())
            await until(lambda: daemon.status().states[0].leases == 1)  # The one it slept with is given back.
            await state.sleep()
            await daemon.load(str(checkpoint), name="m", replace=True)
            with pytest.raises(GenerationChanged) as caught:
                await state.wake()
            assert (caught.value.expected, caught.value.actual) == (1, 2)
            await state.release()


async def test_what_cannot_sleep_says_so(short_tmp: Path, checkpoint: Path) -> None:
    path = short_tmp / "w.sock"
    async with Daemon(path, drain_timeout=5) as daemon:
        await daemon.load(str(checkpoint), name="m")
        async with Client(path) as client:
            state = await client.fetch_state("m")
            with pytest.raises(BackendUnavailable, match="shm_fd"):
                await state.sleep()

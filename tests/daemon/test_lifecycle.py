"""Lock, bind, load, drain, gone: the order, and that nothing is left behind."""

import asyncio
import os
import signal
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from wcache_async import Client, Daemon
from wcache_async.errors import (
    AddressInUse,
    AddressTooLong,
    BackendUnavailable,
    InsufficientMemory,
    InvalidRequest,
    UnknownBackend,
)
from wcache_async.testing.scripted_peer import ScriptedPeer


async def test_leaving_removes_every_file(short_tmp: Path, write_checkpoint: Callable[..., Path]) -> None:
    async with Daemon(short_tmp / "s.sock") as daemon:
        await daemon.load(write_checkpoint(), name="m")
        assert "s.sock" in {path.name for path in short_tmp.iterdir()}
    assert list(short_tmp.iterdir()) == []


async def test_a_second_daemon_is_refused_before_it_does_anything(short_tmp: Path) -> None:
    async with Daemon(short_tmp / "s.sock") as daemon:
        with pytest.raises(AddressInUse) as caught:
            await Daemon(short_tmp / "s.sock").start()
        assert caught.value.pid == os.getpid()
        async with Client(daemon.socket_path) as client:
            await client.status()


async def test_an_impossible_backend_is_an_error_at_start_and_leaves_nothing(short_tmp: Path) -> None:
    with pytest.raises(UnknownBackend):
        await Daemon(short_tmp / "s.sock", backend="carrier_pigeon").start()
    with pytest.raises(BackendUnavailable):
        await Daemon(short_tmp / "s.sock", backend="shm_fd", device="cuda:0").start()
    assert list(short_tmp.iterdir()) == []


async def test_a_path_the_kernel_cannot_take_is_refused(short_tmp: Path) -> None:
    with pytest.raises(AddressTooLong):
        await Daemon(short_tmp / ("x" * 120)).start()


async def test_a_state_is_visible_as_soon_as_its_load_is_begun(
    daemon: Daemon, write_checkpoint: Callable[..., Path]
) -> None:
    daemon.begin_load(write_checkpoint(), name="m")
    assert daemon.status().states[0].phase == "loading"
    with pytest.raises(InvalidRequest):
        daemon.begin_load(write_checkpoint(), name="")


async def test_a_stop_request_is_answered_before_the_daemon_goes(short_tmp: Path) -> None:
    async with Daemon(short_tmp / "s.sock") as daemon:
        serving = asyncio.create_task(daemon.serve_forever())
        async with Client(daemon.socket_path) as client:
            assert await client.stop() == os.getpid()
        await asyncio.wait_for(serving, 20)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signals_end_serving(short_tmp: Path, number: signal.Signals) -> None:
    async with Daemon(short_tmp / "s.sock") as daemon:
        serving = asyncio.create_task(daemon.serve_forever(handle_signals=True))
        async with Client(daemon.socket_path) as client:
            await client.status()  # So that the handlers are in place.
        os.kill(os.getpid(), number)
        await asyncio.wait_for(serving, 20)
    assert list(short_tmp.iterdir()) == []


async def test_a_drain_ends_silent_and_attached_clients_alike(
    short_tmp: Path, write_checkpoint: Callable[..., Path]
) -> None:
    async with Daemon(short_tmp / "s.sock") as daemon:
        await daemon.load(write_checkpoint(), name="m")
        async with Client(daemon.socket_path) as client, ScriptedPeer.connect(daemon.socket_path) as silent:
            state = await client.fetch_state("m")
            await asyncio.wait_for(daemon.close(), 20)
            await asyncio.wait_for(state.lost, 20)
            await silent.hear()
    assert list(short_tmp.iterdir()) == []


def test_using_a_daemon_that_is_not_running_is_told_plainly(short_tmp: Path) -> None:
    with pytest.raises(RuntimeError, match="async with Daemon"):
        Daemon(short_tmp / "s.sock").status()


async def test_a_state_that_does_not_fit_into_memory_fails_with_the_sizes_before_it_takes_any(
    daemon: Daemon, tmp_path: Path
) -> None:
    nbytes = 1 << 42
    header = msgspec.json.encode({"w": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}})
    huge = tmp_path / "huge.safetensors"
    with huge.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        try:
            file.truncate(8 + len(header) + nbytes)  # All of it a hole.
        except OSError:
            pytest.skip("needs a file system that takes a sparse file of 4 TiB")
    with pytest.raises(InsufficientMemory) as caught:
        await daemon.load(huge, name="huge")
    assert caught.value.needed >= nbytes
    assert 0 < caught.value.available < nbytes
    (state,) = daemon.status().states
    assert state.phase == "failed"
    assert state.error == str(caught.value)

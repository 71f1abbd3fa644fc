"""Fetching: what a state says, its tensors, its lease, and what happens when things go away."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from wcache_async import Client, Daemon
from wcache_async.backends.shm_fd import ShmFdTransportBackend
from wcache_async.client import fetch
from wcache_async.errors import (
    BackendNotAccepted,
    ClientClosed,
    ConfigMismatch,
    DaemonLost,
    Draining,
    InvalidRequest,
    LoadingTimeout,
    NotRunning,
    StateExists,
    StateFailed,
    StateNotFound,
    StateReleased,
    StateUnloaded,
    WeightCacheError,
)
from wcache_async.sources.base import Advance
from wcache_async.sources.safetensors import SafetensorsSource

Tensors = dict[str, torch.Tensor]


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in the kernel and in other tasks
            await asyncio.sleep(0)


def assert_same(got: Tensors, expected: Tensors) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype
        assert got[name].shape == tensor.shape
        assert torch.equal(got[name], tensor), name


async def test_a_state_says_what_it_is_and_gives_its_tensors(
    daemon: Daemon, checkpoint: Path, tensors: Tensors
) -> None:
    await daemon.load(checkpoint, name="m", rank=2, config={"revision": "main"})
    async with Client(daemon.socket_path) as client:
        state = await client.fetch_state("m", rank=2)
        assert (state.name, state.rank, state.generation, state.transport_backend) == ("m", 2, 1, "shm_fd")
        assert state.config["revision"] == "main"
        assert state.config["source"] == "safetensors"
        assert state.daemon_pid > 0
        assert state.resident_bytes >= sum(t.nbytes for t in tensors.values())
        assert {entry.name for entry in state.manifest.tensors} == tensors.keys()
        assert_same(await state.import_tensors(), tensors)
        assert torch.equal(await state.import_tensor("layer.bias"), tensors["layer.bias"])
        with pytest.raises(KeyError):
            await state.import_tensor("absent")


@pytest.mark.parametrize(("at_once", "on_the_loops_thread"), [(2, True), (1, False)])
async def test_only_few_tensors_are_imported_on_the_loops_thread(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int, on_the_loops_thread: bool
) -> None:
    """Few take less than a switch to another thread; many would hold the loop up."""
    two = {"a": torch.ones(3), "b": torch.ones(4)}
    save_file(two, tmp_path / "two.safetensors")
    await daemon.load(tmp_path / "two.safetensors", name="two")
    threads: list[int] = []
    really_import = ShmFdTransportBackend.import_tensors

    def tell_thread(backend: ShmFdTransportBackend) -> Tensors:
        threads.append(threading.get_ident())
        return really_import(backend)

    monkeypatch.setattr(fetch, "_AT_ONCE", at_once)
    monkeypatch.setattr(ShmFdTransportBackend, "import_tensors", tell_thread)
    async with Client(daemon.socket_path) as client:
        assert_same(await (await client.fetch_state("two")).import_tensors(), two)
    assert [thread == threading.get_ident() for thread in threads] == [on_the_loops_thread]


async def test_tensors_outlive_release_client_and_daemon(daemon: Daemon, checkpoint: Path, tensors: Tensors) -> None:
    await daemon.load(checkpoint, name="m")
    async with Client(daemon.socket_path) as client:
        state = await client.fetch_state("m")
        got = await state.import_tensors()
        await state.release()
        await state.release()
        with pytest.raises(StateReleased):
            await state.import_tensors()
    await daemon.close()
    assert_same(got, tensors)


async def test_a_client_may_fetch_several_states_at_once(daemon: Daemon, checkpoint: Path, tensors: Tensors) -> None:
    for rank in range(4):
        await daemon.load(checkpoint, name="m", rank=rank)
    async with Client(daemon.socket_path) as client:
        states = await asyncio.gather(*[client.fetch_state("m", rank=i % 4) for i in range(16)])
        assert [state.rank for state in states] == [i % 4 for i in range(16)]
        for state in states:
            assert_same(await state.import_tensors(), tensors)
        assert sum(s.leases for s in daemon.status().states) == 16
    await eventually(lambda: sum(s.leases for s in daemon.status().states) == 0)


async def test_a_mismatch_names_each_field_with_both_values(daemon: Daemon, checkpoint: Path) -> None:
    await daemon.load(checkpoint, name="m", config={"tp_size": 2, "revision": "a"})
    async with Client(daemon.socket_path) as client:
        with pytest.raises(ConfigMismatch) as caught:
            await client.fetch_state("m", expect={"tp_size": 4, "revision": "a", "quantization": "fp8"})
        assert caught.value.differences == {"tp_size": [4, 2], "quantization": ["fp8", None]}
        assert "tp_size: expected 4, the state has 2" in str(caught.value)
        await client.fetch_state("m", expect={"tp_size": 2})


async def test_no_daemon_is_told_at_once_with_the_path(short_tmp: Path) -> None:
    path = short_tmp / "nobody.sock"
    with pytest.raises(NotRunning) as caught:
        await Client(path).connect()
    assert str(path) in str(caught.value)


async def test_a_client_not_entered_is_told_so(short_tmp: Path) -> None:
    with pytest.raises(ClientClosed):
        await Client(short_tmp / "x.sock").status()


async def test_an_unaccepted_backend_is_no_silent_fallback(daemon: Daemon, checkpoint: Path) -> None:
    await daemon.load(checkpoint, name="m")
    async with Client(daemon.socket_path, backends=["vmm_fd"]) as client:
        with pytest.raises(BackendNotAccepted) as caught:
            await client.fetch_state("m")
    assert caught.value.accepted == ["vmm_fd"]
    assert "shm_fd" in caught.value.exportable


class Gate:
    """Holds every read of a safetensors source until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import threading

        self._opened = threading.Event()
        self.reached = threading.Event()
        read = SafetensorsSource.read

        def gated(source: SafetensorsSource, storage: int, into: memoryview, advance: Advance) -> None:
            self.reached.set()
            while not self._opened.wait(0.01):
                advance(0)  # So that a cancelled load ends.
            read(source, storage, into, advance)

        monkeypatch.setattr(SafetensorsSource, "read", gated)

    def open(self) -> None:
        self._opened.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


async def test_a_fetch_waits_for_a_loading_state_and_hears_its_progress(
    daemon: Daemon, checkpoint: Path, tensors: Tensors, gate: Gate
) -> None:
    daemon.begin_load(checkpoint, name="m")
    total = sum(t.nbytes for t in tensors.values())
    heard: list[tuple[int, int]] = []
    async with Client(daemon.socket_path) as client:
        fetching = asyncio.create_task(client.fetch_state("m", progress=lambda *p: heard.append(p)))
        await eventually(lambda: (0, total) in heard)
        gate.open()
        state = await fetching
        assert_same(await state.import_tensors(), tensors)


async def test_a_fetch_waits_no_longer_than_its_timeout(daemon: Daemon, checkpoint: Path, gate: Gate) -> None:
    daemon.begin_load(checkpoint, name="m")
    async with Client(daemon.socket_path) as client:
        await eventually(gate.reached.is_set)
        with pytest.raises(LoadingTimeout) as caught:
            await client.fetch_state("m", timeout=0.01)
        assert caught.value.bytes_total > 0
    gate.open()


async def test_other_requests_are_answered_while_one_waits(daemon: Daemon, checkpoint: Path, gate: Gate) -> None:
    daemon.begin_load(checkpoint, name="m")
    async with Client(daemon.socket_path) as client:
        fetching = asyncio.create_task(client.fetch_state("m"))
        status = await client.status()
        assert status.states[0].phase == "loading"
        assert not fetching.done()
        gate.open()
        await fetching


async def test_a_cancelled_fetch_gives_its_lease_back(daemon: Daemon, checkpoint: Path, gate: Gate) -> None:
    daemon.begin_load(checkpoint, name="m")
    async with Client(daemon.socket_path) as client:
        fetching = asyncio.create_task(client.fetch_state("m"))
        await client.status()  # Behind the fetch on the same connection, so it has arrived.
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        gate.open()
        state = await client.fetch_state("m")
        await eventually(lambda: daemon.status().states[0].leases == 1)
        await state.import_tensors()


async def test_unloading_under_a_waiting_fetch_tells_it(daemon: Daemon, checkpoint: Path, gate: Gate) -> None:
    daemon.begin_load(checkpoint, name="m")
    async with Client(daemon.socket_path) as client:
        fetching = asyncio.create_task(client.fetch_state("m"))
        await eventually(gate.reached.is_set)
        assert (await client.unload("m")).unloaded == ("m:0",)
        with pytest.raises(StateUnloaded):
            await fetching
    gate.open()
    await eventually(lambda: not daemon.status().states)


async def test_draining_under_a_waiting_fetch_tells_it(daemon: Daemon, checkpoint: Path, gate: Gate) -> None:
    daemon.begin_load(checkpoint, name="m")
    async with Client(daemon.socket_path) as client:
        fetching = asyncio.create_task(client.fetch_state("m"))
        await eventually(gate.reached.is_set)
        closing = asyncio.create_task(daemon.close())
        with pytest.raises(Draining):
            await fetching
        await closing


@pytest.fixture
def truncated(checkpoint: Path) -> bytes:
    """The checkpoint lacks its last byte; these are its bytes when it is whole."""
    whole = checkpoint.read_bytes()
    checkpoint.write_bytes(whole[:-1])
    return whole


async def test_a_failed_load_keeps_its_reason_and_may_be_mended(
    daemon: Daemon, checkpoint: Path, truncated: bytes, tensors: Tensors
) -> None:
    async with Client(daemon.socket_path) as client:
        with pytest.raises(WeightCacheError) as failed:
            await client.load(checkpoint, "m")
        with pytest.raises(StateFailed) as caught:
            await client.fetch_state("m")
        assert caught.value.reason == str(failed.value)
        assert (await client.status()).states[0].phase == "failed"
        await asyncio.to_thread(checkpoint.write_bytes, truncated)
        loaded = await client.load(checkpoint, "m")
        assert (loaded.phase, loaded.generation) == ("ready", 2)
        assert_same(await (await client.fetch_state("m")).import_tensors(), tensors)


async def test_a_new_generation_never_disturbs_holders_of_the_old(
    daemon: Daemon, checkpoint: Path, tensors: Tensors, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    await daemon.load(checkpoint, name="m")
    newer = tmp_path / "newer.safetensors"
    save_file({"embed.weight": torch.ones(2)}, newer)
    async with Client(daemon.socket_path) as client:
        old = await client.fetch_state("m")
        with pytest.raises(StateExists):
            await client.load(newer, "m")
        await client.load(newer, "m", replace=True)
        new = await client.fetch_state("m")
        assert (old.generation, new.generation) == (1, 2)
        assert_same(await old.import_tensors(), tensors)
        assert_same(await new.import_tensors(), {"embed.weight": torch.ones(2)})


async def test_a_lost_daemon_completes_lost_and_fails_the_next_request(
    daemon: Daemon, checkpoint: Path, tensors: Tensors
) -> None:
    await daemon.load(checkpoint, name="m")
    async with Client(daemon.socket_path) as client:
        state = await client.fetch_state("m")
        await daemon.close()
        async with asyncio.timeout(20):
            await state.lost
        with pytest.raises(DaemonLost):
            await client.status()
        assert_same(await state.import_tensors(), tensors)
        await state.release()


async def test_unknown_names_list_what_there_is(daemon: Daemon, checkpoint: Path) -> None:
    await daemon.load(checkpoint, name="m", rank=1)
    async with Client(daemon.socket_path) as client:
        with pytest.raises(StateNotFound) as caught:
            await client.fetch_state("n")
        assert caught.value.available == ["m:1"]
        with pytest.raises(StateNotFound):
            await client.unload("n")


@pytest.mark.parametrize(
    ("arguments", "field", "reason"),
    [
        ({"timeout": -1}, "timeout", ">= 0"),
        ({"rank": -1}, "rank", ">= 0"),
        ({"name": 5}, "name", "got `int`"),
        ({"expect": {"dtype": torch.float32}}, "expect['dtype']", "torch.float32 is a torch.dtype; it takes text"),
        ({"expect": {"shape": (1, 2)}}, "expect['shape']", "(1, 2) is a tuple"),
        ({"expect": {"size": 2**70}}, "body", ""),
        ({"name": "\ud800"}, "body", "surrogates"),
    ],
)
async def test_an_argument_that_no_message_can_carry_is_refused_and_the_connection_goes_on(
    daemon: Daemon, checkpoint: Path, arguments: dict[str, Any], field: str, reason: str
) -> None:
    await daemon.load(checkpoint, name="m")
    async with Client(daemon.socket_path) as client:
        held = await client.fetch_state("m")
        with pytest.raises(InvalidRequest) as caught:
            await client.fetch_state(**{"name": "m", **arguments})
        assert caught.value.field == field
        assert reason in caught.value.reason
        assert (await client.status()).states[0].leases == 1
        await held.release()


async def test_a_request_after_the_daemon_hung_up_is_told_why(daemon: Daemon, short_tmp: Path) -> None:
    """Whether the reader or the sender notices first: never the stream's own error."""
    for _ in range(20):
        async with Client(daemon.socket_path) as client:
            await client.status()
            await daemon.close()
            with pytest.raises(DaemonLost):
                await client.status()
        await daemon.start()

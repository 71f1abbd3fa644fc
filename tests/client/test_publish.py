"""Publishing: what was built is handed over once, and one client builds while the others wait."""

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from wcache_async import Client, Daemon, FetchedState
from wcache_async.backends.base import WeightCacheTransportBackend
from wcache_async.backends.carried import pack_manifest
from wcache_async.backends.memfd import create_memfd, sealed_memfd
from wcache_async.client.publish import Turn
from wcache_async.errors import (
    BudgetExceeded,
    BuildNotGranted,
    ConfigMismatch,
    DaemonLost,
    InvalidManifest,
    InvalidMemfd,
    LoadingTimeout,
    ModuleError,
    StateExists,
    StateNotFound,
    StateUnloaded,
    WeightCacheError,
)
from wcache_async.manifest import StateManifest, StateSpec, TensorSpec, build_manifest, plan_layout
from wcache_async.modules.export import export_state
from wcache_async.protocol.connection import Received
from wcache_async.protocol.messages import ErrorResponse, Publish, PublishResponse
from wcache_async.sockets.fds import OwnedFd
from wcache_async.testing.scripted_peer import ScriptedPeer

Tensors = dict[str, torch.Tensor]


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in the kernel and in other tasks
            await asyncio.sleep(0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)


async def test_a_published_module_is_attached_by_others_exactly(daemon: Daemon) -> None:
    original = Model().eval()
    async with Client(daemon.socket_path) as publisher, Client(daemon.socket_path) as other:
        status = await publisher.publish("m", original, config={"dtype": "float32"})
        assert (status.phase, status.config, status.tensors) == ("ready", {"dtype": "float32"}, 2)
        state = await other.fetch_state("m", expect={"dtype": "float32"})
        module = await state.create_module(Model)
        assert module.head.weight is module.embed.weight
        assert torch.equal(module.embed.weight, original.embed.weight)
        assert not module.training
        assert "scale" not in module.state_dict()


async def test_a_published_state_outlives_its_publisher(daemon: Daemon, tensors: Tensors) -> None:
    async with Client(daemon.socket_path) as publisher:
        await publisher.publish("m", tensors)
    async with Client(daemon.socket_path) as other:
        got = await (await other.fetch_state("m")).import_tensors()
    assert all(torch.equal(got[name], tensor) for name, tensor in tensors.items())


async def test_rebind_moves_the_publishers_own_module_onto_the_arenas(daemon: Daemon) -> None:
    module = Model()
    before = module.embed.weight
    values = before.detach().clone()
    address = before.data_ptr()
    async with Client(daemon.socket_path) as publisher:
        await publisher.publish("m", module, rebind=True)
        assert module.embed.weight is before
        assert module.embed.weight.data_ptr() != address
        assert torch.equal(module.embed.weight, values)
        maps = Path(f"/proc/{os.getpid()}/maps").read_text()
        assert "wcache-arena" in maps


async def test_a_name_in_use_is_refused_and_replaced_on_request(daemon: Daemon) -> None:
    async with Client(daemon.socket_path) as client:
        await client.publish("m", {"w": torch.zeros(3)})
        old = await client.fetch_state("m")
        with pytest.raises(StateExists):
            await client.publish("m", {"w": torch.ones(3)})
        status = await client.publish("m", {"w": torch.ones(3)}, replace=True)
        assert status.generation == 2
        assert torch.equal((await old.import_tensors())["w"], torch.zeros(3))
        assert torch.equal((await (await client.fetch_state("m")).import_tensors())["w"], torch.ones(3))


async def test_what_cannot_be_exported_leaves_everything_as_it_was(daemon: Daemon) -> None:
    async with Client(daemon.socket_path) as client:
        with pytest.raises(ModuleError):
            await client.publish("m", nn.Linear(1, 1, device="meta"))
        assert daemon.status().states == ()


@pytest.mark.parametrize(
    ("built", "said"),
    [
        (5, "the module cannot be kept exactly: a value of type int is neither a module nor a mapping "),
        ({"w": 3.0}, "w cannot be kept exactly: a value of type float is no tensor"),
    ],
)
async def test_a_build_that_gives_no_tensors_is_told_so_and_the_turn_passed_on(
    daemon: Daemon, built: Any, said: str
) -> None:
    async with Client(daemon.socket_path) as client:
        with pytest.raises(ModuleError) as caught:
            await client.fetch_or_publish("m", lambda: built)
        assert str(caught.value).startswith(said)
        assert (await client.fetch_or_publish("m", lambda: {"w": torch.ones(1)})).built_here


async def test_a_publish_cancelled_while_it_copies_leaves_nothing(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that copies goes on for a while; its arenas are closed when it is done."""
    copying, go_on = threading.Event(), threading.Event()

    def slow(built: Any, backend: WeightCacheTransportBackend) -> StateManifest:
        copying.set()
        assert go_on.wait(20)
        return export_state(built, backend)

    monkeypatch.setattr("wcache_async.client.publish.export_state", slow)
    async with Client(daemon.socket_path) as client:
        await client.status()  # By now the daemon has opened what it opens for a client.
        before = set(os.listdir("/proc/self/fd"))
        publishing = asyncio.create_task(client.publish("m", {"w": torch.zeros(1 << 20)}))
        await eventually(copying.is_set)
        publishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await publishing
        exporting = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        go_on.set()
        await eventually(lambda: sum(not task.done() for task in exporting) < len(exporting))
        await eventually(lambda: set(os.listdir("/proc/self/fd")) == before)
        assert daemon.status().states == ()


# ---------------------------------------------------------------------------- one builder at a time
async def test_one_of_many_builds_and_all_attach(daemon: Daemon) -> None:
    built = 0

    def build() -> Tensors:
        nonlocal built
        built += 1
        return {"w": torch.arange(5)}

    async def one() -> bool:
        async with Client(daemon.socket_path) as client:
            state = await client.fetch_or_publish("m", build, config={"tp": 1})
            assert torch.equal((await state.import_tensors())["w"], torch.arange(5))
            return state.built_here

    assert sorted(await asyncio.gather(*[one() for _ in range(8)])) == [False] * 7 + [True]
    assert built == 1


@pytest.mark.parametrize("end", ["raises", "cancelled", "disconnects"])
async def test_when_a_builder_ends_the_next_waiter_builds_at_once(daemon: Daemon, end: str) -> None:
    building = asyncio.Event()
    hold = asyncio.Event()

    async def fails() -> Tensors:
        building.set()
        await hold.wait()
        raise ArithmeticError("no weights here")

    async with Client(daemon.socket_path) as first, Client(daemon.socket_path) as second:
        failing = asyncio.create_task(first.fetch_or_publish("m", fails))
        await building.wait()
        waiting = asyncio.create_task(second.fetch_or_publish("m", lambda: {"w": torch.ones(1)}))
        plain = asyncio.create_task(second.fetch_state("m"))
        assert (await second.status()).states[0].phase == "loading"
        if end == "raises":
            hold.set()
            with pytest.raises(ArithmeticError):
                await failing
        elif end == "cancelled":
            failing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await failing
        else:
            await first.close()
        assert (await waiting).built_here
        assert torch.equal((await (await plain).import_tensors())["w"], torch.ones(1))
        hold.set()
        if end == "disconnects":
            with pytest.raises((ArithmeticError, WeightCacheError)):
                await failing


async def test_a_build_nobody_takes_over_is_as_if_it_had_never_been(daemon: Daemon) -> None:
    def fails() -> Tensors:
        raise ArithmeticError

    async with Client(daemon.socket_path) as client, Client(daemon.socket_path) as other:
        with pytest.raises(ArithmeticError):
            await client.fetch_or_publish("m", fails)
        await eventually(lambda: daemon.status().states == ())
        with pytest.raises(StateNotFound):
            await other.fetch_state("m")


async def test_a_waiter_that_goes_is_never_granted_anything(daemon: Daemon) -> None:
    building, hold = asyncio.Event(), asyncio.Event()

    async def build() -> Tensors:
        building.set()
        await hold.wait()
        raise ArithmeticError

    async with Client(daemon.socket_path) as first, Client(daemon.socket_path) as third:
        failing = asyncio.create_task(first.fetch_or_publish("m", build))
        await building.wait()
        gone = Client(daemon.socket_path)
        await gone.connect()
        never = asyncio.create_task(gone.fetch_or_publish("m", lambda: {"w": torch.zeros(1)}))
        await first.status()
        await gone.close()
        with pytest.raises(WeightCacheError):
            await never
        last = asyncio.create_task(third.fetch_or_publish("m", lambda: {"w": torch.ones(2)}))
        await third.status()
        hold.set()
        with pytest.raises(ArithmeticError):
            await failing
        assert (await last).built_here


async def test_a_turn_that_comes_too_late_is_passed_on(daemon: Daemon) -> None:
    """A claim cancelled as its turn was granted holds nobody up, though its client lives on."""
    async with Client(daemon.socket_path) as first, Client(daemon.socket_path) as second:
        turn = await first.claim("m")
        assert isinstance(turn, Turn)
        cancelled = asyncio.create_task(second.claim("m"))
        await eventually(lambda: daemon.status().clients == 2)
        await second.status()
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        turn.abandon()
        async with asyncio.timeout(20):
            state = await first.fetch_or_publish("m", lambda: {"w": torch.ones(1)})
        assert state.built_here


async def test_a_turn_is_ended_by_publishing_where_the_claimer_likes(daemon: Daemon) -> None:
    async with Client(daemon.socket_path) as client:
        turn = await client.claim("", config={"tp": 1})
        assert isinstance(turn, Turn)
        state = await turn.publish({"w": torch.ones(2)})
        assert state.built_here
        again = await client.claim("", config={"tp": 1})
        assert isinstance(again, FetchedState)
        assert again.name == state.name


async def test_configs_that_differ_under_one_name_are_a_mismatch_and_side_by_side_under_none(daemon: Daemon) -> None:
    async with Client(daemon.socket_path) as client:
        await client.fetch_or_publish("m", lambda: {"w": torch.zeros(1)}, config={"tp": 1})
        with pytest.raises(ConfigMismatch) as caught:
            await client.fetch_or_publish("m", lambda: {"w": torch.zeros(1)}, config={"tp": 2})
        assert caught.value.differences == {"tp": [2, 1]}
        one = await client.fetch_or_publish("", lambda: {"w": torch.ones(1)}, config={"tp": 1})
        two = await client.fetch_or_publish("", lambda: {"w": torch.ones(2)}, config={"tp": 2})
        again = await client.fetch_or_publish("", lambda: {"w": torch.ones(3)}, config={"tp": 1})
        assert one.name == again.name != two.name
        assert (one.built_here, two.built_here, again.built_here) == (True, True, False)


async def test_a_stage_tells_states_of_one_config_apart(daemon: Daemon) -> None:
    async with Client(daemon.socket_path) as client:
        raw = await client.fetch_or_publish("", lambda: {"w": torch.ones(1)}, config={"tp": 1}, stage="raw")
        fused = await client.fetch_or_publish("", lambda: {"w": torch.ones(2)}, config={"tp": 1}, stage="fused")
        assert raw.name != fused.name
        assert (raw.config["stage"], fused.config["stage"]) == ("raw", "fused")


async def test_waiting_for_a_builder_ends_with_the_timeout(daemon: Daemon) -> None:
    hold = asyncio.Event()

    async def build() -> Tensors:
        await hold.wait()
        return {"w": torch.zeros(1)}

    async with Client(daemon.socket_path) as first, Client(daemon.socket_path) as second:
        building = asyncio.create_task(first.fetch_or_publish("m", build))
        await eventually(lambda: bool(daemon.status().states))
        with pytest.raises(LoadingTimeout):
            await second.fetch_or_publish("m", build, timeout=0.01)
        hold.set()
        await building


async def test_unloading_a_build_refuses_its_publication(daemon: Daemon) -> None:
    building, hold = asyncio.Event(), asyncio.Event()

    async def build() -> Tensors:
        building.set()
        await hold.wait()
        return {"w": torch.zeros(1)}

    async with Client(daemon.socket_path) as client:
        publishing = asyncio.create_task(client.fetch_or_publish("m", build))
        await building.wait()
        await client.unload("m")
        hold.set()
        with pytest.raises(StateUnloaded):
            await publishing
        assert daemon.status().states == ()


async def test_a_lost_daemon_fails_the_builder_too(short_tmp: Path) -> None:
    building, hold = asyncio.Event(), asyncio.Event()

    async def build() -> Tensors:
        building.set()
        await hold.wait()
        return {"w": torch.zeros(1)}

    daemon = Daemon(short_tmp / "s.sock", drain_timeout=5)
    await daemon.start()
    async with Client(daemon.socket_path) as client:
        publishing = asyncio.create_task(client.fetch_or_publish("m", build))
        await building.wait()
        await daemon.close()
        hold.set()
        with pytest.raises(DaemonLost):
            await publishing


# ------------------------------------------------------------------------------- memory budget
@pytest.fixture
async def small(short_tmp: Path) -> Any:
    """A daemon that holds two states of 64 KiB, no more."""
    async with Daemon(short_tmp / "small.sock", drain_timeout=5, max_bytes=140_000) as running:
        yield running


def weights(value: float) -> Tensors:
    return {"w": torch.full((16_384,), float(value))}


async def test_the_least_recently_used_state_that_nobody_holds_makes_room(small: Daemon) -> None:
    async with Client(small.socket_path) as client:
        await client.publish("a", weights(1))
        await client.publish("b", weights(2))
        state = await client.fetch_state("a")
        await state.release()
        await client.publish("c", weights(3))
        assert [s.name for s in small.status().states] == ["a", "c"]


async def test_held_and_pinned_states_are_never_evicted(small: Daemon) -> None:
    async with Client(small.socket_path) as client:
        await client.publish("a", weights(1))
        await client.publish("b", weights(2))
        held = await client.fetch_state("a")
        assert await client.pin("b") == ("b:0",)
        with pytest.raises(BudgetExceeded) as caught:
            await client.publish("c", weights(3))
        assert (caught.value.max_bytes, caught.value.evictable) == (140_000, 0)
        assert [s.name for s in small.status().states] == ["a", "b"]
        await client.unpin("b")
        await client.publish("c", weights(3))
        assert [s.name for s in small.status().states] == ["a", "c"]
        assert torch.equal((await held.import_tensors())["w"], weights(1)["w"])


async def test_a_load_that_does_not_fit_fails_before_it_takes_memory(small: Daemon, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "big.safetensors"
    save_file({"w": torch.zeros(100_000)}, path)
    with pytest.raises(BudgetExceeded):
        await small.load(path, name="big")
    async with Client(small.socket_path) as client:
        await client.publish("a", weights(1))


async def test_pinning_what_is_not_there_is_an_error(small: Daemon) -> None:
    async with Client(small.socket_path) as client:
        with pytest.raises(StateNotFound):
            await client.pin("a")


# -------------------------------------------------------------------------- lying publishers
def manifest(nbytes: int = 64) -> StateManifest:
    spec = StateSpec(storages=(nbytes,), tensors=(TensorSpec(name="w", dtype="uint8", shape=(nbytes,), storage=0),))
    return build_manifest(spec, plan_layout(spec.storages))


def arena_payload(nbytes: int) -> bytes:
    import msgspec

    return msgspec.msgpack.encode({"arenas": [nbytes]})


def unsealed(nbytes: int) -> OwnedFd:
    return create_memfd("unsealed", nbytes)


def short(nbytes: int) -> OwnedFd:
    return sealed_memfd("short", bytes(nbytes - 1))


def null(_: int) -> OwnedFd:
    return OwnedFd(os.open("/dev/null", os.O_RDONLY))


@pytest.mark.parametrize("make", [unsealed, short, null], ids=lambda make: make.__name__)
async def test_a_publishers_arena_is_checked_before_it_is_adopted(
    daemon: Daemon, make: Callable[[int], OwnedFd]
) -> None:
    inline, _, nbytes = pack_manifest(manifest())
    request = Publish(
        name="m",
        manifest=inline,
        manifest_nbytes=nbytes,
        transport_backend="shm_fd",
        payload=arena_payload(64),
    )
    with make(64) as fd:
        async with ScriptedPeer.connect(daemon.socket_path) as peer:
            await peer.greet()
            await peer.say(1, request, [fd.fileno()])
            event = await peer.hear()
            assert isinstance(event, Received)
            assert isinstance(event.message, ErrorResponse)
            assert isinstance(event.message.to_error(), InvalidMemfd)
            assert daemon.status().states == ()
            with sealed_memfd("good", bytes(64)) as good:  # The connection goes on.
                await peer.say(2, request, [good.fileno()])
                event = await peer.hear()
                assert isinstance(event, Received)
                assert isinstance(event.message, PublishResponse)
    await eventually(lambda: daemon.status().clients == 0)


@pytest.mark.parametrize("fds", [0, 2])
async def test_too_few_and_too_many_fds_are_refused(daemon: Daemon, fds: int) -> None:
    inline, _, nbytes = pack_manifest(manifest())
    request = Publish(
        name="m", manifest=inline, manifest_nbytes=nbytes, transport_backend="shm_fd", payload=arena_payload(64)
    )
    with sealed_memfd("a", bytes(64)) as one, sealed_memfd("b", bytes(64)) as two:
        async with ScriptedPeer.connect(daemon.socket_path) as peer:
            await peer.greet()
            await peer.say(1, request, [one.fileno(), two.fileno()][:fds])
            event = await peer.hear()
            assert isinstance(event, Received)
            assert isinstance(event.message, ErrorResponse)
            assert event.message.code in ("fds_truncated", "fds_undeclared")
    assert daemon.status().states == ()


async def test_a_manifest_that_contradicts_its_arenas_is_refused(daemon: Daemon) -> None:
    inline, _, nbytes = pack_manifest(manifest(128))
    request = Publish(
        name="m", manifest=inline, manifest_nbytes=nbytes, transport_backend="shm_fd", payload=arena_payload(64)
    )
    with sealed_memfd("a", bytes(64)) as fd:
        async with ScriptedPeer.connect(daemon.socket_path) as peer:
            await peer.greet()
            await peer.say(1, request, [fd.fileno()])
            event = await peer.hear()
            assert isinstance(event, Received)
            assert isinstance(event.message, ErrorResponse)
            assert isinstance(event.message.to_error(), InvalidManifest)


async def test_a_ticket_is_good_for_its_holder_alone(daemon: Daemon) -> None:
    inline, _, nbytes = pack_manifest(manifest())
    request = Publish(
        name="m",
        manifest=inline,
        manifest_nbytes=nbytes,
        transport_backend="shm_fd",
        payload=arena_payload(64),
        ticket=1,
    )
    with sealed_memfd("a", bytes(64)) as fd:
        async with ScriptedPeer.connect(daemon.socket_path) as peer:
            await peer.greet()
            await peer.say(1, request, [fd.fileno()])
            event = await peer.hear()
            assert isinstance(event, Received)
            assert isinstance(event.message, ErrorResponse)
            assert isinstance(event.message.to_error(), BuildNotGranted)

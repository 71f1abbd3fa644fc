"""What every transport backend keeps, whichever memory it uses."""

import asyncio
import gc
import os
import socket
from functools import partial

import pytest
import torch

from tests.conformance import states
from tests.conformance.cases import BackendCase, StateBuilder, raw_bytes
from tests.conformance.peers import attached, client, daemon, served, starved_client
from tests.conformance.wire import StreamSender, blank_response, connect, fetch
from tests.processes import Child, Forge
from wcache_async.errors import ExportError, StateReleased, StateUnloaded
from wcache_async.manifest import Kind
from wcache_async.sockets.fds import OwnedFd

BUILDERS = (states.every_dtype, states.shapes, states.shared_storages, states.strided, states.thousand, states.weights)


def differences(build: StateBuilder, tensors: dict[str, torch.Tensor]) -> list[str]:
    """Where `tensors` are not exactly what `build` makes."""
    expected = build("cpu")
    if list(expected) != list(tensors):
        return [f"names: {list(tensors)}"]
    wrong = []
    for name, (want, _) in expected.items():
        got = tensors[name]
        if (got.shape, got.dtype, got.stride()) != (want.shape, want.dtype, want.stride()):
            wrong.append(f"{name}: {got.shape} {got.dtype} {got.stride()}")
        elif raw_bytes(got.contiguous()) != raw_bytes(want.contiguous()):
            wrong.append(f"{name}: bytes")
    return wrong


def clear_buffer(tensors: dict[str, torch.Tensor]) -> list[str]:
    """What differed before this process overwrote a buffer."""
    before = differences(states.weights, tensors)
    tensors["running_mean"].zero_()
    return before


async def said(child: Child) -> object:
    return await asyncio.to_thread(child.receive)


async def finish(child: Child) -> None:
    child.send("done")
    assert await asyncio.to_thread(lambda: child.exit_status) == 0


# ---------------------------------------------------------------------------------- what arrives
@pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__)
async def test_another_process_sees_every_tensor_exactly(case: BackendCase, build: StateBuilder, forge: Forge) -> None:
    async with served(case.name, build) as state:
        with forge.start(client, state.dial(), partial(differences, build)) as child:
            assert await said(child) == []
            await finish(child)


async def test_one_tensor_at_a_time_is_the_same_as_all_at_once(case: BackendCase) -> None:
    async with attached(case.name, states.strided) as (backend, manifest):
        every = await asyncio.to_thread(backend.import_tensors)
        for entry in manifest.tensors:
            one = await asyncio.to_thread(backend.import_tensor, entry)
            assert one is not every[entry.name]
            assert differences(lambda _, t=one, n=entry.name: {n: (t, True)}, {entry.name: every[entry.name]}) == []  # type: ignore[misc]


async def test_manifest_tells_kinds_gradients_and_order(case: BackendCase) -> None:
    backend = case.backend()
    tensors = states.weights(case.device)
    manifest = await asyncio.to_thread(backend.prepare_export, tensors)
    assert [(entry.name, entry.kind, entry.requires_grad) for entry in manifest.tensors] == [
        ("weight", Kind.PARAMETER, True),
        ("frozen", Kind.PARAMETER, False),
        ("running_mean", Kind.BUFFER, False),
    ]
    assert backend.resident_bytes >= sum(tensor.nbytes for tensor, _ in tensors.values())
    backend.close()


async def test_buffers_named_non_persistent_are_told_apart(case: BackendCase) -> None:
    backend = case.backend()
    manifest = await asyncio.to_thread(
        partial(backend.prepare_export, states.weights(case.device), non_persistent={"running_mean"})
    )
    assert manifest.tensors[-1].kind is Kind.NON_PERSISTENT_BUFFER
    backend.close()


# -------------------------------------------------------------------------------------- sharing
async def test_one_object_under_three_names_is_one_object_again(case: BackendCase) -> None:
    async with attached(case.name, states.tied) as (backend, manifest):
        tensors = await asyncio.to_thread(backend.import_tensors)
        assert list(tensors) == ["embed.weight", "other.weight", "head.weight", "head2.weight"]
        assert tensors["head.weight"] is tensors["embed.weight"]
        assert tensors["head2.weight"] is tensors["embed.weight"]
        assert tensors["other.weight"].data_ptr() != tensors["embed.weight"].data_ptr()
        assert len({entry.storage for entry in manifest.tensors}) == 2


async def test_views_of_one_storage_are_views_of_one_storage_again(case: BackendCase) -> None:
    async with attached(case.name, states.shared_storages) as (backend, manifest):
        tensors = await asyncio.to_thread(backend.import_tensors)
        start = tensors["fused"].data_ptr()
        assert tensors["q"].data_ptr() == start
        assert tensors["kv"].data_ptr() == start + 4 * 8 * 4
        assert tensors["bits"].data_ptr() == start
        assert not start <= tensors["alone"].data_ptr() < start + tensors["fused"].nbytes
        numbers = {entry.name: entry.storage for entry in manifest.tensors}
        assert len({numbers[name] for name in ("fused", "q", "kv", "bits")}) == 1


async def test_shared_storages_are_carried_once(case: BackendCase) -> None:
    backend = case.backend()
    block = torch.zeros(1 << 20, dtype=torch.uint8, device=case.device)
    views = {f"part{i}": (block[i * 1000 :], False) for i in range(50)}
    await asyncio.to_thread(backend.prepare_export, views)
    assert block.nbytes <= backend.resident_bytes < 4 * block.nbytes
    backend.close()


# ----------------------------------------------------------------------------- ordinary tensors
async def test_tensors_are_plain_leaves_with_version_counters_of_their_own(case: BackendCase) -> None:
    async with attached(case.name, states.weights) as (backend, _):
        with torch.inference_mode():  # A caller's mode must not show in what it is given.
            tensors = backend.import_tensors()
        for tensor in tensors.values():
            assert tensor.is_leaf
            assert not tensor.requires_grad
            assert not tensor._is_view()
            assert not tensor.is_inference()
        weight = tensors["weight"]
        tensors["running_mean"].add_(1)
        assert tensors["running_mean"]._version == 1
        assert weight._version == 0


async def test_a_parameter_made_of_one_takes_gradients(case: BackendCase) -> None:
    async with attached(case.name, states.weights) as (backend, _):
        tensors = await asyncio.to_thread(backend.import_tensors)
        weight = torch.nn.Parameter(tensors["weight"])
        loss = (weight * 2).sum()
        tensors["running_mean"].add_(1)  # Through a shared counter this would spoil the backward pass.
        torch.autograd.backward(loss)
        assert weight.grad is not None
        assert bool((weight.grad == 2).all())


# ------------------------------------------------------------------------- several, and their ends
async def test_a_clients_write_reaches_nobody_else(case: BackendCase, forge: Forge) -> None:
    if not case.backend().capabilities.read_only:
        pytest.skip(f"{case.name} says that it does not promise this")
    async with served(case.name, states.weights) as state:
        report = partial(differences, states.weights)
        with (
            forge.start(client, state.dial(), report) as reader,
            forge.start(client, state.dial(), clear_buffer) as writer,
        ):
            assert await said(reader) == []
            assert await said(writer) == []
            writer.send("again")
            assert await said(writer) == ["running_mean: bytes"]
            reader.send("again")
            assert await said(reader) == []
            with forge.start(client, state.dial(), report) as later:
                assert await said(later) == []
                await finish(later)
            await finish(writer)
            await finish(reader)


async def test_a_killed_client_costs_the_daemon_and_the_next_client_nothing(case: BackendCase, forge: Forge) -> None:
    async with served(case.name, states.weights) as state:
        report = partial(differences, states.weights)
        with forge.start(client, state.dial(), report) as child:
            assert await said(child) == []
            child.kill()
            assert await asyncio.to_thread(lambda: child.exit_status) == -9
        with forge.start(client, state.dial(), report) as child:
            assert await said(child) == []
            await finish(child)


async def test_tensors_outlive_a_killed_daemon(case: BackendCase, forge: Forge) -> None:
    if not case.backend().capabilities_on(case.device).survives_daemon_exit:
        pytest.skip(f"{case.name} says that it does not promise this")
    ours, theirs = socket.socketpair()
    with forge.start(daemon, theirs, case.name, states.weights) as child:
        assert await said(child) == "ready"
        stream = await connect(ours)
        backend, _ = await fetch(stream)
        early = await asyncio.to_thread(backend.import_tensors)
        child.kill()
        assert await asyncio.to_thread(lambda: child.exit_status) == -9
        await stream.wait_closed()
        late = await asyncio.to_thread(backend.import_tensors)
        backend.close()
        stream.close()
        assert differences(states.weights, early) == []
        assert differences(states.weights, late) == []


async def test_tensors_outlive_the_clients_release_and_the_daemons_unload(case: BackendCase) -> None:
    async with attached(case.name, states.weights) as (backend, manifest):
        tensors = await asyncio.to_thread(backend.import_tensors)
        assert backend.resident_bytes > 0
        backend.close()
        backend.close()
        assert backend.resident_bytes == 0
        gc.collect()
        assert differences(states.weights, tensors) == []
        with pytest.raises(StateReleased) as caught:
            backend.import_tensors()
        assert (caught.value.name, caught.value.rank) == ("state", 0)
        with pytest.raises(StateReleased):
            backend.import_tensor(manifest.tensors[0])


async def test_a_closed_export_is_not_sent(case: BackendCase) -> None:
    async with served(case.name, states.weights) as state:
        stream = await connect(state.dial())
        state.backend.close()
        fd = OwnedFd(os.dup(0))
        with pytest.raises(StateUnloaded):
            await state.backend.send_fetch_state_response(StreamSender(stream, 1), blank_response(state.manifest), [fd])
        assert fd.closed
        stream.close()


# --------------------------------------------------------------------------------- what is refused
async def test_a_client_without_descriptors_is_told_and_the_next_one_served(case: BackendCase, forge: Forge) -> None:
    async with served(case.name, states.weights) as state:
        with forge.start(starved_client, state.dial()) as child:
            assert await said(child) == "fds_truncated"
        with forge.start(client, state.dial(), partial(differences, states.weights)) as child:
            assert await said(child) == []
            await finish(child)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("kind", ["meta", "sparse", "quantized", "conjugate"])
async def test_what_cannot_be_carried_is_refused_by_name(case: BackendCase, kind: str) -> None:
    tensor = {
        "meta": lambda: torch.empty(3, device="meta"),
        "sparse": lambda: torch.eye(3, device=case.device).to_sparse(),
        "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "conjugate": lambda: torch.ones(3, dtype=torch.complex64, device=case.device).conj(),
    }[kind]()
    state = {"good": (torch.ones(4, device=case.device), True), "bad": (tensor, False)}
    backend = case.backend()
    assert not backend.can_export_state(state)
    assert backend.can_export_state({"good": state["good"]})
    with pytest.raises(ExportError) as caught:
        await asyncio.to_thread(backend.prepare_export, state)
    assert caught.value.tensor == "bad"
    assert caught.value.backend == case.name
    assert backend.resident_bytes == 0
    backend.close()

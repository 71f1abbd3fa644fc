"""Between processes: whoever dies, the others go on; and devices are told by UUID."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.conformance.wire import connect, fetch, serve
from tests.emulated_gpu.suite import children
from tests.emulated_gpu.suite.rig import Emulator, contents, expected, exported
from tests.processes import Child, Forge
from wcache_async.backends.vmm_fd import VmmFdTransportBackend
from wcache_async.manifest import StateManifest


class Serving:
    def __init__(self, backend: VmmFdTransportBackend, manifest: StateManifest, tasks: asyncio.TaskGroup) -> None:
        self.backend, self.manifest, self._tasks = backend, manifest, tasks

    def dial(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        self._tasks.create_task(serve(ours, self.backend, self.manifest))
        return theirs


@asynccontextmanager
async def serving(backend: VmmFdTransportBackend, manifest: StateManifest) -> AsyncIterator[Serving]:
    try:
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            yield Serving(backend, manifest, tasks)
    finally:
        await asyncio.to_thread(backend.close)


async def said(child: Child) -> object:
    return await asyncio.to_thread(child.receive)


async def refusal(child: Child) -> tuple[str, str]:
    """The code and the text of the error that the child met."""
    outcome = await said(child)
    assert isinstance(outcome, tuple), outcome
    code, text = outcome
    return str(code), str(text)


async def ended(child: Child) -> int:
    return await asyncio.to_thread(lambda: child.exit_status)


async def finish(child: Child) -> None:
    child.send("done")
    assert await ended(child) == 0


# --------------------------------------------------------------------------------------- deaths
async def test_tensors_outlive_the_exporter_killed(forge: Forge, emulator: Emulator) -> None:
    ours, theirs = socket.socketpair()
    with forge.start(children.daemon, theirs, {}) as child:
        assert await said(child) == "ready"
        stream = await connect(ours)
        backend, _ = await fetch(stream)
        tensors = backend.import_tensors()
        child.kill()
        assert await ended(child) == -9
        stream.close()
    assert contents(tensors) == expected()
    again = backend.import_tensors()
    backend.close()
    assert contents(again) == expected()


@pytest.mark.parametrize(
    ("where", "fault"),
    [
        ("between receipt and import", "cuMemImportFromShareableHandle:1:kill"),
        ("between import and map", "cuMemMap:2:kill"),
        ("between map and set access", "cuMemSetAccess:2:kill"),
        ("while copying buffers", "cuMemcpy:1:kill"),
    ],
)
async def test_a_client_killed_half_way_costs_nobody_anything(
    where: str, fault: str, forge: Forge, emulator: Emulator
) -> None:
    async with exported() as (backend, manifest), serving(backend, manifest) as state:
        before = emulator.held(), emulator.used(0)
        with forge.start(children.client, state.dial(), {"FAKECUDA_FAIL": fault}) as child:
            assert await ended(child) == -9, where
        assert (emulator.held(), emulator.used(0)) == before
        with forge.start(children.client, state.dial(), {}) as child:
            assert await said(child) == children.mixed_digests()
            await finish(child)
        assert (emulator.held(), emulator.used(0)) == before


async def test_memory_goes_when_the_last_process_goes(forge: Forge, emulator: Emulator) -> None:
    before = emulator.used(0)
    async with exported() as (backend, manifest), serving(backend, manifest) as state:
        with forge.start(children.client, state.dial(), {}) as child:
            assert await said(child) == children.mixed_digests()
            held = emulator.used(0)
            assert held == before + manifest.tensor_bytes
            await asyncio.to_thread(backend.close)
            assert emulator.used(0) == held
            child.send("again")
            assert await said(child) == children.mixed_digests()
            await finish(child)
        assert emulator.used(0) == before


# -------------------------------------------------------------------------------------- devices
async def test_a_device_is_the_same_one_under_another_number(forge: Forge) -> None:
    """Peer access is off: another GPU's memory could not be mapped for the device."""
    content = bytes(range(200)) * 3
    for device, ordinals in (("cuda:1", "1,0"), ("cuda:0", "1,0"), ("cuda:1", "1")):
        backend, manifest = await asyncio.to_thread(children.one_on, device, content)
        async with serving(backend, manifest) as state:
            environment = {"CUDA_VISIBLE_DEVICES": ordinals, "FAKECUDA_P2P": "0"}
            with forge.start(children.client, state.dial(), environment) as child:
                seen = await said(child)
                assert seen == children.digests_of({"w": content}), (device, ordinals, seen)
                await finish(child)


async def test_a_device_that_is_not_seen_is_named(forge: Forge) -> None:
    backend, manifest = await asyncio.to_thread(children.one_on, "cuda:1", b"x")
    async with serving(backend, manifest) as state:
        with forge.start(children.client, state.dial(), {"CUDA_VISIBLE_DEVICES": "0"}) as child:
            code, text = await refusal(child)
        assert code == "backend_unavailable"
        assert "on GPU-46414b45-4355-4441-0000-000000000001" in text
        assert "sees GPU-46414b45-4355-4441-0000-000000000000" in text
        assert "CUDA_VISIBLE_DEVICES" in text
        # An instance in MIG mode is such a device: one with a UUID that nobody else has.
        with forge.start(children.client, state.dial(), {"FAKECUDA_SEED": "9"}) as child:
            code, text = await refusal(child)
        assert code == "backend_unavailable"
        assert "MIG" in text


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"FAKECUDA_DEVICES": "0"}, "CUDA_ERROR_NO_DEVICE"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "CUDA_ERROR_NO_DEVICE"),
        ({"FAKECUDA_ATTR": "102=0"}, "virtual memory management"),
        ({"FAKECUDA_ATTR": "103=0"}, "file descriptors"),
        ({"FAKECUDA_DEVICES": "1"}, "cuda:1 was asked for, and this process sees GPU-"),
        ({"FAKECUDA_DRIVER_VERSION": "10010"}, "cannot be called"),
    ],
)
async def test_what_a_machine_lacks_is_said(environment: dict[str, str], text: str, forge: Forge) -> None:
    with forge.start(children.begin_export, "cuda:1", environment) as child:
        code, said_ = await refusal(child)
        assert code == "backend_unavailable"
        assert text in said_
        assert "'vmm_fd' cannot work here" in said_
        assert await ended(child) == 0


@pytest.mark.parametrize(
    "call",
    [
        *("cuInit", "cuDeviceGetCount", "cuDeviceGetUuid", "cuDeviceGetAttribute"),
        *("cuDevicePrimaryCtxRetain", "cuCtxPushCurrent", "cuMemGetAllocationGranularity", "cuCtxPopCurrent"),
    ],
)
@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_a_call_that_fails_when_a_device_is_first_used(call: str, forge: Forge) -> None:
    """And the next try finds the device: nothing of the failure is remembered."""
    with forge.start(children.use_device_twice, {"FAKECUDA_FAIL": f"{call}:1:SYSTEM_NOT_READY"}) as child:
        code, text = await refusal(child)
        assert code in ("cuda_driver_error", "backend_unavailable")
        assert call in text
        assert "SYSTEM_NOT_READY" in text
        second, contexts = await said(child), await said(child)
        assert second == "GPU-46414b45-4355-4441-0000-000000000000"
        assert contexts == 1, "a context was retained that nothing uses"


@pytest.mark.parametrize("device", ["cpu", "cuda:", "cuda:x", "cuda:-1", "xpu:0", "GPU-unknown"])
async def test_no_device_by_that_name(device: str, forge: Forge) -> None:
    with forge.start(children.begin_export, device, {}) as child:
        code, said_ = await refusal(child)
        assert code == "backend_unavailable"
        assert device in said_


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "GPU-46414b45-4355-4441-0000-000000000000"])
async def test_names_of_the_first_device(device: str, forge: Forge) -> None:
    with forge.start(children.begin_export, device, {}) as child:
        assert await said(child) == "GPU-46414b45-4355-4441-0000-000000000000"


async def test_a_process_forked_after_cuda_was_used_is_told_so(forge: Forge) -> None:
    with forge.start(children.forked_after_use) as child:
        code, said_ = await refusal(child)
        assert code == "backend_unavailable"
        assert "spawn" in said_


async def test_every_call_is_made_in_a_context(forge: Forge) -> None:
    with forge.start(children.strict_round_trip) as child:
        assert await said(child) == children.mixed_digests()


async def test_a_write_to_a_parameter_is_an_illegal_access(forge: Forge) -> None:
    with forge.start(children.write_to_a_parameter) as child:
        code, text = await refusal(child)
        assert code == "cuda_driver_error"
        assert "CUDA_ERROR_ILLEGAL_ADDRESS" in text


# ------------------------------------------------------------------------------------- at the end
def test_an_interpreter_ends_quietly_with_states_alive() -> None:
    program = """
import asyncio
from tests.emulated_gpu.suite.rig import attach, export, mixed_state
async def main():
    global backend, client, tensors, manifest
    backend, manifest = await asyncio.to_thread(export, mixed_state())
    client = await attach(backend, manifest)
    tensors = client.import_tensors()
asyncio.run(main())
import sys, torch
torch.kept = tensors["first"][1:]
sys.modules["kept"] = tensors["second"]
cycle = [tensors["large"]]
cycle.append(cycle)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")

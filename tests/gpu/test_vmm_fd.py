"""vmm_fd on a real GPU: what the driver answers, and what the emulator cannot show."""

import asyncio
import json

import pytest
import torch

from tests.conformance.wire import blank_response
from tests.emulated_gpu import conformance
from tests.emulated_gpu.suite.rig import Wire
from tests.gpu.trials import run
from tests.processes import Forge, Peer
from wcache_async.backends import cuda_driver
from wcache_async.backends.vmm_fd import VmmFdTransportBackend
from wcache_async.manifest import StateManifest

# Neither question initialises CUDA: the process that forks the others must never have done so.
LACKING = cuda_driver.missing_reason() or (
    None if torch.version.cuda else f"torch {torch.__version__} is built without CUDA"
)
pytestmark = pytest.mark.skipif(
    LACKING is not None,
    reason=f"needs an NVIDIA GPU with its driver, and a torch built with CUDA ({LACKING}): "
    "run `make test-gpu` on such a machine",
)

RELIED_ON = {
    "alive_after_exporter_released",
    "alive_by_mapping_alone",
    "create_unaligned",
    "downgrade_rw_to_ro",
    "export_twice_distinct",
    "export_without_type",
    "fd_alone_keeps_memory",
    "free_while_mapped",
    "getaccess_default",
    "getaccess_ro",
    "import_closed",
    "import_fd_still_open_after",
    "map_again_where_it_was",
    "map_too_big",
    "map_twice_same_alloc",
    "memcpy_unified",
    "release_then_use_mapping",
    "reserve_default_alignment_is_granularity",
}
"""The answers that the package depends on; the others are there for the emulator to be mended by."""

MIB = 1 << 20


@pytest.mark.timeout(600)
def test_the_driver_answers_as_the_package_expects(capsys: pytest.CaptureFixture[str]) -> None:
    recorded = json.loads(conformance.RECORDED.read_text())
    answers = conformance.probe()
    different = conformance.differences(answers, recorded)
    with capsys.disabled():
        print(f"\nThe emulator differs from this GPU in {len(different)} of {len(answers)} answers:")
        print("\n".join(different))
    assert [line for line in different if line.partition(":")[0] in RELIED_ON] == []
    for name in ("import_devnull", "import_memfd"):
        assert answers[name] != "CUDA_SUCCESS"


@pytest.mark.parametrize("backend", ["vmm_fd", "torch_ipc"])
def test_processes_share_a_state_on_a_gpu(backend: str, forge: Forge) -> None:
    trial = run(forge, backend, 512)
    assert trial.good, trial
    assert trial.bytes_right
    if backend == "vmm_fd":
        assert trial.outlives_the_daemon
        assert trial.others_right_after_the_write
        assert "nothing" not in trial.write_to_a_parameter


def test_attaching_takes_no_device_memory(forge: Forge) -> None:
    with forge.start(attach_within) as child:
        taken, right = child.receive()
        assert right
        assert taken < 64 * MIB, f"{taken} bytes for a second view of {512 * MIB}"


def test_moving_peaks_at_the_state_and_one_arena(forge: Forge) -> None:
    with forge.start(move) as child:
        taken, right, read_only = child.receive()
        assert right
        assert taken <= 2 * 64 * MIB
        assert read_only


def test_a_state_sleeps_and_wakes_at_the_same_addresses(forge: Forge) -> None:
    with forge.start(sleep_and_wake) as child:
        same, freed, right = child.receive()
        assert same
        assert freed >= 256 * MIB
        assert right


def test_buffers_can_be_written_and_are_private(forge: Forge) -> None:
    with forge.start(write_buffers) as child:
        assert child.receive() == [True, True, True]


# --------------------------------------------------------------------------------- in children
def _state(count: int, each: int) -> dict[str, tuple[torch.Tensor, bool]]:
    return {f"w{i}": (torch.full((each,), i + 1, dtype=torch.uint8, device="cuda"), True) for i in range(count)}


def _right(tensors: dict[str, torch.Tensor]) -> bool:
    return all(bool((tensor == i + 1).all()) for i, tensor in enumerate(tensors.values()))


async def _attach(backend: VmmFdTransportBackend, manifest: StateManifest) -> VmmFdTransportBackend:
    wire = Wire()
    await backend.send_fetch_state_response(wire, blank_response(manifest), [])
    assert wire.response is not None
    half = VmmFdTransportBackend()
    await half.recv_fetch_state_response(wire, wire.response, manifest)
    return half


def attach_within(peer: Peer) -> None:
    async def main() -> tuple[int, bool]:
        backend = VmmFdTransportBackend()
        manifest = await asyncio.to_thread(backend.prepare_export, _state(8, 64 * MIB))
        torch.cuda.empty_cache()
        before = torch.cuda.mem_get_info()[0]
        half = await _attach(backend, manifest)
        tensors = half.import_tensors()
        taken = before - torch.cuda.mem_get_info()[0]
        return taken, _right(tensors)

    peer.send(asyncio.run(main()))


def move(peer: Peer) -> None:
    state = _state(8, 64 * MIB)
    backend = VmmFdTransportBackend()
    backend.arena_nbytes = 64 * MIB
    before = torch.cuda.mem_get_info()[0]
    backend.prepare_export(state, move=True)
    torch.cuda.empty_cache()
    taken = before - torch.cuda.mem_get_info()[0]
    right = _right({name: tensor for name, (tensor, _) in state.items()})
    try:
        state["w0"][0].fill_(9)
        torch.cuda.synchronize()
        read_only = False
    except RuntimeError:
        read_only = True
    peer.send((taken, right, read_only))


def sleep_and_wake(peer: Peer) -> None:
    async def main() -> tuple[bool, int, bool]:
        backend = VmmFdTransportBackend()
        manifest = await asyncio.to_thread(backend.prepare_export, _state(4, 64 * MIB))
        half = await _attach(backend, manifest)
        torch.cuda.empty_cache()
        tensors = half.import_tensors()
        addresses = [tensor.data_ptr() for tensor in tensors.values()]
        wire = Wire()
        await backend.send_fetch_state_response(wire, blank_response(manifest), [])
        assert wire.response is not None
        fds = half.take_arena_fds(wire, wire.response)
        await asyncio.to_thread(half.prepare_unmap)
        await asyncio.to_thread(half.remap, fds)
        right = _right(tensors)
        await asyncio.to_thread(half.prepare_unmap)
        before = torch.cuda.mem_get_info()[0]
        await asyncio.to_thread(backend.close)
        freed = torch.cuda.mem_get_info()[0] - before
        return addresses == [tensor.data_ptr() for tensor in half.import_tensors().values()], freed, right

    peer.send(asyncio.run(main()))


def write_buffers(peer: Peer) -> None:
    async def main() -> list[bool]:
        backend = VmmFdTransportBackend()
        state = {"mean": (torch.full((1000,), 5.0, device="cuda"), False)}
        manifest = await asyncio.to_thread(backend.prepare_export, state)
        one = await _attach(backend, manifest)
        two = await _attach(backend, manifest)
        ours, theirs = one.import_tensors()["mean"], two.import_tensors()["mean"]
        ours.add_(1)
        torch.cuda.synchronize()
        three = await _attach(backend, manifest)
        return [bool((t == v).all()) for t, v in ((ours, 6), (theirs, 5), (three.import_tensors()["mean"], 5))]

    peer.send(asyncio.run(main()))

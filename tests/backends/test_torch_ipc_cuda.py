"""torch_ipc on GPUs: exported once, opened once, held by the lease.  The GPUs are files (fake_cuda)."""

import asyncio
import gc
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from tests.backends.fake_cuda import FREED, FakeCudaIpc
from tests.backends.test_torch_ipc import SPEC, Outbox, shared_files
from tests.conformance.wire import ReceivedFds, blank_response, connect, fetch, serve
from tests.processes import Forge, Peer
from wcache_async.backends.registry import choose_for_device
from wcache_async.backends.torch_cuda import CudaExport, TorchCudaIpc
from wcache_async.backends.torch_ipc import TorchIpcTransportBackend
from wcache_async.errors import BackendUnavailable, InsufficientMemory, WeightCacheError
from wcache_async.manifest import StateManifest
from wcache_async.protocol.messages import FetchStateResponse


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCudaIpc]:
    """What this process sees; everything allocated is freed by the end, and nothing is in limbo."""
    fake = FakeCudaIpc(tmp_path)
    monkeypatch.setattr(TorchIpcTransportBackend, "cuda", fake)
    yield fake
    gc.collect()
    assert fake.allocations() == []
    assert fake.limbo == []


@pytest.fixture
def backend(gpus: FakeCudaIpc) -> Iterator[TorchIpcTransportBackend]:
    backend = TorchIpcTransportBackend()
    yield backend
    backend.close()


def load(backend: TorchIpcTransportBackend, device: str = "cuda:1") -> StateManifest:
    """Export SPEC from `device`, with storage number i full of the byte i + 1."""
    writer = backend.begin_export(SPEC, device=device)
    for number, nbytes in enumerate(SPEC.storages):
        with writer.storage(number) as view:
            view[:] = bytes([number + 1]) * nbytes
    return writer.finish()


def right(tensors: dict[str, torch.Tensor]) -> bool:
    """Whether the tensors of SPEC hold what `load` wrote."""
    return bool((tensors["a"] == 1).all()) and bool((tensors["b"].view(torch.uint8) == 3).all())


async def response_of(
    backend: TorchIpcTransportBackend, manifest: StateManifest
) -> tuple[FetchStateResponse, ReceivedFds]:
    outbox = Outbox()
    await backend.send_fetch_state_response(outbox, blank_response(manifest), [])
    return outbox.responses[0], ReceivedFds([fd.duplicate() for fd in outbox.fds])


async def attach(backend: TorchIpcTransportBackend, manifest: StateManifest) -> TorchIpcTransportBackend:
    """A client's half in this process."""
    response, fds = await response_of(backend, manifest)
    attached = TorchIpcTransportBackend()
    try:
        await attached.recv_fetch_state_response(fds, response, manifest)
    finally:
        fds.close()
    return attached


# -------------------------------------------------------------------------------- the daemon's half
async def test_all_storages_lie_in_one_allocation_that_is_exported_once(
    backend: TorchIpcTransportBackend, gpus: FakeCudaIpc
) -> None:
    manifest = load(backend)
    assert [(arena.device, arena.nbytes) for arena in manifest.arenas] == [("GPU-b", backend.resident_bytes)]
    starts = [entry.offset for entry in manifest.tensors]
    assert all(start % 512 == 0 for start in starts)
    assert len(gpus.allocations()) == 1
    for _ in range(3):
        response, fds = await response_of(backend, manifest)
        assert fds.fds == []
        (export,) = msgspec.msgpack.decode(response.payload)["cuda"]
        assert msgspec.convert(export, CudaExport) == gpus.shared[0]
        assert export["device"] == "GPU-b"
    assert len(gpus.shared) == 1
    assert not backend.survives_daemon_exit


def test_giving_a_state_up_frees_it_whatever_torch_counted(
    backend: TorchIpcTransportBackend, gpus: FakeCudaIpc
) -> None:
    load(backend)
    (export,) = gpus.shared
    assert gpus.consumers(export) == 1
    backend.close()
    backend.close()
    assert gpus.consumers(export) == 0
    assert gpus.allocations() == []
    assert backend.resident_bytes == 0


def test_exported_bytes_are_read_back_for_another_backend(backend: TorchIpcTransportBackend, gpus: FakeCudaIpc) -> None:
    manifest = load(backend)
    into = bytearray(12_000)
    backend.read_arena(0, manifest.tensors[2].offset, memoryview(into))
    assert into == b"\3" * 12_000


def test_an_aborted_export_gives_its_memory_back(backend: TorchIpcTransportBackend, gpus: FakeCudaIpc) -> None:
    writer = backend.begin_export(SPEC, device="cuda")
    with writer.storage(0) as view:
        view[:] = b"x" * 5000
    assert len(gpus.allocations()) == 1
    writer.abort()
    writer.abort()
    assert gpus.allocations() == []
    assert gpus.shared == []


def test_a_storage_left_by_an_error_is_not_written(backend: TorchIpcTransportBackend, gpus: FakeCudaIpc) -> None:
    writer = backend.begin_export(SPEC, device="cuda:0")

    def fail() -> None:
        with writer.storage(0) as view:
            view[:] = b"x" * 5000
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    manifest = writer.finish()
    into = bytearray(5000)
    backend.read_arena(0, manifest.tensors[0].offset, memoryview(into))
    assert into == bytes(5000)


async def test_tensors_on_the_cpu_and_on_two_gpus_are_one_state(
    backend: TorchIpcTransportBackend, gpus: FakeCudaIpc
) -> None:
    base = torch.arange(600, dtype=torch.float32)
    others = [torch.full((40 + i,), float(i)) for i in range(5)]
    gpus.on_gpu = {
        base.untyped_storage().data_ptr(): 1,
        others[1].untyped_storage().data_ptr(): 0,
        others[3].untyped_storage().data_ptr(): 1,
    }
    state = {"base": base[100:], "view": base[:50], **{f"other{i}": t for i, t in enumerate(others)}}
    assert backend.can_export_state({name: (tensor, True) for name, tensor in state.items()})
    manifest = backend.prepare_export({name: (tensor, True) for name, tensor in state.items()})
    assert [arena.device for arena in manifest.arenas] == ["GPU-b", "cpu", "cpu", "cpu", "GPU-a"]
    attached = await attach(backend, manifest)
    tensors = attached.import_tensors()
    assert tensors.keys() == state.keys()
    assert all(torch.equal(tensors[name], state[name]) for name in state)
    assert tensors["base"].data_ptr() == tensors["view"].data_ptr() + 400
    assert not attached.survives_daemon_exit
    attached.close()


# ----------------------------------------------------------------------- refused before it begins
def test_expandable_segments_are_refused_before_anything_with_what_to_do(gpus: FakeCudaIpc) -> None:
    gpus.configured_expandable = True
    for requested in ("torch_ipc", "auto"):
        with pytest.raises(BackendUnavailable) as caught:
            choose_for_device("cuda:0", requested)
        assert "expandable_segments:True out of PYTORCH_ALLOC_CONF" in str(caught.value)
        assert "vmm_fd" in str(caught.value)
    with pytest.raises(BackendUnavailable, match="expandable_segments"):
        TorchIpcTransportBackend().begin_export(SPEC, device="cuda:0")
    TorchIpcTransportBackend().begin_export(SPEC).abort()  # The CPU's memory does not care.


def test_an_expandable_segment_is_found_out_where_no_setting_says_so(gpus: FakeCudaIpc) -> None:
    gpus.allocates_expandable = True
    with pytest.raises(BackendUnavailable, match="expandable_segments"):
        TorchIpcTransportBackend().begin_export(SPEC, device="cuda:0")
    assert gpus.allocations() == []


def test_device_memory_that_cannot_be_had_is_told_with_the_device(gpus: FakeCudaIpc) -> None:
    gpus.free_bytes = 4096
    with pytest.raises(InsufficientMemory) as caught:
        TorchIpcTransportBackend().begin_export(SPEC, device="cuda:1")
    assert caught.value.available == 4096
    assert "GPU-b" in caught.value.limit


@pytest.mark.parametrize("device", ["cuda:2", "cuda:x", "cuda:-1", "GPU-c"])
def test_a_device_that_is_not_there_is_told(gpus: FakeCudaIpc, device: str) -> None:
    with pytest.raises(BackendUnavailable, match=device):
        TorchIpcTransportBackend().begin_export(SPEC, device=device)


def test_a_second_gpu_that_fails_leaves_nothing_on_the_first(
    gpus: FakeCudaIpc, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = torch.ones(100), torch.ones(100_000)
    gpus.on_gpu = {one.untyped_storage().data_ptr(): 0, two.untyped_storage().data_ptr(): 1}
    gpus.free_bytes = 4096
    backend = TorchIpcTransportBackend()
    with pytest.raises(InsufficientMemory):
        backend.prepare_export({"one": (one, True), "two": (two, True), "cpu": (torch.ones(3), True)})
    assert gpus.allocations() == []
    assert shared_files() == []


# ------------------------------------------------------------------------------------- the client's half
def client_in(peer: Peer, sock: socket.socket, folder: Path, visible: list[str]) -> None:
    """Child: attach where the GPUs have other numbers, and say what is seen; again at each word."""
    fake = FakeCudaIpc(folder, visible)
    TorchIpcTransportBackend.cuda = fake

    async def main() -> dict[str, torch.Tensor]:
        stream = await connect(sock)
        try:
            backend, _ = await fetch(stream)
            return backend.import_tensors()
        finally:
            stream.close()

    try:
        tensors = asyncio.run(main())
    except WeightCacheError as error:
        peer.send(str(error))
        return
    peer.send(right(tensors))
    while peer.receive() == "again":
        peer.send(right(tensors))


async def serve_child(backend: TorchIpcTransportBackend, manifest: StateManifest) -> tuple[socket.socket, object]:
    ours, theirs = socket.socketpair()
    return theirs, asyncio.create_task(serve(ours, backend, manifest))


@pytest.mark.parametrize("visible", [["GPU-b"], ["GPU-c", "GPU-b", "GPU-a"]])
async def test_a_client_finds_the_device_by_uuid_whatever_its_number(
    backend: TorchIpcTransportBackend, gpus: FakeCudaIpc, forge: Forge, visible: list[str]
) -> None:
    manifest = load(backend)
    sock, serving = await serve_child(backend, manifest)
    with forge.start(client_in, sock, gpus.folder, visible) as child:
        assert await asyncio.to_thread(child.receive) is True
        child.send("done")
        assert await asyncio.to_thread(lambda: child.exit_status) == 0
    await serving  # type: ignore[misc]


async def test_a_client_that_does_not_see_the_device_is_told_which_and_how(
    backend: TorchIpcTransportBackend, gpus: FakeCudaIpc, forge: Forge
) -> None:
    manifest = load(backend)
    sock, serving = await serve_child(backend, manifest)
    with forge.start(client_in, sock, gpus.folder, ["GPU-a", "GPU-c"]) as child:
        text = await asyncio.to_thread(child.receive)
        assert "the state is on GPU-b" in text
        assert "sees GPU-a, GPU-c" in text
        assert "CUDA_VISIBLE_DEVICES" in text
    await serving  # type: ignore[misc]


async def test_killed_clients_leave_nothing_counted(
    backend: TorchIpcTransportBackend, gpus: FakeCudaIpc, forge: Forge
) -> None:
    manifest = load(backend)
    for _ in range(3):
        sock, serving = await serve_child(backend, manifest)
        with forge.start(client_in, sock, gpus.folder, ["GPU-b"]) as child:
            assert await asyncio.to_thread(child.receive) is True
            child.kill()
            assert await asyncio.to_thread(lambda: child.exit_status) == -9
        await serving  # type: ignore[misc]
    assert gpus.consumers(gpus.shared[0]) == 1
    backend.close()
    assert gpus.allocations() == []


async def test_the_exporting_process_attaches_without_opening_anything(
    backend: TorchIpcTransportBackend, gpus: FakeCudaIpc
) -> None:
    manifest = load(backend)
    attached = await attach(backend, manifest)
    tensors = attached.import_tensors()
    assert gpus.opened == []
    assert right(tensors)
    attached.close()
    # Its own process keeps what it uses, so the daemon may give the state up at once.
    assert attached.when_unused(lambda: None)
    backend.close()
    assert right(tensors)


class Elsewhere:
    """A state exported by another process, and what a client here needs to attach to it."""

    def __init__(self, response: bytes, manifest: StateManifest) -> None:
        self.response = response
        self.manifest = manifest

    async def attach(self) -> TorchIpcTransportBackend:
        response = msgspec.structs.replace(blank_response(self.manifest), payload=self.response)
        backend = TorchIpcTransportBackend()
        await backend.recv_fetch_state_response(ReceivedFds(), response, self.manifest)
        return backend


def exporter(peer: Peer, folder: Path) -> None:
    """Child: export, say how it is opened, and give it up at a word."""
    TorchIpcTransportBackend.cuda = FakeCudaIpc(folder)
    backend = TorchIpcTransportBackend()
    manifest = load(backend)
    outbox = Outbox()
    asyncio.run(backend.send_fetch_state_response(outbox, blank_response(manifest), []))
    peer.send((outbox.responses[0].payload, msgspec.msgpack.encode(manifest)))
    peer.receive()
    backend.close()


@pytest.fixture
def elsewhere(gpus: FakeCudaIpc, forge: Forge) -> Iterator[Elsewhere]:
    with forge.start(exporter, gpus.folder) as child:
        response, manifest = child.receive()
        yield Elsewhere(response, msgspec.msgpack.decode(manifest, type=StateManifest))
        child.send("done")


async def test_one_process_opens_an_allocation_once_for_all_its_clients(
    elsewhere: Elsewhere, gpus: FakeCudaIpc
) -> None:
    first, second = await asyncio.gather(elsewhere.attach(), elsewhere.attach())
    assert len(gpus.opened) == 1
    one, two = first.import_tensors(), second.import_tensors()
    assert one["b"].data_ptr() == two["b"].data_ptr()
    first.close()
    del one
    gc.collect()
    third = await elsewhere.attach()
    assert len(gpus.opened) == 1
    assert right(two)
    second.close()
    third.close()
    del two
    await asyncio.sleep(0)
    gc.collect()
    again = await elsewhere.attach()
    assert len(gpus.opened) == 2
    assert right(again.import_tensors())
    again.close()


async def test_a_client_is_told_when_its_last_tensor_is_gone(elsewhere: Elsewhere) -> None:
    called: list[int] = []
    attached = await elsewhere.attach()
    await asyncio.sleep(0)  # Until then the loop holds what it was given last.
    tensors = attached.import_tensors()
    view = tensors["b"][7:9]
    attached.close()
    assert not attached.when_unused(lambda: called.append(1))
    del tensors
    gc.collect()
    assert called == []
    assert view.numel() == 2
    del view
    gc.collect()
    assert called == [1]


def exporter_on_two(peer: Peer, folder: Path) -> None:
    """Child: export a tensor on each of two GPUs, say how they are opened, and wait."""
    TorchIpcTransportBackend.cuda = fake = FakeCudaIpc(folder)
    state = {"a": torch.ones(5000, dtype=torch.uint8), "b": torch.full((12_000,), 3, dtype=torch.uint8)}
    fake.on_gpu = {tensor.untyped_storage().data_ptr(): number for number, tensor in enumerate(state.values())}
    backend = TorchIpcTransportBackend()
    manifest = backend.prepare_export({name: (tensor, False) for name, tensor in state.items()})
    outbox = Outbox()
    asyncio.run(backend.send_fetch_state_response(outbox, blank_response(manifest), []))
    peer.send((outbox.responses[0].payload, msgspec.msgpack.encode(manifest)))
    peer.receive()
    backend.close()


async def test_a_client_on_two_gpus_is_told_when_the_last_of_both_is_gone(gpus: FakeCudaIpc, forge: Forge) -> None:
    called: list[int] = []
    with forge.start(exporter_on_two, gpus.folder) as child:
        response, manifest = await asyncio.to_thread(child.receive)
        attached = await Elsewhere(response, msgspec.msgpack.decode(manifest, type=StateManifest)).attach()
        await asyncio.sleep(0)
        tensors = attached.import_tensors()
        assert right(tensors)
        attached.close()
        assert not attached.when_unused(lambda: called.append(1))
        for name, expected in (("a", []), ("b", [1])):
            del tensors[name]
            gc.collect()
            assert called == expected
        child.send("done")


async def test_a_client_that_imported_nothing_is_done_when_it_closes(elsewhere: Elsewhere) -> None:
    attached = await elsewhere.attach()
    await asyncio.sleep(0)
    attached.close()
    gc.collect()
    assert attached.when_unused(lambda: None)


async def test_an_open_that_cuda_refuses_is_told_and_leaves_nothing(elsewhere: Elsewhere, gpus: FakeCudaIpc) -> None:
    gpus.failing_open = "CUDA error: peer access is not supported"
    attached = TorchIpcTransportBackend()
    response = msgspec.structs.replace(blank_response(elsewhere.manifest), payload=elsewhere.response)
    with pytest.raises(BackendUnavailable, match="peer access"):
        await attached.recv_fetch_state_response(ReceivedFds(), response, elsewhere.manifest)
    assert attached.resident_bytes == 0
    gpus.failing_open = None
    other = await elsewhere.attach()
    assert right(other.import_tensors())
    other.close()


async def test_no_cuda_at_the_client_is_told_with_where_the_state_is(elsewhere: Elsewhere, gpus: FakeCudaIpc) -> None:
    gpus.missing = "there is no CUDA driver: libcuda.so.1"
    with pytest.raises(BackendUnavailable, match=r"the state is on GPU-b, and there is no CUDA driver"):
        await elsewhere.attach()


async def test_a_handle_whose_memory_was_freed_is_no_memory(elsewhere: Elsewhere, gpus: FakeCudaIpc) -> None:
    """And memory freed under a client would show in this suite."""
    attached = await elsewhere.attach()
    tensors = attached.import_tensors()
    (path,) = gpus.folder.glob("gpu-*")
    path.write_bytes(bytes([FREED]) * path.stat().st_size)
    assert not right(tensors)
    attached.close()


# -------------------------------------------------------------------------------------- what it says
def test_capabilities_are_those_of_the_device() -> None:
    on_gpus = TorchIpcTransportBackend.capabilities_on("cuda")
    assert on_gpus == TorchIpcTransportBackend.capabilities
    assert not on_gpus.survives_daemon_exit
    assert on_gpus.needs_shared_pid_namespace
    assert not TorchIpcTransportBackend.capabilities_on("cpu").needs_shared_pid_namespace


# ----------------------------------------------------------------------------------- the real border
def test_this_torch_says_that_it_has_no_cuda() -> None:
    if torch.version.cuda is not None:
        pytest.skip("this torch is built with CUDA")
    assert TorchCudaIpc().missing_reason() == "this torch is built without CUDA"
    for requested in ("torch_ipc", "auto"):
        with pytest.raises(BackendUnavailable, match="without CUDA"):
            choose_for_device("cuda", requested)


@pytest.mark.parametrize(
    ("setting", "expandable"),
    [
        ("", False),
        ("expandable_segments:True", True),
        ("max_split_size_mb:128, expandable_segments:True", True),
        ("expandable_segments:False", False),
    ],
)
@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_allocators_setting_is_read(
    monkeypatch: pytest.MonkeyPatch, name: str, setting: str, expandable: bool
) -> None:
    for other in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, setting)
    assert TorchCudaIpc().expandable_segments() is expandable


def test_what_torch_raises_is_told_as_a_typed_error() -> None:
    if torch.cuda.is_available():
        pytest.skip("CUDA works here")
    export = CudaExport("GPU-a", b"h", 1, 0, b"", 0, b"", False)
    real = TorchCudaIpc()
    calls: dict[str, Callable[[], object]] = {
        "opening": lambda: real.open(0, export),
        "exporting": lambda: real.share(torch.empty(1, dtype=torch.uint8), "GPU-a"),
        "releasing": lambda: real.release_consumer(export),
    }
    for what, call in calls.items():
        with pytest.raises(BackendUnavailable, match=what):
            call()

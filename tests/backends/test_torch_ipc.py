"""torch_ipc on the CPU: torch's own shared storages, one fd each, lent, checked and opened."""

import asyncio
import gc
import mmap
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch

from tests.conformance.peers import client, served
from tests.conformance.states import thousand, tied, weights
from tests.conformance.wire import ReceivedFds, blank_response, connect, fetch
from tests.processes import Forge, Peer
from wcache_async.backends.base import ImportOptions
from wcache_async.backends.registry import get_client_transport_backend
from wcache_async.backends.torch_ipc import TorchIpcTransportBackend
from wcache_async.errors import (
    BackendUnavailable,
    FdsTruncated,
    InsufficientMemory,
    InvalidManifest,
    InvalidMemfd,
    MalformedMessage,
    StateUnloaded,
    WeightCacheError,
)
from wcache_async.manifest import Arena, StateManifest, StateSpec, TensorEntry, TensorSpec
from wcache_async.protocol.messages import FetchStateResponse
from wcache_async.sockets.fds import OwnedFd

SPEC = StateSpec(
    storages=(5000, 0, 12_000),
    tensors=(
        TensorSpec(name="a", dtype="uint8", shape=(5000,), storage=0),
        TensorSpec(name="empty", dtype="float32", shape=(0,), storage=1),
        TensorSpec(name="b", dtype="float32", shape=(3000,), storage=2),
    ),
)
TORCHS = "/dev/shm/torch_"


def shared_files() -> list[int]:
    """Every fd of this process that is a file of torch's."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith(TORCHS):
                found.append(int(name))
        except FileNotFoundError:
            pass  # the listing's own
    return found


def shared_mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum(TORCHS in line for line in maps)


@pytest.fixture(autouse=True)
def nothing_stays_shared() -> Iterator[None]:
    yield
    if shared_files() or shared_mappings():
        gc.collect()  # A failed test's traceback, an exception's cycle.
    assert (shared_files(), shared_mappings()) == ([], 0)


@pytest.fixture
def backend() -> Iterator[TorchIpcTransportBackend]:
    backend = TorchIpcTransportBackend()
    yield backend
    backend.close()


@dataclass
class Outbox:
    """The daemon's end of a request, with no socket behind it."""

    responses: list[FetchStateResponse] = field(default_factory=list)
    fds: list[OwnedFd] = field(default_factory=list)

    async def send(self, response: FetchStateResponse, fds: Sequence[OwnedFd]) -> None:
        self.responses.append(response)
        self.fds += fds

    def close(self) -> None:
        for fd in self.fds:
            fd.close()
        self.fds.clear()


def fill(backend: TorchIpcTransportBackend, spec: StateSpec = SPEC) -> StateManifest:
    """Export `spec` with storage number i full of the byte i + 1."""
    writer = backend.begin_export(spec)
    for number, nbytes in enumerate(spec.storages):
        with writer.storage(number) as view:
            assert len(view) == nbytes
            view[:] = bytes([number + 1]) * nbytes
    return writer.finish()


# ------------------------------------------------------------------------------ the daemon's half
def test_each_storage_is_a_file_with_one_fd(backend: TorchIpcTransportBackend) -> None:
    manifest = fill(backend)
    # The empty one shares the file that follows it.
    assert [arena.nbytes for arena in manifest.arenas] == [5056, 64, 12_032]
    assert [entry.arena for entry in manifest.tensors] == [0, 1, 2]
    files = shared_files()
    assert sorted(os.fstat(fd).st_size for fd in files) == [64, 5056, 12_032]
    assert backend.resident_bytes == sum(arena.nbytes for arena in manifest.arenas)
    assert not any(os.get_inheritable(fd) for fd in files)
    backend.close()
    backend.close()
    assert shared_files() == []
    assert backend.resident_bytes == 0


def test_tensors_that_share_a_storage_share_its_file(backend: TorchIpcTransportBackend) -> None:
    manifest = backend.prepare_export(tied("cpu"))
    assert len(manifest.arenas) == len(shared_files()) == 2


def test_what_is_exported_is_a_copy_and_no_tie_to_the_original(backend: TorchIpcTransportBackend) -> None:
    tensor = torch.arange(100)
    manifest = backend.prepare_export({"a": (tensor, False)})
    assert not tensor.untyped_storage().is_shared()
    tensor.zero_()
    into = bytearray(800)
    backend.read_arena(0, manifest.tensors[0].offset, memoryview(into))
    assert torch.equal(torch.frombuffer(into, dtype=torch.int64), torch.arange(100))


def test_memory_is_taken_storage_by_storage(backend: TorchIpcTransportBackend) -> None:
    writer = backend.begin_export(SPEC)
    taken = [len(shared_files())]
    for number in (2, 0):
        with writer.storage(number):
            taken.append(len(shared_files()))
    assert taken == [0, 1, 2]
    writer.abort()


def test_storages_are_filled_from_several_threads(backend: TorchIpcTransportBackend) -> None:
    sizes = tuple((1000 + 77 * i) * (i % 5 > 0) for i in range(64))
    tensors = tuple(TensorSpec(name=str(i), dtype="uint8", shape=(n,), storage=i) for i, n in enumerate(sizes))
    writer = backend.begin_export(StateSpec(storages=sizes, tensors=tensors))
    together = threading.Barrier(4)

    def write(first: int) -> None:
        together.wait(30)
        for number in range(first, 64, 4):
            with writer.storage(number) as view:
                view[:] = bytes([number]) * sizes[number]

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write, range(4)))
    manifest = writer.finish()
    for number, entry in enumerate(manifest.tensors):
        into = bytearray(sizes[number])
        backend.read_arena(entry.arena, entry.offset, memoryview(into))
        assert into == bytes([number]) * sizes[number]


def test_an_aborted_export_gives_everything_back(backend: TorchIpcTransportBackend) -> None:
    writer = backend.begin_export(SPEC)
    with writer.storage(0):
        assert shared_mappings() == 1
    writer.abort()
    assert (shared_files(), shared_mappings()) == ([], 0)
    writer.abort()
    with pytest.raises(ValueError, match="given up"), writer.storage(0):
        pass
    with pytest.raises(ValueError, match="given up"):
        writer.finish()
    fill(backend)  # The backend is as good as new.


def test_a_closed_export_is_not_read(backend: TorchIpcTransportBackend) -> None:
    fill(backend)
    backend.close()
    with pytest.raises(ValueError, match="closed"):
        backend.read_arena(0, 0, memoryview(bytearray(4)))


def test_a_state_without_tensors_is_a_state(backend: TorchIpcTransportBackend) -> None:
    manifest = backend.prepare_export({})
    assert manifest.tensors == ()
    assert backend.resident_bytes == manifest.arenas[0].nbytes > 0


# ------------------------------------------------------------------------- refused before it begins
def test_more_memory_than_there_is_is_refused_before_any_is_taken(backend: TorchIpcTransportBackend) -> None:
    with pytest.raises(InsufficientMemory) as caught:
        backend.begin_export(StateSpec(storages=(1 << 50,), tensors=()))
    assert caught.value.needed == 1 << 50
    assert shared_files() == []


def test_a_small_dev_shm_is_told_with_what_to_use_instead(
    backend: TorchIpcTransportBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    statvfs = os.statvfs

    def container(path: str) -> os.statvfs_result:
        blocks = 8  # of 4 KiB; containers have 64 MiB.
        return os.statvfs_result((4096, 4096, blocks, blocks, blocks, *statvfs(path)[5:]))

    monkeypatch.setattr(os, "statvfs", container)
    fill(backend)
    with pytest.raises(InsufficientMemory) as caught:
        TorchIpcTransportBackend().begin_export(StateSpec(storages=(32 << 10, 1), tensors=()))
    assert (caught.value.needed, caught.value.available) == ((32 << 10) + 64, 32 << 10)
    assert "/dev/shm" in caught.value.limit
    assert "shm_fd" in caught.value.limit


def test_more_storages_than_a_response_can_carry_are_refused(backend: TorchIpcTransportBackend) -> None:
    with pytest.raises(BackendUnavailable) as caught:
        backend.begin_export(StateSpec(storages=(1,) * 8192, tensors=()))
    assert "8191 of the state's 8192" in str(caught.value)
    assert "shm_fd" in str(caught.value)


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "GPU-0"])
def test_without_cuda_only_cpu_memory_is_offered(backend: TorchIpcTransportBackend, device: str) -> None:
    with pytest.raises(BackendUnavailable, match="built without CUDA"):
        backend.begin_export(SPEC, device=device)


def test_read_only_memory_is_not_promised() -> None:
    with pytest.raises(BackendUnavailable, match="writable"):
        get_client_transport_backend("torch_ipc", ImportOptions(mapping="read_only"))


def export_at_the_limit(peer: Peer, hard: int) -> None:
    """Child: export 100 storages with few fds allowed; says what came of it, and the limit then."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (16, hard))
    backend = TorchIpcTransportBackend()
    spec = StateSpec(storages=(8,) * 100, tensors=())
    try:
        backend.begin_export(spec).finish()
        peer.send((None, resource.getrlimit(resource.RLIMIT_NOFILE)))
    except WeightCacheError as error:
        peer.send((str(error), len(shared_files())))


def test_the_soft_limit_of_fds_is_raised_to_the_hard_one_first(forge: Forge) -> None:
    with forge.start(export_at_the_limit, 200) as child:
        assert child.receive() == (None, (200, 200))


def test_too_few_fds_are_told_before_any_is_taken_and_what_to_do(forge: Forge) -> None:
    with forge.start(export_at_the_limit, 100) as child:
        text, files = child.receive()
        assert "100 storages" in text
        assert "at most 100" in text
        assert "`ulimit -n`" in text
        assert "shm_fd" in text
        assert files == 0


# --------------------------------------------------------------------------------------- sending
async def test_given_fds_go_first_and_a_storages_own_fd_is_lent_not_duplicated(
    backend: TorchIpcTransportBackend,
) -> None:
    manifest = fill(backend)
    before = shared_files()
    outbox = Outbox()
    given = OwnedFd(os.dup(0))
    await backend.send_fetch_state_response(outbox, blank_response(manifest), [given])
    await backend.send_fetch_state_response(outbox, blank_response(manifest), [])
    assert outbox.fds[0] is given
    numbers = [fd.fileno() for fd in outbox.fds[1:]]
    assert sorted(numbers) == sorted(2 * before)
    assert shared_files() == before
    for response in outbox.responses:
        assert response.transport_backend == "torch_ipc"
        assert response.resident_bytes == backend.resident_bytes
        assert msgspec.msgpack.decode(response.payload) == {"arenas": [5056, 64, 12_032], "cuda": []}
    outbox.close()
    assert shared_files() == before


async def test_what_waits_to_be_sent_outlives_the_export(backend: TorchIpcTransportBackend) -> None:
    manifest = fill(backend)
    outbox = Outbox()
    await backend.send_fetch_state_response(outbox, blank_response(manifest), [])
    backend.close()
    first, second, third = outbox.fds
    assert os.pread(first.fileno(), 2, 0) == b"\1\1"
    assert os.pread(third.fileno(), 2, 0) == b"\3\3"
    with second.duplicate() as duplicate:
        second.close()
        assert os.fstat(duplicate.fileno()).st_size == 64
    number = third.take()  # Its own to close from now on.
    assert third.closed
    assert os.fstat(number).st_size == 12_032
    os.close(number)
    outbox.close()


async def test_a_closed_export_closes_what_it_was_given(backend: TorchIpcTransportBackend) -> None:
    manifest = fill(backend)
    backend.close()
    given = OwnedFd(os.dup(0))
    with pytest.raises(StateUnloaded):
        await backend.send_fetch_state_response(Outbox(), blank_response(manifest), [given])
    assert given.closed


# ------------------------------------------------------------------------------------- receiving
MANIFEST = StateManifest(("uint8",), (Arena(4096),), (TensorEntry("a", 0, (4096,), 0, 0),), {})
TWO_ARENAS = StateManifest(("uint8",), (Arena(4096), Arena(64)), (TensorEntry("a", 0, (64,), 0, 0, 1),), {})
ON_A_GPU = StateManifest(("uint8",), (Arena(4096, "GPU-0"),), (TensorEntry("a", 0, (4096,), 0, 0),), {})
EXPORT = {
    "device": "GPU-0",
    "handle": b"h" * 66,
    "nbytes": 4096,
    "offset": 0,
    "ref_counter": b"/torch_1",
    "ref_counter_offset": 3,
    "event": b"e" * 64,
    "event_sync": False,
}


def shm(nbytes: int = 4096, flags: int = os.O_RDWR) -> OwnedFd:
    """A file such as torch makes."""
    path = f"{TORCHS}test_{os.getpid()}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.truncate(fd, nbytes)
        return OwnedFd(os.open(path, flags | os.O_CLOEXEC))
    finally:
        os.unlink(path)
        os.close(fd)


def opened(path: str, flags: int) -> OwnedFd:
    return OwnedFd(os.open(path, flags | os.O_CLOEXEC))


def pipe() -> OwnedFd:
    read, write = os.pipe()
    os.close(write)
    return OwnedFd(read)


def payload(*arenas: int, **others: object) -> bytes:
    return msgspec.msgpack.encode({"arenas": arenas, "from_the_future": 1, **others})


@dataclass(frozen=True)
class Lie:
    """What a peer sends, and what it is told."""

    fds: Callable[[], list[OwnedFd]]
    payload: bytes
    error: type[WeightCacheError]
    says: str
    manifest: StateManifest = MANIFEST


LIES = {
    "short": Lie(lambda: [shm(2048)], payload(4096), InvalidMemfd, "2048 bytes"),
    "long": Lie(lambda: [shm(8192)], payload(4096), InvalidMemfd, "8192 bytes"),
    "empty": Lie(lambda: [shm(0)], payload(4096), InvalidMemfd, "0 bytes"),
    "read_only": Lie(lambda: [shm(flags=os.O_RDONLY)], payload(4096), InvalidMemfd, "reading and writing"),
    "write_only": Lie(lambda: [shm(flags=os.O_WRONLY)], payload(4096), InvalidMemfd, "reading and writing"),
    "null": Lie(lambda: [opened("/dev/null", os.O_RDWR)], payload(4096), InvalidMemfd, "no shared memory"),
    "folder": Lie(lambda: [opened("/tmp", os.O_RDONLY)], payload(4096), InvalidMemfd, "no shared memory"),
    "pipe": Lie(lambda: [pipe()], payload(4096), InvalidMemfd, "no shared memory"),
    "socket": Lie(lambda: [OwnedFd(socket.socket().detach())], payload(4096), InvalidMemfd, "no shared memory"),
    "second_is_bad": Lie(lambda: [shm(), pipe()], payload(4096, 64), InvalidMemfd, "arena 1", TWO_ARENAS),
    "second_is_short": Lie(lambda: [shm(), shm(63)], payload(4096, 64), InvalidMemfd, "arena 1", TWO_ARENAS),
    "reordered": Lie(lambda: [shm(64), shm()], payload(4096, 64), InvalidMemfd, "arena 0", TWO_ARENAS),
    "stripped": Lie(list, payload(4096), FdsTruncated, "`ulimit -n`"),
    "fewer_fds": Lie(lambda: [shm()], payload(4096, 64), FdsTruncated, "shm_fd", TWO_ARENAS),
    "fewer_announced": Lie(lambda: [shm(), shm(64)], payload(4096), InvalidManifest, "announced", TWO_ARENAS),
    "more_announced": Lie(lambda: [shm()], payload(4096, 64), InvalidManifest, "announced"),
    "other_sizes": Lie(lambda: [shm()], payload(4095), InvalidManifest, "announced"),
    "gpu_without_handle": Lie(list, payload(4096), InvalidManifest, "on GPUs", ON_A_GPU),
    "handle_without_gpu": Lie(lambda: [shm()], payload(4096, cuda=[EXPORT]), InvalidManifest, "on GPUs"),
    "handle_of_another_gpu": Lie(
        list, payload(4096, cuda=[EXPORT | {"device": "GPU-1"}]), InvalidManifest, "GPU-1", ON_A_GPU
    ),
    "handle_of_another_size": Lie(
        list, payload(4096, cuda=[EXPORT | {"nbytes": 8192}]), InvalidManifest, "8192", ON_A_GPU
    ),
    "negative_offset": Lie(list, payload(4096, cuda=[EXPORT | {"offset": -1}]), MalformedMessage, "offset", ON_A_GPU),
    "no_cuda_here": Lie(list, payload(4096, cuda=[EXPORT]), BackendUnavailable, "built without CUDA", ON_A_GPU),
    "no_payload": Lie(lambda: [shm()], b"", MalformedMessage, "payload"),
    "nested_payload": Lie(lambda: [shm()], b"\x91" * 100_000, MalformedMessage, "payload"),
    "negative_size": Lie(lambda: [shm()], payload(-4096), MalformedMessage, "payload"),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
async def test_a_lie_is_refused_and_nothing_stays_open(lie: Lie, backend: TorchIpcTransportBackend) -> None:
    received = ReceivedFds(lie.fds())
    files = [(fd, os.fstat(fd.fileno()).st_size) for fd in received.fds]
    watchers = [(fd.duplicate(), size) for fd, size in files]
    response = msgspec.structs.replace(blank_response(lie.manifest), payload=lie.payload)
    try:
        with pytest.raises(lie.error) as caught:
            await backend.recv_fetch_state_response(received, response, lie.manifest)
        assert lie.says in str(caught.value)
        del caught
        # Mapping a file that is too short would have enlarged it, for its owner too.
        assert [os.fstat(fd.fileno()).st_size for fd, _ in watchers] == [size for _, size in watchers]
        assert backend.resident_bytes == 0
    finally:
        received.close()
        for fd, _ in watchers:
            fd.close()
    gc.collect()
    assert shared_mappings() == 0


async def test_more_fds_than_arenas_are_left_for_who_counts_them(backend: TorchIpcTransportBackend) -> None:
    received = ReceivedFds([shm(), shm()])
    response = msgspec.structs.replace(blank_response(MANIFEST), payload=payload(4096))
    await backend.recv_fetch_state_response(received, response, MANIFEST)
    assert len(received.fds) == 1
    received.close()


def import_at_the_limit(peer: Peer, spare: int) -> None:
    """Child: has just the fds it received, and `spare` numbers left for torch's duplicates."""

    async def main() -> str:
        received = ReceivedFds([shm(), shm(64)])
        response = msgspec.structs.replace(blank_response(TWO_ARENAS), payload=payload(4096, 64))
        # A number at or above the limit is of no use, even if it is free.
        while (lowest_free := os.dup(0)) < max(fd.fileno() for fd in received.fds):
            pass
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + spare, lowest_free + spare))
        backend = TorchIpcTransportBackend()
        try:
            await backend.recv_fetch_state_response(received, response, TWO_ARENAS)
        except BackendUnavailable as error:
            return str(error)
        return "it was opened"

    peer.send(asyncio.run(main()))


def test_no_fd_for_torchs_duplicate_is_told_with_what_to_do(forge: Forge) -> None:
    with forge.start(import_at_the_limit, 0) as child:
        text = child.receive()
        assert "`ulimit -n`" in text
        assert "shm_fd" in text


def test_one_fd_more_than_there_are_storages_is_enough(forge: Forge) -> None:
    with forge.start(import_at_the_limit, 1) as child:
        assert child.receive() == "it was opened"


# -------------------------------------------------------------------------------------- sharing
def add_one(tensors: dict[str, torch.Tensor]) -> float:
    """What the first weight was before this process added one to it."""
    first = float(tensors["weight"][0])
    tensors["weight"][0] += 1
    return first


async def test_a_clients_write_reaches_everyone_as_the_capabilities_say(forge: Forge) -> None:
    assert not TorchIpcTransportBackend.capabilities.read_only
    async with served("torch_ipc", weights) as state:
        seen = []
        for _ in range(3):
            with forge.start(client, state.dial(), add_one) as child:
                seen.append(await asyncio.to_thread(child.receive))
                child.send("done")
        assert seen == [seen[0], seen[0] + 1, seen[0] + 2]


async def test_a_client_holds_an_fd_per_storage_that_no_program_it_starts_inherits() -> None:
    async with served("torch_ipc", thousand) as state:
        daemons = len(shared_files())
        stream = await connect(state.dial())
        backend, _ = await fetch(stream)
        stream.close()
        assert len(shared_files()) - daemons == 1000
        assert not any(os.get_inheritable(fd) for fd in shared_files())
        tensors = await asyncio.to_thread(backend.import_tensors)
        backend.close()
        assert len(shared_files()) - daemons == 1000
        del tensors
        await asyncio.to_thread(gc.collect)  # The loop itself holds the last result until it has run on.
        assert len(shared_files()) == daemons


async def test_on_the_cpu_tensors_survive_and_nothing_holds_the_lease() -> None:
    assert TorchIpcTransportBackend.capabilities_on("cpu").survives_daemon_exit
    assert not TorchIpcTransportBackend.capabilities.survives_daemon_exit
    async with served("torch_ipc", weights) as state:
        stream = await connect(state.dial())
        backend, _ = await fetch(stream)
        stream.close()
        tensors = backend.import_tensors()
        assert backend.survives_daemon_exit
        backend.close()
        assert backend.when_unused(partial(pytest.fail, "it was unused already"))
        assert tensors["weight"].numel() == 5000


def test_a_file_is_no_larger_than_its_storage_and_whole(backend: TorchIpcTransportBackend) -> None:
    """Memory that is missing is an error at the export, and no SIGBUS at a client's first touch."""
    nbytes = 8 * mmap.PAGESIZE
    writer = backend.begin_export(StateSpec(storages=(nbytes,), tensors=()))
    writer.finish()
    (fd,) = shared_files()
    info = os.fstat(fd)
    assert (info.st_size, info.st_blocks * 512) == (nbytes, nbytes)
    assert Path(os.readlink(f"/proc/self/fd/{fd}")).name.endswith("(deleted)")

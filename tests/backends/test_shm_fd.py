"""shm_fd: sealed arenas, checked before they are mapped, shared by all and changed by none."""

import asyncio
import ctypes
import errno
import fcntl
import gc
import mmap
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import pytest
import torch

from tests.backends.procfs import arena_fds, arena_mappings
from tests.conformance.cases import raw_bytes
from tests.conformance.peers import served
from tests.conformance.states import weights
from tests.conformance.wire import ReceivedFds, blank_response, connect, fetch
from tests.processes import Forge, Peer
from wcache_async.backends import memory, shm_fd
from wcache_async.backends.base import ImportOptions
from wcache_async.backends.mapping import Access, map_pages
from wcache_async.backends.memfd import SEALS, check_memfd, create_memfd, sealed_memfd
from wcache_async.backends.shm_fd import ShmFdTransportBackend
from wcache_async.errors import (
    BackendUnavailable,
    FdsTruncated,
    InsufficientMemory,
    InvalidManifest,
    InvalidMemfd,
    MalformedMessage,
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


@pytest.fixture(autouse=True)
def nothing_stays_mapped() -> Iterator[None]:
    yield
    if arena_mappings():
        gc.collect()  # A failed test's traceback, an exception's cycle.
    assert arena_mappings() == []


@pytest.fixture
def backend() -> Iterator[ShmFdTransportBackend]:
    backend = ShmFdTransportBackend()
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


def fill(backend: ShmFdTransportBackend, spec: StateSpec = SPEC) -> StateManifest:
    """Export `spec` with storage number i full of the byte i + 1."""
    writer = backend.begin_export(spec)
    for number, nbytes in enumerate(spec.storages):
        with writer.storage(number) as view:
            assert len(view) == nbytes
            view[:] = bytes([number + 1]) * nbytes
    return writer.finish()


# ------------------------------------------------------------------------------- the daemon's arenas
def test_what_was_written_is_sealed_and_the_daemon_keeps_an_fd_and_no_mapping(backend: ShmFdTransportBackend) -> None:
    manifest = fill(backend)
    (fd,) = arena_fds()
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
    assert arena_mappings() == []
    assert os.fstat(fd).st_size == manifest.arenas[0].nbytes == backend.resident_bytes
    a, _, b = manifest.tensors
    assert os.pread(fd, 5000, a.offset) == b"\1" * 5000
    assert os.pread(fd, 12_000, b.offset) == b"\3" * 12_000
    assert a.offset % 64 == b.offset % 64 == 0
    backend.close()
    backend.close()
    assert arena_fds() == []
    assert backend.resident_bytes == 0


def test_memory_is_taken_storage_by_storage(backend: ShmFdTransportBackend) -> None:
    page = mmap.PAGESIZE
    tensors = tuple(TensorSpec(name=str(i), dtype="uint8", shape=(4 * page,), storage=i) for i in range(3))
    writer = backend.begin_export(StateSpec(storages=(4 * page,) * 3, tensors=tensors))
    (fd,) = arena_fds()
    taken = [os.fstat(fd).st_blocks * 512]
    for number in (2, 0):
        with writer.storage(number):
            taken.append(os.fstat(fd).st_blocks * 512)
    assert taken == [0, 4 * page, 8 * page]
    writer.abort()


def test_storages_are_filled_from_several_threads(backend: ShmFdTransportBackend) -> None:
    sizes = tuple(1000 + 77 * i for i in range(64))
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
    (fd,) = arena_fds()
    for number, entry in enumerate(manifest.tensors):
        assert os.pread(fd, sizes[number], entry.offset) == bytes([number]) * sizes[number]


def test_kernels_without_populate_allocate_by_the_file(
    backend: ShmFdTransportBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def older_kernel(*_: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(shm_fd, "populate", older_kernel)
    writer = backend.begin_export(SPEC)
    with writer.storage(1):
        pass
    (fd,) = arena_fds()
    assert os.fstat(fd).st_blocks == 0
    with writer.storage(2):
        assert os.fstat(fd).st_blocks * 512 >= 12_000
    writer.abort()
    fill(backend)


def test_exported_bytes_are_read_back_for_another_backend(backend: ShmFdTransportBackend) -> None:
    manifest = fill(backend)
    into = bytearray(12_000)
    backend.read_arena(0, manifest.tensors[2].offset, memoryview(into))
    assert into == b"\3" * 12_000
    backend.close()
    with pytest.raises(ValueError, match="closed"):
        backend.read_arena(0, 0, memoryview(into))


def test_address_space_that_cannot_be_had_is_insufficient_memory(
    backend: ShmFdTransportBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    writer = backend.begin_export(SPEC)
    monkeypatch.setattr(shm_fd, "map_pages", full)
    with pytest.raises(InsufficientMemory), writer.storage(0):
        pass
    writer.abort()


def test_an_aborted_export_gives_everything_back(backend: ShmFdTransportBackend) -> None:
    writer = backend.begin_export(SPEC)
    with writer.storage(0):
        assert arena_mappings() == ["rw-s"]
    writer.abort()
    assert (arena_fds(), arena_mappings()) == ([], [])
    writer.abort()
    with pytest.raises(ValueError, match="given up"), writer.storage(0):
        pass
    with pytest.raises(ValueError, match="given up"):
        writer.finish()
    fill(backend)  # The backend is as good as new.


def test_abort_after_finish_takes_nothing_away(backend: ShmFdTransportBackend) -> None:
    writer = backend.begin_export(SPEC)
    writer.finish()
    writer.abort()
    assert len(arena_fds()) == 1


def test_a_view_still_held_keeps_the_arena_from_being_final(backend: ShmFdTransportBackend) -> None:
    writer = backend.begin_export(SPEC)
    with writer.storage(0) as view:
        kept = view[:10]
    with pytest.raises(BackendUnavailable, match="still held"):
        writer.finish()
    kept.release()
    assert writer.finish().tensors
    assert backend.resident_bytes


def test_a_dropped_writer_leaves_nothing_behind(backend: ShmFdTransportBackend) -> None:
    writer = backend.begin_export(SPEC)
    with writer.storage(0):
        pass
    del writer
    gc.collect()
    assert (arena_fds(), arena_mappings()) == ([], [])


def test_a_state_without_tensors_is_a_state(backend: ShmFdTransportBackend) -> None:
    manifest = backend.prepare_export({})
    assert manifest.tensors == ()
    assert backend.resident_bytes == manifest.arenas[0].nbytes > 0


# ------------------------------------------------------------------------------------ memory
def test_more_memory_than_there_is_is_refused_before_any_is_taken(backend: ShmFdTransportBackend) -> None:
    huge = StateSpec(storages=(1 << 50,), tensors=())
    with pytest.raises(InsufficientMemory) as caught:
        backend.begin_export(huge)
    assert caught.value.needed == 1 << 50
    assert 0 < caught.value.available < 1 << 50
    assert caught.value.limit
    assert arena_fds() == []


def test_two_loads_that_fit_only_one_at_a_time_are_told(backend: ShmFdTransportBackend) -> None:
    with pytest.raises(InsufficientMemory) as caught:
        backend.begin_export(StateSpec(storages=(1 << 50,), tensors=()))
    most = StateSpec(storages=(caught.value.available * 2 // 3,), tensors=())
    first = backend.begin_export(most)
    with pytest.raises(InsufficientMemory):
        ShmFdTransportBackend().begin_export(most)
    first.abort()
    backend.begin_export(most).abort()


@pytest.mark.parametrize("way", ["mapped", "copied"])
def test_memory_already_taken_is_not_counted_twice(
    backend: ShmFdTransportBackend, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: (30_000, "a tiny machine"))
    other = ShmFdTransportBackend()
    writer = backend.begin_export(SPEC)  # 17,088 bytes
    with pytest.raises(InsufficientMemory):
        other.begin_export(SPEC)
    if way == "mapped":
        with writer.storage(2):
            pass
    else:
        source = ctypes.create_string_buffer(12_000)
        writer.copy_from(2, ctypes.addressof(source))
    other.begin_export(SPEC).abort()
    writer.abort()


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EFAULT, errno.ENOSPC])
def test_a_kernel_that_refuses_pages_half_way_is_insufficient_memory(
    backend: ShmFdTransportBackend, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    writer = backend.begin_export(SPEC)
    with writer.storage(0):
        pass

    def full(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(shm_fd, "populate", full)
    with pytest.raises(InsufficientMemory) as caught, writer.storage(2):
        pass
    assert caught.value.needed == 12_000
    assert os.strerror(code) in caught.value.limit
    writer.abort()
    assert arena_fds() == []


def test_a_copy_the_kernel_refuses_half_way_leaves_nothing(
    backend: ShmFdTransportBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwrite
    calls: list[int] = []

    def full_soon(fd: int, data: memoryview, offset: int) -> int:
        calls.append(offset)
        if len(calls) > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data[:8192], offset)  # write(2) may always write less.

    monkeypatch.setattr(os, "pwrite", full_soon)
    with pytest.raises(InsufficientMemory):
        backend.prepare_export(weights("cpu"))
    assert len(calls) == 4
    assert arena_fds() == []
    assert backend.resident_bytes == 0


def test_no_descriptor_for_an_arena_is_a_typed_error(backend: ShmFdTransportBackend) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        with pytest.raises(BackendUnavailable, match="Too many open files"):
            backend.begin_export(SPEC)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "meta"])
def test_only_cpu_memory_is_offered(backend: ShmFdTransportBackend, device: str) -> None:
    with pytest.raises(BackendUnavailable, match=device):
        backend.begin_export(SPEC, device=device)


def test_loading_imports_no_torch() -> None:
    script = """
import sys
from wcache_async.backends.registry import choose_for_device
from wcache_async.manifest import StateSpec, TensorSpec
spec = StateSpec(storages=(8,), tensors=(TensorSpec(name="a", dtype="uint8", shape=(8,), storage=0),))
backend = choose_for_device("cpu")
writer = backend.begin_export(spec)
with writer.storage(0) as view:
    view[:] = b"12345678"
writer.finish()
backend.close()
heavy = {"torch", "numpy", "cuda", "asyncio.base_events"} & set(sys.modules) - {"asyncio.base_events"}
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


# ----------------------------------------------------------------------------------- sending
async def test_given_fds_go_first_and_each_response_has_duplicates_of_its_own(backend: ShmFdTransportBackend) -> None:
    manifest = fill(backend)
    outbox = Outbox()
    first, second = OwnedFd(os.dup(0)), OwnedFd(os.dup(0))
    await backend.send_fetch_state_response(outbox, blank_response(manifest), [first, second])
    await backend.send_fetch_state_response(outbox, blank_response(manifest), [])
    assert outbox.fds[:2] == [first, second]
    (own,) = backend._arenas
    numbers = [fd.fileno() for fd in outbox.fds[2:]]
    assert len({*numbers, own.fileno()}) == 3
    assert {os.fstat(number).st_ino for number in numbers} == {os.fstat(own.fileno()).st_ino}
    for response in outbox.responses:
        assert response.transport_backend == "shm_fd"
        assert response.resident_bytes == backend.resident_bytes
        assert msgspec.msgpack.decode(response.payload) == {"arenas": [manifest.arenas[0].nbytes]}
    backend.close()  # An unload while both are still queued.
    assert os.pread(numbers[0], 1, 0) == b"\1"
    outbox.close()


async def test_a_response_that_cannot_have_its_fds_closes_what_it_was_given(backend: ShmFdTransportBackend) -> None:
    manifest = fill(backend)
    outbox = Outbox()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    given = OwnedFd(os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (given.fileno() + 1, hard))
    try:
        with pytest.raises(BackendUnavailable, match="ulimit -n"):
            await backend.send_fetch_state_response(outbox, blank_response(manifest), [given])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert given.closed
    assert outbox.responses == []


# ------------------------------------------------------------------------------------ receiving
MANIFEST = StateManifest(("uint8",), (Arena(4096),), (TensorEntry("a", 0, (4096,), 0, 0),), {})
TWO_ARENAS = StateManifest(("uint8",), (Arena(4096), Arena(64)), (TensorEntry("a", 0, (64,), 0, 0, 1),), {})


def arena(nbytes: int = 4096) -> OwnedFd:
    return sealed_memfd("wcache-arena-lie", bytes(nbytes))


def unsealed(seals: int) -> OwnedFd:
    fd = create_memfd("wcache-arena-lie", 4096)
    fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, seals)
    return fd


def pipe() -> OwnedFd:
    read, write = os.pipe()
    os.close(write)
    return OwnedFd(read)


def payload(*arenas: int) -> bytes:
    return msgspec.msgpack.encode({"arenas": arenas, "from_the_future": 1})


@dataclass(frozen=True)
class Lie:
    """What a peer sends, and what it is told."""

    fds: Callable[[], list[OwnedFd]]
    payload: bytes
    error: type[WeightCacheError]
    says: str
    manifest: StateManifest = MANIFEST


LIES = {
    "short": Lie(lambda: [arena(2048)], payload(4096), InvalidMemfd, "2048 bytes"),
    "long": Lie(lambda: [arena(8192)], payload(4096), InvalidMemfd, "8192 bytes"),
    "empty": Lie(lambda: [arena(0)], payload(4096), InvalidMemfd, "0 bytes"),
    "unsealed": Lie(lambda: [unsealed(fcntl.F_SEAL_SEAL)], payload(4096), InvalidMemfd, "F_SEAL_WRITE"),
    "shrinkable": Lie(lambda: [unsealed(SEALS & ~fcntl.F_SEAL_SHRINK)], payload(4096), InvalidMemfd, "F_SEAL_SHRINK"),
    "growable": Lie(lambda: [unsealed(SEALS & ~fcntl.F_SEAL_GROW)], payload(4096), InvalidMemfd, "F_SEAL_GROW"),
    "unsealable": Lie(lambda: [unsealed(SEALS & ~fcntl.F_SEAL_SEAL)], payload(4096), InvalidMemfd, "F_SEAL_SEAL"),
    "null": Lie(lambda: [OwnedFd(os.open("/dev/null", os.O_RDWR))], payload(4096), InvalidMemfd, "no memfd"),
    "pipe": Lie(lambda: [pipe()], payload(4096), InvalidMemfd, "no memfd"),
    "second_is_bad": Lie(lambda: [arena(), pipe()], payload(4096, 64), InvalidMemfd, "arena 1", TWO_ARENAS),
    "fewer_fds": Lie(lambda: [arena()], payload(4096, 64), FdsTruncated, "2", TWO_ARENAS),
    "fewer_announced": Lie(lambda: [arena()], payload(4096), InvalidManifest, "announced", TWO_ARENAS),
    "more_announced": Lie(lambda: [arena(), arena(64)], payload(4096, 64), InvalidManifest, "announced"),
    "other_size": Lie(lambda: [arena(64)], payload(64), InvalidManifest, "announced"),
    "other_order": Lie(lambda: [arena(64), arena()], payload(64, 4096), InvalidManifest, "announced", TWO_ARENAS),
    "no_bytes": Lie(
        lambda: [arena(0)], payload(0), InvalidManifest, "empty", StateManifest(("uint8",), (Arena(0),), (), {})
    ),
    "no_payload": Lie(lambda: [arena()], b"", MalformedMessage, "payload"),
    "negative": Lie(lambda: [arena()], payload(-1), MalformedMessage, "payload"),
    "other_payload": Lie(lambda: [arena()], msgspec.msgpack.encode([1]), MalformedMessage, "payload"),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
async def test_what_is_not_as_announced_is_refused_before_it_is_mapped(
    backend: ShmFdTransportBackend, lie: Lie, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("mapped")

    monkeypatch.setattr(shm_fd, "map_pages", never)
    fds = ReceivedFds(lie.fds())
    owned = list(fds.fds)
    response = FetchStateResponse(
        name="a", rank=0, generation=1, lease=1, config={}, manifest_nbytes=0, payload=lie.payload
    )
    with pytest.raises(lie.error, match=lie.says):
        await backend.recv_fetch_state_response(fds, response, lie.manifest)
    fds.close()
    assert all(fd.closed for fd in owned)
    assert backend.resident_bytes == 0
    with pytest.raises(ValueError, match="no state was received"):
        backend.import_tensors()


async def test_all_arenas_are_opened_or_none(backend: ShmFdTransportBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    really_map = map_pages
    calls: list[int] = []

    def second_fails(fd: int, nbytes: int, access: object) -> object:
        calls.append(fd)
        if len(calls) == 2:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return really_map(fd, nbytes, access)  # type: ignore[arg-type]

    monkeypatch.setattr(shm_fd, "map_pages", second_fails)
    fds = ReceivedFds([arena(), arena(64)])
    owned = list(fds.fds)
    response = msgspec.structs.replace(blank_response(TWO_ARENAS), payload=payload(4096, 64))
    with pytest.raises(InsufficientMemory):
        await backend.recv_fetch_state_response(fds, response, TWO_ARENAS)
    assert len(calls) == 2
    assert all(fd.closed for fd in owned)
    # That nothing stays mapped is checked after every test here.


@pytest.mark.parametrize("when", ["before", "while"])
async def test_cancelling_leaks_no_fd_and_no_mapping(
    backend: ShmFdTransportBackend, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Cancelled with the opening, of as many arenas as an executor opens, still queued, or half done."""
    monkeypatch.setattr(shm_fd, "_AT_ONCE", 0)
    reached, go_on = threading.Event(), threading.Event()
    really_check = check_memfd

    def slow_check(fd: OwnedFd, nbytes: int, what: str) -> None:
        reached.set()
        assert go_on.wait(30)
        really_check(fd, nbytes, what)

    monkeypatch.setattr(shm_fd, "check_memfd", slow_check)
    loop = asyncio.get_running_loop()
    threads = ThreadPoolExecutor(1)
    loop.set_default_executor(threads)
    if when == "before":
        threads.submit(go_on.wait, 30)
    received = ReceivedFds([arena()])
    response = msgspec.structs.replace(blank_response(MANIFEST), payload=payload(4096))
    task = asyncio.create_task(backend.recv_fetch_state_response(received, response, MANIFEST))
    await asyncio.sleep(0)
    if when == "while":
        # The one thread is busy, so this is the only way to wait for it.
        assert reached.wait(30)
    assert received.fds == []  # Taken: no longer the stream's to close.
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go_on.set()
    await asyncio.to_thread(lambda: None)  # Behind the opening in the one thread.
    del task
    assert arena_fds() == []
    assert arena_mappings() == []
    assert backend.resident_bytes == 0


# ---------------------------------------------------------------------------------- the client's view
@asynccontextmanager
async def attached(options: ImportOptions | None = None) -> AsyncIterator[ShmFdTransportBackend]:
    async with served("shm_fd", weights) as state:
        stream = await connect(state.dial())
        backend, _ = await fetch(stream, options)
        stream.close()
    assert isinstance(backend, ShmFdTransportBackend)
    yield backend
    backend.close()


async def test_attached_memory_is_one_private_mapping_and_no_fd() -> None:
    async with attached() as backend:
        assert arena_mappings() == ["rw-p"]
        assert arena_fds() == []
        assert backend.resident_bytes >= 60_000


async def test_the_last_tensor_unmaps_the_arena() -> None:
    async with attached() as backend:
        tensors = backend.import_tensors()  # A future would hold its result until the loop's next turn.
        backend.close()
        part = tensors["weight"][10:20]
        numbers = tensors["running_mean"].numpy()
        del tensors
        gc.collect()
        assert arena_mappings() == ["rw-p"]
        assert part.tolist()
        del part
        assert arena_mappings() == ["rw-p"]
        del numbers
        assert arena_mappings() == []


async def test_read_only_memory_is_mapped_read_only() -> None:
    async with attached(ImportOptions(mapping="read_only")) as backend:
        assert arena_mappings()[0].startswith("r--")
        tensors = await asyncio.to_thread(backend.import_tensors)
        assert torch.equal(tensors["weight"].view(torch.int32), weights("cpu")["weight"][0].detach().view(torch.int32))
        del tensors


async def test_kernels_before_6_7_map_sealed_memory_read_only_and_privately(monkeypatch: pytest.MonkeyPatch) -> None:
    really_map = map_pages

    def older_kernel(fd: int, nbytes: int, access: Access) -> object:
        if access is Access.SHARED_READ:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        return really_map(fd, nbytes, access)

    monkeypatch.setattr(shm_fd, "map_pages", older_kernel)
    async with attached(ImportOptions(mapping="read_only")):
        assert arena_mappings() == ["r--p"]


def write_to_read_only(peer: Peer, sock: object) -> None:
    async def main() -> dict[str, torch.Tensor]:
        stream = await connect(peer.sockets[0])
        backend, _ = await fetch(stream, ImportOptions(mapping="read_only"))
        stream.close()
        return backend.import_tensors()

    tensors = asyncio.run(main())
    peer.send(float(tensors["weight"].view(torch.uint8)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tensors["weight"].zero_()


async def test_a_write_to_read_only_memory_kills_its_process(forge: Forge) -> None:
    async with served("shm_fd", weights) as state:
        with forge.start(write_to_read_only, state.dial()) as child:
            assert await asyncio.to_thread(child.receive) >= 0
            assert await asyncio.to_thread(lambda: child.exit_status) == -signal.SIGSEGV


def fork_with_tensors(peer: Peer, sock: object) -> None:
    async def main() -> dict[str, torch.Tensor]:
        stream = await connect(peer.sockets[0])
        backend, _ = await fetch(stream)
        stream.close()
        return backend.import_tensors()

    tensors = asyncio.run(main())
    before = tensors["weight"].clone()
    pid = os.fork()
    if pid == 0:
        right = torch.equal(tensors["weight"].view(torch.int32), before.view(torch.int32))
        tensors["weight"].zero_()
        tensors.clear()
        gc.collect()
        os._exit(0 if right and arena_mappings() == [] else 1)
    _, status = os.waitpid(pid, 0)
    peer.send(
        (os.waitstatus_to_exitcode(status), torch.equal(tensors["weight"].view(torch.int32), before.view(torch.int32)))
    )


async def test_a_forked_child_has_tensors_of_its_own(forge: Forge) -> None:
    async with served("shm_fd", weights) as state:
        with forge.start(fork_with_tensors, state.dial()) as child:
            assert await asyncio.to_thread(child.receive) == (0, True)


KEPT: list[object] = []


class LastReader:
    """Reads a tensor's memory when the interpreter takes its modules apart: after every atexit handler."""

    def __init__(self, peer: Peer, tensor: torch.Tensor) -> None:
        self.peer = peer
        self.address = tensor.data_ptr()

    def __del__(self, read: Callable[[int, int], bytes] = ctypes.string_at) -> None:
        self.peer.send(read(self.address, 4))


def exit_with_tensors(peer: Peer, sock: object) -> None:
    async def main() -> None:
        stream = await connect(peer.sockets[0])
        backend, _ = await fetch(stream)
        tensors = backend.import_tensors()
        KEPT.extend([backend, tensors, stream, LastReader(peer, tensors["weight"])])

    peer.finalize = True
    asyncio.run(main())
    KEPT.append(KEPT)  # Only interpreter shutdown gets rid of these.
    peer.send("attached")


async def test_the_interpreter_ends_well_with_tensors_alive_and_in_use(forge: Forge) -> None:
    async with served("shm_fd", weights) as state:
        with forge.start(exit_with_tensors, state.dial()) as child:
            assert await asyncio.to_thread(child.receive) == "attached"
            assert await asyncio.to_thread(child.receive) == raw_bytes(weights("cpu")["weight"][0])[:4]
            assert await asyncio.to_thread(lambda: child.exit_status) == 0

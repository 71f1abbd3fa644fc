"""Many at once, and those who go away meanwhile."""

import asyncio
import os

import pytest

from tests.conformance.wire import blank_response
from tests.emulated_gpu.suite.rig import (
    Emulator,
    Wire,
    attach,
    contents,
    expected,
    exported,
    send,
    settle,
    until,
)
from wcache_async.backends.vmm_fd import VmmFdTransportBackend
from wcache_async.errors import StateUnloaded
from wcache_async.manifest import StateManifest
from wcache_async.sockets.fds import OwnedFd

SLOW_EXPORT = "cuMemExportToShareableHandle:*:sleep=500"


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    async for line in reader:
        writer.write(line)
    writer.close()


async def test_requests_are_answered_while_exports_are_slow(emulator: Emulator) -> None:
    import socket

    ours, theirs = socket.socketpair()
    async with exported() as (backend, manifest):
        served = asyncio.create_task(answer(*await asyncio.open_connection(sock=theirs)))
        reader, writer = await asyncio.open_connection(sock=ours)
        emulator.fail(SLOW_EXPORT)
        exports = [asyncio.create_task(send(backend, manifest)) for _ in range(8)]
        await until(lambda: emulator.seen() > 0)
        async with asyncio.timeout(60):
            for number in range(100):
                writer.write(b"%d\n" % number)
                assert await reader.readline() == b"%d\n" % number
        assert not any(export.done() for export in exports)
        emulator.fail("")
        for wire in await asyncio.gather(*exports):
            assert len(wire.fds) == len(manifest.arenas)
            wire.close()
        writer.close()
        await served


async def test_many_attach_at_once() -> None:
    async with exported() as (backend, manifest):
        clients = await asyncio.gather(*(attach(backend, manifest) for _ in range(16)))
        for client in clients:
            assert contents(client.import_tensors()) == expected()
            client.close()


async def test_closing_waits_for_the_export_that_runs_and_refuses_the_next(emulator: Emulator) -> None:
    async with exported() as (backend, manifest):
        emulator.fail("cuMemExportToShareableHandle:1:sleep=200")
        running = asyncio.create_task(send(backend, manifest))
        queued = asyncio.create_task(send(backend, manifest))
        await until(lambda: emulator.seen() > 0)
        closing = asyncio.create_task(asyncio.to_thread(backend.close))
        wire = await running
        assert len(wire.fds) == len(manifest.arenas)
        wire.close()
        for late in await asyncio.gather(queued, send(backend, manifest), return_exceptions=True):
            if isinstance(late, Wire):  # It was in the thread's queue before the closing.
                late.close()
            else:
                assert isinstance(late, StateUnloaded)
        await closing
        with pytest.raises(StateUnloaded):
            await send(backend, manifest)


async def test_fds_given_along_are_closed_where_there_is_no_state() -> None:
    async with exported() as (backend, manifest):
        pass
    fd = OwnedFd(os.dup(0))
    with pytest.raises(StateUnloaded):
        await backend.send_fetch_state_response(Wire(), blank_response(manifest), [fd])
    assert fd.closed


async def test_fds_given_along_go_first() -> None:
    async with exported() as (backend, manifest):
        fd = OwnedFd(os.dup(0))
        wire = Wire()
        await backend.send_fetch_state_response(wire, blank_response(manifest), [fd])
        assert wire.fds[0] is fd
        assert len(wire.fds) == 1 + len(manifest.arenas)
        assert wire.response is not None
        assert wire.response.transport_backend == "vmm_fd"
        assert wire.response.resident_bytes == backend.resident_bytes
        wire.close()


# ---------------------------------------------------------------------------------- cancellation
async def cancel_at(task: "asyncio.Task[object]", emulator: Emulator) -> None:
    """Cancel once the emulator's first fault is met, which is slow."""
    await until(lambda: emulator.seen() > 0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_export_that_is_cancelled_leaves_no_fd(emulator: Emulator) -> None:
    async with exported() as (backend, manifest):
        before = set(os.listdir("/proc/self/fd"))
        emulator.fail("cuMemExportToShareableHandle:2:sleep=200")
        task = asyncio.create_task(send(backend, manifest))
        await until(lambda: emulator.seen() >= 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        await asyncio.to_thread(settle)
        assert set(os.listdir("/proc/self/fd")) == before, "fds that were exported for nobody"
        assert caught.value.__traceback__ is not None, "it keeps the frames that were waiting for the fds"


@pytest.mark.parametrize(
    "call",
    ["cuMemGetInfo", "cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess", "cuMemcpy"],
)
async def test_an_import_that_is_cancelled_leaves_nothing(call: str, emulator: Emulator) -> None:
    async with exported() as (backend, manifest):
        before = emulator.held()
        wire = await send(backend, manifest)
        fds = list(wire.fds)
        emulator.fail(f"{call}:1:sleep=200")
        await cancel_at(asyncio.create_task(receive(wire, manifest)), emulator)
        await asyncio.to_thread(settle)
        assert emulator.held() == before
        assert all(fd.closed for fd in fds)
        client = await attach(backend, manifest)
        assert contents(client.import_tensors()) == expected()
        client.close()


async def receive(wire: Wire, manifest: StateManifest) -> object:
    client = VmmFdTransportBackend()
    assert wire.response is not None
    await client.recv_fetch_state_response(wire, wire.response, manifest)
    return client


async def test_an_import_cancelled_before_it_began_leaves_nothing() -> None:
    async with exported() as (backend, manifest):
        wire = await send(backend, manifest)
        fds = list(wire.fds)
        task = asyncio.create_task(receive(wire, manifest))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(settle)
        assert all(fd.closed for fd in fds)

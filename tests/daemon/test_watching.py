"""Looking at files for a status: off the loop, one look at a time, and never waited for long."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from wcache_async import Client, Daemon
from wcache_async.daemon import watching
from wcache_async.errors import Scalar
from wcache_async.identity.files import changed_files
from wcache_async.manifest import Origin

Changes = dict[str, dict[str, list[Scalar]]]


class FileServer:
    """Holds every look until it answers, and counts them."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.asked = threading.Event()
        self.looks = 0

    def changed_files(self, origin: Origin) -> Changes:
        self.looks += 1
        self.asked.set()
        self.answers.wait(30)
        return changed_files(origin)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    server = FileServer()
    monkeypatch.setattr(watching, "changed_files", server.changed_files)
    yield server
    server.answers.set()


async def test_a_file_server_that_does_not_answer_delays_no_status_for_long_and_no_fetch_at_all(
    daemon: Daemon, write_checkpoint: Callable[..., Path], server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "LOOK_TIMEOUT_S", 0.05)
    await daemon.load(write_checkpoint(), name="m")
    async with Client(daemon.socket_path) as client, Client(daemon.socket_path) as other:
        asking = asyncio.create_task(client.status())
        assert await asyncio.to_thread(server.asked.wait, 20)
        assert (await other.fetch_state("m")).name == "m"
        assert not (await asking).states[0].stale
        await client.status()
        assert server.looks == 1  # The second waits for the first one's look, as there is one thread at most.
        server.answers.set()


async def test_statuses_asked_for_together_share_one_look(
    daemon: Daemon, write_checkpoint: Callable[..., Path], server: FileServer
) -> None:
    path = write_checkpoint()
    await daemon.load(path, name="m")
    os.utime(path, ns=(0, 5))
    async with Client(daemon.socket_path) as one, Client(daemon.socket_path) as other:
        asking = [asyncio.create_task(client.status()) for client in (one, other)]
        assert await asyncio.to_thread(server.asked.wait, 20)
        async with Client(daemon.socket_path) as third:
            with pytest.raises(TimeoutError):  # It has been heard, and waits.
                await asyncio.wait_for(third.status(), 0.05)
        server.answers.set()
        assert [(await answer).states[0].stale for answer in asking] == [True, True]
        assert server.looks == 1
        assert (await one.status()).states[0].stale
        assert server.looks == 2
    assert daemon.status().states[0].stale


async def test_without_files_nobody_looks(daemon: Daemon, server: FileServer) -> None:
    async with Client(daemon.socket_path) as client:
        await client.status()
    assert server.looks == 0

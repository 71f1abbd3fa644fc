"""torch_ipc on a real GPU: what the fake at torch's border cannot show.

Daemon and clients are processes of their own, forked from one that never touches CUDA.
"""

import asyncio
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.processes import Child, Forge, Peer
from wcache_async import Client, Daemon, blocking
from wcache_async.backends.torch_cuda import TorchCudaIpc
from wcache_async.errors import DaemonLost, WeightCacheError

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="needs an NVIDIA GPU with its driver, and a torch built with CUDA "
    f"(this is {torch.__version__}): run `make test-gpu` on such a machine",
)

NBYTES = 256 << 20  # Of the state's largest tensor: what is not given back shows.


def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "large": torch.randint(0, 256, (NBYTES,), dtype=torch.uint8, generator=generator),
        "small": torch.randn(17, generator=generator),
        "half": torch.randn(1000, generator=generator).bfloat16(),
        "empty": torch.zeros(0, 4),
    }


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpu") / "model.safetensors"
    save_file(state(), path)
    return path


def daemon_process(peer: Peer, path: str, checkpoint: str, allocator: str) -> None:
    """Child: a daemon on the first GPU; answers each word with the leases and the bytes torch has reserved."""
    if allocator:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = allocator

    async def main() -> None:
        async with Daemon(path, backend="torch_ipc", device="cuda:0", drain_timeout=5) as daemon:
            await daemon.load(checkpoint, name="m")
            peer.send("ready")
            while (word := await asyncio.to_thread(peer.receive)) != "stop":
                if word == "unload":
                    async with Client(path) as client:
                        await client.unload("m")
                leases = sum(held.leases for held in daemon.status().states)
                peer.send((leases, torch.cuda.memory_reserved(0)))

    try:
        asyncio.run(main())
    except WeightCacheError as error:
        peer.send(str(error))


def client_process(peer: Peer, path: str, visible: str) -> None:
    """Child: attach, say where the tensors are and whether they are right, again at each word."""
    if visible:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    expected = state()
    told: list[DaemonLost] = []
    with blocking.Client(path, on_daemon_lost=told.append) as client:
        try:
            held = client.fetch_state("m")
            tensors = held.import_tensors()
        except WeightCacheError as error:
            peer.send(str(error))
            return
        while True:
            right = all(torch.equal(tensors[name].cpu(), tensor) for name, tensor in expected.items())
            peer.send((right, str(tensors["large"].device)))
            word = peer.receive()
            if word == "release":
                held.release()
            elif word == "drop":
                tensors = {}
                gc.collect()
                client.status()  # Answered after the lease's end has been heard.
                peer.send("dropped")
                return
            elif word == "lost":
                try:
                    held.import_tensors()
                except DaemonLost:
                    peer.send(len(told))
                return
            elif word == "done":
                return


@pytest.fixture
def path(short_tmp: Path) -> str:
    return str(short_tmp / "w.sock")


@pytest.fixture
def daemon(forge: Forge, path: str, checkpoint: Path) -> Iterator[Child]:
    child = forge.start(daemon_process, path, str(checkpoint), "")
    try:
        assert child.receive() == "ready"
        yield child
    finally:
        child.close()


def ask(child: Child, word: str) -> Any:
    child.send(word)
    return child.receive()


def test_processes_see_the_daemons_bytes_on_their_gpu(daemon: Child, path: str, forge: Forge) -> None:
    with forge.start(client_process, path, "") as one, forge.start(client_process, path, "") as other:
        for child in (one, other):
            assert child.receive() == (True, "cuda:0")
            child.send("done")


def test_one_export_serves_any_number_of_clients_and_is_freed_after_them(
    daemon: Child, path: str, forge: Forge
) -> None:
    """torch's count of consumers is one; clients come and go, die, and touch no counter."""
    for ending in ("done", "kill", "drop", "kill", "done"):
        with forge.start(client_process, path, "") as child:
            assert child.receive() == (True, "cuda:0")
            if ending == "kill":
                child.kill()
                assert child.exit_status == -9
            else:
                child.send(ending)
                if ending == "drop":
                    assert child.receive() == "dropped"
    leases, reserved = ask(daemon, "leases")
    assert reserved >= NBYTES
    assert leases == 0
    assert ask(daemon, "unload") == (0, 0)


def test_a_released_state_is_intact_until_its_last_tensor_is_gone(daemon: Child, path: str, forge: Forge) -> None:
    with forge.start(client_process, path, "") as child:
        assert child.receive() == (True, "cuda:0")
        assert ask(child, "release") == (True, "cuda:0")
        _, reserved = ask(daemon, "unload")
        assert reserved >= NBYTES
        assert ask(child, "look") == (True, "cuda:0")
        assert ask(child, "drop") == "dropped"
    assert ask(daemon, "leases") == (0, 0)


def test_the_daemons_death_is_told_and_kills_nobody(daemon: Child, path: str, forge: Forge) -> None:
    with forge.start(client_process, path, "") as child:
        assert child.receive() == (True, "cuda:0")
        daemon.kill()
        assert daemon.exit_status == -9
        assert ask(child, "lost") == 1


def test_expandable_segments_are_refused_with_what_to_do(forge: Forge, path: str, checkpoint: Path) -> None:
    with forge.start(daemon_process, path, str(checkpoint), "expandable_segments:True") as child:
        text = child.receive()
        assert "expandable_segments:True out of" in text
        assert "vmm_fd" in text


def test_the_device_is_found_by_uuid(daemon: Child, path: str, forge: Forge) -> None:
    uuids = TorchCudaIpc().uuids()
    if len(uuids) < 2:
        pytest.skip("needs two GPUs")
    with forge.start(client_process, path, ",".join(reversed(uuids))) as child:
        assert child.receive() == (True, f"cuda:{len(uuids) - 1}")
        child.send("done")
    with forge.start(client_process, path, uuids[1]) as child:
        text = child.receive()
        assert uuids[0] in text
        assert "CUDA_VISIBLE_DEVICES" in text


def test_the_daemons_own_process_attaches_to_itself(short_tmp: Path, checkpoint: Path, forge: Forge) -> None:
    with forge.start(attach_to_itself, str(short_tmp / "w.sock"), str(checkpoint)) as child:
        assert child.receive() is True


def attach_to_itself(peer: Peer, path: str, checkpoint: str) -> None:
    """Child: daemon and client in one process, where CUDA refuses to open the handle."""

    async def main() -> bool:
        async with Daemon(path, backend="torch_ipc", device="cuda:0") as daemon:
            await daemon.load(checkpoint, name="m")
            async with Client(path) as client:
                tensors = await (await client.fetch_state("m")).import_tensors()
                return all(torch.equal(tensors[name].cpu(), tensor) for name, tensor in state().items())

    peer.send(asyncio.run(main()))


def test_a_write_reaches_every_client_as_the_capabilities_say(daemon: Child, path: str, forge: Forge) -> None:
    seen = []
    for _ in range(2):
        with forge.start(add_one, path) as child:
            seen.append(child.receive())
    assert seen[1] == pytest.approx(seen[0] + 1)


def add_one(peer: Peer, path: str) -> None:
    """Child: add one to a number in the state's memory, and say what it is then."""
    with blocking.Client(path) as client:
        small = client.fetch_state("m").import_tensors()["small"]
        small[0] += 1
        torch.cuda.synchronize()
        peer.send(float(small[0]))

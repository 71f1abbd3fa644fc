"""The whole path with real processes: checkpoint, daemon, socket, many clients on the same pages."""

import asyncio
import contextlib
import hashlib
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import uvloop
from safetensors.torch import save_file

from tests.processes import Child, Forge, Peer
from wcache_async import Client, Daemon, blocking
from wcache_async.protocol.framing import encode_frame
from wcache_async.protocol.messages import Hello, encode_message

RANKS = 8
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


# ------------------------------------------------------------------------------ in child processes
def serve(peer: Peer, loop: str, path: str, checkpoints: list[str]) -> None:
    """A daemon on either loop, each checkpoint one rank of the state `m`; answers `fds` and `maps`."""

    async def main() -> None:
        async with Daemon(path, drain_timeout=5) as daemon:
            for rank, checkpoint in enumerate(checkpoints):
                await daemon.load(checkpoint, name="m", rank=rank)
            peer.send(os.getpid())
            await daemon.serve_forever(handle_signals=True)

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(main())


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """Names, shapes, dtypes and bytes of a state in one value."""
    total = hashlib.blake2b()
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def attach(peer: Peer, loop: str, path: str, rank: int) -> None:
    """Connect when told to, and report what the state's bytes are."""

    async def main() -> None:
        async with Client(path) as client:
            state = await client.fetch_state("m", rank=rank)
            tensors = await state.import_tensors()
            peer.send(digest(tensors))
            # In-place writes stay here: the others' digests are taken while these stand.
            for tensor in tensors.values():
                tensor.zero_()
            peer.receive()

    peer.receive()
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(main())


def hold_until_killed(peer: Peer, path: str) -> None:
    state = blocking.fetch_state("m", socket_path=path)
    tensors = state.import_tensors()
    peer.send(len(tensors))
    peer.receive()


# ---------------------------------------------------------------------------------------- the tests
@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, str]]:
    """One checkpoint a rank, and its digest."""
    folder = tmp_path_factory.mktemp("ranks")
    made = []
    for rank in range(RANKS):
        torch.manual_seed(rank)
        tensors = {f"layers.{i}.weight": torch.randn(64, 32 + rank, dtype=torch.bfloat16) for i in range(20)}
        path = folder / f"rank{rank}.safetensors"
        save_file(tensors, path)
        made.append((path, digest(tensors)))
    return made


@pytest.fixture(params=sorted(LOOPS))
def loop(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def served(forge: Forge, loop: str, short_tmp: Path, checkpoints: list[tuple[Path, str]]) -> Iterator[tuple[str, int]]:
    """The socket and pid of a daemon process that holds every rank."""
    path = str(short_tmp / "wcache.sock")
    with forge.start(serve, loop, path, [str(checkpoint) for checkpoint, _ in checkpoints]) as daemon:
        yield path, daemon.receive()
        daemon.kill(signal.SIGTERM)
        assert daemon.exit_status == 0
    assert os.listdir(short_tmp) == []


def test_64_clients_over_8_ranks_at_once_each_see_their_ranks_bytes(
    forge: Forge, served: tuple[str, int], loop: str, checkpoints: list[tuple[Path, str]]
) -> None:
    path, _ = served
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(forge.start(attach, loop, path, i % RANKS)) for i in range(64)]
        for child in children:
            child.send("go")
        for i, child in enumerate(children):
            assert child.receive() == checkpoints[i % RANKS][1]
        assert sum(state.leases for state in blocking.status(path).states) == 64
        for child in children:
            child.send("leave")


def test_clients_attach_beside_silent_and_dripping_ones(
    forge: Forge, served: tuple[str, int], loop: str, checkpoints: list[tuple[Path, str]]
) -> None:
    path, _ = served
    with contextlib.ExitStack() as stack:
        hello = encode_frame(0, encode_message(Hello(versions=(1, 1))))[0].data
        for i in range(16 + 4):
            peer = stack.enter_context(socket.socket(socket.AF_UNIX))
            peer.connect(path)
            if i >= 16:
                peer.sendall(hello)
                peer.sendall(b"W")  # One byte of a request that will never be whole.
                peer.settimeout(20)
                assert peer.recv(1)
        children = [stack.enter_context(forge.start(attach, loop, path, rank)) for rank in range(8)]
        for child in children:
            child.send("go")
        assert [child.receive() for child in children] == [expected for _, expected in checkpoints]
        assert blocking.status(path).clients == 16 + 4 + 8 + 1
        for child in children:
            child.send("leave")


def mapped_and_open(pid: int) -> tuple[int, int]:
    """Bytes of shared memory a process maps, and how many fds it has."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in maps if "memfd:" in line]
    return sum(int(end, 16) - int(start, 16) for start, end in spans), len(os.listdir(f"/proc/{pid}/fd"))


def wait_until_alone(watch: blocking.Client) -> None:
    """Until the daemon serves nobody else: a session is counted until its fds are closed."""
    for _ in range(100_000):
        if watch.status().clients == 1:
            return
    raise AssertionError(f"the daemon still serves {watch.status().clients - 1} others")


async def cycles(path: str) -> None:
    """2,000 times connect, fetch, import, release, eight at a time."""

    async def cycle(times: int) -> None:
        for _ in range(times):
            async with Client(path) as client:
                state = await client.fetch_state("m")
                tensors = await state.import_tensors()
                assert len(tensors) == 20
                await state.release()

    await asyncio.gather(*[cycle(250) for _ in range(8)])


def kill_fifty(forge: Forge, path: str) -> None:
    """Half of them somewhere in between, half while they hold the state."""
    with contextlib.ExitStack() as stack:
        children: list[Child] = [stack.enter_context(forge.start(hold_until_killed, path)) for _ in range(50)]
        for i, child in enumerate(children):
            if i % 2:
                assert child.receive() == 20
            child.kill()
            with contextlib.suppress(EOFError):
                while True:
                    child.receive()
            assert child.exit_status == -signal.SIGKILL


@pytest.mark.parametrize("loop", ["uvloop"])
def test_cycles_and_killed_clients_leave_the_daemon_as_it_was(forge: Forge, served: tuple[str, int]) -> None:
    path, pid = served
    with blocking.Client(path) as watch:
        wait_until_alone(watch)
        before = mapped_and_open(pid)
        asyncio.run(cycles(path))
        for _ in range(10):
            kill_fifty(forge, path)
        wait_until_alone(watch)
        assert [state.leases for state in watch.status().states] == [0] * RANKS
        assert mapped_and_open(pid) == before

"""Finding a daemon again: when the policy tries, what it tries again, and what it never does."""

import asyncio
import math
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.processes import Child, Forge, Peer
from wcache_async import Client, Daemon, ReconnectPolicy, blocking
from wcache_async.client.publish import Turn
from wcache_async.client.reconnect import connect_again
from wcache_async.daemon.server import ServerLimits
from wcache_async.errors import (
    AddressNotTrusted,
    ClientClosed,
    DaemonLost,
    NotRunning,
    PeerTimeout,
    StateNotFound,
    TooManyClients,
    VersionMismatch,
    WeightCacheError,
)
from wcache_async.protocol.framing import Segment, encode_frame
from wcache_async.protocol.messages import ErrorResponse, encode_message
from wcache_async.sockets.fds import OwnedFd

SOON = ReconnectPolicy(first_pause=0.001, longest_pause=0.01, deadline=20)
Tensors = dict[str, torch.Tensor]


# ------------------------------------------------------------------------------------ it decides
@given(
    st.floats(1e-4, 10),
    st.floats(1, 1e6),
    st.none() | st.floats(0, 1e9),
    st.integers(1, 10**9),
    st.floats(0, 1e10),
    st.floats(0, 1, exclude_max=True),
)
def test_a_pause_is_within_its_bounds_and_there_is_time_after_it(
    first: float, times: float, deadline: float | None, failures: int, elapsed: float, chance: float
) -> None:
    policy = ReconnectPolicy(first_pause=first, longest_pause=first * times, deadline=deadline)
    pause = policy.pause(failures, elapsed, chance)
    left = math.inf if deadline is None else deadline - elapsed
    if pause is None:
        assert left <= first
    else:
        assert 0 <= pause <= min(policy.longest_pause, first * 2.0 ** min(failures - 1, 900))
        assert pause < left


def test_the_bound_doubles_up_to_the_longest() -> None:
    policy = ReconnectPolicy(first_pause=1, longest_pause=10, deadline=None)
    assert [policy.pause(n, 0, 0.5) for n in range(1, 7)] == [0.5, 1, 2, 4, 5, 5]
    assert policy.pause(10**9, 1e300, 0.5) == 5


def test_pauses_are_spread_over_all_of_their_range() -> None:
    """Full jitter: also nothing at all, so that not even half of the clients come in one moment."""
    policy = ReconnectPolicy(first_pause=1, longest_pause=8)
    assert [policy.pause(4, 0, chance / 4) for chance in range(4)] == [0, 2, 4, 6]


@pytest.mark.parametrize(
    "wrong",
    [
        {"first_pause": 0},
        {"first_pause": -1},
        {"first_pause": 3, "longest_pause": 2},
        {"longest_pause": math.inf},
        {"first_pause": math.nan},
        {"deadline": -1},
        {"deadline": math.nan},
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        ReconnectPolicy(**wrong)


# ----------------------------------------------------------------------------------- it performs
class World:
    """A clock that only sleeping moves, dice that always fall alike, and a daemon that comes late."""

    def __init__(self, comes_at: float, error: Callable[[], WeightCacheError], chance: float = 0.5) -> None:
        self.now = 100.0
        self.slept: list[float] = []
        self.tries = 0
        self.comes_at = 100.0 + comes_at
        self.error = error
        self.fell = chance

    def clock(self) -> float:
        return self.now

    def chance(self) -> float:
        return self.fell

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    async def connect(self) -> str:
        self.tries += 1
        if self.now < self.comes_at:
            raise self.error()
        return "connected"

    async def run(self, policy: ReconnectPolicy) -> str:
        return await connect_again(self.connect, policy, clock=self.clock, sleep=self.sleep, chance=self.chance)


def nobody() -> NotRunning:
    return NotRunning(socket="/s", reason="No such file or directory")


@pytest.mark.parametrize(
    "error",
    [
        nobody,
        lambda: DaemonLost(socket="/s", reason="it closed the connection"),
        lambda: PeerTimeout(what="answer a hello", seconds=1),
        lambda: TooManyClients(limit=1),
    ],
)
async def test_what_passes_is_tried_again_with_growing_pauses(error: Callable[[], WeightCacheError]) -> None:
    world = World(20, error)
    assert await world.run(ReconnectPolicy(first_pause=1, longest_pause=8, deadline=60)) == "connected"
    assert world.slept == [0.5, 1, 2, 4, 4, 4, 4, 4]
    assert world.tries == 9


@pytest.mark.parametrize(
    "error",
    [
        lambda: AddressNotTrusted(path="/s", reason="it belongs to uid 7"),
        lambda: VersionMismatch(ours=[1, 1], theirs=[2, 2]),
        ClientClosed,
    ],
)
async def test_what_waiting_does_not_mend_is_raised_at_once(error: Callable[[], WeightCacheError]) -> None:
    world = World(20, error)
    with pytest.raises(type(error())):
        await world.run(ReconnectPolicy())
    assert world.slept == []


async def test_at_the_deadline_the_last_error_is_raised_with_how_often_it_came() -> None:
    world = World(1e9, nobody, chance=0.999)
    with pytest.raises(NotRunning, match=r"No such file or directory, at each of \d+ tries in [91]\S+ s"):
        await world.run(ReconnectPolicy(first_pause=0.1, longest_pause=2, deadline=10))
    assert 9.9 <= world.now - 100 < 10


async def test_a_deadline_of_nothing_is_one_try() -> None:
    world = World(1, nobody)
    with pytest.raises(NotRunning, match=r"directory\. Start"):
        await world.run(ReconnectPolicy(deadline=0))
    assert world.tries == 1


# ------------------------------------------------------------------------------- a real daemon
def daemon_process(peer: Peer, path: str, checkpoint: str) -> None:
    """Child: a daemon with one state."""

    async def main() -> None:
        async with Daemon(path, drain_timeout=1) as daemon:
            await daemon.load(checkpoint, name="m")
            peer.send(daemon.instance)
            await daemon.serve_forever()

    asyncio.run(main())


@pytest.fixture
def path(short_tmp: Path) -> str:
    return str(short_tmp / "w.sock")


def same(got: Tensors, expected: Tensors) -> bool:
    return got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in expected)


async def start(forge: Forge, path: str, checkpoint: Path) -> Child:
    child = forge.start(daemon_process, path, str(checkpoint))
    assert isinstance(await asyncio.to_thread(child.receive), str)
    return child


async def kill(child: Child) -> None:
    child.kill()
    assert await asyncio.to_thread(lambda: child.exit_status) == -9


async def test_a_restarted_daemon_is_found_and_what_was_attached_goes_on(
    forge: Forge, path: str, checkpoint: Path, tensors: Tensors
) -> None:
    told: list[DaemonLost] = []
    first = await start(forge, path, checkpoint)
    async with Client(path, on_daemon_lost=told.append) as client:
        state = await client.fetch_state("m")
        early = await state.import_tensors()
        await kill(first)
        with pytest.raises(DaemonLost):
            await client.fetch_state("m")
        finding = asyncio.create_task(client.reconnect(SOON))
        await asyncio.sleep(0)
        assert not finding.done()
        with await start(forge, path, checkpoint) as second:
            await finding
            assert client.daemon_pid == second.pid
            assert same(early, tensors)
            assert same(await state.import_tensors(), tensors)
            again = await client.fetch_state("m")
            assert same(await again.import_tensors(), tensors)
            with pytest.raises(DaemonLost):
                await state.fetch_digests()  # Its lease ended with the daemon that gave it.
            await state.release()
            assert (await client.status()).states[0].leases == 1
            assert len(told) == 1
            second.kill()
            assert await asyncio.to_thread(lambda: second.exit_status) == -9
            first.close()
            second.close()


async def test_with_a_policy_calls_find_it_by_themselves_and_are_sent_once(
    forge: Forge, path: str, checkpoint: Path, tensors: Tensors
) -> None:
    first = await start(forge, path, checkpoint)
    told: list[DaemonLost] = []
    async with Client(path, reconnect=SOON, on_daemon_lost=told.append) as client:
        turn = await client.claim("built")
        assert isinstance(turn, Turn)
        waiting = asyncio.create_task(client.fetch_state("built"))
        await client.status()
        await kill(first)
        with pytest.raises(DaemonLost):  # It waited when the daemon died: whoever asked decides.
            await waiting
        later = [asyncio.create_task(client.fetch_state("m")) for _ in range(8)]
        await asyncio.sleep(0)
        with await start(forge, path, checkpoint) as second:
            for state in await asyncio.gather(*later):
                assert state.daemon_pid == second.pid
                assert same(await state.import_tensors(), tensors)
            status = await client.status()
            assert (status.clients, status.states[0].leases) == (1, 8)
            with pytest.raises(DaemonLost):
                await turn.publish({"w": torch.ones(1)})  # The new daemon knows no such ticket.
            turn.abandon()
            with pytest.raises(StateNotFound):
                await client.fetch_state("built")
            assert len(told) == 1
            await kill(second)
    first.close()


async def test_a_loop_that_was_kept_busy_notices_before_it_asks(forge: Forge, path: str, checkpoint: Path) -> None:
    """The daemon was killed and started again while this process computed: no call fails for it."""
    with await start(forge, path, checkpoint) as first:
        async with Client(path, reconnect=SOON) as client:
            await client.status()
            first.kill()
            assert first.exit_status == -9
            with forge.start(daemon_process, path, str(checkpoint)) as second:
                assert isinstance(second.receive(), str)
                assert (await client.status()).pid == second.pid
                second.kill()
                assert second.exit_status == -9


async def test_whoever_waits_is_told_at_once_by_the_socket_and_no_clock(
    forge: Forge, path: str, checkpoint: Path
) -> None:
    """All within a few turns of the loop after the kernel closed the dead daemon's sockets, in which no time passes."""
    with await start(forge, path, checkpoint) as child:
        async with Client(path) as builder, Client(path) as client, Client(path) as another:
            await builder.claim("built")
            waiting = [
                *(asyncio.create_task(client.fetch_state("built", timeout=timeout)) for timeout in (None, 60)),
                *(asyncio.create_task(each.claim("built")) for each in (client, another)),
                asyncio.create_task(another.fetch_state("built", progress=lambda done, total: None)),
            ]
            for each in (client, another):
                await each.status()
            child.kill()
            assert child.exit_status == -9  # Waits without the loop, which therefore knows of nothing yet.
            for _ in range(20):
                await asyncio.sleep(0)
            assert [type(task.exception()) for task in waiting if task.done()] == 5 * [DaemonLost]


async def test_without_a_policy_nothing_is_looked_for(daemon: Daemon) -> None:
    async with Client(daemon.socket_path) as client:
        await client.status()
        await daemon.close()
        for _ in range(3):
            with pytest.raises(DaemonLost):
                await client.status()
        with pytest.raises(NotRunning):
            await client.connect()
        with pytest.raises(NotRunning):
            await client.reconnect(ReconnectPolicy(deadline=0))
        async with Daemon(daemon.socket_path):
            await client.connect()
            await client.reconnect(ReconnectPolicy(deadline=0))
            assert (await client.status()).clients == 1


async def test_a_daemon_that_is_not_there_yet_can_be_waited_for(short_tmp: Path) -> None:
    client = Client(short_tmp / "w.sock")
    finding = asyncio.create_task(client.reconnect(SOON))
    await asyncio.sleep(0)
    async with Daemon(short_tmp / "w.sock", drain_timeout=5):
        await finding
        assert (await client.status()).clients == 1
        await client.close()


async def test_closing_ends_looking(short_tmp: Path) -> None:
    client = Client(short_tmp / "w.sock")
    finding = asyncio.create_task(
        client.reconnect(ReconnectPolicy(first_pause=1000, longest_pause=1000, deadline=None))
    )
    await asyncio.sleep(0)
    async with asyncio.timeout(20):
        await client.close()
        with pytest.raises(ClientClosed):
            await finding


async def test_a_closed_client_is_not_connected_again_by_asking(daemon: Daemon) -> None:
    client = Client(daemon.socket_path, reconnect=SOON)
    await client.connect()
    await client.close()
    with pytest.raises(ClientClosed):
        await client.status()


async def test_a_client_that_is_connected_twice_at_once_has_one_connection(daemon: Daemon) -> None:
    client = Client(daemon.socket_path)
    await asyncio.gather(*(client.connect() for _ in range(5)), *(client.reconnect() for _ in range(5)))
    assert (await client.status()).clients == 1
    await client.close()


async def test_a_full_daemon_is_tried_until_there_is_room(short_tmp: Path) -> None:
    async with Daemon(short_tmp / "w.sock", limits=ServerLimits(max_clients=1), drain_timeout=5) as daemon:
        async with Client(daemon.socket_path) as only:
            await only.status()
            client = Client(daemon.socket_path)
            with pytest.raises(TooManyClients):
                await client.reconnect(ReconnectPolicy(first_pause=0.001, longest_pause=0.01, deadline=0.1))
            finding = asyncio.create_task(client.reconnect(SOON))
            await asyncio.sleep(0)
        await finding
        assert (await client.status()).clients == 1
        await client.close()


@asynccontextmanager
async def listening(path: Path, says: bytes) -> AsyncIterator[None]:
    """Something at a socket of the tests' own, which says that and nothing more to whoever connects."""

    async def serve(sock: socket.socket) -> None:
        while True:
            connection, _ = await asyncio.get_running_loop().sock_accept(sock)
            with connection:
                await asyncio.get_running_loop().sock_sendall(connection, says)
                await asyncio.get_running_loop().sock_recv(connection, 1 << 10)

    with socket.socket(socket.AF_UNIX) as sock:
        sock.setblocking(False)
        sock.bind(str(path))
        path.chmod(0o600)
        sock.listen()
        server = asyncio.create_task(serve(sock)) if says else None
        yield
        if server is not None:
            server.cancel()
            await asyncio.wait((server,))


async def test_a_daemon_that_says_nothing_is_given_up(short_tmp: Path) -> None:
    """SIGSTOPped, say: its socket takes connections all the same, as the kernel does that."""
    async with listening(short_tmp / "w.sock", b""):
        client = Client(short_tmp / "w.sock", connect_timeout=0.01)
        with pytest.raises(PeerTimeout, match="answer a hello"):
            await client.reconnect(ReconnectPolicy(first_pause=0.001, longest_pause=0.01, deadline=0.1))


async def test_a_daemon_of_another_version_is_told_at_once(short_tmp: Path) -> None:
    refusal = ErrorResponse.of(VersionMismatch(ours=[9, 9], theirs=[1, 1]))
    segments: list[Segment[OwnedFd]] = encode_frame(0, encode_message(refusal), ())
    async with listening(short_tmp / "w.sock", b"".join(segment.data for segment in segments)):
        with pytest.raises(VersionMismatch):
            await Client(short_tmp / "w.sock").reconnect(SOON)


# --------------------------------------------------------------------------------- without a loop
def test_code_without_a_loop_finds_it_too(forge: Forge, path: str, checkpoint: Path, tensors: Tensors) -> None:
    with forge.start(daemon_process, path, str(checkpoint)) as first:
        assert isinstance(first.receive(), str)
        with blocking.Client(path, reconnect=SOON) as client:
            state = client.fetch_state("m")
            first.kill()
            assert first.exit_status == -9
            got: list[int] = []
            finding = threading.Thread(target=lambda: got.append(client.status().pid))
            finding.start()
            with forge.start(daemon_process, path, str(checkpoint)) as second:
                assert isinstance(second.receive(), str)
                finding.join(20)
                client.reconnect()
                assert got == [second.pid]
                assert same(state.import_tensors(), tensors)
                assert same(client.fetch_state("m").import_tensors(), tensors)
                second.kill()
                assert second.exit_status == -9

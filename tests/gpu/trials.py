"""One state through one backend between real processes: loaded, attached, its daemon killed, written to."""

import asyncio
import socket
import time
from contextlib import ExitStack

import msgspec
import torch

from tests.conformance.wire import connect, fetch, serve
from tests.emulated_gpu.emulator import emulated, stand_in
from tests.processes import Child, ChildError, Forge, Peer
from wcache_async.backends.registry import get_transport_backend_class
from wcache_async.errors import WeightCacheError
from wcache_async.manifest import StateSpec, TensorSpec

__all__ = ["Trial", "run"]

if emulated():
    stand_in()

MIB = 1 << 20
TENSOR_NBYTES = 256 * MIB
CLIENTS = 3


class Trial(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One backend with one size of state."""

    backend: str
    mib: int
    load_s: float = 0.0
    attach_ms: list[float] = []
    """One a client; the first is the daemon's first, too."""
    bytes_right: bool | None = None
    outlives_the_daemon: bool | None = None
    write_to_a_parameter: str = ""
    """What the process that wrote was told."""
    others_right_after_the_write: bool | None = None
    error: str = ""

    @property
    def good(self) -> bool:
        told = (self.bytes_right, self.outlives_the_daemon, self.others_right_after_the_write)
        return not self.error and False not in told


def spec(nbytes: int) -> StateSpec:
    """Parameters of 256 MiB, or of a quarter of a smaller state."""
    each = min(TENSOR_NBYTES, nbytes // 4)
    count = nbytes // each
    tensors = tuple(TensorSpec(name=f"w{i}", dtype="uint8", shape=(each,), storage=i) for i in range(count))
    return StateSpec(storages=(each,) * count, tensors=tensors)


def value(number: int) -> int:
    return (number * 7 + 3) % 251


# ----------------------------------------------------------------------------- other processes
def hold(peer: Peer, one: socket.socket, two: socket.socket, three: socket.socket, name: str, nbytes: int) -> None:
    """Child: load a state, say how long that took, and serve three clients."""
    try:
        started = time.monotonic()
        backend = get_transport_backend_class(name)()
        what = spec(nbytes)
        writer = backend.begin_export(what, device="cuda:0")
        for number, size in enumerate(what.storages):
            with writer.storage(number) as view:
                view[:] = bytes([value(number)]) * size
        manifest = writer.finish()
        peer.send(time.monotonic() - started)
    except WeightCacheError as error:
        peer.send(str(error))
        return

    async def main() -> None:
        await asyncio.gather(*(serve(sock, backend, manifest) for sock in (one, two, three)))

    asyncio.run(main())
    peer.receive()  # Holds the state until it is killed.


def attach(peer: Peer, sock: socket.socket) -> None:
    """Child: at the first word attach and say how long that took; at each further one do as it says."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    tensors: dict[str, torch.Tensor] = {}

    async def main() -> float:
        stream = await connect(sock)
        try:
            started = time.monotonic()
            backend, _ = await fetch(stream)
            tensors.update(await asyncio.to_thread(backend.import_tensors))
            return time.monotonic() - started
        finally:
            stream.close()

    peer.send("ready")
    while (word := peer.receive()) != "done":
        if word == "attach":
            try:
                peer.send(asyncio.run(main()))
            except WeightCacheError as error:
                peer.send(str(error))
        elif word == "look":
            peer.send(all(bool((tensor == value(i)).all()) for i, tensor in enumerate(tensors.values())))
        elif word == "write":
            peer.send(_write(tensors["w0"]))


def _write(tensor: torch.Tensor) -> str:
    try:
        tensor[:16].fill_(0)
        if tensor.is_cuda:
            torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "nothing: it was written"


def ask(child: Child, word: str) -> object:
    child.send(word)
    return child.receive()


# --------------------------------------------------------------------------------------- trials
def run(forge: Forge, name: str, mib: int) -> Trial:
    """Load, attach three times, kill the daemon, write."""
    trial = Trial(backend=name, mib=mib)
    try:
        with ExitStack() as stack:
            _run(forge, trial, stack)
    except (ChildError, EOFError, TimeoutError, WeightCacheError) as error:
        trial.error = f"{type(error).__name__}: {error}".strip().splitlines()[-1]
    return trial


def _run(forge: Forge, trial: Trial, stack: ExitStack) -> None:
    capabilities = get_transport_backend_class(trial.backend).capabilities
    pairs = [socket.socketpair() for _ in range(CLIENTS)]
    one, two, three = (theirs for _, theirs in pairs)
    daemon = forge.start(hold, one, two, three, trial.backend, trial.mib * MIB)
    stack.callback(daemon.close)
    clients = []
    for ours, _ in pairs:
        client = forge.start(attach, ours)
        stack.callback(client.close)
        clients.append(client)
        client.receive()
    said = daemon.receive()
    if isinstance(said, str):
        trial.error = said
        return
    trial.load_s = round(said, 2)
    for client in clients:
        took = ask(client, "attach")
        if not isinstance(took, float):
            trial.error = str(took)
            return
        trial.attach_ms.append(round(took * 1e3, 2))
    trial.bytes_right = all(ask(client, "look") is True for client in clients)
    daemon.kill()
    _ = daemon.exit_status
    if capabilities.survives_daemon_exit:
        trial.outlives_the_daemon = all(ask(client, "look") is True for client in clients)
    if capabilities.read_only:
        writer, *others = clients
        try:
            trial.write_to_a_parameter = str(ask(writer, "write"))
        except EOFError:
            trial.write_to_a_parameter = f"its process ended with status {writer.exit_status}"
        trial.others_right_after_the_write = all(ask(client, "look") is True for client in others)

"""What other processes do in the tests of the suite: each is one function of a forked child."""

import asyncio
import hashlib
import os
import socket
from collections.abc import Callable

import torch

from tests.conformance.wire import connect, fetch, serve
from tests.emulated_gpu.suite.rig import GRANULARITY, Emulator, attach, contents, export, mixed_state, send
from tests.processes import Peer
from wcache_async.backends import cuda_driver
from wcache_async.backends.cuda_device import device_by_name
from wcache_async.backends.vmm_fd import VmmFdTransportBackend
from wcache_async.errors import WeightCacheError
from wcache_async.manifest import StateManifest, StateSpec, TensorSpec

__all__ = [
    "begin_export",
    "client",
    "daemon",
    "digests_of",
    "forked_after_use",
    "mixed_digests",
    "one_on",
    "strict_round_trip",
    "use_device_twice",
    "write_to_a_parameter",
]

Digests = dict[str, str]


def digests(tensors: dict[str, torch.Tensor]) -> Digests:
    return digests_of(contents(tensors))


def digests_of(data: dict[str, bytes]) -> Digests:
    return {name: hashlib.sha256(body).hexdigest() for name, body in data.items()}


def mixed_digests() -> Digests:
    return digests({name: tensor for name, (tensor, _) in mixed_state().items()})


def client(peer: Peer, sock: socket.socket, environment: dict[str, str]) -> None:
    """Attach, send the digests of what is seen, and again at each word; or send the error's code and text."""
    os.environ.update(environment)

    tensors: dict[str, torch.Tensor] = {}

    async def attach() -> None:  # Returns none of them: asyncio.run shows the result's text to signal.getsignal.
        stream = await connect(sock)
        try:
            backend, _ = await fetch(stream)
            tensors.update(await asyncio.to_thread(backend.import_tensors))
        finally:
            stream.close()

    try:
        asyncio.run(attach())
    except WeightCacheError as error:
        peer.send((error.code, str(error)))
        return
    peer.send(digests(tensors))
    while peer.receive() != "done":
        peer.send(digests(tensors))


def daemon(peer: Peer, sock: socket.socket, environment: dict[str, str]) -> None:
    """Export and serve one connection."""
    os.environ.update(environment)
    backend, manifest = export(mixed_state())
    peer.send("ready")
    asyncio.run(serve(sock, backend, manifest))


def one_on(device: str, content: bytes) -> tuple[VmmFdTransportBackend, StateManifest]:
    """A state of one parameter, loaded onto a device."""
    backend = VmmFdTransportBackend()
    spec = StateSpec(
        storages=(len(content),), tensors=(TensorSpec(name="w", dtype="uint8", shape=(len(content),), storage=0),)
    )
    writer = backend.begin_export(spec, device=device)
    with writer.storage(0) as view:
        view[:] = content
    return backend, writer.finish()


def begin_export(peer: Peer, device: str, environment: dict[str, str]) -> None:
    """Send the code and text of what exporting to the device raises, or the UUID it went to."""
    os.environ.update(environment)
    peer.send(_outcome(lambda: one_on(device, b"x")[1].arenas[0].device))


def use_device_twice(peer: Peer, environment: dict[str, str]) -> None:
    """Send what using a device gives at first and then, and how many references on its context that takes."""
    os.environ.update(environment)
    for _ in range(2):
        peer.send(_outcome(lambda: device_by_name("cuda").uuid))
    peer.send(Emulator().contexts())


def forked_after_use(peer: Peer) -> None:
    """Send what using CUDA raises in a process forked from one that has used it."""
    device_by_name("cuda")
    if os.fork() == 0:
        peer.send(_outcome(lambda: device_by_name("cuda").uuid))
        os._exit(0)
    os.wait()


def strict_round_trip(peer: Peer) -> None:
    """Export, attach, sleep, wake where every call must have a context; send what is seen."""
    os.environ["FAKECUDA_STRICT_CTX"] = "1"

    async def main() -> Digests:
        backend, manifest = await asyncio.to_thread(export, mixed_state(), GRANULARITY)
        half = await attach(backend, manifest)
        await asyncio.to_thread(half.prepare_unmap)
        wire = await send(backend, manifest)
        assert wire.response is not None
        await asyncio.to_thread(half.remap, half.take_arena_fds(wire, wire.response))
        await asyncio.to_thread(backend.close)
        return digests(half.import_tensors())

    peer.send(asyncio.run(main()))


def write_to_a_parameter(peer: Peer) -> None:
    """Send the error of the driver, and the device's state after it, when a parameter is written."""

    async def main() -> tuple[str, str] | str:
        backend, manifest = await asyncio.to_thread(export, mixed_state(), GRANULARITY)
        half = await attach(backend, manifest)
        tensors = half.import_tensors()

        def write() -> str:
            with device_by_name("cuda").context():
                cuda_driver.copy(tensors["first"].data_ptr(), tensors["running_mean"].data_ptr(), 4)
            return "written"

        return _outcome(write)

    peer.send(asyncio.run(main()))


def _outcome(work: Callable[[], str]) -> tuple[str, str] | str:
    try:
        return work()
    except WeightCacheError as error:
        return error.code, str(error)

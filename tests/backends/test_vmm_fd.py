"""vmm_fd where there is no CUDA driver; `tests/emulated_gpu` has what it does where there is one."""

import ctypes
import os
from collections.abc import Callable

import msgspec
import pytest
import torch

from tests.conformance.wire import ReceivedFds, blank_response
from wcache_async.backends import cuda_driver
from wcache_async.backends.cuda_device import FINDER
from wcache_async.backends.vmm_fd import VmmFdTransportBackend
from wcache_async.errors import BackendUnavailable, StateUnloaded
from wcache_async.manifest import Arena, StateManifest, StateSpec
from wcache_async.sockets.fds import OwnedFd


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


pytestmark = pytest.mark.skipif(has_driver(), reason="needs a machine without a CUDA driver (libcuda.so.1)")

MANIFEST = StateManifest((), (Arena(2 << 20, "GPU-46414b45-4355-4441-0000-000000000000"),), ())


def test_it_says_that_there_is_no_driver() -> None:
    reason = cuda_driver.missing_reason()
    assert reason is not None
    assert "no CUDA driver" in reason
    assert "libcuda.so.1" in reason
    assert VmmFdTransportBackend.unavailable_reason() in (reason, "this torch is built without CUDA")
    assert "cannot be called" in (VmmFdTransportBackend.device_refusal("cuda") or "")


def test_every_driver_call_is_a_typed_answer() -> None:
    calls: list[Callable[[], object]] = [
        cuda_driver.initialize,
        cuda_driver.device_count,
        lambda: cuda_driver.granularity(0),
        lambda: cuda_driver.release_allocation(1),
    ]
    for call in calls:
        with pytest.raises(BackendUnavailable, match="cannot be called") as caught:
            call()
        assert caught.value.name == "vmm_fd"


def test_exporting_is_a_typed_answer() -> None:
    with pytest.raises(BackendUnavailable):
        VmmFdTransportBackend().begin_export(StateSpec(storages=(1,), tensors=()), device="cuda:0")


def test_no_state_can_be_exported() -> None:
    assert not VmmFdTransportBackend.can_export_state({"a": (torch.ones(1), True)})


async def test_importing_is_a_typed_answer_and_closes_the_fds() -> None:
    fd = OwnedFd(os.dup(0))
    payload = msgspec.msgpack.encode({"arenas": [2 << 20]})
    response = msgspec.structs.replace(blank_response(MANIFEST), payload=payload)
    backend = VmmFdTransportBackend()
    with pytest.raises(BackendUnavailable):
        await backend.recv_fetch_state_response(ReceivedFds([fd]), response, MANIFEST)
    await FINDER.run(lambda: None)  # Undoing is left to the thread that looked for the device.
    assert fd.closed


async def test_what_was_never_exported_is_not_sent() -> None:
    with pytest.raises(StateUnloaded):
        await VmmFdTransportBackend().send_fetch_state_response(_Nowhere(), blank_response(MANIFEST), [])


def test_what_was_never_received_is_not_imported() -> None:
    backend = VmmFdTransportBackend()
    with pytest.raises(ValueError, match="no state was received"):
        backend.import_tensors()
    backend.close()


class _Nowhere:
    async def send(self, response: object, fds: object) -> None:
        raise AssertionError("nothing was to be sent")

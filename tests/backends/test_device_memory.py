"""Tensors made of memory that torch did not allocate, and when their owner goes."""

import copy
import ctypes
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable

import pytest
import torch

from wcache_async.backends.device_memory import empty_torch_cache, tensor_at, torch_device
from wcache_async.errors import BackendUnavailable

CPU = torch.device("cpu")


class Memory:
    """Sixty-four bytes that are freed when this object goes."""

    def __init__(self) -> None:
        self.block = (ctypes.c_uint8 * 64)(*range(64))

    def tensor(self) -> torch.Tensor:
        return tensor_at(ctypes.addressof(self.block), 64, CPU, self)


def owned() -> "tuple[torch.Tensor, weakref.ref[Memory]]":
    memory = Memory()
    return memory.tensor(), weakref.ref(memory)


def test_it_is_the_memory_itself() -> None:
    memory = Memory()
    tensor = memory.tensor()
    assert tensor.dtype is torch.uint8
    assert tensor.tolist() == list(range(64))
    assert tensor.data_ptr() == ctypes.addressof(memory.block)
    memory.block[3] = 99
    assert int(tensor[3]) == 99
    tensor[4] = 98
    assert memory.block[4] == 98


def test_no_bytes() -> None:
    memory = Memory()
    assert tensor_at(ctypes.addressof(memory.block), 0, CPU, memory).shape == (0,)


@pytest.mark.parametrize(
    "keep",
    [
        lambda t: t[5:],
        lambda t: t.view(torch.float32),
        lambda t: t.detach(),
        lambda t: t.untyped_storage(),
        lambda t: t.untyped_storage()[8:16],
        lambda t: torch.empty(0, dtype=torch.int64).set_(t.untyped_storage()[8:24], 0, (2,), (1,)),
        lambda t: torch.nn.Parameter(t.view(torch.float32)),
        lambda t: t.data,
        lambda t: torch.as_strided(t, (2, 2), (3, 1), 7),
        lambda t: t.numpy(),
        lambda t: memoryview(t.numpy()),
        lambda t: torch.utils.dlpack.from_dlpack(t),
        lambda t: copy.copy(t),
    ],
    ids=[
        *("view", "other dtype", "detached", "storage", "slice of the storage", "tensor on a slice", "parameter"),
        *("data", "as_strided", "numpy", "memoryview", "dlpack", "copy"),
    ],
)
def test_whatever_uses_the_memory_keeps_its_owner(keep: Callable[[torch.Tensor], object]) -> None:
    tensor, owner = owned()
    kept = keep(tensor)
    del tensor
    gc.collect()
    assert owner() is not None
    del kept
    gc.collect()
    assert owner() is None


def test_the_owner_goes_without_the_garbage_collector() -> None:
    tensor, owner = owned()
    views = [tensor[i:] for i in range(5)]
    gc.disable()
    try:
        del tensor
        views.clear()
        assert owner() is None
    finally:
        gc.enable()


def test_a_copy_does_not_keep_the_owner() -> None:
    tensor, owner = owned()
    copies = [tensor.clone(), copy.deepcopy(tensor)]
    del tensor
    gc.collect()
    assert owner() is None
    assert all(each.tolist() == list(range(64)) for each in copies)


def test_what_autograd_has_saved_keeps_the_owner() -> None:
    tensor, owner = owned()
    weights = tensor[:16].view(torch.float32)
    of_ones = torch.ones(4, requires_grad=True)
    loss = (weights * of_ones).sum()
    del tensor, weights
    gc.collect()
    assert owner() is not None
    torch.autograd.backward(loss)
    del loss
    gc.collect()
    assert owner() is None


def test_it_goes_while_an_exception_unwinds() -> None:
    """ctypes' callbacks, of which DLPack deleters are made, fail just there."""
    gone: list[bool] = []

    def use(tensor: torch.Tensor, number: float) -> None: ...

    def make() -> torch.Tensor:
        tensor, owner = owned()
        weakref.finalize(owner(), gone.append, True)
        return tensor

    with pytest.raises(ZeroDivisionError):
        use(make(), 1 / 0)
    gc.collect()
    assert gone == [True]


def test_it_goes_in_another_thread() -> None:
    tensor, owner = owned()
    box = [tensor]
    del tensor
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    assert owner() is None


def test_an_ordinary_tensor_whatever_the_mode() -> None:
    memory = Memory()
    with torch.inference_mode():
        tensor = memory.tensor()
    assert not tensor.is_inference()
    assert not tensor.requires_grad


def test_an_interpreter_ends_quietly_with_tensors_alive() -> None:
    program = """
import ctypes, sys, threading
import torch
from wcache_async.backends.device_memory import tensor_at
block = (ctypes.c_uint8 * 64)()
class Owner:
    def __del__(self):
        pass
def make():
    return tensor_at(ctypes.addressof(block), 64, torch.device("cpu"), Owner())
kept = make()
torch.kept = make()
sys.modules["kept"] = make()
cycle = [make()]
cycle.append(cycle)
graph = (make()[:16].view(torch.float32) * torch.ones(4, requires_grad=True)).sum()
threading.Thread(target=threading.Event().wait, args=(0.01,)).start()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")


# ----------------------------------------------------------------------------------- torch's own
def test_torch_names_devices_as_the_driver_numbers_them() -> None:
    assert torch_device("cpu", 3) == CPU
    if torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        assert torch_device("cuda", 3) == torch.device("cuda:3")
    else:
        with pytest.raises(BackendUnavailable, match="without CUDA"):
            torch_device("cuda", 3)


def test_no_cache_is_emptied_where_cuda_is_not_used() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        pytest.skip("this process uses CUDA: needs one that does not")
    assert not empty_torch_cache()

"""How weights get into a process without a cache daemon: from files, or from another process.

Each `attach_...` gives name to tensor; what must outlive the call, if anything, goes onto the
stack.  The servers hold the tensors ready, and answer one connection after the other.
"""

import multiprocessing
import pickle
import socket
import struct
from contextlib import ExitStack
from multiprocessing.connection import Client, Listener
from pathlib import Path

import torch
from safetensors.torch import load_file

__all__ = [
    "attach_multiprocessing",
    "attach_pickle",
    "attach_safetensors",
    "attach_torch_load",
    "attach_torch_load_mmap",
    "serve_multiprocessing",
    "serve_pickle",
]

_length = struct.Struct("<Q")
_AUTHKEY = b"the two ends of one benchmark"


# ------------------------------------------------------------------------------ from files
def attach_safetensors(path: str, stack: ExitStack) -> dict[str, torch.Tensor]:
    """`safetensors.torch.load_file`."""
    del stack
    return load_file(path)


def attach_torch_load(path: str, stack: ExitStack) -> dict[str, torch.Tensor]:
    """`torch.load`."""
    del stack
    return _state_dict(torch.load(path, weights_only=True))


def attach_torch_load_mmap(path: str, stack: ExitStack) -> dict[str, torch.Tensor]:
    """`torch.load` with `mmap=True`."""
    del stack
    return _state_dict(torch.load(path, weights_only=True, mmap=True))


def _state_dict(loaded: object) -> dict[str, torch.Tensor]:
    if not isinstance(loaded, dict):
        raise TypeError(f"a {type(loaded).__name__} was loaded, no state dict")
    return loaded


# ------------------------------------------------- torch.multiprocessing, file_descriptor
def serve_multiprocessing(address: str, checkpoint: Path) -> None:
    """Send shared tensors to whoever connects; prints ``ready`` and never returns."""
    torch.multiprocessing.set_sharing_strategy("file_descriptor")  # type: ignore[no-untyped-call]
    # Each tensor's fd is asked for over a connection of its own, which authenticates with this.
    multiprocessing.current_process().authkey = _AUTHKEY
    tensors = load_file(checkpoint)
    for tensor in tensors.values():
        tensor.share_memory_()  # type: ignore[no-untyped-call]
    with Listener(address, "AF_UNIX", backlog=512, authkey=_AUTHKEY) as listener:
        print("ready", flush=True)
        while True:
            with listener.accept() as connection:
                connection.send(tensors)
                connection.poll(None)  # Until it hangs up: the fds are fetched from this process.


def attach_multiprocessing(address: str, stack: ExitStack) -> dict[str, torch.Tensor]:
    """Tensors in shared memory, one fd each, as torch.multiprocessing's queues and pipes deliver them."""
    torch.multiprocessing.set_sharing_strategy("file_descriptor")  # type: ignore[no-untyped-call]
    multiprocessing.current_process().authkey = _AUTHKEY
    connection = stack.enter_context(Client(address, "AF_UNIX", authkey=_AUTHKEY))
    return _state_dict(connection.recv())


# ------------------------------------------------------------------- pickle over a socket
def serve_pickle(address: str, checkpoint: Path) -> None:
    """Send the pickled tensors to whoever connects; prints ``ready`` and never returns."""
    body = pickle.dumps(load_file(checkpoint), pickle.HIGHEST_PROTOCOL)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(512)
        print("ready", flush=True)
        while True:
            sock, _ = listener.accept()
            with sock:
                sock.sendall(_length.pack(len(body)))
                sock.sendall(body)


def attach_pickle(address: str, stack: ExitStack) -> dict[str, torch.Tensor]:
    """Every byte through the socket, then unpickled."""
    del stack
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(address)
        (nbytes,) = _length.unpack(sock.recv(_length.size, socket.MSG_WAITALL))
        body = bytearray(nbytes)
        rest = memoryview(body)
        while rest:
            rest = rest[sock.recv_into(rest) :]
    return _state_dict(pickle.loads(body))

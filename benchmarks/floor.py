"""The floor: the least that attaching can cost in Python, written by hand with nothing around it.

One connection, one `recvmsg` that brings one fd and one typed msgpack list, one mapping, and one
view per tensor off one typed base, with the garbage collector held off.  No handshake, no lease,
no check of anything, no seals, one dtype, one request per connection, one client at a time.
"""

import gc
import mmap
import os
import socket
from array import array
from contextlib import ExitStack
from pathlib import Path
from struct import Struct

import msgspec
import torch
from safetensors.torch import load_file

__all__ = ["attach", "serve"]

_ALIGNMENT = 64
_header = Struct("<QQ")  # bytes of the arena, bytes of the list
_FIRST_RECEIVE_NBYTES = 512 << 10


class _Entry(msgspec.Struct, array_like=True, gc=False):
    """Shape, stride and offset in elements of a bfloat16 tensor."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


_decode = msgspec.msgpack.Decoder(list[_Entry]).decode


def serve(address: str, checkpoint: Path) -> None:
    """Serve the tensors of a safetensors file; prints ``ready`` and never returns."""
    tensors = load_file(checkpoint)
    entries = []
    position = 0
    for name, tensor in tensors.items():
        entries.append(_Entry(name, tuple(tensor.shape), tensor.stride(), position // tensor.itemsize))
        position += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    arena = os.memfd_create("floor")
    os.ftruncate(arena, position)
    base = torch.frombuffer(mmap.mmap(arena, position), dtype=torch.bfloat16)
    for entry, tensor in zip(entries, tensors.values(), strict=True):
        base.as_strided(entry.shape, entry.stride, entry.offset).copy_(tensor)
    del base, tensors, tensor
    message = msgspec.msgpack.encode(entries)
    message = _header.pack(position, len(message)) + message
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(512)
        print("ready", flush=True)
        while True:
            sock, _ = listener.accept()
            with sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * len(message))
                sent = sock.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [arena]))])
                if sent < len(message):
                    sock.sendall(memoryview(message)[sent:])


def attach(address: str, stack: ExitStack) -> dict[str, torch.Tensor]:
    """Name to tensor, on a private mapping of the server's memory."""
    del stack  # Nothing has to outlive this but the tensors.
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(address)
        message, ancillary, _, _ = sock.recvmsg(_FIRST_RECEIVE_NBYTES, socket.CMSG_SPACE(array("i").itemsize))
        fd = array("i", ancillary[0][2])[0]
        nbytes, length = _header.unpack_from(message)
        while len(message) < _header.size + length:
            message += sock.recv(_header.size + length - len(message), socket.MSG_WAITALL)
    collecting = gc.isenabled()
    gc.disable()
    try:
        entries = _decode(memoryview(message)[_header.size :])
        pages = mmap.mmap(fd, nbytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        os.close(fd)
        view = torch.frombuffer(pages, dtype=torch.bfloat16).as_strided
        return {entry.name: view(entry.shape, entry.stride, entry.offset) for entry in entries}
    finally:
        if collecting:
            gc.enable()

"""Every way of attaching that is measured delivers the checkpoint's tensors, twice in one process."""

import socket
from pathlib import Path

import pytest
from attach import METHODS
from checkpoints import Checkpoint, write_checkpoint

from tests.benchmarks.attaching import attach, serve
from tests.processes import Forge

TENSORS, NBYTES = 12, 2 << 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), TENSORS, NBYTES)


@pytest.mark.parametrize("method", ["floor", "multiprocessing", "pickle"])
def test_from_another_process(forge: Forge, checkpoint: Checkpoint, tmp_path: Path, method: str) -> None:
    address = str(tmp_path / "socket")
    output, theirs = socket.socketpair()
    with output, forge.start(serve, theirs, method, address, str(checkpoint.safetensors)) as server:
        assert output.recv(64) == b"ready\n"
        with forge.start(attach, method, address, TENSORS, NBYTES) as client:
            assert min(client.receive()) > 0
        server.kill()


@pytest.mark.parametrize("method", ["safetensors", "torch-load", "torch-load-mmap"])
def test_from_a_file(forge: Forge, checkpoint: Checkpoint, method: str) -> None:
    path = checkpoint.safetensors if method == "safetensors" else checkpoint.torch
    with forge.start(attach, method, str(path), TENSORS, NBYTES) as client:
        assert min(client.receive()) > 0


def test_these_are_all_there_are_but_for_wcache() -> None:
    others = {"floor", "multiprocessing", "pickle", "safetensors", "torch-load", "torch-load-mmap"}
    assert METHODS.keys() - others == {"wcache", "wcache-blocking"}

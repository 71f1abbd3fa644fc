"""A backend of another distribution, found by its entry point: served and fetched like a built-in one."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.daemon.conftest import WriteCheckpoint

PLUGIN = '''
"""Carries tensors in a file whose path travels in the payload."""

import os
import tempfile
from contextlib import contextmanager

import torch

from wcache_async.backends.base import Capabilities, StateWriter, WeightCacheTransportBackend
from wcache_async.backends.views import ArenaViews
from wcache_async.errors import StateReleased
from wcache_async.manifest import build_manifest, plan_layout

import msgspec


class TempFile(WeightCacheTransportBackend):
    name = "temp_file"
    capabilities = Capabilities(
        survives_daemon_exit=True, read_only=False, needs_shared_pid_namespace=False, devices=frozenset({"cpu"})
    )
    path = None
    views = None
    nbytes = 0

    @classmethod
    def unavailable_reason(cls):
        return None

    @property
    def resident_bytes(self):
        return self.nbytes

    def close(self):
        path, self.path, self.views, self.nbytes = self.path, None, None, 0
        if path is not None:
            os.unlink(path)

    @classmethod
    def can_export_state(cls, state_tensors):
        return True

    def prepare_export(self, state_tensors, *, non_persistent=frozenset()):
        raise NotImplementedError

    def begin_export(self, spec, *, device="cpu"):
        return Writer(self, spec)

    def read_arena(self, number, offset, into):
        with open(self.path, "rb") as file:
            file.seek(offset)
            file.readinto(into)

    async def send_fetch_state_response(self, stream, response, fds):
        response = msgspec.structs.replace(
            response, transport_backend=self.name, payload=self.path.encode(), resident_bytes=self.nbytes
        )
        await stream.send(response, fds)

    async def recv_fetch_state_response(self, stream, response, manifest):
        (arena,) = manifest.arenas
        memory = torch.from_file(response.payload.decode(), shared=True, size=arena.nbytes, dtype=torch.uint8)
        self.views = ArenaViews(manifest, [memory])

    def import_tensor(self, entry):
        return self.views.tensor(entry)

    def import_tensors(self):
        if self.views is None:
            raise StateReleased(name="", rank=0)
        return self.views.tensors()


class Writer(StateWriter):
    def __init__(self, backend, spec):
        self.backend, self.spec, self.layout = backend, spec, plan_layout(spec.storages)
        self.bytes = bytearray(self.layout.arena_nbytes[0])

    @contextmanager
    def storage(self, number):
        _, offset = self.layout.places[number]
        with memoryview(self.bytes) as whole, whole[offset : offset + self.spec.storages[number]] as part:
            yield part

    def finish(self):
        fd, self.backend.path = tempfile.mkstemp()
        with open(fd, "wb") as file:
            file.write(self.bytes)
        self.backend.nbytes = len(self.bytes)
        return build_manifest(self.spec, self.layout)

    def abort(self):
        self.bytes = bytearray()
'''

SCRIPT = """
import asyncio, os, sys
from wcache_async import Client, Daemon
from wcache_async.backends.registry import known_backends

async def main(checkpoint, path):
    async with Daemon(path, backend=sys.argv[3]) as daemon:
        await daemon.load(checkpoint, name="m")
        async with Client(path, backends=["temp_file"]) as client:
            state = await client.fetch_state("m")
            assert state.transport_backend == "temp_file", state.transport_backend
            tensors = await state.import_tensors()
            assert [float(t.view(torch.uint8)[1]) for t in tensors.values()] == [1, 2, 3], tensors
            if sys.argv[3] == "auto":
                both = await client.fetch_state("m", backends=["shm_fd"])
                assert both.transport_backend == "shm_fd"
                others = await both.import_tensors()
                assert all(torch.equal(tensors[name], others[name]) for name in tensors)
            (held,) = (await client.status()).states
            print(",".join(held.backends))

import torch

assert "temp_file" in known_backends()
asyncio.run(main(sys.argv[1], sys.argv[2]))
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder for sys.path with the plugin's distribution in it, as pip leaves one."""
    site = tmp_path / "site"
    info = site / "wcache_temp_file-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "wcache_temp_file.py").write_text(textwrap.dedent(PLUGIN))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: wcache-temp-file\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[wcache_async.backends]\ntemp_file = wcache_temp_file:TempFile\n")
    (info / "RECORD").write_text("")
    return site


@pytest.mark.parametrize(("backend", "served"), [("temp_file", "temp_file"), ("auto", "shm_fd,temp_file")])
def test_it_is_served_and_fetched_end_to_end(
    installed: Path, write_checkpoint: WriteCheckpoint, short_tmp: Path, backend: str, served: str
) -> None:
    """Named by the user it is the one backend; otherwise it is the second, for who accepts no other."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(write_checkpoint()), str(short_tmp / "w.sock"), backend],
        env={"PYTHONPATH": str(installed), "PATH": "", "TMPDIR": str(short_tmp)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == served
    assert list(short_tmp.iterdir()) in ([], [short_tmp / "w.sock.lock"])

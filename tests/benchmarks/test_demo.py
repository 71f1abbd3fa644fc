"""The demo at a small size: its pieces, the whole of it, and that it leaves nothing behind whatever happens."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import demo
import pytest
import torch
from safetensors.torch import load_file

from tests.benchmarks.holding import hold
from tests.processes import Forge
from wcache_async import Daemon
from wcache_async.sources import open_source

SCRIPT = Path(demo.__file__)


@pytest.fixture
def temporary(short_tmp: Path) -> Iterator[Path]:
    """Where the demo makes its folder; nothing of it may be left there."""
    handler = signal.getsignal(signal.SIGTERM)  # `demo.main` puts its own in place.
    yield short_tmp
    signal.signal(signal.SIGTERM, handler)
    assert list(short_tmp.iterdir()) == []


def processes_of(folder: Path) -> list[str]:
    """Command lines that name a folder, which those of the demo's processes do."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if str(folder) in line:
                found.append(line)
    return found


def start(temporary: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *arguments],
        env=os.environ | {"TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# ------------------------------------------------------------------------------------- pieces
def test_the_checkpoint_is_sharded_indexed_and_of_the_size_asked_for(tmp_path: Path) -> None:
    demo.write_checkpoint(tmp_path, 4 << 20)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert [shard.name for shard in shards] == [f"model-0000{n}-of-00004.safetensors" for n in (1, 2, 3, 4)]
    index = json.loads((tmp_path / demo.INDEX).read_text())["weight_map"]
    tensors = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    assert tensors.keys() == index.keys()
    assert "model.layers.15.mlp.down_proj.weight" in tensors
    assert sum(tensor.nbytes for tensor in tensors.values()) == 4 << 20
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    with open_source(str(tmp_path)) as source:
        assert source.open().nbytes == 4 << 20


def test_no_two_tensors_have_the_same_bytes(tmp_path: Path) -> None:
    """A tensor served in the place of another would be found."""
    demo.write_checkpoint(tmp_path, 4 << 20)
    seen = Counter(
        tensor.view(torch.uint8).numpy().tobytes()
        for shard in tmp_path.glob("*.safetensors")
        for tensor in load_file(shard).values()
    )
    assert max(seen.values()) == 1


@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_memory_is_told_apart_into_shared_and_private(short_tmp: Path, tmp_path: Path, forge: Forge) -> None:
    nbytes = 8 << 20
    demo.write_checkpoint(tmp_path, nbytes, tensors=3)
    async with Daemon(short_tmp / "s") as daemon:
        await daemon.load(tmp_path, name="m")
        with (
            forge.start(hold, daemon.socket_path, False) as reader,
            forge.start(hold, daemon.socket_path, True) as writer,
        ):
            pids = [await asyncio.to_thread(child.receive) for child in (reader, writer)]
            reading, writing = map(demo.arena_memory, pids)
            others = [demo.private_memory(pid) for pid in pids]
            for child in (reader, writer):
                child.send("end")
    assert reading.shared + reading.private == nbytes
    assert 0.4 * nbytes < writing.private < 0.6 * nbytes
    assert reading.shared == pytest.approx(nbytes - writing.private, abs=64 << 10)
    assert reading.proportional + writing.proportional == pytest.approx(1.5 * nbytes, rel=0.1)
    assert all(other >= each.private for other, each in zip(others, (reading, writing), strict=True))


# -------------------------------------------------------------------------------------- whole
def test_it_serves_attaches_compares_and_leaves_nothing(temporary: Path) -> None:
    with start(temporary, "--size", "16", "--processes", "2") as process:
        out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    rows = [re.split(r"  +", line.strip()) for line in out.splitlines() if re.match(r" +\d ", line)]
    assert [row[0] for row in rows] == ["1", "2"]
    assert {tuple(row[2:6]) for row in rows} == {("147", "16.00 MiB, equal", "16.00 MiB", "0 B")}
    assert "2 processes together: 16.00 MiB; 2 separate copies would be 32.00 MiB" in out
    assert out.splitlines()[-1] == "nothing is left: no process, no file"
    assert processes_of(temporary) == []


def test_ended_while_it_serves_it_leaves_nothing(temporary: Path) -> None:
    with start(temporary, "--size", "16", "--processes", "1") as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("served"):
            assert process.poll() is None
        process.terminate()
        _, err = process.communicate(timeout=100)
    assert process.returncode == 130
    assert "demo: interrupted" in err
    assert processes_of(temporary) == []


def test_bytes_that_differ_are_an_error_that_names_them(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint is changed between being served and being compared."""

    def alter(daemon: subprocess.Popen[str], socket_path: Path) -> str:
        line = ready_line(daemon, socket_path)
        shard = socket_path.parent.parent / "model" / "model-00002-of-00004.safetensors"
        with open(shard, "r+b") as file:
            file.seek(-3, os.SEEK_END)
            (byte,) = file.read(1)
            file.seek(-3, os.SEEK_END)
            file.write(bytes([byte ^ 1]))
        return line

    ready_line = demo.ready_line
    monkeypatch.setattr(demo, "ready_line", alter)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    assert demo.main(["--size", "16", "--processes", "1"]) == 1
    out, err = capsys.readouterr()
    assert "16.00 MiB, DIFFERENT" in out
    assert re.search(r"demo: process 1 sees other bytes than the checkpoint's: model\.layers\.\d+\.\S+: bytes at ", err)
    assert processes_of(temporary) == []


def test_a_checkpoint_that_cannot_be_loaded_is_an_error_with_its_reason(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(folder: Path, nbytes: int) -> None:
        (folder / "model.safetensors").write_bytes(bytes(100))

    monkeypatch.setattr(demo, "write_checkpoint", write)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    assert demo.main(["--size", "16"]) == 1
    assert "demo: cannot load " in capsys.readouterr().err
    assert processes_of(temporary) == []

"""The examples run as their docstrings say, and show what they claim."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(300)

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.fixture
def socket_path(short_tmp: Path) -> Iterator[Path]:
    """The socket of a `wcache serve` that holds nothing."""
    path = short_tmp / "wcache.sock"
    wcache = Path(sys.executable).with_name("wcache")
    command = [str(wcache), "serve", "--socket", str(path), "--log-level", "warning"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as daemon:
        assert daemon.stdout is not None
        try:
            assert daemon.stdout.readline().startswith(b"ready")
            yield path
        finally:
            daemon.terminate()


def run(*command: object) -> list[str]:
    """What a command that must succeed prints."""
    ran = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def test_a_pipelines_modules_are_states_of_their_own_and_shared_with_another(socket_path: Path) -> None:
    command = [sys.executable, EXAMPLES / "pipeline.py", "--socket", socket_path]
    *parts, image = run(*command)
    assert [line.split()[:2] for line in parts] == [
        ["tiny/text_encoder", "built"],
        ["tiny/denoiser-base", "built"],
        ["tiny/decoder", "built"],
    ]
    *parts, again = run(*command)
    assert [line.split()[1] for line in parts] == ["attached"] * 3
    assert again == image
    *parts, other = run(*command, "--variant", "inpaint")
    assert [line.split()[1] for line in parts] == ["attached", "built", "attached"]
    assert other != image


def test_ranks_build_their_shards_once_and_attach_ever_after(socket_path: Path) -> None:
    def ranks(number: int) -> tuple[list[str], str]:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", number]
        lines = run(*torchrun, EXAMPLES / "distributed_ranks.py", "--socket", socket_path)
        [result] = [line for line in lines if line.startswith("result")]
        return sorted(line for line in lines if line.startswith("rank")), result

    first, result = ranks(2)
    assert [line.split(" (")[0] for line in first] == ["rank 0 of 2", "rank 1 of 2"]
    assert all(") built " in line for line in first)
    second, same = ranks(2)
    assert all(") attached " in line for line in second)
    assert same == result


@contextlib.contextmanager
def server(socket_path: Path, workers: int) -> Iterator[tuple[int, list[str]]]:
    """The embedding server: its port, and what its workers say of their weights."""
    script = str(EXAMPLES / "embedding_server.py")
    command = [sys.executable, script, "--port", "0", "--workers", str(workers), "--socket", str(socket_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as running:
        assert running.stdout is not None
        try:
            listening = running.stdout.readline()
            said = [running.stdout.readline() for _ in range(workers)]
            yield int(listening.rpartition(":")[2]), said
        finally:
            running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 0


def embed(port: int, body: str) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        connection.request("POST", "/embed", body)
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def test_workers_of_a_server_share_one_model(socket_path: Path) -> None:
    texts = json.dumps({"texts": ["a weight cache", "a cash weight"]})
    with server(socket_path, workers=2) as (port, said):
        assert sorted(line.split()[2] for line in said) == ["attached", "built"]
        status, answer = embed(port, texts)
        assert status == 200
        first, second = answer["vectors"]
        assert len(first) == len(second) == 64
        assert sum(x * x for x in first) == pytest.approx(1, abs=1e-4)
        assert first != second
        assert answer["worker"] in {int(line.split()[1]) for line in said}
        assert embed(port, "{}") == (400, {"error": "KeyError('texts')"})
        assert embed(port, json.dumps({"texts": []}))[1]["vectors"] == []
    with server(socket_path, workers=1) as (port, said):
        assert [line.split()[2] for line in said] == ["attached"]
        assert embed(port, texts)[1]["vectors"] == [first, second]

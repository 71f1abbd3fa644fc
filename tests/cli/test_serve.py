"""wcache serve: one ready line, loads that fail, shutdowns that leave nothing, and what is refused."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import Wcache, run_command
from tests.processes import Peer
from wcache_async import Daemon
from wcache_async.cli.app import app
from wcache_async.sources.safetensors import SafetensorsSource

WCACHE = Path(sys.executable).with_name("wcache")


def test_the_installed_command_serves_and_leaves_nothing_behind(checkpoint: Path, short_tmp: Path) -> None:
    path = short_tmp / "run" / "wcache.sock"
    with subprocess.Popen(
        [WCACHE, "serve", checkpoint, "--socket", path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as daemon:
        assert daemon.stdout is not None
        assert daemon.stdout.readline() == f"ready socket={path} states=1\n"
        ran = subprocess.run(
            [WCACHE, "status", "--json"], env={"WCACHE_SOCKET": str(path)}, capture_output=True, check=True
        )
        status = json.loads(ran.stdout)
        assert (status["pid"], status["socket"]) == (daemon.pid, str(path))
        daemon.terminate()
        out, err = daemon.communicate(timeout=30)
    assert (daemon.returncode, out) == (0, "")
    assert list(path.parent.iterdir()) == []
    assert err.count(" INFO exported tiny:0 generation 1: 4 tensors, ") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_0_and_no_file_left(wcache: Wcache, checkpoint: Path, number: signal.Signals) -> None:
    with wcache.serve(checkpoint) as serving:
        serving.signal(number)
        assert serving.ended() == (0, "")
        assert list(serving.socket_path.parent.iterdir()) == []


def serve_told_to_end_as_it_starts(peer: Peer, out: socket.socket, err: socket.socket, argv: list[str]) -> None:
    """SIGTERM comes when lock and socket are there, and nothing handles it yet."""
    start = Daemon.start

    async def started(self: Daemon) -> None:
        await start(self)
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Daemon, "start", started)
        run_command(peer, out, err, argv)


def test_a_signal_that_comes_as_it_starts_ends_it_in_order(wcache: Wcache, checkpoint: Path) -> None:
    with wcache.start("serve", checkpoint, run=serve_told_to_end_as_it_starts) as serving:
        assert serving.ended() == (0, "")
        assert "SIGTERM: shutting down" in serving.err
        assert list(serving.socket_path.parent.iterdir()) == []


def serve_from_a_dead_file_server(peer: Peer, out: socket.socket, err: socket.socket, argv: list[str]) -> None:
    """Reading the checkpoint never returns, and nothing can interrupt it."""
    nothing, _never = os.pipe()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SafetensorsSource, "read", lambda *_: print("reading", file=sys.stderr) or os.read(nothing, 1))
        run_command(peer, out, err, argv)


def test_a_load_that_hangs_does_not_keep_it_from_ending(wcache: Wcache, checkpoint: Path) -> None:
    with wcache.start("serve", checkpoint, "--drain-timeout", "0.1", run=serve_from_a_dead_file_server) as serving:
        serving.told("reading")
        serving.signal(signal.SIGTERM)
        assert serving.ended() == (0, "")
        assert "WARNING not waiting any longer for the load of tiny:0" in serving.err
        assert list(serving.socket_path.parent.iterdir()) == []


@pytest.mark.parametrize("numbers", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT)])
def test_a_second_signal_ends_it_at_once(wcache: Wcache, checkpoint: Path, numbers: tuple[int, int]) -> None:
    with wcache.start("serve", checkpoint, "--drain-timeout", "1000", run=serve_from_a_dead_file_server) as serving:
        serving.told("reading")
        serving.signal(numbers[0])
        serving.told("draining")
        assert "is shutting down" in wcache("load", checkpoint, "--name", "other").err
        serving.signal(numbers[1])
        assert serving.ended() == (130, "")
        assert list(serving.socket_path.parent.iterdir()) == []


def test_a_state_is_called_after_its_file_or_folder_or_as_told(wcache: Wcache, checkpoint: Path) -> None:
    folder = checkpoint.parent / "Llama-3.1-8B"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(checkpoint.read_bytes())
    with wcache.start("serve", checkpoint, folder, f"draft={checkpoint}") as serving:
        assert serving.ready() == f"ready socket={serving.socket_path} states=3\n"
        states = wcache("status", "--json").json["states"]
        assert [state["name"] for state in states] == ["Llama-3.1-8B", "draft", "tiny"]


def test_rank_config_and_dtype_are_the_states(wcache: Wcache, checkpoint: Path) -> None:
    options = ("--rank", "3", "--dtype", "float16", "--config", "tp_size=4", "--config", "revision=main")
    with wcache.serve(checkpoint, "--name", "m", *options):
        (state,) = wcache("status", "--json").json["states"]
    assert (state["name"], state["rank"]) == ("m", 3)
    assert state["config"] == {"source": "safetensors", "dtype": "float16", "tp_size": 4, "revision": "main"}


def test_progress_is_a_line_per_tenth_where_there_is_no_terminal(wcache: Wcache, checkpoint: Path) -> None:
    with wcache.serve(checkpoint) as serving:
        assert serving.told("loading tiny:0: 100 %") == "loading tiny:0: 100 % of 3.00 KiB\n"
        (state,) = wcache("status", "--json").json["states"]
    assert state["bytes_done"] == state["bytes"]


def test_without_a_model_it_is_ready_at_once(wcache: Wcache) -> None:
    with wcache.start("serve") as serving:
        assert serving.ready() == f"ready socket={serving.socket_path} states=0\n"


def test_a_ready_line_that_nobody_reads_is_no_reason_not_to_serve(checkpoint: Path, short_tmp: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command: list[str | Path] = [WCACHE, "serve", checkpoint, "--socket", short_tmp / "wcache.sock"]
    with subprocess.Popen(command, stdout=writing, stderr=subprocess.PIPE, text=True) as daemon:
        os.close(writing)
        assert daemon.stderr is not None
        while "the ready line could not be written" not in daemon.stderr.readline():
            assert daemon.poll() is None
        daemon.terminate()
        daemon.communicate(timeout=30)
    assert daemon.returncode == 0


def test_a_checkpoint_that_fails_is_told_and_the_daemon_stays_up_without_a_ready_line(
    wcache: Wcache, checkpoint: Path
) -> None:
    broken = checkpoint.with_name("broken.safetensors")
    broken.write_bytes(checkpoint.read_bytes()[:-1])
    with wcache.start("serve", checkpoint, broken) as serving:
        serving.told("listening")
        fetched = wcache("fetch", "broken", "--json")
        assert fetched.code == 5
        assert fetched.json["error"]["code"] in ("state_failed", "source_error")
        assert str(broken) in fetched.err
        states = {state["name"]: state for state in wcache("status", "--json").json["states"]}
        assert states["broken"]["phase"] == "failed"
        assert "truncated" in states["broken"]["error"]
        assert wcache("fetch", "tiny").code == 0
        assert wcache("stop").code == 0
        assert serving.ended() == (0, "")
        assert f"ERROR loading broken:0 from {broken} failed: cannot load {broken}" in serving.err


def test_a_second_daemon_is_refused_before_it_loads_naming_the_first(wcache: Wcache, checkpoint: Path) -> None:
    with wcache.serve(checkpoint) as serving:
        second = wcache("serve", "/no/such/model")
        assert (second.code, second.out) == (6, "")
        assert f"wcache: socket {serving.socket_path} is held by the daemon with pid {serving.pid}\n" in second.err
        assert "/no/such/model" not in second.err
        assert wcache("status").code == 0


def test_a_backend_that_cannot_carry_the_device_is_an_error_and_leaves_no_file(
    wcache: Wcache, checkpoint: Path
) -> None:
    ran = wcache("serve", checkpoint, "--backend", "vmm_fd")
    assert (ran.code, ran.out) == (6, "")
    assert "wcache: transport backend 'vmm_fd' cannot work here: " in ran.err
    assert list(wcache.socket_path.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["a/tiny", "b/tiny"], "would both be called 'tiny'"),
        (["a", "b", "--name", "m"], "it names one MODEL, and 2 are given"),
        (["--name", "m"], "it names one MODEL, and 0 are given"),
        (["=a"], "is no NAME=PATH"),
        (["a", "--dtype", "bf16"], "'bf16' is none of float16, bfloat16, float32, float64"),
        (["a", "--source", "gguf"], "'gguf' is none of auto, "),
        (["a", "--backend", "nccl"], "'nccl' is none of auto, "),
        (["a", "--config", "tp_size"], "'tp_size' is no KEY=VALUE"),
        (["a", "--config", "a=1", "--config", "a=2"], "'a' is given twice"),
        (["a", "--config", "a=18446744073709551616"], "does not fit into 64 bits"),
        (["a", "--rank", "-1"], "Invalid value for '--rank'"),
        (["a", "--max-clients", "0"], "Invalid value for '--max-clients'"),
        (["a", "--log-level", "loud"], "Invalid value for '--log-level'"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_exit_code_2(
    short_tmp: Path, capsys: pytest.CaptureFixture[str], argv: list[str], told: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        app(["serve", *argv, "--socket", str(short_tmp / "wcache.sock")], prog_name="wcache")
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert told in " ".join(err.split())
    assert list(short_tmp.iterdir()) == []

"""wcache status: a stable object for machines, a table for people."""

import contextlib
import os
import pty
import subprocess
import sys
from io import FileIO
from pathlib import Path

from tests.cli.commands import Wcache

WCACHE = Path(sys.executable).with_name("wcache")


def test_json_has_every_key_always(wcache: Wcache, checkpoint: Path) -> None:
    with wcache.serve() as serving:
        empty = wcache("status", "--json").json
        wcache("load", checkpoint)
        status = wcache("status", "--json").json
    assert empty.keys() == status.keys()
    assert status.keys() >= {"version", "pid", "socket", "uptime_s", "clients", "states"}
    assert empty["states"] == []
    assert (status["pid"], status["socket"]) == (serving.pid, str(serving.socket_path))
    assert status["uptime_s"] > empty["uptime_s"] > 0
    assert status["clients"] == 1
    assert status["health"]["generations"] == 1 > empty["health"]["generations"]
    assert status["health"]["fds"] > 0 <= status["health"]["worst_loop_stall_s"]
    (state,) = status["states"]
    expected = {
        "name": "tiny",
        "rank": 0,
        "phase": "ready",
        "generation": 1,
        "tensors": 4,
        "bytes": 3136,  # 3076, and the arena ends at a multiple of 64
        "backends": ["shm_fd"],
        "leases": 0,
        "config": {"source": "safetensors", "dtype": "mixed"},
        "error": None,
    }
    assert expected == {key: state[key] for key in expected}


def test_without_a_terminal_the_table_is_aligned_text(wcache: Wcache, checkpoint: Path) -> None:
    with wcache.serve(f"a={checkpoint}", f"much-longer={checkpoint}") as serving:
        ran = wcache("status")
    lines = ran.out.splitlines()
    assert lines[0] == f"daemon 0.1.0, pid {serving.pid}, on {serving.socket_path}"
    assert lines[1].endswith(", 0 other clients")
    assert lines[2:] == [
        "NAME         RANK  PHASE  GEN  TENSORS      SIZE  BACKEND  LEASES  CONFIG",
        "a               0  ready    1        4  3.06 KiB  shm_fd        0  source=safetensors dtype=mixed",
        "much-longer     0  ready    1        4  3.06 KiB  shm_fd        0  source=safetensors dtype=mixed",
    ]


def read_to_the_end(screen: FileIO) -> str:
    """All of a terminal's output: a read gives what is there, and EIO once nobody has the other side (pty(7))."""
    shown = b""
    with contextlib.suppress(OSError):
        while chunk := screen.read(65536):
            shown += chunk
    return shown.decode()


def test_on_a_terminal_names_are_no_markup(wcache: Wcache, checkpoint: Path) -> None:
    with wcache.serve(f"[red]x={checkpoint}") as serving:
        ours, theirs = pty.openpty()
        with os.fdopen(ours, "rb", 0) as screen:
            environment = {"COLUMNS": "140", "TERM": "xterm", "WCACHE_SOCKET": str(serving.socket_path)}
            subprocess.run([WCACHE, "status"], stdout=theirs, env=environment, check=True, timeout=30)
            os.close(theirs)
            shown = read_to_the_end(screen)
    assert "[red]x" in shown
    assert "━" in shown or "─" in shown


def test_a_state_that_failed_says_why(wcache: Wcache, tmp_path: Path) -> None:
    with wcache.serve():
        assert wcache("load", tmp_path / "none", "--name", "m").code == 5
        ran = wcache("status")
    assert "  failed  " in ran.out
    assert f"m:0: cannot load {tmp_path / 'none'}: No such file or directory" in ran.out


def test_no_daemon_is_exit_code_3_and_says_where_none_was_found(wcache: Wcache) -> None:
    ran = wcache("status")
    assert (ran.code, ran.out) == (3, "")
    message, hint = ran.err.splitlines()
    assert message.startswith(f"wcache: no weight-cache daemon answers on {wcache.socket_path}: ")
    assert hint.startswith(f"Start one with `wcache serve MODEL --socket {wcache.socket_path}`")


def test_an_error_is_a_json_object_too(wcache: Wcache) -> None:
    ran = wcache("status", "--json")
    error = ran.json["error"]
    assert (ran.code, error["exit_code"], error["code"]) == (3, 3, "not_running")
    assert error["details"]["socket"] == str(wcache.socket_path)
    assert ran.err.startswith(f"wcache: {error['message']}\n{error['hint']}\n")

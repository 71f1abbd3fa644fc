"""wcache load, unload and stop: the running daemon changed from outside."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.commands import Wcache


def test_load_waits_until_the_state_is_ready(wcache: Wcache, checkpoint: Path) -> None:
    with wcache.serve():
        ran = wcache("load", checkpoint, "--rank", "2", "--config", "tp_size=4")
        assert (ran.code, ran.out) == (0, "tiny:2 is ready: generation 1, 4 tensors, 3.06 KiB\n")
        assert wcache("fetch", "tiny", "--rank", "2", "--expect", "tp_size=4").code == 0


def test_a_relative_path_is_this_process_s(wcache: Wcache, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with wcache.serve():
        relative = os.path.relpath(checkpoint)
        state = wcache("load", relative, "--json").json
    assert (state["source"], state["phase"]) == (str(checkpoint), "ready")


def test_a_name_that_is_taken_is_refused_and_can_be_replaced(wcache: Wcache, checkpoint: Path, tmp_path: Path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "other.safetensors")
    with wcache.serve(checkpoint):
        refused = wcache("load", tmp_path / "other.safetensors", "--name", "tiny")
        assert (refused.code, refused.out) == (4, "")
        assert "state 'tiny' rank 0 is taken (it is ready)" in refused.err
        assert wcache("verify", checkpoint).code == 0
        replaced = wcache("load", tmp_path / "other.safetensors", "--name", "tiny", "--replace", "--json").json
        assert replaced["generation"] == 2
        assert wcache("verify", tmp_path / "other.safetensors", "--name", "tiny").code == 0


def test_a_load_that_fails_is_exit_code_5_and_the_daemon_goes_on(wcache: Wcache, tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(b"not a checkpoint")
    with wcache.serve():
        ran = wcache("load", tmp_path / "m.safetensors")
        assert (ran.code, ran.out) == (5, "")
        assert ran.err.startswith(f"wcache: cannot load {tmp_path / 'm.safetensors'}: ")
        assert wcache("status", "--json").json["states"][0]["phase"] == "failed"


def test_a_path_that_is_not_there_says_what_to_look_at(wcache: Wcache, tmp_path: Path) -> None:
    missing = tmp_path / "nowhere.safetensors"
    with wcache.start("serve") as serving:
        serving.ready()
        ran = wcache("load", missing)
        fetched = wcache("fetch", "nowhere")
    assert ran.code == fetched.code == 5
    assert ran.err == (
        f"wcache: cannot load {missing}: No such file or directory\n"
        "Check the spelling; a daemon in a container has files of its own\n"
    )
    assert fetched.err.endswith("Mend the cause, then load it again: `wcache load MODEL --name nowhere`\n")


def test_a_mended_checkpoint_is_loaded_again_as_the_error_says(
    wcache: Wcache, checkpoint: Path, tmp_path: Path
) -> None:
    with wcache.start("serve") as serving:
        serving.ready()
        assert wcache("load", tmp_path / "nowhere", "--name", "m").code == 5
        assert wcache("load", checkpoint, "--name", "m").code == 0
        assert wcache("fetch", "m").code == 0


def test_without_waiting_it_returns_at_once(wcache: Wcache, checkpoint: Path) -> None:
    with wcache.serve():
        assert wcache("load", checkpoint, "--no-wait").code == 0
        assert wcache("fetch", "tiny").code == 0


def test_unload_forgets_every_rank_or_the_one_named(wcache: Wcache, checkpoint: Path) -> None:
    with wcache.serve(checkpoint):
        wcache("load", checkpoint, "--rank", "1")
        wcache("load", checkpoint, "--rank", "2")
        assert wcache("unload", "tiny", "--rank", "1").out == "unloaded tiny:1: 3.06 KiB\n"
        assert wcache("unload", "tiny", "--json").json == {"unloaded": ["tiny:0", "tiny:2"], "bytes": 6272}
        gone = wcache("unload", "tiny")
    assert (gone.code, gone.out) == (4, "")


def test_stop_returns_when_the_daemon_has_ended(wcache: Wcache, checkpoint: Path) -> None:
    with wcache.serve(checkpoint) as serving:
        ran = wcache("stop")
        assert (ran.code, ran.out) == (0, f"daemon {serving.pid} has stopped\n")
        assert list(serving.socket_path.parent.iterdir()) == []
        assert serving.ended() == (0, "")
    assert wcache("stop").code == 3


def test_stop_need_not_wait(wcache: Wcache) -> None:
    with wcache.serve() as serving:
        assert wcache("stop", "--no-wait", "--json").json == {"pid": serving.pid, "ended": False}
        assert serving.ended() == (0, "")


def test_a_folder_that_is_moved_away_under_the_daemon_stays_served(wcache: Wcache, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"w": torch.ones(3)}, folder / "model.safetensors")
    with wcache.serve(folder):
        shutil.rmtree(folder)
        assert wcache("fetch", "model", "--touch").code == 0

"""--tp-size: one checkpoint, a state for each rank."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.commands import Wcache
from wcache_async.cli.app import app

PLAN = {"layers.*.up": "colwise", "layers.*.down": "rowwise", "embed": "replicated"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a checkpoint, and `plan.json` beside it."""
    folder = tmp_path / "model"
    folder.mkdir()
    tensors = {
        "embed.weight": torch.randn(5, 8),
        "layers.0.up.weight": torch.randn(16, 8),
        "layers.0.down.weight": torch.randn(8, 16),
        "layers.0.down.bias": torch.randn(8),
    }
    save_file(tensors, folder / "model.safetensors")
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    return folder


@pytest.fixture
def plan(model: Path) -> Path:
    return model.with_name("plan.json")


def test_serve_holds_a_state_for_each_rank(wcache: Wcache, model: Path, plan: Path) -> None:
    with wcache.start("serve", model, "--name", "m", "--tp-size", "4", "--tp-plan", plan) as serving:
        assert serving.ready() == f"ready socket={serving.socket_path} states=4\n"
        states = wcache("status", "--json").json["states"]
        assert [(state["name"], state["rank"]) for state in states] == [("m", rank) for rank in range(4)]
        for rank, state in enumerate(states):
            assert state["config"] == {"source": "safetensors", "dtype": "float32", "tp_size": 4, "tp_rank": rank}
            # 160 bytes of embeddings, 32 of the bias, quarters of 512 and 512; each 64-byte aligned.
            assert state["bytes"] == 192 + 64 + 128 + 128
        verify = ("verify", model, "--name", "m", "--tp-size", "4", "--tp-plan", plan)
        for rank in range(4):
            ran = wcache(*verify, "--rank", str(rank))
            assert (ran.code, ran.err) == (0, "")
            assert "every byte" in ran.out
        assert wcache("fetch", "m", "--rank", "3", "--expect", "tp_rank=3", "--expect", "tp_size=4").code == 0
        whole = wcache("verify", model, "--name", "m", "--json")
        assert whole.code == 1
        assert {d["tensor"] for d in whole.json["differences"]} == {"layers.0.up.weight", "layers.0.down.weight"}


def test_verify_tells_one_ranks_share_from_anothers(wcache: Wcache, model: Path, plan: Path) -> None:
    with wcache.serve(model, "--name", "m", "--tp-size", "2", "--tp-plan", plan):
        ran = wcache("unload", "m", "--rank", "1")
        assert ran.code == 0
        options = ("--option", "tp_size=2", "--option", "tp_rank=0", "--option", f"tp_plan={plan}")
        assert wcache("load", model, "--name", "m", "--rank", "1", *options).code == 0
        ran = wcache("verify", model, "--name", "m", "--rank", "1", "--tp-size", "2", "--tp-plan", plan)
    assert ran.code == 1
    assert "layers.0.up.weight: bytes at byte 0" in ran.out


def test_load_loads_each_rank(wcache: Wcache, model: Path, plan: Path) -> None:
    relative = os.path.relpath(plan)
    with wcache.serve():
        ran = wcache("load", model, "--tp-size", "2", "--tp-plan", relative)
        assert ran.code == 0
        assert ran.out == "".join(f"model:{rank} is ready: generation 1, 4 tensors, 768 B\n" for rank in range(2))
        ran = wcache("load", model, "--tp-size", "2", "--tp-plan", relative, "--replace", "--json")
        assert [(s["rank"], s["generation"], s["phase"]) for s in ran.json["states"]] == [
            (0, 2, "ready"),
            (1, 2, "ready"),
        ]


def test_sizes_that_do_not_divide_are_told_and_there_is_no_ready_line(wcache: Wcache, model: Path, plan: Path) -> None:
    with wcache.start("serve", model, "--tp-size", "3", "--tp-plan", plan) as serving:
        for rank in range(3):
            told = serving.told(f"ERROR loading model:{rank} ")
            assert "tensor 'layers.0." in told
            assert "cannot be cut into 3 equal slices" in told
        states = wcache("status", "--json").json["states"]
        assert [(state["rank"], state["phase"]) for state in states] == [(rank, "failed") for rank in range(3)]
        assert wcache("stop").code == 0
        assert serving.ended() == (0, "")
    with wcache.serve():
        ran = wcache("load", model, "--tp-size", "3", "--tp-plan", plan)
        assert (ran.code, ran.out) == (5, "")
        assert "cannot be cut into 3 equal slices" in ran.err


def test_without_a_plan_it_is_transformers_or_an_error(wcache: Wcache, model: Path) -> None:
    with wcache.serve():
        ran = wcache("load", model, "--tp-size", "2")
    assert ran.code == 5
    assert f"cannot load {model / 'config.json'}: " in ran.err
    assert "give a --tp-plan" in ran.err


@pytest.mark.parametrize("command", [["serve"], ["load"], ["verify"]])
@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--tp-size", "0"], "Invalid value for '--tp-size'"),
        (["--tp-plan", "plan.json"], "Invalid value for --tp-plan: it needs --tp-size"),
        (["--tp-size", "2", "--tp-plan", "/no/plan.json"], "there is no file /no/plan.json"),
        (["--tp-size", "2", "--rank", "2"], "--tp-size 2 makes ranks 0 to 1"),
        (["--tp-size", "2", "--source", "torch"], "only safetensors are cut, not what --source torch loads"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_exit_code_2(
    short_tmp: Path, capsys: pytest.CaptureFixture[str], command: list[str], argv: list[str], told: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        app([*command, "model", *argv, "--socket", str(short_tmp / "wcache.sock")], prog_name="wcache")
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert told in " ".join(err.split())

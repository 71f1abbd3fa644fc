"""wcache fetch: what attaching took and gave, and each way it can be refused."""

import signal
import socket
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.commands import Wcache
from tests.processes import DEADLINE_S


def test_json_tells_what_came_and_how_long_each_step_took(wcache: Wcache, checkpoint: Path) -> None:
    with wcache.serve(checkpoint, "--config", "tp_size=1") as serving:
        fetched = wcache("fetch", "tiny", "--touch", "--json").json
    assert list(fetched["seconds"]) == ["prepare", "connect", "fetch", "import", "touch"]
    assert all(seconds > 0 for seconds in fetched["seconds"].values())
    expected = {
        "name": "tiny",
        "rank": 0,
        "generation": 1,
        "tensors": 4,
        "bytes": 3136,
        "transport_backend": "shm_fd",
        "config": {"source": "safetensors", "dtype": "mixed", "tp_size": 1},
        "daemon_pid": serving.pid,
    }
    assert expected == {key: fetched[key] for key in expected}
    assert "listed" not in fetched


def test_tensors_are_listed_with_what_aliases_stand_for(wcache: Wcache, tmp_path: Path) -> None:
    weight = torch.zeros(2, 3)
    torch.save({"head": weight, "tied": weight, "count": torch.tensor(1)}, tmp_path / "m.pt")
    with wcache.serve(tmp_path / "m.pt"):
        listed = {row.pop("name"): row for row in wcache("fetch", "m", "--tensors", "--json").json["listed"]}
        shown = wcache("fetch", "m", "--tensors").out
    assert listed["head"] == {
        "dtype": "float32",
        "shape": [2, 3],
        "kind": "parameter",
        "bytes": 24,
        "alias_of": None,
    }
    assert listed["tied"] == listed["head"] | {"alias_of": "head"}
    assert listed["count"]["shape"] == []
    rows = [line.split() for line in shown.partition("\n\n")[2].splitlines()]
    assert ["tied", "float32", "2x3", "parameter", "=", "head"] in rows


def test_what_was_expected_is_compared_typed(wcache: Wcache, checkpoint: Path) -> None:
    with wcache.serve(checkpoint, "--config", "tp_size=4", "--config", 'revision="1"'):
        assert wcache("fetch", "tiny", "--expect", "tp_size=4", "--expect", 'revision="1"').code == 0
        ran = wcache("fetch", "tiny", "--expect", "tp_size=2", "--expect", "revision=1", "--json")
    assert ran.code == 1
    assert ran.json["error"]["details"]["differences"] == {"tp_size": [2, 4], "revision": [1, "1"]}
    assert "tp_size: expected 2, the state has 4" in ran.err


@pytest.mark.parametrize("argv", [["none"], ["tiny", "--rank", "7"]])
def test_an_unknown_state_is_exit_code_4_and_lists_what_there_is(
    wcache: Wcache, checkpoint: Path, argv: list[str]
) -> None:
    with wcache.serve(checkpoint):
        ran = wcache("fetch", *argv)
    assert (ran.code, ran.out) == (4, "")
    assert "; it holds tiny:0\n" in ran.err


def test_a_transport_that_the_state_does_not_have_is_exit_code_4(wcache: Wcache, checkpoint: Path) -> None:
    with wcache.serve(checkpoint):
        ran = wcache("fetch", "tiny", "--backend", "vmm_fd")
    assert ran.code == 4
    assert "the client accepts vmm_fd" in ran.err


def test_a_transport_that_nobody_knows_makes_no_sense(wcache: Wcache) -> None:
    ran = wcache("fetch", "m", "--backend", "shm_df")
    assert ran.code == 2
    assert "'shm_df' is none of " in ran.err


def test_an_interrupt_is_exit_code_130(wcache: Wcache) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(wcache.socket_path))
        silent.listen()
        silent.settimeout(DEADLINE_S)
        with wcache.start("fetch", "m") as running, silent.accept()[0]:
            running.signal(signal.SIGINT)
            assert running.ended() == (130, "")
            assert "Traceback" not in running.err


def test_every_page_is_touched_of_a_state_in_many_storages(wcache: Wcache, tmp_path: Path) -> None:
    """The arena of many tensors is one storage: its bytes are read once, not once per tensor."""
    save_file({f"w{i}": torch.full((4096,), float(i)) for i in range(50)}, tmp_path / "m.safetensors")
    with wcache.serve(tmp_path / "m.safetensors"):
        ran = wcache("fetch", "m", "--touch")
    assert ran.code == 0
    assert [line.split()[0] for line in ran.out.splitlines()][-5:] == ["prepare", "connect", "fetch", "import", "touch"]

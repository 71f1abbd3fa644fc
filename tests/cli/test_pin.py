"""wcache pin, unpin, and what serve --max-bytes lets go."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.commands import Wcache


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    """Checkpoints of 64 KiB each."""
    paths = [tmp_path / f"{name}.safetensors" for name in ("a", "b", "c")]
    for path in paths:
        save_file({"w": torch.zeros(16_384)}, path)
    return paths


def test_a_pinned_state_stays_and_another_makes_room(wcache: Wcache, three: list[Path]) -> None:
    with wcache.serve("--max-bytes", "140KiB"):
        for path in three[:2]:
            assert wcache("load", path).code == 0
        assert wcache("pin", "a").out == "pinned a:0\n"
        assert wcache("load", three[2]).code == 0
        states = wcache("status", "--json").json["states"]
        assert [(state["name"], state["pinned"]) for state in states] == [("a", True), ("c", False)]
        wcache("pin", "c")
        refused = wcache("load", three[1])
        assert refused.code == 4
        assert "140" in refused.err or "143360" in refused.err
        assert wcache("unpin", "a", "--json").json == {"states": ["a:0"], "pinned": False}
        assert wcache("load", three[1]).code == 0


@pytest.mark.parametrize("size", ["many", "12XB", "-3GiB", "0"])
def test_a_size_that_is_none_is_a_usage_error(wcache: Wcache, size: str) -> None:
    ran = wcache("serve", "--max-bytes", size)
    assert ran.code == 2
    assert "--max-bytes" in ran.err


def test_pinning_what_is_not_there_is_exit_code_4(wcache: Wcache) -> None:
    with wcache.serve():
        assert wcache("pin", "absent").code == 4

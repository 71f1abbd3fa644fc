"""The benchmark of binding: that it runs, checks what was bound, and reports; never how fast it was."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "bind.py"


def test_both_ways_to_build_are_measured_and_reported(tmp_path: Path) -> None:
    output = tmp_path / "bind.json"
    command = [sys.executable, str(SCRIPT), "--tensors", "20", "--mebibytes", "2", "--rounds", "2"]
    finished = subprocess.run([*command, "--output", str(output)], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr

    report = json.loads(output.read_text())
    assert (report["tensors"], report["nbytes"]) == (20, 2 << 20)
    assert report["bind"].keys() == {"cpu", "meta"}
    for took in report["bind"].values():
        assert len(took["samples"]) == 2
        assert 0 < took["least"] <= took["median"] <= took["most"]
    assert "built on meta" in finished.stdout

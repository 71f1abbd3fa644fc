"""The benchmark of slow peers: that it runs and reports; never how fast anything was."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "slow_peers.py"


def test_both_conditions_are_measured_and_reported(tmp_path: Path) -> None:
    output = tmp_path / "slow_peers.json"
    peers = ("--clients", "2", "--silent", "2", "--trickling", "1", "--tensors", "12", "--mebibytes", "2")
    command = [sys.executable, str(SCRIPT), "--quick", *peers, "--output", str(output)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr

    report = json.loads(output.read_text())
    assert (report["clients"], report["silent"], report["trickling"]) == (2, 2, 1)
    for condition, beside_slow_peers in (("without", False), ("beside", True)):
        latency = report[condition]
        assert latency["slow_peers"] is beside_slow_peers
        assert latency["attaches"] == 2 * 5
        assert 0 < latency["p50"] <= latency["p99"] <= latency["most"]
    assert report["p99_ratio"] == report["beside"]["p99"] / report["without"]["p99"]
    assert "| the slow peers |" in finished.stdout

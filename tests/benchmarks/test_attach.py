"""The benchmark of attaching: that it runs and reports; never how fast anything was."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "attach.py"

METHODS = ("wcache", "wcache-blocking", "floor")  # The others: test_attach_process.py


def test_a_fresh_process_each_attaches_and_is_reported(tmp_path: Path) -> None:
    """Each process checks what it got; one that got anything else is reported as failed, and there is none."""
    output = tmp_path / "results" / "attach.json"
    methods = [word for method in METHODS for word in ("--method", method)]
    command = [sys.executable, str(SCRIPT), "--quick", "--case", "12x2", "--rounds", "1", "--output", str(output)]
    finished = subprocess.run(command + methods, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr

    report = json.loads(output.read_text())
    assert report["rounds"] == 1
    assert set(report["environment"]["versions"]) == {"wcache-async", "torch", "safetensors", "msgspec", "uvloop"}
    assert len(report["environment"]["load_average"]) == len(report["load_average_after"]) == 3
    (case,) = report["cases"]
    assert (case["tensors"], case["nbytes"]) == (12, 2 << 20)
    assert tuple(method["method"] for method in case["methods"]) == METHODS
    for method in case["methods"]:
        assert method["error"] == ""
        for measured in ("attach", "touch", "again"):
            samples = method[measured]["samples"]
            assert len(samples) == 1
            assert method[measured]["least"] == method[measured]["median"] == method[measured]["most"] == samples[0] > 0
    floors = {method["method"]: method["floors"] for method in case["methods"]}
    assert floors["floor"] == 1
    assert "| 12 tensors in 2 MiB | attach |" in finished.stdout
    assert "failed" not in finished.stdout

"""The script for a visit to a real GPU works, as far as the emulator can tell."""

import json
import os

import pytest

from tests.gpu.visit import main


def test_a_visit_reports_what_it_found(capfd: pytest.CaptureFixture[str]) -> None:
    if os.environ.get("FAKECUDA_HOST_ACCESS") == "0":
        pytest.skip("the script's processes look at device memory with torch: FAKECUDA_HOST_ACCESS=1 lets them")
    assert main(["--mib", "8", "--backends", "vmm_fd,nonsense", "--no-conformance"]) == 1
    report = json.loads(capfd.readouterr().out)
    vmm_fd, nonsense = report["trials"]
    assert vmm_fd["bytes_right"] is True
    assert vmm_fd["outlives_the_daemon"] is True
    assert vmm_fd["others_right_after_the_write"] is True
    assert vmm_fd["write_to_a_parameter"] == "its process ended with status -11"
    assert len(vmm_fd["attach_ms"]) == 3
    assert "nonsense" in nonsense["error"]
    assert main(["--mib", "8", "--backends", "vmm_fd", "--no-conformance", "--seconds", "0"]) == 1
    assert json.loads(capfd.readouterr().out)["left_out"] == ["vmm_fd with 8 MiB"]

"""Starts what needs the emulated driver, each in a process that has it from its beginning."""

import json
from pathlib import Path

import pytest

from tests.emulated_gpu import conformance
from tests.emulated_gpu.emulator import emulated, environment, run_pytest

pytestmark = [
    pytest.mark.skipif(emulated(), reason="this process is what these tests start"),
    pytest.mark.timeout(600),
]


@pytest.mark.parametrize("host_access", ["1", "0"])
def test_vmm_fd_on_the_emulated_driver(host_access: str) -> None:
    """Once as it is, and once where the host touching device memory is a fault, as on most GPUs."""
    done = run_pytest([str(Path(__file__).with_name("suite"))], host_access=host_access)
    assert done.returncode == 0, done.stdout


def test_vmm_fd_conforms_on_the_emulated_driver() -> None:
    done = run_pytest(["tests/conformance"])
    assert done.returncode == 0, done.stdout


def test_the_emulator_answers_as_recorded() -> None:
    """A change here must be one towards what a GPU answers (`make test-gpu` tells)."""
    answers = conformance.probe(environment=environment())
    assert conformance.differences(answers, json.loads(conformance.RECORDED.read_text())) == []

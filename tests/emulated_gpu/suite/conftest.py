"""Fixtures of the suite: the emulator's own side, and that nothing is left in it."""

import gc
from collections.abc import Iterator

import pytest

from tests.emulated_gpu.suite.rig import Emulator, settle


@pytest.fixture(scope="session")
def _emulator() -> Emulator:
    gc.freeze()  # What torch keeps for ever would be looked through after every test.
    return Emulator()


@pytest.fixture(autouse=True)
def emulator(_emulator: Emulator) -> Iterator[Emulator]:
    """What the driver holds for this process.  A test must leave it as it was."""
    before = _emulator.held()
    yield _emulator
    _emulator.fail("")
    gc.collect()
    settle()
    if (after := _emulator.held()) != before:
        pytest.fail(f"left in the driver: {after}, before it was {before}", pytrace=False)

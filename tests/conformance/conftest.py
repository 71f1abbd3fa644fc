"""Fixtures of the conformance suite."""

import pytest

from tests.conformance.cases import CASES, BackendCase


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> BackendCase:
    """One backend after the other."""
    chosen = request.param
    assert isinstance(chosen, BackendCase)
    return chosen

"""A daemon for the tests of what hostile and unlucky peers do to it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from wcache_async import Daemon


@pytest.fixture
async def daemon(short_tmp: Path) -> AsyncIterator[Daemon]:
    """A daemon that holds nothing yet."""
    async with Daemon(short_tmp / "wcache.sock", drain_timeout=5) as running:
        yield running

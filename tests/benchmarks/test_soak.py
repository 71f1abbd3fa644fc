"""The soak: that it runs, that its peers break rules and are survived, and that it tells what is left behind."""

import json
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from soak_daemon import MEMORY_TOLERANCE, Level, breaches, errors_in
from soak_hostile import DEEDS, Hostile

from tests.faults.wire import eventually
from wcache_async import Client, Daemon
from wcache_async.daemon.server import ServerLimits

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "soak.py"


def test_a_short_soak_finds_nothing_and_reports(tmp_path: Path) -> None:
    output = tmp_path / "soak.json"
    few = ("--seconds", "2", "--processes", "3", "--connections", "3", "--seed", "7")
    command = [sys.executable, str(SCRIPT), *few, "--output", str(output)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr

    report = json.loads(output.read_text())
    assert (report["processes"], report["seed"], report["problems"]) == (3, 7, [])
    assert sum(report["done"].values()) > 0
    assert report["survived"] + report["killed"] == report["started"] >= 2 * 3
    assert report["end"]["fds"] <= report["baseline"]["fds"]
    assert "| problems | 0 |" in finished.stdout


@pytest.mark.parametrize("deed", DEEDS)
async def test_every_broken_rule_is_survived(short_tmp: Path, deed: str) -> None:
    limits = ServerLimits(handshake_timeout=0.05, frame_timeout=0.05, write_timeout=0.05, farewell_timeout=0.05)
    done: Counter[str] = Counter()
    async with Daemon(short_tmp / "wcache.sock", limits=limits, drain_timeout=5) as daemon:
        hostile = Hostile(daemon.socket_path, done, random.Random(1))
        for _ in range(5):
            await hostile.do(deed, until=time.monotonic())
        async with Client(daemon.socket_path) as client:  # Served after all of those.
            assert (await client.status()).states == ()
        await eventually(lambda: daemon.status().clients == 0)
    assert done.keys() <= {f"hostile: {deed}"}


def test_what_is_left_behind_is_told(tmp_path: Path) -> None:
    before = Level(fds=10, mappings=3, tasks=2, leases=0, generations=0, clients=0, memory_bytes=1 << 30)
    assert breaches(before, before) == []
    less = msgspec.structs.replace(before, fds=9, memory_bytes=0)
    assert breaches(before, less) == []
    for name in ("fds", "mappings", "tasks", "leases", "generations", "clients"):
        more = msgspec.structs.replace(before, **{name: getattr(before, name) + 1})
        (found,) = breaches(before, more)
        assert f"has {getattr(more, name)} {name}" in found
    grown = msgspec.structs.replace(before, memory_bytes=before.memory_bytes + MEMORY_TOLERANCE + 1)
    assert len(breaches(before, grown)) == 1

    log = tmp_path / "daemon.log"
    log.write_text("INFO listening\nWARNING dropping client 3: the peer did not say hello\n")
    assert errors_in(log) == []
    log.write_text("ERROR client 3 (pid 4): publish failed\nTraceback (most recent call last):\n  boom\n")
    assert [found.count("boom") for found in errors_in(log)] == [1, 1]

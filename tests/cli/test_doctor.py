"""wcache doctor: every topic judged, and what it says of this machine is so."""

import os
from pathlib import Path

import torch

from tests.cli.commands import Wcache
from wcache_async.backends.registry import known_backends, usable_backends


def test_it_judges_every_transport_as_the_registry_does(wcache: Wcache) -> None:
    ran = wcache("doctor", "--json")
    assert (ran.code, ran.json["usable"]) == (0, True)
    findings = {finding["topic"]: finding for finding in ran.json["findings"]}
    verdicts = {name: findings[f"transport {name}"]["verdict"] for name in known_backends()}
    assert verdicts == {name: "ok" if name in usable_backends() else "no" for name in known_backends()}
    assert os.uname().release in findings["kernel"]["found"]
    assert findings["sealed memfds"]["verdict"] == "ok"
    assert all(finding["advice"] for finding in findings.values() if finding["verdict"] in ("slow", "limited"))


def test_it_promises_no_cuda_tensors_where_there_is_no_cuda(wcache: Wcache) -> None:
    findings = {finding["topic"]: finding["found"] for finding in wcache("doctor", "--json").json["findings"]}
    promised = findings["transport torch_ipc"].partition(";")[0]
    assert promised == f"works here, for cpu{', cuda' if torch.cuda.is_available() else ''} tensors"


def test_it_finds_the_daemon_that_runs(wcache: Wcache, checkpoint: Path) -> None:
    with wcache.serve(checkpoint) as serving:
        lines = wcache("doctor").out.splitlines()
    (line,) = (line for line in lines if line.startswith("daemon "))
    assert line.split(maxsplit=2)[1:] == ["ok", f"pid {serving.pid} on {serving.socket_path}, 1 state"]
    assert lines[0].split() == ["WHAT", "VERDICT", "FOUND"]

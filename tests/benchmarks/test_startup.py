"""The benchmark of starting: that every way computes the same, and how it reports; never how fast anything was."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from results import Environment

from tests.benchmarks.starting import start_each
from tests.processes import Forge
from wcache_async import Daemon

pytest.importorskip("transformers", reason="needs `pip install wcache-async[transformers]`")

import startup
import startup_model
from startup_sample import StartupSample

NBYTES = 4 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    path = tmp_path_factory.mktemp("startup") / "model"
    before = torch.get_default_dtype()
    try:
        startup_model.write_checkpoint(path, NBYTES)
    finally:
        torch.set_default_dtype(before)
    return path


@pytest.mark.timeout(300)
@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_every_variant_computes_the_same_from_disk_and_from_the_cache(
    folder: Path, short_tmp: Path, forge: Forge, monkeypatch: pytest.MonkeyPatch
) -> None:
    from startup_server import load_variants

    def start(variant: str, way: str, folder: Path, address: str) -> StartupSample:
        child.send(("cache" if way == startup.CACHE else "load", variant, str(folder), address))
        return msgspec.convert(child.receive(), StartupSample)

    monkeypatch.setattr(startup, "_start", start)
    variants = list(startup.VARIANTS)
    assert variants == list(startup_model.VARIANTS)
    with forge.start(start_each) as child:
        child._line.settimeout(280)  # It imports transformers first, on a busy machine in a minute.
        async with Daemon(short_tmp / "s") as daemon:
            await load_variants(daemon, folder, variants)
            sizes = {state.name: state.bytes for state in daemon.status().states}
            results, cached = await asyncio.to_thread(startup.measure, folder, daemon.socket_path, variants, 1)
        child.send(None)
    assert sizes["int8"] < sizes["stored"]
    assert 0 <= cached <= 1
    assert [result.variant for result in results] == variants
    for result in results:
        assert [way.way for way in result.ways] == list(startup.WAYS)
        assert [way.state is None for way in result.ways] == [True, True, False]
        for way in result.ways:
            parts = way.imports.median + way.weights.median + way.forward.median
            assert parts == pytest.approx(way.total.median)
        warm, cold, cache = result.ways
        assert result.warm == warm.weights.median / cache.weights.median
        assert result.cold == cold.weights.median / cache.weights.median
        assert cache.state is not None
        assert result.state_warm == warm.weights.median / cache.state.median
        assert (result.met, result.state_met) == (result.warm >= 50, result.state_warm >= 50)
    environment = Environment.here()
    report = startup.Report(
        environment=environment,
        load_average_after=os.getloadavg(),
        rounds=1,
        nbytes=NBYTES,
        cached=cached,
        target=startup.TARGET,
        variants=tuple(results),
    )
    text = startup.table(report)
    assert text.count("| from_cache |") == 5
    assert text.count("at least 50)") == sum(result.met + result.state_met for result in results)
    assert text.count("MISSED: 50)") == 10 - text.count("at least 50)")


def test_other_logits_are_a_failure(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(variant: str, way: str, *_: object) -> StartupSample:
        return StartupSample(imports_s=1, weights_s=1, state_s=1, forward_s=1, total_s=3, logits=way)

    monkeypatch.setattr(startup, "_start", start)
    with pytest.raises(startup.Failed, match="3 different logits"):
        startup.measure(folder, "", ["stored"], 1)


def test_a_process_that_fails_is_told_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def script(name: str, *arguments: object) -> list[str]:
        if name == "startup_model.py":
            return [
                sys.executable,
                "-c",
                "import pathlib, sys; p = pathlib.Path(sys.argv[1]); p.mkdir(); (p / 'x').write_text('x')",
                *map(str, arguments),
            ]
        if name == "startup_server.py":
            return [sys.executable, "-c", "print('ready', flush=True); input()"]
        return [sys.executable, "-c", "import sys; sys.exit('no such state')"]

    monkeypatch.setattr(startup, "script", script)
    monkeypatch.setattr(sys, "argv", ["startup.py", "--quick", "--output", str(tmp_path / "out.json")])
    assert startup.main() == 1
    assert "no such state" in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()


def test_a_file_is_put_out_of_memory_and_the_share_that_is_left_is_told(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    path.read_bytes()
    assert startup.cached_share([path]) == 1
    startup.evict([path])
    assert startup.cached_share([path]) < 1
    (tmp_path / "empty").write_bytes(b"")
    assert startup.checkpoint_files(tmp_path) == [path]


def test_the_command_line_says_what_it_does() -> None:
    """Whole runs take minutes of imports; `--help` and the rest of the tests are what there is time for."""
    shown = subprocess.run(
        [sys.executable, startup.__file__, "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert "--quick" in shown
    assert "first forward" in shown


def test_results_are_kept_where_the_others_are() -> None:
    kept = Path(startup.__file__).parent / "results" / "startup.json"
    if kept.exists():
        report: dict[str, Any] = json.loads(kept.read_text())
        assert report["target"] == 50
        assert {variant["variant"] for variant in report["variants"]} <= set(startup.VARIANTS)

"""Engines in an environment of their own: `make test-vllm` gives it, elsewhere these tests are skipped by name."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.processes import PYTHON_VARIABLE, DaemonProcess, EngineProcess, StartEngine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without vLLM's environment these tests are skipped, by name; `make test-vllm` gives it."""
    if os.environ.get(PYTHON_VARIABLE):
        return
    skip = pytest.mark.skip(reason="needs vLLM in an environment of its own: make test-vllm")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(skip)


@pytest.fixture
def start_engine(tmp_path: Path) -> Iterator[StartEngine]:
    """Starts engine processes, which have imported nothing yet when it returns."""
    with contextlib.ExitStack() as stack:
        started = 0

        def start(*, ranks: int = 1) -> EngineProcess:
            nonlocal started
            started += 1
            environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
            if ranks > 1:
                environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(rank % 2) for rank in range(ranks))
            engine = EngineProcess(tmp_path / f"engine-{started}.log", environment)
            stack.callback(engine.close)
            return engine

        yield start


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths of small random models, by name."""
    folder = tmp_path_factory.mktemp("models")
    engine = EngineProcess(folder / "engine.log", {})
    try:
        made: dict[str, str] = engine.do("models", folder=str(folder))
    finally:
        engine.close()
    return made


@pytest.fixture
def daemon(short_tmp: Path) -> Iterator[DaemonProcess]:
    """A daemon that holds nothing."""
    running = DaemonProcess(short_tmp / "wcache.sock")
    yield running
    running.close()

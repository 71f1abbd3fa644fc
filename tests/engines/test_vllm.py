"""A real vLLM on the CPU, from the cache: the same tokens as from disk, whoever built the weights, whoever dies."""

from typing import Any

import pytest

from tests.engines.processes import DaemonProcess, EngineProcess, StartEngine
from wcache_async import blocking

PROMPTS = [[1, 5, 9], [7, 8, 100, 200], [3], [400, 401, 402, 403, 404, 405]]
TOKENS = 12

pytestmark = pytest.mark.timeout(900)

Models = dict[str, str]


def through(daemon: DaemonProcess, **options: Any) -> dict[str, Any]:
    """What an LLM is started with to take its weights from `daemon`."""
    return {"load_format": "wcache", "model_loader_extra_config": {"socket": daemon.socket, **options}}


def tokens_of(engine: EngineProcess) -> Any:
    return engine.do("generate", prompts=PROMPTS, max_tokens=TOKENS)


def builders(socket: str) -> dict[int, int]:
    """Generation by rank of the one state there is: how often each rank was built."""
    states = blocking.status(socket).states
    assert len({state.name for state in states}) == 1
    return {state.rank: state.generation for state in states}


def test_the_first_engine_publishes_and_the_next_attach_with_the_same_tokens(
    daemon: DaemonProcess, models: Models, start_engine: StartEngine
) -> None:
    """Llama, tied Qwen, mixture of experts; then the daemon dies while the second engine generates."""
    names = ["llama", "qwen", "mixtral"]
    first, second = start_engine(), start_engine()
    plain: dict[str, Any] = {}
    second.say("prepare")
    for name in names:
        assert first.do("start", model=models[name]) == [None]
        plain[name] = tokens_of(first)
        assert all(len(tokens) == TOKENS for tokens in plain[name])
        first.do("stop")
    assert len({str(tokens) for tokens in plain.values()}) == 3
    for name in names:
        [outcome] = first.do("start", model=models[name], **through(daemon))
        assert (outcome["built_here"], outcome["on_meta"]) == (True, 0)
        assert tokens_of(first) == plain[name]
        first.do("stop")
    first.close()

    second.hear()
    for name in reversed(names):
        [outcome] = second.do("start", model=models[name], **through(daemon, on_missing="error"))
        assert (outcome["built_here"], outcome["on_meta"], outcome["generation"]) == (False, 0, 1)
        assert f"wcache: attached {outcome['name']!r} rank 0: {outcome['nbytes']} bytes in " in second.log
        assert second.do("external_memory") == outcome["nbytes"] > 0
        assert tokens_of(second) == plain[name]
        if name != names[0]:
            second.do("stop")

    second.say("generate_with_pause", prompts=PROMPTS, max_tokens=TOKENS, pause_after=TOKENS // 2)
    assert second.hear() == "paused"
    daemon.kill()
    second.say("go_on")
    assert second.hear() == plain[names[0]]
    assert tokens_of(second) == plain[names[0]]

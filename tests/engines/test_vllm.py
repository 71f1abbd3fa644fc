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


def test_tensor_parallel_ranks_each_publish_and_attach_their_share(
    daemon: DaemonProcess, models: Models, start_engine: StartEngine
) -> None:
    both: dict[str, Any] = {"model": models["llama"], "tensor_parallel_size": 2}
    engine = start_engine(ranks=2)
    assert engine.do("start", **both) == [None, None]
    plain = tokens_of(engine)
    engine.do("stop")
    outcomes = engine.do("start", **both, **through(daemon))
    assert [(o["rank"], o["built_here"]) for o in outcomes] == [(0, True), (1, True)]
    assert tokens_of(engine) == plain
    engine.close()
    assert builders(daemon.socket) == {0: 1, 1: 1}

    engine = start_engine(ranks=2)
    outcomes = engine.do("start", **both, **through(daemon, on_missing="error"))
    assert [(o["rank"], o["built_here"], o["on_meta"]) for o in outcomes] == [(0, False, 0), (1, False, 0)]
    assert tokens_of(engine) == plain
    assert builders(daemon.socket) == {0: 1, 1: 1}


def test_engines_that_start_at_once_build_each_rank_once(
    daemon: DaemonProcess, models: Models, start_engine: StartEngine
) -> None:
    """Two engines of two ranks each, and nothing cached."""
    engines = [start_engine(ranks=2), start_engine(ranks=2)]
    for engine in engines:
        engine.say("start", model=models["mixtral"], tensor_parallel_size=2, **through(daemon))
    outcomes = [outcome for engine in engines for outcome in engine.hear()]
    assert sorted((o["rank"], o["built_here"]) for o in outcomes) == [(0, False), (0, True), (1, False), (1, True)]
    assert builders(daemon.socket) == {0: 1, 1: 1}
    for engine in engines:
        engine.say("generate", prompts=PROMPTS, max_tokens=TOKENS)
    one, other = [engine.hear() for engine in engines]
    assert one == other


def test_when_the_builder_is_killed_half_way_another_takes_over(
    daemon: DaemonProcess, models: Models, start_engine: StartEngine
) -> None:
    dying, *others = [start_engine() for _ in range(3)]
    for engine in (dying, *others):
        engine.say("prepare")
    dying.hear()
    dying.do("pause_when_loaded")
    dying.say("start", model=models["qwen"], **through(daemon))
    assert dying.hear() == "paused"  # Its weights are read, and not yet anybody else's.
    assert [state.phase for state in blocking.status(daemon.socket).states] == ["loading"]
    for engine in others:
        engine.hear()
        engine.do("tell_before_loading")
        engine.say("start", model=models["qwen"], **through(daemon))
    for engine in others:
        assert engine.hear() == "loading"
    dying.kill()
    outcomes = [outcome for engine in others for outcome in engine.hear()]
    assert sorted(outcome["built_here"] for outcome in outcomes) == [False, True]
    assert [state.phase for state in blocking.status(daemon.socket).states] == ["ready"]
    one, other = [tokens_of(engine) for engine in others]
    assert one == other


def test_what_the_cache_cannot_give_is_an_error_and_no_engine(
    daemon: DaemonProcess, models: Models, start_engine: StartEngine
) -> None:
    """Never a silent load from disk."""
    engine = start_engine()
    absent = daemon.socket + ".absent"
    refused = engine.do(
        "refused", model=models["llama"], load_format="wcache", model_loader_extra_config={"socket": absent}
    )
    assert refused["type"] == "NotRunning"
    assert absent in refused["text"]
    assert f"wcache serve --socket {absent}" in refused["hint"]
    assert "leave --load-format wcache out" in refused["hint"]

    refused = engine.do("refused", model=models["llama"], **through(daemon, on_missing="error"))
    assert refused["type"] == "StateNotFound"

    refused = engine.do("refused", model=models["llama"], **through(daemon, sockt="x"))
    assert refused["type"] == "InvalidRequest"
    assert "sockt" in refused["text"]
    assert "on_missing" in refused["text"]

    refused = engine.do("refused", model=models["llama"], **through(daemon, stage="processed"))
    assert refused["type"] == "ModuleError"
    assert "model.embed_tokens" in refused["text"]
    assert "cpu_linear" in refused["text"]
    assert blocking.status(daemon.socket).states == ()

    [outcome] = engine.do("start", model=models["llama"], **through(daemon, name="mine"))
    assert (outcome["name"], outcome["built_here"]) == ("mine", True)
    engine.do("stop")
    refused = engine.do("refused", model=models["llama-other"], **through(daemon, name="mine"))
    assert refused["type"] == "ConfigMismatch"
    [state] = blocking.status(daemon.socket).states
    assert "model_files: expected" in refused["text"]
    assert str(state.config["model_files"]) in refused["text"]
    assert "dtype" not in refused["text"]

    with blocking.Client(daemon.socket) as client:
        other = client.fetch_state("mine").import_tensors()
        client.publish("mine", {"model.norm.weight": other["model.norm.weight"]}, config=state.config, replace=True)
    refused = engine.do("refused", model=models["llama"], **through(daemon, name="mine"))
    assert refused["type"] == "BindError"
    assert "model.embed_tokens.weight" in refused["text"]

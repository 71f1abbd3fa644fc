"""The state table: every transition, and what each one demands."""

import pytest

from wcache_async.daemon.states import Cancel, Discard, Generation, Phase, StateKey, StateTable, Wake
from wcache_async.errors import SourceError, StateExists, StateFailed, StateNotFound

KEY = StateKey("llama", 0)
BROKEN = SourceError(path="/models/llama", reason="truncated")


def begin(table: StateTable, key: StateKey = KEY, *, replace: bool = False) -> Generation:
    return table.begin(key, source="/models/llama", config={}, replace=replace)


def ready(table: StateTable, key: StateKey = KEY) -> Generation:
    generation = begin(table, key)
    table.ready(generation)
    return generation


def test_a_new_state_is_loading_and_then_ready() -> None:
    table = StateTable()
    generation = begin(table)
    assert (generation.phase, generation.number) == (Phase.LOADING, 1)
    assert table.lookup(KEY) is generation
    assert table.loading() == [generation]
    assert table.ready(generation) == [Wake(KEY)]
    assert table.lookup(KEY).phase is Phase.READY
    assert table.loading() == []


def test_a_failed_load_tells_its_reason_and_may_be_tried_again() -> None:
    table = StateTable()
    generation = begin(table)
    assert table.fail(generation, BROKEN) == [Wake(KEY)]
    with pytest.raises(StateFailed) as caught:
        table.lookup(KEY)
    assert caught.value.reason == str(BROKEN)
    again = begin(table)
    assert again.number == 2
    assert table.lookup(KEY) is again


@pytest.mark.parametrize("phase", [Phase.LOADING, Phase.READY])
def test_a_name_in_use_is_refused_and_left_as_it_was(phase: Phase) -> None:
    table = StateTable()
    generation = begin(table)
    if phase is Phase.READY:
        table.ready(generation)
    with pytest.raises(StateExists) as caught:
        begin(table)
    assert caught.value.phase == phase
    assert table.lookup(KEY) is generation


def test_a_replacement_serves_the_old_generation_until_the_new_one_is_ready() -> None:
    table = StateTable()
    old = ready(table)
    new = begin(table, replace=True)
    assert table.lookup(KEY) is old
    assert table.loading() == [new]
    assert table.ready(new) == [Discard(old), Wake(KEY)]
    assert table.lookup(KEY) is new


def test_only_one_replacement_loads_at_a_time() -> None:
    table = StateTable()
    ready(table)
    begin(table, replace=True)
    with pytest.raises(StateExists):
        begin(table, replace=True)


def test_a_replacement_that_fails_leaves_the_old_generation_serving_with_the_reason() -> None:
    table = StateTable()
    old = ready(table)
    new = begin(table, replace=True)
    assert table.fail(new, BROKEN) == [Wake(KEY)]
    assert table.lookup(KEY) is old
    assert old.error is BROKEN
    assert old.phase is Phase.READY


def test_a_replaced_generation_under_lease_is_discarded_by_the_end_of_the_last_lease() -> None:
    table = StateTable()
    old = ready(table)
    table.lease_granted(old)
    table.lease_granted(old)
    new = begin(table, replace=True)
    assert table.ready(new) == [Wake(KEY)]
    assert table.lease_ended(old) == []
    assert table.lease_ended(old) == [Discard(old)]


def test_the_last_lease_on_a_held_generation_discards_nothing() -> None:
    table = StateTable()
    generation = ready(table)
    table.lease_granted(generation)
    assert table.lease_ended(generation) == []
    assert table.lookup(KEY) is generation


def test_unloading_forgets_the_state_and_discards_it() -> None:
    table = StateTable()
    generation = ready(table)
    gone, effects = table.unload("llama", None)
    assert gone == [generation]
    assert effects == [Discard(generation), Wake(KEY)]
    with pytest.raises(StateNotFound):
        table.lookup(KEY)


def test_unloading_under_lease_keeps_the_memory_until_the_lease_ends() -> None:
    table = StateTable()
    generation = ready(table)
    table.lease_granted(generation)
    _, effects = table.unload("llama", 0)
    assert effects == [Wake(KEY)]
    assert table.lease_ended(generation) == [Discard(generation)]


def test_unloading_a_loading_state_cancels_it_and_its_late_success_is_discarded() -> None:
    table = StateTable()
    generation = begin(table)
    _, effects = table.unload("llama", None)
    assert effects == [Cancel(generation), Wake(KEY)]
    assert table.ready(generation) == [Discard(generation)]


def test_unloading_also_cancels_the_pending_replacement() -> None:
    table = StateTable()
    old = ready(table)
    new = begin(table, replace=True)
    gone, effects = table.unload("llama", None)
    assert gone == [old, new]
    assert effects == [Discard(old), Cancel(new), Wake(KEY)]


def test_a_load_that_fails_after_its_state_was_unloaded_changes_nothing() -> None:
    table = StateTable()
    generation = begin(table)
    table.unload("llama", None)
    other = begin(table)
    assert table.fail(generation, BROKEN) == []
    assert table.lookup(KEY) is other


def test_unload_takes_one_rank_or_every_rank() -> None:
    table = StateTable()
    keys = [StateKey("llama", rank) for rank in range(3)]
    generations = [ready(table, key) for key in keys]
    other = ready(table, StateKey("qwen", 0))
    assert table.unload("llama", 1)[0] == [generations[1]]
    assert table.unload("llama", None)[0] == [generations[0], generations[2]]
    assert list(table) == [other]


def test_what_is_not_held_is_answered_with_what_is() -> None:
    table = StateTable()
    ready(table, StateKey("qwen", 1))
    ready(table, StateKey("qwen", 0))
    with pytest.raises(StateNotFound) as caught:
        table.lookup(KEY)
    assert caught.value.available == ["qwen:0", "qwen:1"]
    with pytest.raises(StateNotFound) as caught:
        table.unload("qwen", 7)
    assert (caught.value.name, caught.value.rank) == ("qwen", 7)


def test_generation_numbers_go_on_after_an_unload() -> None:
    table = StateTable()
    ready(table)
    table.unload("llama", None)
    assert begin(table).number == 2

"""The state table of engine health, detection of lost engines, and the budget of restarts."""

from __future__ import annotations

from itertools import product

import pytest

from paceline.orchestrator.supervision import (
    BEAT_S,
    FIRST_BACKOFF_S,
    LONGEST_BACKOFF_S,
    SILENT_S,
    SOUND_S,
    STEADY_S,
    TABLE,
    EngineSupervisor,
    Health,
    HealthEvent,
    RecoveryAction,
)


def supervisor(max_restarts: int = 3) -> EngineSupervisor:
    return EngineSupervisor(["a", "b"], max_restarts=max_restarts)


def wait_for(found: EngineSupervisor, action: RecoveryAction, now_s: float) -> float:
    """The second in which it is ordered for place a; b answers all the time."""
    for second in range(10_000):
        found.on("b", HealthEvent.BEAT, now_s + second)
        if ("a", action) in found.due(now_s + second):
            return now_s + second
    raise AssertionError(f"{action} never came")


def heal(found: EngineSupervisor, now_s: float) -> float:
    """Place a is started and joins, in no time."""
    now_s = wait_for(found, RecoveryAction.START, now_s)
    assert found.on("a", HealthEvent.STARTED, now_s) == [("a", RecoveryAction.CATCH_UP)]
    found.on("a", HealthEvent.JOINED, now_s)
    return now_s


def test_every_state_has_an_answer_to_every_event() -> None:
    assert set(TABLE) == set(product(Health, HealthEvent))


def test_every_state_but_the_last_can_end_and_no_event_revives_a_place_that_was_given_up() -> None:
    for state in Health:
        ends = {TABLE[state, event][0] for event in HealthEvent} - {state}
        assert bool(ends) == (state is not Health.GIVEN_UP)


@pytest.mark.parametrize("state", [Health.LOST, Health.STARTING])
def test_word_of_an_earlier_life_changes_nothing(state: Health) -> None:
    """A heartbeat that was under way, or the news of a death that is known."""
    assert TABLE[state, HealthEvent.BEAT] == TABLE[state, HealthEvent.DIED] == (state, ())


def test_only_started_engines_catch_up_and_only_those_join() -> None:
    assert {state for state in Health if RecoveryAction.CATCH_UP in TABLE[state, HealthEvent.STARTED][1]} == {
        Health.STARTING
    }
    assert {state for state in Health if TABLE[state, HealthEvent.JOINED][0] is not state} == {Health.CATCHING_UP}


def test_silent_engine_is_lost_within_15_seconds_and_not_for_one_late_answer() -> None:
    found = supervisor()
    found.begin(0.0)
    for second in range(8):
        found.on("b", HealthEvent.BEAT, second)
        assert not found.due(second)
    assert (found.state("a"), found.state("b")) == (Health.SUSPECT, Health.HEALTHY)
    found.on("a", HealthEvent.BEAT, 8)
    assert found.state("a") is Health.HEALTHY
    lost_s = wait_for(found, RecoveryAction.LOSE, 8)
    assert lost_s == 8 + SILENT_S
    assert SILENT_S + BEAT_S <= 15
    assert found.state("b") is not Health.LOST


def test_first_start_comes_at_once_and_later_ones_wait_longer_until_the_budget_is_spent() -> None:
    found = supervisor(max_restarts=4)
    found.begin(0.0)
    found.on("a", HealthEvent.DIED, 1.0)
    waits, now_s = [], 1.0
    for _ in range(4):
        start_s = wait_for(found, RecoveryAction.START, now_s)
        waits.append(start_s - now_s)
        now_s = start_s + 20
        found.on("a", HealthEvent.FAILED, now_s)
    assert waits == [0, FIRST_BACKOFF_S, 2 * FIRST_BACKOFF_S, 4 * FIRST_BACKOFF_S]
    assert wait_for(found, RecoveryAction.GIVE_UP, now_s) == now_s, "nothing to wait for"
    assert found.state("a") is Health.GIVEN_UP and found.state("b") is Health.HEALTHY
    assert found.due(now_s + 10 * LONGEST_BACKOFF_S) == []


def test_engines_that_die_soon_after_they_join_use_the_budget_up() -> None:
    found = supervisor(max_restarts=2)
    found.begin(0.0)
    now_s = 1.0
    for _ in range(2):
        found.on("a", HealthEvent.DIED, now_s)
        now_s = heal(found, now_s) + 60
    found.on("a", HealthEvent.DIED, now_s)
    assert wait_for(found, RecoveryAction.GIVE_UP, now_s) == now_s


@pytest.mark.parametrize(("well_s", "waits_s"), [(SOUND_S - 1, FIRST_BACKOFF_S), (SOUND_S, 0.0)])
def test_only_an_engine_that_dies_soon_after_its_start_has_to_wait_for_the_next(well_s: float, waits_s: float) -> None:
    """A run that loses an engine every few minutes would wait for minutes each time, for starts that have all gone
    well."""
    found = supervisor()
    found.begin(0.0)
    found.on("a", HealthEvent.DIED, 1.0)
    died_s = heal(found, 1.0) + well_s
    found.on("a", HealthEvent.DIED, died_s)
    assert wait_for(found, RecoveryAction.START, died_s) == died_s + waits_s


def test_budget_comes_back_to_a_place_that_was_well_for_long() -> None:
    """A long run loses an engine now and then, and must not lose a place for it."""
    found = supervisor(max_restarts=1)
    found.begin(0.0)
    now_s = 1.0
    for life in range(2, 7):
        found.on("a", HealthEvent.DIED, now_s)
        now_s = heal(found, now_s)
        assert found.incarnation("a") == life
        now_s += STEADY_S


def test_no_restart_means_that_a_place_is_given_up_at_once() -> None:
    found = supervisor(max_restarts=0)
    found.begin(0.0)
    found.on("a", HealthEvent.DIED, 5.0)
    assert found.due(5.0) == [("a", RecoveryAction.GIVE_UP)]


def test_healing_time_counts_from_the_loss_over_all_tries() -> None:
    found = supervisor()
    found.begin(0.0)
    found.on("a", HealthEvent.DIED, 100.0)
    now_s = wait_for(found, RecoveryAction.START, 100.0)
    found.on("a", HealthEvent.FAILED, now_s + 30)
    joined_s = heal(found, now_s + 30)
    assert found.downtime_s("a") == joined_s - 100.0 > 30

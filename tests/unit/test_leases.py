"""Leases: the whole table, every interleaving of an engine, its worker and the clock, and the account of idle time."""

from __future__ import annotations

from itertools import product

import pytest

from paceline.config import LeaseConfig
from paceline.orchestrator.leases import TABLE, Action, Event, Leases, LeaseState, Slot

CONFIG = LeaseConfig(settle_s=0.05, lease_s=10, grace_s=0.1)
ENGINE_AND_CLOCK = (Event.SLEPT, Event.AWAKE, Event.TIME_UP)
TIMED = (LeaseState.IDLE, LeaseState.LEASED, LeaseState.RECALLED)


def reachable() -> set[tuple[LeaseState, bool]]:
    """Every (state, has work) that any order of events leads to."""
    seen: set[tuple[LeaseState, bool]] = set()
    waiting = [(LeaseState.IDLE, False)]
    while waiting:
        found = waiting.pop()
        if found in seen:
            continue
        seen.add(found)
        for event in Event:
            slot = Slot(state=found[0], has_work=found[1])
            slot.on(event, slot.lease)
            waiting.append((slot.state, slot.has_work))
    return seen


def test_every_state_has_an_answer_to_every_event() -> None:
    assert set(TABLE) == set(product(LeaseState, Event))


def test_every_state_is_reached_and_an_engine_with_work_is_never_idle() -> None:
    assert {state for state, _ in reachable()} == set(LeaseState)
    assert (LeaseState.IDLE, True) not in reachable()
    assert not {state for state, has_work in reachable() if has_work} & {
        LeaseState.DOZING,
        LeaseState.ASLEEP,
        LeaseState.LEASED,
    }


@pytest.mark.parametrize(("state", "has_work"), sorted(reachable(), key=str))
def test_an_engine_with_work_gets_back_without_a_word_from_the_trainer(state: LeaseState, has_work: bool) -> None:
    """A trainer that hangs, or that is slow with a checkpoint, must not hold rollouts up."""
    if state is LeaseState.LOST:
        return
    slot = Slot(state=state, has_work=has_work)
    slot.on(Event.WORK)
    answers = {
        LeaseState.DOZING: Event.SLEPT,
        LeaseState.ROUSED: Event.SLEPT,
        LeaseState.WAKING: Event.AWAKE,
        LeaseState.RECALLED: Event.TIME_UP,
    }
    for _ in range(4):
        if slot.state is LeaseState.BUSY:
            break
        event = answers[slot.state]
        assert event in ENGINE_AND_CLOCK
        assert event is not Event.TIME_UP or slot.state in TIMED
        slot.on(event)
    assert slot.state is LeaseState.BUSY and slot.has_work


@pytest.mark.parametrize(("state", "has_work"), sorted(reachable(), key=str))
def test_an_engine_is_awake_for_the_weights_that_follow_a_phase(state: LeaseState, has_work: bool) -> None:
    if state is LeaseState.LOST:
        return
    slot = Slot(state=state, has_work=has_work)
    slot.on(Event.PHASE_END)
    answers = {LeaseState.ROUSED: Event.SLEPT, LeaseState.WAKING: Event.AWAKE, LeaseState.RECALLED: Event.TIME_UP}
    while slot.state in answers:
        slot.on(answers[slot.state])
    assert slot.state is (LeaseState.BUSY if has_work else LeaseState.IDLE)


@pytest.mark.parametrize(("state", "has_work"), sorted(reachable(), key=str))
def test_a_crash_of_the_worker_costs_a_lease_and_never_a_rollout(state: LeaseState, has_work: bool) -> None:
    slot = Slot(state=state, has_work=has_work)
    actions = slot.on(Event.CRASHED)
    assert slot.has_work == has_work and (slot.state is LeaseState.LOST) == (state is LeaseState.LOST)
    assert (Action.REPLACE in actions) == (state is not LeaseState.LOST)
    assert set(actions) <= {Action.REPLACE, Action.WAKE}, "nothing else is done to an engine whose worker died"
    assert (Action.WAKE in actions) == (state is LeaseState.RECALLED)
    assert slot.state not in (LeaseState.LEASED, LeaseState.RECALLED), "a dead worker holds no slot"


def test_an_engine_is_told_to_sleep_and_to_wake_in_turns_on_every_path() -> None:
    """Waking an engine that is awake, or leasing the slot of one that is, would have both of them on one device."""
    awake, told_to_sleep, asleep, told_to_wake = range(4)
    seen = set()
    waiting = [(LeaseState.IDLE, False, awake, False)]
    while waiting:
        state, has_work, engine, held = waiting.pop()
        if (state, has_work, engine, held) in seen:
            continue
        seen.add((state, has_work, engine, held))
        for event in Event:
            if (event is Event.SLEPT and engine != told_to_sleep) or (event is Event.AWAKE and engine != told_to_wake):
                continue  # an engine answers what it was asked
            if (
                (event is Event.STOPPED and not held)
                or (event is Event.TIME_UP and state not in TIMED)
                or event is Event.LOST
            ):
                continue
            if event in (Event.WORK, Event.DRAINED) and has_work == (event is Event.WORK):
                continue
            if event is Event.DRAINED and state is not LeaseState.BUSY:
                continue  # rollouts that were not submitted do not finish
            now_engine = {Event.SLEPT: asleep, Event.AWAKE: awake}.get(event, engine)
            now_held = held and event not in (Event.STOPPED, Event.CRASHED)
            slot = Slot(state=state, has_work=has_work)
            for action in slot.on(event, slot.lease):
                match action:
                    case Action.SLEEP:
                        assert now_engine == awake and not now_held
                        now_engine = told_to_sleep
                    case Action.LEASE:
                        assert now_engine == asleep and not now_held
                        now_held = True
                    case Action.KILL:
                        now_held = False
                    case Action.WAKE:
                        assert now_engine == asleep and not now_held, "the trainer is out before the engine comes in"
                        now_engine = told_to_wake
                    case Action.RECALL:
                        assert now_held
                    case Action.OFFER | Action.REPLACE:
                        pass
            assert (slot.state is LeaseState.BUSY) <= (now_engine == awake)
            assert now_held == (slot.state in (LeaseState.LEASED, LeaseState.RECALLED))
            waiting.append((slot.state, slot.has_work, now_engine, now_held))
    assert {state for state, *_ in seen} == set(LeaseState) - {LeaseState.LOST}


def test_a_lost_engine_takes_its_worker_along_and_stays_lost_until_another_takes_its_place() -> None:
    for state in set(LeaseState) - {LeaseState.LOST}:
        slot = Slot(state=state)
        assert slot.on(Event.LOST) == (Action.KILL,)
        for event in set(Event) - {Event.JOINED}:
            assert slot.on(event, slot.lease) == () and slot.state is LeaseState.LOST
        slot.on(Event.LOST)
        assert slot.on(Event.JOINED) == (Action.REPLACE,) and slot.state is LeaseState.IDLE, "rollouts of the lost one"


def test_a_word_from_an_earlier_lease_is_not_heard() -> None:
    """STOPPED, sent before a kill, would wake the engine into the next worker's lease."""
    slot = Slot(state=LeaseState.ASLEEP, lease=3)
    slot.on(Event.READY)
    assert (slot.state, slot.lease) == (LeaseState.LEASED, 4)
    assert slot.on(Event.STOPPED, 3) == () and slot.state is LeaseState.LEASED
    assert slot.on(Event.STOPPED, 4) == (Action.WAKE,)


def leased(engines: tuple[str, ...] = ("a",), now_s: float = 0.0) -> Leases:
    """A phase that has begun, with every engine's slot leased from `now_s` + 0.05 on."""
    leases = Leases(engines, CONFIG)
    leases.announce(now_s=now_s, phase_open=True, training_wanted=True)
    assert leases.due(now_s + 0.04) == []
    assert leases.due(now_s + 0.05) == [(engine, Action.SLEEP) for engine in engines]
    for engine in engines:
        assert leases.on(engine, Event.SLEPT, now_s + 0.05) == [(engine, Action.OFFER)]
        assert leases.on(engine, Event.READY, now_s + 0.05) == [(engine, Action.LEASE)]
    return leases


def test_an_engine_between_two_rollouts_is_left_alone() -> None:
    leases = Leases(["a"], CONFIG)
    leases.announce(now_s=0.0, phase_open=True, training_wanted=True)
    leases.on("a", Event.WORK, 0.0)
    leases.on("a", Event.DRAINED, 1.0)
    assert leases.next_due_s() == pytest.approx(1.05)
    leases.on("a", Event.WORK, 1.04)
    assert leases.due(1.2) == [] and leases.next_due_s() is None


@pytest.mark.parametrize(("phase_open", "wanted"), [(True, False), (False, True)])
def test_no_engine_sleeps_outside_a_phase_or_for_nothing(phase_open: bool, wanted: bool) -> None:
    leases = Leases(["a"], CONFIG)
    leases.announce(now_s=0.0, phase_open=phase_open, training_wanted=wanted)
    assert leases.next_due_s() is None and leases.due(100.0) == []


def test_a_trainer_that_does_not_let_go_is_killed_after_the_grace() -> None:
    leases = leased()
    assert leases.on("a", Event.WORK, 2.0) == [("a", Action.RECALL)]
    assert leases.next_due_s() == pytest.approx(2.1)
    assert leases.due(2.05) == []
    assert leases.due(2.1) == [("a", Action.KILL), ("a", Action.WAKE)]
    assert leases.on("a", Event.CRASHED, 2.12) == [("a", Action.REPLACE)]
    leases.on("a", Event.AWAKE, 2.14)
    assert leases.state("a") is LeaseState.BUSY
    assert leases.account.recall_s == pytest.approx([0.14])
    assert (leases.account.num_kills, leases.account.num_crashes, leases.account.num_recalls) == (1, 1, 1)


@pytest.mark.parametrize("ending", ["phase", "wanted", "deadline"])
def test_a_lease_ends_with_the_phase_with_its_reason_or_with_its_time(ending: str) -> None:
    leases = leased(("a", "b"))
    if ending == "deadline":
        orders = leases.due(10.05)
    elif ending == "phase":
        orders = leases.announce(now_s=1.0, phase_open=False)
    else:
        orders = leases.announce(now_s=1.0, training_wanted=False)
    assert orders == [("a", Action.RECALL), ("b", Action.RECALL)]


def test_a_slot_whose_worker_died_is_leased_again_when_a_new_one_is_there() -> None:
    leases = leased()
    assert leases.on("a", Event.CRASHED, 1.0) == [("a", Action.REPLACE)]
    assert leases.on("a", Event.READY, 3.0) == [("a", Action.LEASE)]
    assert leases.lease("a") == 2


def test_the_account_says_where_idle_time_went() -> None:
    """Training is held against all time that could have been leased, sleeping and waking included, not against the
    leases."""
    leases = leased(("a", "b"))
    leases.on("b", Event.WORK, 1.05)
    leases.on("b", Event.STOPPED, 1.10, lease=1)
    leases.on("b", Event.AWAKE, 1.20)
    leases.announce(now_s=4.05, phase_open=False)
    leases.on("a", Event.STOPPED, 4.10, lease=1)
    leases.on("a", Event.AWAKE, 4.20)
    leases.announce(now_s=9.0, phase_open=True)
    account = leases.account
    assert account.leasable_s == pytest.approx(4.05 + 1.05), "not b's time with work, and nothing between phases"
    assert account.leased_s == pytest.approx(4.0 + 1.0)
    assert account.num_leases == 2 and account.recall_s == pytest.approx([0.15])


def test_time_without_anything_to_train_on_is_not_held_against_training() -> None:
    leases = Leases(["a"], CONFIG)
    leases.announce(now_s=0.0, phase_open=True)
    leases.announce(now_s=5.0, training_wanted=True)
    leases.due(5.05)
    leases.on("a", Event.LOST, 6.0)
    leases.announce(now_s=9.0, phase_open=False)
    assert leases.account.leasable_s == pytest.approx(1.0), "nor that of an engine that is lost"

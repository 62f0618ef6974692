"""Leases: the whole table, every interleaving of an engine, its worker and the clock, and the account of idle time."""

from __future__ import annotations

from itertools import product

import pytest

from paceline.orchestrator import leases as leasing
from paceline.orchestrator.leases import TABLE, Action, Event, Leases, LeaseState, Slot


@pytest.fixture(autouse=True)
def short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leasing, "SETTLE_S", 0.05)
    monkeypatch.setattr(leasing, "LEASE_S", 10.0)


TIMED = (LeaseState.IDLE, LeaseState.LEASED)


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
            slot.fire(event)
            waiting.append((slot.state, slot.has_work))
    return seen


def test_every_state_has_an_answer_to_every_event() -> None:
    assert set(TABLE) == set(product(LeaseState, Event))


def test_every_state_is_reached_and_an_engine_with_work_is_never_idle() -> None:
    assert {state for state, _ in reachable()} == set(LeaseState)
    assert (LeaseState.IDLE, True) not in reachable()
    assert not {state for state, has_work in reachable() if has_work} & {
        LeaseState.DOZING,
        LeaseState.LEASED,
    }


@pytest.mark.parametrize(("state", "has_work"), sorted(reachable(), key=str))
def test_an_engine_with_work_gets_back_by_the_answers_of_its_own_process(state: LeaseState, has_work: bool) -> None:
    """A trainer that hangs, or that is slow with a checkpoint, must not hold rollouts up. STOPPED is the engine's
    word too: it is sent when the signal is."""
    if state is LeaseState.LOST:
        return
    slot = Slot(state=state, has_work=has_work)
    slot.fire(Event.WORK)
    answers = {
        LeaseState.DOZING: Event.SLEPT,
        LeaseState.ROUSED: Event.SLEPT,
        LeaseState.WAKING: Event.AWAKE,
        LeaseState.RECALLED: Event.STOPPED,
    }
    for _ in range(4):
        if slot.state is LeaseState.BUSY:
            break
        slot.fire(answers[slot.state])
    assert slot.state is LeaseState.BUSY and slot.has_work


@pytest.mark.parametrize(("state", "has_work"), sorted(reachable(), key=str))
def test_an_engine_is_awake_for_the_weights_that_follow_a_phase(state: LeaseState, has_work: bool) -> None:
    if state is LeaseState.LOST:
        return
    slot = Slot(state=state, has_work=has_work)
    slot.fire(Event.PHASE_END)
    answers = {LeaseState.ROUSED: Event.SLEPT, LeaseState.WAKING: Event.AWAKE, LeaseState.RECALLED: Event.STOPPED}
    while slot.state in answers:
        slot.fire(answers[slot.state])
    assert slot.state is (LeaseState.BUSY if has_work else LeaseState.IDLE)


@pytest.mark.parametrize(("state", "has_work"), sorted(reachable(), key=str))
def test_a_crash_of_the_worker_costs_a_lease_and_never_a_rollout(state: LeaseState, has_work: bool) -> None:
    slot = Slot(state=state, has_work=has_work)
    actions = slot.fire(Event.CRASHED)
    assert slot.has_work == has_work and (slot.state is LeaseState.LOST) == (state is LeaseState.LOST)
    assert (Action.REPLACE in actions) == (state is not LeaseState.LOST)
    assert set(actions) <= {Action.REPLACE, Action.WAKE}, "nothing else is done to an engine whose worker died"
    assert (Action.WAKE in actions) == (state in (LeaseState.LEASED, LeaseState.RECALLED))
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
                (event is Event.STOPPED and state is not LeaseState.RECALLED)
                or (event is Event.TIMEOUT and state not in TIMED)
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
            for action in slot.fire(event):
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
                    case Action.REPLACE:
                        pass
            assert (slot.state is LeaseState.BUSY) <= (now_engine == awake)
            assert now_held == (slot.state in (LeaseState.LEASED, LeaseState.RECALLED))
            waiting.append((slot.state, slot.has_work, now_engine, now_held))
    assert {state for state, *_ in seen} == set(LeaseState) - {LeaseState.LOST}


def test_a_lost_engine_takes_its_worker_along_and_stays_lost_until_another_takes_its_place() -> None:
    for state in set(LeaseState) - {LeaseState.LOST}:
        slot = Slot(state=state)
        assert slot.fire(Event.LOST) == (Action.KILL,)
        for event in set(Event) - {Event.JOINED}:
            assert slot.fire(event) == () and slot.state is LeaseState.LOST
        slot.fire(Event.LOST)
        assert slot.fire(Event.JOINED) == (Action.REPLACE,) and slot.state is LeaseState.IDLE, (
            "rollouts of the lost one"
        )


def test_a_word_from_an_earlier_lease_is_not_heard() -> None:
    """STOPPED, held up on its way while the worker died, would wake the engine beside the next worker."""
    leases = Leases(["a"])
    slot = leases._machines["a"]
    slot.state, slot.lease = LeaseState.DOZING, 3
    leases.on("a", Event.SLEPT, 0.0)
    assert (slot.state, slot.lease) == (LeaseState.LEASED, 4)
    leases.on("a", Event.WORK, 0.0)
    assert leases.on("a", Event.STOPPED, 0.0, lease=3) == [] and slot.state is LeaseState.RECALLED
    assert leases.on("a", Event.STOPPED, 0.0, lease=4) == [("a", Action.WAKE)]


def leased(engines: tuple[str, ...] = ("a",), now_s: float = 0.0) -> Leases:
    """A phase that has begun, with every engine's slot leased from `now_s` + 0.05 on."""
    leases = Leases(engines)
    leases.announce(now_s=now_s, phase_open=True, training_wanted=True)
    assert leases.due(now_s + 0.04) == []
    assert leases.due(now_s + 0.05) == [(engine, Action.SLEEP) for engine in engines]
    for engine in engines:
        assert leases.on(engine, Event.SLEPT, now_s + 0.05) == [(engine, Action.LEASE)]
    return leases


def test_an_engine_between_two_rollouts_is_left_alone() -> None:
    leases = Leases(["a"])
    leases.announce(now_s=0.0, phase_open=True, training_wanted=True)
    leases.on("a", Event.WORK, 0.0)
    leases.on("a", Event.DRAINED, 1.0)
    assert leases.next_due_s() == pytest.approx(1.05)
    leases.on("a", Event.WORK, 1.04)
    assert leases.due(1.2) == [] and leases.next_due_s() is None


@pytest.mark.parametrize(("phase_open", "wanted"), [(True, False), (False, True)])
def test_no_engine_sleeps_outside_a_phase_or_for_nothing(phase_open: bool, wanted: bool) -> None:
    leases = Leases(["a"])
    leases.announce(now_s=0.0, phase_open=phase_open, training_wanted=wanted)
    assert leases.next_due_s() is None and leases.due(100.0) == []


def test_no_trainer_is_killed_while_the_word_of_its_stop_is_on_its_way() -> None:
    """A recall crosses the network while the learner takes the cores: eight of nine leases ended in a kill."""
    leases = leased()
    assert leases.on("a", Event.WORK, 2.0) == [("a", Action.RECALL)]
    assert leases.next_due_s() is None and leases.due(100.0) == []
    assert leases.on("a", Event.STOPPED, 100.0, lease=1) == [("a", Action.WAKE)]
    leases.on("a", Event.AWAKE, 100.5)
    assert leases.state("a") is LeaseState.BUSY
    assert leases.account.recall_s == pytest.approx([98.5]) and leases.account.stall_s == pytest.approx(98.5)


def idle_time(leases: Leases, begin_s: float, idle_s: float, *, way_s: float) -> bool:
    """One phase with `idle_s` at its end, of which a lease takes `way_s` to begin and to end; whether there was one."""
    leases.on("a", Event.WORK, begin_s)
    leases.announce(now_s=begin_s, phase_open=True, training_wanted=True)
    leases.on("a", Event.DRAINED, begin_s)
    due_s = leases.next_due_s()
    if due_s is None or due_s > begin_s + idle_s:
        leases.announce(now_s=begin_s + idle_s, phase_open=False)
        return False
    leases.due(due_s)
    leases.on("a", Event.SLEPT, due_s + way_s / 2)
    end_s = max(begin_s + idle_s, due_s + way_s / 2)
    leases.announce(now_s=end_s, phase_open=False)
    leases.on("a", Event.STOPPED, end_s, lease=leases.lease("a"))
    leases.on("a", Event.AWAKE, end_s + way_s / 2)
    return True


def test_a_lease_that_would_be_over_before_it_has_begun_is_not_begun() -> None:
    leases = Leases(["a"])
    assert idle_time(leases, 0.0, 0.2, way_s=0.2), "nothing is known yet"
    assert not idle_time(leases, 10.0, 0.2, way_s=0.2)


def test_leases_begin_where_they_leave_time_for_training() -> None:
    leases = Leases(["a"])
    assert all(idle_time(leases, 10.0 * step, 0.5, way_s=0.2) for step in range(20))


def test_leases_begin_again_when_idle_times_have_grown_or_the_machine_is_quiet_again() -> None:
    """One minute with a busy neighbor must not end training for the rest of the run."""
    for later_idle_s, later_way_s in ((2.0, 0.2), (0.2, 0.01)):
        leases = Leases(["a"])
        for step in range(10):
            idle_time(leases, 10.0 * step, 0.2, way_s=0.2)
        later = [idle_time(leases, 1000 + 10.0 * step, later_idle_s, way_s=later_way_s) for step in range(30)]
        assert all(later[-10:]), (later_idle_s, later_way_s, later)


def test_leases_that_are_hardly_worth_it_are_rare() -> None:
    leases = Leases(["a"])
    assert sum(idle_time(leases, 10.0 * step, 0.2, way_s=0.2) for step in range(50)) <= 10


def test_whoever_waits_for_leases_gets_them_however_long_they_take() -> None:
    """Inline training waits for its slices: without a lease it would wait in vain."""
    leases = Leases(["a"], skip_short=False)
    assert all(idle_time(leases, 10.0 * step, 0.2, way_s=0.2) for step in range(10))


def test_a_slot_without_a_trainer_is_not_leased_until_another_engine_has_it() -> None:
    leases = leased()
    leases.on("a", Event.CRASHED, 1.0)
    leases.on("a", Event.AWAKE, 1.1)
    leases.retire("a")
    assert leases.next_due_s() is None
    leases.on("a", Event.LOST, 2.0)
    leases.on("a", Event.JOINED, 3.0)
    assert leases.next_due_s() == pytest.approx(3.05)


def test_a_slot_that_is_retired_in_its_lease_still_ends_it_with_the_phase() -> None:
    """A new trainer failed to start after its lease began: the run would wait for an engine that nobody wakes."""
    leases = leased()
    leases.retire("a")
    assert leases.announce(now_s=1.0, phase_open=False) == [("a", Action.RECALL)]


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


def test_a_slot_whose_worker_died_is_leased_again() -> None:
    leases = leased()
    assert leases.on("a", Event.CRASHED, 1.0) == [("a", Action.WAKE), ("a", Action.REPLACE)]
    leases.on("a", Event.AWAKE, 1.1)
    assert leases.due(1.16) == [("a", Action.SLEEP)]
    assert leases.on("a", Event.SLEPT, 1.2) == [("a", Action.LEASE)] and leases.lease("a") == 2


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
    assert account.idle_s == account.leasable_s and account.stall_s == pytest.approx(0.15)


def test_time_without_anything_to_train_on_is_not_held_against_training() -> None:
    leases = Leases(["a"])
    leases.announce(now_s=0.0, phase_open=True)
    leases.announce(now_s=5.0, training_wanted=True)
    leases.due(5.05)
    leases.on("a", Event.LOST, 6.0)
    leases.announce(now_s=9.0, phase_open=False)
    assert leases.account.leasable_s == pytest.approx(1.0), "nor that of an engine that is lost"
    assert leases.account.idle_s == pytest.approx(6.0), "but engines were idle"

"""An engine is frozen when it owes an answer and uses no core and wants none; a long step is none of that."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import psutil
import pytest

from paceline.rollout.pulse import ASLEEP_S, QUIET_S, STOPPED_S, Pulse, Vitals

IN_TIME_S = 13
"""A stopped process is found by then, with a second to spare for the heartbeat that tells."""


def seconds_until_frozen(
    used_s: Callable[[float], Mapping[int, float]],
    *,
    owes: Callable[[float], bool] = lambda s: True,
    status: str = psutil.STATUS_SLEEPING,
) -> float:
    """When an engine that was last heard of at 0 is called frozen, if it is looked at every second; -1 for never.
    Process 1 has `status`, the others sleep."""
    now_s = 0.0

    def look() -> dict[int, Vitals]:
        return {pid: Vitals(s, status if pid == 1 else psutil.STATUS_SLEEPING) for pid, s in used_s(now_s).items()}

    pulse = Pulse(look)
    for second in range(200):
        now_s = float(second)
        if pulse.frozen(silent_s=now_s if owes(now_s) else 0.0, now_s=now_s):
            return now_s
    return -1.0


@pytest.mark.parametrize("waiting", [0.0, 0.012, 0.03])
def test_stopped_process_is_found_in_time_though_others_look_around_while_they_wait_for_it(waiting: float) -> None:
    """A worker of vLLM that waits for EngineCore used 1.2 % of a core; eight of them are no life either."""
    found_s = seconds_until_frozen(
        lambda now_s: {1: 3.0} | dict.fromkeys(range(2, 10), waiting * now_s), status=psutil.STATUS_STOPPED
    )
    assert 0 < found_s <= QUIET_S + STOPPED_S + 1 <= IN_TIME_S


def test_processes_that_wait_for_each_other_are_found() -> None:
    assert 0 < seconds_until_frozen(lambda now_s: {1: 3.0, 2: 0.012 * now_s}) <= QUIET_S + ASLEEP_S + 1


def test_step_whose_notifications_were_missed_is_no_freeze() -> None:
    """CI lost an engine that slept for twice vLLM's 5 s: nobody had told its worker of the step, nor EngineCore of the
    answer."""
    assert seconds_until_frozen(lambda now_s: {1: 3.0}, owes=lambda now_s: now_s % 16 > 1) == -1


@pytest.mark.parametrize("share", [0.1, 1.0, 16.0])
def test_long_step_is_no_freeze_however_little_of_a_core_it_gets(share: float) -> None:
    assert seconds_until_frozen(lambda now_s: {1: 0.0, 2: share * now_s}) == -1


@pytest.mark.parametrize("status", [psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP])
def test_step_that_waits_for_a_core_or_the_disk_is_no_freeze(status: str) -> None:
    """Engines that got 3 % of a core at a load of 40 on two cores were lost, and niced ones that got 1.4 %."""
    assert seconds_until_frozen(lambda now_s: {1: 0.014 * now_s}, status=status) == -1


def test_step_that_freezes_in_the_middle_is_found_from_there() -> None:
    found_s = seconds_until_frozen(lambda now_s: {1: min(now_s, 60.0)})
    assert 60 < found_s <= 60 + ASLEEP_S + 2


def test_compilers_that_come_and_go_are_life() -> None:
    """Each may end before anybody has seen it compute."""
    assert seconds_until_frozen(lambda now_s: {1: 5.0, 100 + int(now_s // 5): 0.01}) == -1


def test_nobody_looks_at_processes_of_an_engine_that_owes_nothing() -> None:
    def unasked(now_s: float) -> Mapping[int, float]:
        raise AssertionError("this costs milliseconds")

    assert seconds_until_frozen(unasked, owes=lambda now_s: False) == -1


def test_wait_for_others_does_not_count() -> None:
    """A push waits for the learner without using a core; after it the engine has its time again."""
    found_s = seconds_until_frozen(lambda now_s: {1: 3.0}, owes=lambda now_s: not 4 <= now_s < 100)
    assert 100 + ASLEEP_S < found_s <= 100 + ASLEEP_S + 2

"""When to train, when to publish, and the alarm for a lost drafter, each on a run whose answer is known."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import pytest

from paceline.config import DrafterTrainingConfig
from paceline.drafters import drift
from paceline.drafters.drift import DriftMonitor, LostDrafter, Remedy, judge

CONFIG = DrafterTrainingConfig(round_tokens=4000)
FROM_SCRATCH = (1.020, 1.022, 1.025, 1.06, 1.34, 1.6, 1.9, 2.9)
"""Accepted length of an untrained drafter by rounds of training: it hardly rises at first, then in jumps."""


def verdict(before: float, after: float):
    return judge(before=before, after=after, num_tokens=1000, config=CONFIG)


def trained(monitor: DriftMonitor, before: float, after: float, cost_s: float = 1.0) -> None:
    monitor.note_update(verdict(before, after), cost_s)


def follow(curve: Sequence[float], num_steps: int = 40) -> tuple[int, int]:
    """RL steps of a drafter whose accepted length after so many rounds of training is known: one round in each step in
    which training is wanted, and what is worse is dropped. Returns the round that was published last, and how many
    there were."""
    monitor, published, learned, num_rounds = DriftMonitor(), 0, 0, 0
    for _ in range(num_steps):
        monitor.observe(curve[published], 10.0)
        if not monitor.decide().train:
            continue
        num_rounds, learned = num_rounds + 1, min(learned + 1, len(curve) - 1)
        found = verdict(curve[published], curve[learned])
        published = learned if found.publish else published
        learned = learned if found.after >= found.before else published
        monitor.note_update(found, 0.1)
    return published, num_rounds


def test_untrained_drafter_that_gains_little_at_first_is_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first round gains less than noise: it would be taken for one that holds, and stay untrained for ever."""
    assert follow(FROM_SCRATCH)[0] == len(FROM_SCRATCH) - 1
    monkeypatch.setattr(drift, "_PATIENCE", 0)
    assert follow(FROM_SCRATCH) == (0, 1), "the curve does not show the failure any more"


def test_untrained_drafter_that_learns_slowly_is_trained_on_between_publications() -> None:
    """Each round gains half of the noise, so that every second one is published at best."""
    curve = [1.005**number for number in range(30)]
    published, _ = follow(curve, 60)
    assert curve[published] > 1.14


def test_drafter_that_learns_nothing_is_left_alone_after_a_few_rounds() -> None:
    """Patience without an end would take every idle moment of the run for nothing."""
    assert follow([1.02] * 50) == (0, 4)
    assert follow([1.02, *[0.9] * 50]) == (0, 1), "what ruins a drafter is not tried again"
    assert follow([3.0] * 50) == (0, 1), "a trained drafter that holds is not untrained"


def test_resumed_run_remembers_that_its_drafter_may_yet_learn() -> None:
    monitor, again = DriftMonitor(), DriftMonitor()
    monitor.observe(1.02, 10.0)
    trained(monitor, 1.02, 1.022)
    again.restore(json.loads(json.dumps(monitor.state())))
    assert again.decide() == monitor.decide() and again.decide().train


def test_nothing_is_trained_before_anything_is_measured() -> None:
    assert not DriftMonitor().decide().train


def test_the_first_update_is_tried_because_its_gain_is_not_known() -> None:
    """A drafter that knows nothing shows no drift: waiting for one would leave it untrained for ever."""
    monitor = DriftMonitor()
    monitor.observe(1.0, 10.0)
    decision = monitor.decide()
    assert decision.train and decision.drift == 0


def test_training_goes_on_while_it_gains_and_ends_when_it_does_not() -> None:
    monitor = DriftMonitor()
    monitor.observe(1.5, 10.0)
    trained(monitor, 1.5, 1.8)
    monitor.observe(1.8, 9.0)
    assert monitor.decide().train, "an update that won a fifth promises another gain"
    trained(monitor, 1.8, 1.805)
    monitor.observe(1.8, 9.0)
    decision = monitor.decide()
    assert not decision.train and decision.why == "acceptance holds"


def test_a_frozen_drafter_that_holds_is_left_alone_through_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "NOISE", 0.03)
    monitor = DriftMonitor()
    monitor.observe(3.0, 10.0)
    trained(monitor, 3.0, 3.0)
    for step in range(36):
        monitor.observe(3.0 + (0.05 if step % 2 else -0.05), 10.0)
        assert not monitor.decide().train, step


def test_drift_is_seen_and_its_figures_say_so() -> None:
    monitor = DriftMonitor()
    monitor.observe(3.0, 10.0)
    trained(monitor, 3.0, 3.0, cost_s=2.0)
    for _ in range(8):
        monitor.observe(2.4, 10.0)
    decision = monitor.decide()
    assert decision.train and decision.why == "gain exceeds cost"
    assert 2.4 < decision.accepted_length < 2.43 and 2.75 < decision.baseline < 3.0
    gain = decision.baseline / decision.accepted_length - 1
    assert decision.drift == pytest.approx(gain / (1 + gain))
    assert decision.expected_gain_s == pytest.approx(10.0 * gain / (1 + gain) * 5)
    assert decision.cost_s == 2.0
    assert decision.metrics()["draft/drift"] == decision.drift and decision.metrics()["draft/decision"] == 1.0


def test_an_update_that_costs_more_than_it_gains_is_not_made() -> None:
    """Inline training of a short phase: a fifth of 1 s over 5 steps does not pay for 10 s."""
    monitor = DriftMonitor()
    monitor.observe(3.0, 1.0)
    trained(monitor, 3.0, 3.6, cost_s=10.0)
    monitor.observe(3.0, 1.0)
    decision = monitor.decide()
    assert not decision.train and decision.why == "cost exceeds gain"
    assert 0 < decision.expected_gain_s < decision.cost_s


def test_a_fall_that_training_does_not_mend_is_not_trained_against_for_ever() -> None:
    """Harder prompts lower acceptance too; without this every step from then on would train for nothing."""
    monitor = DriftMonitor()
    monitor.observe(3.0, 10.0)
    trained(monitor, 3.0, 3.0)
    for _ in range(8):
        monitor.observe(2.0, 10.0)
    assert monitor.decide().train
    trained(monitor, 2.0, 2.0)
    for _ in range(5):
        monitor.observe(2.0, 10.0)
        assert not monitor.decide().train
    for _ in range(8):
        monitor.observe(1.5, 10.0)
    assert monitor.decide().train, "a further fall is a new reason"


def test_the_baseline_rises_at_once_and_falls_slowly() -> None:
    monitor = DriftMonitor()
    monitor.observe(2.0, 1.0)
    for _ in range(20):
        monitor.observe(3.0, 1.0)
    assert monitor.decide().baseline == pytest.approx(3.0, rel=1e-3)
    monitor.observe(2.0, 1.0)
    assert monitor.decide().baseline > 2.97


@pytest.mark.parametrize(
    ("before", "after", "num_tokens", "publish"),
    [
        (2.0, 2.5, 1000, True),
        (2.0, 2.01, 1000, False),
        (2.0, 2.0, 1000, False),
        (2.5, 1.2, 1000, False),
        (2.0, 2.5, 100, False),
        (2.0, math.nan, 1000, False),
        (1.0, 1.05, 1000, True),
    ],
)
def test_only_what_is_better_on_enough_heldout_tokens_is_published(
    before: float, after: float, num_tokens: int, publish: bool
) -> None:
    """A drafter that training has ruined, or that is better by chance on a dozen tokens, would slow every engine
    down."""
    assert judge(before=before, after=after, num_tokens=num_tokens, config=CONFIG).publish is publish


def test_any_improvement_is_published_if_training_always() -> None:
    always = DrafterTrainingConfig(when="always", round_tokens=4000)
    assert judge(before=2.0, after=2.01, num_tokens=1000, config=always).publish
    assert not judge(before=2.0, after=2.0, num_tokens=1000, config=always).publish


def test_a_lost_drafter_is_pushed_again_and_then_switched_off() -> None:
    alarm = LostDrafter()
    alarm.synced(promised=2.5)
    assert alarm.observe(num_verifications=150, num_accepted=0) is Remedy.NONE, "too few to tell"
    assert alarm.observe(num_verifications=150, num_accepted=0) is Remedy.PUSH_AGAIN
    alarm.synced()  # the policy's next sync must not start the count of tries over
    assert alarm.observe(num_verifications=1000, num_accepted=3) is Remedy.SPECULATION_OFF


def test_a_drafter_that_comes_back_after_the_second_push_is_trusted_again() -> None:
    alarm = LostDrafter()
    alarm.synced(promised=2.5)
    assert alarm.observe(num_verifications=500, num_accepted=0) is Remedy.PUSH_AGAIN
    assert alarm.observe(num_verifications=500, num_accepted=700) is Remedy.NONE
    alarm.synced()
    assert alarm.observe(num_verifications=500, num_accepted=0) is Remedy.PUSH_AGAIN, "a new loss has its own two tries"


def test_a_policy_sync_that_loses_the_drafter_is_noticed_without_a_promise() -> None:
    alarm = LostDrafter()
    alarm.synced()
    assert alarm.observe(num_verifications=500, num_accepted=800) is Remedy.NONE
    alarm.synced()
    assert alarm.observe(num_verifications=500, num_accepted=0) is Remedy.PUSH_AGAIN


def test_a_drafter_that_knows_nothing_yet_or_drifts_is_not_lost() -> None:
    """Switching speculation off for one that starts from random weights would end its training before it began."""
    alarm = LostDrafter()
    for _ in range(5):
        alarm.synced()
        assert alarm.observe(num_verifications=1000, num_accepted=2) is Remedy.NONE
    for accepted in (2000, 1200, 700, 400):
        alarm.synced()
        assert alarm.observe(num_verifications=1000, num_accepted=accepted) is Remedy.NONE


def test_counts_from_before_a_sync_do_not_hide_a_loss() -> None:
    alarm = LostDrafter()
    alarm.synced(promised=3.0)
    alarm.observe(num_verifications=199, num_accepted=400)
    alarm.synced()
    assert alarm.observe(num_verifications=200, num_accepted=0) is Remedy.PUSH_AGAIN


def test_a_resumed_run_decides_about_training_as_if_it_had_not_stopped() -> None:
    monitor, again = DriftMonitor(), DriftMonitor()
    for accepted in (3.0, 3.1, 2.4):
        monitor.observe(accepted, 20.0)
    trained(monitor, 2.4, 2.6, cost_s=0.5)
    monitor.observe(2.2, 25.0)
    again.restore(json.loads(json.dumps(monitor.state())))
    assert again.decide() == monitor.decide() and monitor.decide().drift > 0


def test_a_resumed_run_remembers_that_its_drafter_was_pushed_again() -> None:
    watch, again = LostDrafter(), LostDrafter()
    watch.synced(promised=3.0)
    assert watch.observe(num_verifications=500, num_accepted=0) is Remedy.PUSH_AGAIN
    again.restore(json.loads(json.dumps(watch.state())))
    again.synced()
    assert again.observe(num_verifications=500, num_accepted=0) is Remedy.SPECULATION_OFF

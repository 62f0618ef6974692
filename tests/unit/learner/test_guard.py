"""The guard's ladder: the right answer to each kind of fault, none to ordinary noise, and the way back."""

import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from paceline.config import CorrectionConfig
from paceline.files import verify_checksums
from paceline.learner import guard
from paceline.learner.correction import EngineGap
from paceline.learner.guard import GuardDecision, GuardState, Level, decide, least_correction, save_batch
from paceline.types import GroupId, RolloutId, Sample

CLEAN = 3e-5


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "CALIBRATION_STEPS", 4)
    monkeypatch.setattr(guard, "HOLD_STEPS", 3)


def gap(k3: float, *, num_tokens: int = 5000, num_not_finite: int = 0) -> EngineGap:
    return EngineGap(num_tokens=num_tokens, num_not_finite=num_not_finite, k3=k3)


def calm_state(k3: float = CLEAN, num_engines: int = 2, seed: int = 0) -> GuardState:
    """After some ordinary steps, which scatter by 20 %."""
    random, state = np.random.default_rng(seed), GuardState()
    for _ in range(8):
        gaps = {f"engine-{i}": gap(k3 * math.exp(0.2 * random.normal())) for i in range(num_engines)}
        state, decision = decide(state, gaps)
        assert decision.level == Level.OBSERVE
    assert state.center == pytest.approx(math.log(k3), abs=0.3)
    return state


def play(
    state: GuardState, steps: Iterable[tuple[float, ...]], *, can_raise: bool = False
) -> tuple[GuardState, list[GuardDecision]]:
    """Steps given by the k3 of each engine."""
    decisions = []
    for k3s in steps:
        state, decision = decide(state, {f"engine-{i}": gap(k3) for i, k3 in enumerate(k3s)}, can_raise=can_raise)
        decisions.append(decision)
    return state, decisions


def levels(decisions: Iterable[GuardDecision]) -> list[str]:
    return [decision.level.words for decision in decisions]


def test_noise_of_all_engines_climbs_by_its_size_and_comes_down_with_hysteresis() -> None:
    sizes = (1e-3, 3.5e-3, 2e-2, 4e-3, 1.5e-3, 1e-3, 5e-4)
    _, decisions = play(calm_state(1e-3), [(size, 1.1 * size) for size in sizes])
    assert levels(decisions) == ["observe", "correct", "mask", "mask", "correct", "correct", "observe"]
    assert all(decision.update for decision in decisions)
    assert {decision.cause for decision in decisions[1:6]} == {"noise"}


def test_a_jump_of_all_engines_raises_precision_below_the_published_limit() -> None:
    """FP8 that was healthy at 2e-4 and is at 1.4e-2: wrong rounding, such as four bits."""
    _, decisions = play(calm_state(2e-4), [(1.4e-2, 1.3e-2)] * 2 + [(2e-4, 2e-4)], can_raise=True)
    assert levels(decisions) == ["mask", "raise precision", "observe"]


def test_one_engine_that_jumps_is_a_broken_sync_long_before_it_is_large() -> None:
    """2e-4 in both engines would be corrected; in one of them it means that its weights are not the policy's."""
    state, decisions = play(calm_state(), [(CLEAN, 2e-4), (CLEAN, CLEAN)])
    assert levels(decisions) == ["skip", "observe"]
    assert decisions[0].engines == ("engine-1",) and decisions[0].cause == "sync" and not decisions[0].update
    assert state.num_pushes == 0, "a push that helped is forgotten"


def test_a_broken_engine_is_found_in_a_run_that_was_never_calm() -> None:
    _, decisions = play(GuardState(), [(3e-3, 4e-2)])
    assert decisions[0].level == Level.SKIP and decisions[0].engines == ("engine-1",)


def test_pushes_that_do_not_help_end_the_run() -> None:
    _, decisions = play(calm_state(), [(CLEAN, 0.5)] * 3)
    assert levels(decisions) == ["skip", "skip", "stop"]


def test_before_it_stops_a_fleet_in_fp8_is_started_again_in_full_precision() -> None:
    _, decisions = play(calm_state(), [(CLEAN, 0.5)] * 4, can_raise=True)
    assert levels(decisions) == ["skip", "skip", "raise precision", "skip"]
    assert decisions[2].precision == "raise" and not decisions[2].update


def test_precision_is_raised_after_two_hot_steps_and_lowered_after_calm_ones() -> None:
    state, decisions = play(
        calm_state(1e-3), [(0.05, 0.06)] * 2 + [(CLEAN, CLEAN)] * 3 + [(1e-3, 1e-3)], can_raise=True
    )
    assert levels(decisions) == ["mask", "raise precision", "observe", "observe", "observe", "observe"]
    assert [decision.precision for decision in decisions] == [None, "raise", None, None, "lower", None]
    assert not state.raised


def test_a_relapse_holds_full_precision_twice_as_long() -> None:
    hot, calm = (0.05, 0.06), (CLEAN, CLEAN)
    _, decisions = play(calm_state(1e-3), [hot] * 2 + [calm] * 3 + [hot] * 2 + [calm] * 6, can_raise=True)
    lowered = [i for i, decision in enumerate(decisions) if decision.precision == "lower"]
    assert lowered == [4, 12]


def test_beyond_the_skip_limit_precision_is_raised_at_once_and_the_batch_is_left_out() -> None:
    _, (decision,) = play(calm_state(1e-3), [(0.5, 0.6)], can_raise=True)
    assert (decision.level, decision.update) == (Level.RAISE_PRECISION, False)


def test_without_a_higher_precision_it_says_so_and_takes_the_next_level() -> None:
    _, decisions = play(calm_state(1e-3), [(0.05, 0.06)] * 2 + [(0.5, 0.6)])
    assert levels(decisions) == ["mask", "mask", "skip"]
    assert "no higher precision" in decisions[1].why and "no higher precision" in decisions[2].why


def test_not_a_number_from_an_engine_is_pushed_away_and_from_the_learner_stops_the_run() -> None:
    gaps = {"engine-0": gap(CLEAN), "engine-1": gap(CLEAN, num_not_finite=1)}
    _, decision = decide(calm_state(), gaps)
    assert (decision.level, decision.engines) == (Level.SKIP, ("engine-1",))
    _, decision = decide(calm_state(), gaps, learner_is_finite=False)
    assert (decision.level, decision.cause) == (Level.STOP, "policy")


def test_a_lone_engine_is_judged_by_its_past() -> None:
    """Smooth growth is noise, a jump is a sync."""
    state = calm_state(num_engines=1)
    _, grown = play(state, [(1.5e-4,), (2e-4,), (2.4e-4,)])
    assert levels(grown) == ["correct", "mask", "mask"]
    _, jumped = play(state, [(2e-2,), (CLEAN,)])
    assert levels(jumped) == ["skip", "observe"]


def test_slow_drift_of_a_sharpening_policy_is_no_alarm() -> None:
    """Ten times over 200 steps, which is above the limit of the first steps."""
    steps = [(CLEAN * 10 ** (i / 200), CLEAN * 10 ** (i / 200)) for i in range(200)]
    assert calm_state().own_limit() < 10 * CLEAN
    _, decisions = play(calm_state(), steps)
    assert set(levels(decisions)) == {"observe"}


def test_an_engine_with_a_handful_of_tokens_is_not_judged() -> None:
    gaps = {"engine-0": gap(CLEAN), "engine-1": gap(0.05, num_tokens=20)}
    assert decide(calm_state(), gaps)[1].level == Level.OBSERVE
    assert decide(calm_state(), {})[1].level == Level.OBSERVE


@pytest.mark.parametrize(
    ("configured", "level", "kind"),
    [
        ("none", Level.OBSERVE, "none"),
        ("none", Level.CORRECT, "token-tis"),
        ("sequence-tis", Level.CORRECT, "sequence-tis"),
        ("token-tis", Level.MASK, "token-mis"),
        ("geometric-mis", Level.MASK, "geometric-mis"),
        ("none", Level.RAISE_PRECISION, "token-mis"),
    ],
)
def test_a_level_strengthens_the_correction_and_never_weakens_it(configured: str, level: Level, kind: str) -> None:
    assert least_correction(CorrectionConfig.model_validate({"kind": configured}), level).kind == kind


def test_a_saved_batch_can_be_read_without_pickle_and_checked(tmp_path: Path) -> None:
    sample = Sample(
        token_ids=np.arange(5, dtype=np.int32),
        num_prompt_tokens=3,
        logp=np.array([-1.0, math.nan], np.float32),
        advantage=1.0,
        version_spans=((1, 1), (2, 1)),
        engine="engine-1",
        rollout_id=RolloutId(GroupId(4), 1),
    )
    file = save_batch(tmp_path / "stopped", [sample, sample], [np.zeros(2, np.float32)] * 2)
    assert verify_checksums(tmp_path / "stopped")
    with np.load(file, allow_pickle=False) as saved:
        assert saved["token_ids"].tolist() == [*range(5), *range(5)]
        assert saved["engine"].tolist() == ["engine-1"] * 2
        assert saved["rollout_id"].tolist() == ["4.0/train:1"] * 2
        assert saved["version_spans"].tolist() == [[0, 1, 1], [0, 2, 1], [1, 1, 1], [1, 2, 1]]
        assert np.isnan(saved["engine_logp"][[1, 3]]).all()

"""Decide when to train the drafter, when to publish the result, and when a published drafter is lost.

The accepted length `alpha` is compared with a baseline that follows rises at once and falls slowly. The shortfall is
the drift, which training may recover. The time of a rollout phase is proportional to 1 / alpha, so a relative gain g
saves

    expected_gain_s = generation_s x g / (1 + g) x HORIZON_STEPS

and the drafter is updated when that exceeds the cost: publishing on idle engines, publishing and training inline. An
untrained drafter gains less than noise at first, so its training continues through a few such rounds.

    observe (every step) ──▶ decide ──▶ training ──▶ judge on the held-out slice ──▶ published or not ──▶ note_update
                                                                │
                                                 sync ──▶ LostDrafter.observe ──▶ nothing, push again, speculation off
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

from paceline.config import DrafterTrainingConfig

NOISE = 0.01
"""Relative change of accepted length that counts as noise."""
HORIZON_STEPS = 5
"""RL steps over which an update must pay for its cost; then the policy has moved on."""
RECENT = 0.4
"""Weight of the newest step in the smoothed accepted length. Steps differ by their prompts."""
_FORGET = 0.05
"""Share of a fall that the baseline follows per step."""
_LOST_SHARE = 0.1
"""Share of the expected acceptance below which a drafter is lost. Drift stays above it, since even a policy that has
moved far agrees with its drafter on easy tokens."""
_MIN_EXPECTED = 0.2
"""Accepted drafts per verification below which a drafter is untrained, and cannot be lost."""
_PATIENCE = 3
"""Consecutive rounds in which an untrained drafter may change by less than noise before training stops."""
_MIN_VERIFICATIONS = 200
"""Verifications before an alarm. With 0.2 independently accepted drafts per verification, fewer than a tenth of
200 x 0.2 occur by chance with probability 1e-11."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingDecision:
    """Decision to train, with its figures."""

    train: bool
    why: str
    accepted_length: float
    baseline: float
    drift: float
    """0.1 is 10 % below the baseline."""
    expected_gain_s: float
    cost_s: float

    def metrics(self) -> dict[str, float]:
        return {
            "draft/decision": float(self.train),
            "draft/baseline": self.baseline,
            "draft/drift": self.drift,
            "draft/expected_gain_s": self.expected_gain_s,
            "draft/expected_cost_s": self.cost_s,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftState:
    """State of a DriftMonitor in checkpoints."""

    recent: float | None = None
    """Smoothed accepted length."""
    baseline: float = 0.0
    generation_s: float = 0.0
    last_gain: float | None = None
    cost_s: float = 0.0
    num_idle: int = 0
    """Consecutive rounds in which an untrained drafter changed by less than noise."""


class DriftMonitor:
    """Acceptance and updates of one run."""

    def __init__(self) -> None:
        self._state = DriftState()

    def state(self) -> dict[str, Any]:
        return asdict(self._state)

    def restore(self, state: Mapping[str, Any]) -> None:
        self._state = DriftState(**state)

    def observe(self, accepted_length: float, generation_s: float) -> None:
        """Add one RL step with speculation: its accepted length, and the time of its rollout phase."""
        state = self._state
        if state.recent is not None:
            accepted_length = state.recent + RECENT * (accepted_length - state.recent)
            generation_s = state.generation_s + RECENT * (generation_s - state.generation_s)
        self._state = replace(
            state,
            recent=accepted_length,
            generation_s=generation_s,
            baseline=max(accepted_length, state.baseline + _FORGET * (accepted_length - state.baseline)),
        )

    def note_update(self, verdict: Verdict, cost_s: float) -> None:
        """Add an update's gain on the held-out slice, and its cost.

        An update without gain resets the baseline to the current acceptance, which has fallen for a reason that
        training cannot fix, such as harder prompts. Training resumes when acceptance falls further."""
        state = self._state
        idle = abs(verdict.gain) <= NOISE and verdict.before < 1 + _MIN_EXPECTED
        self._state = replace(
            state,
            last_gain=max(0.0, verdict.gain),
            cost_s=cost_s,
            num_idle=state.num_idle + 1 if idle else 0,
            baseline=state.baseline if verdict.publish or state.recent is None else state.recent,
        )

    def decide(self) -> TrainingDecision:
        state = self._state
        if state.recent is None:
            return self._decision(False, "nothing measured yet", 0.0, 0.0)
        drift = max(0.0, 1 - state.recent / state.baseline)
        if state.last_gain is None:
            return self._decision(True, "the gain of training is unknown", drift, drift)
        # Back to the baseline is a rise by drift / (1 - drift).
        gain = max(drift / (1 - drift), state.last_gain)
        if 0 < state.num_idle <= _PATIENCE:
            return self._decision(True, "untrained drafters learn little at first", drift, gain)
        if gain <= NOISE:
            return self._decision(False, "acceptance holds", drift, gain)
        worth = self.worth_s(gain) > state.cost_s
        return self._decision(worth, "gain exceeds cost" if worth else "cost exceeds gain", drift, gain)

    def worth_s(self, gain: float) -> float:
        """Return the seconds that a relative gain of accepted length saves over the horizon."""
        return self._state.generation_s * gain / (1 + gain) * HORIZON_STEPS

    def _decision(self, train: bool, why: str, drift: float, gain: float) -> TrainingDecision:
        return TrainingDecision(
            train=train,
            why=why,
            accepted_length=self._state.recent or 0.0,
            baseline=self._state.baseline,
            drift=drift,
            expected_gain_s=self.worth_s(gain),
            cost_s=self._state.cost_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Decision to publish a trained drafter."""

    publish: bool
    why: str
    before: float
    """Accepted length of the published drafter on held-out documents."""
    after: float
    """Accepted length of the candidate on the same documents."""

    @property
    def gain(self) -> float:
        return self.after / self.before - 1

    def metrics(self) -> dict[str, float]:
        return {
            "draft/published": float(self.publish),
            "draft/heldout_before": self.before,
            "draft/heldout_after": self.after,
            "draft/gain": self.gain,
        }


def judge(*, before: float, after: float, num_tokens: int, config: DrafterTrainingConfig) -> Verdict:
    """Publish the candidate if it is better on the held-out documents, by more than noise unless `when` is `always`."""
    if num_tokens * 4 < config.heldout_tokens:
        return Verdict(publish=False, why=f"only {num_tokens} held-out tokens", before=before, after=after)
    margin = 0.0 if config.when == "always" else NOISE
    better = after > before * (1 + margin)  # False for NaN
    return Verdict(publish=better, why="better" if better else "not better", before=before, after=after)


class Remedy(Enum):
    NONE = "none"
    PUSH_AGAIN = "push again"
    SPECULATION_OFF = "speculation off"


class LostDrafter:
    """Alarm for a drafter that accepts nothing because its weights did not arrive.

    After a sync, the engines' accepted length is compared with the expected one: from the held-out slice for a new
    drafter, otherwise from the last good observation. If nearly nothing is accepted, the drafter is pushed again. If
    the next observation is no better, speculation is switched off. Syncs in between do not restart this."""

    def __init__(self) -> None:
        self._expected = 0.0
        """Accepted drafts per verification."""
        self._pushed_again = False
        self._num_verifications = self._num_accepted = 0

    def state(self) -> dict[str, Any]:
        """Return the state without the counts since the last sync."""
        return {"expected": self._expected, "pushed_again": self._pushed_again}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._expected, self._pushed_again = state["expected"], state["pushed_again"]

    def synced(self, promised: float | None = None) -> None:
        """Note a push of policy or drafter; `promised` is a new drafter's accepted length."""
        if promised is not None:
            self._expected = promised - 1
        self._reset()

    def observe(self, *, num_verifications: int, num_accepted: int) -> Remedy:
        """Add the counts of all engines since the last call, and return the remedy."""
        self._num_verifications += num_verifications
        self._num_accepted += num_accepted
        if self._num_verifications < _MIN_VERIFICATIONS:
            return Remedy.NONE
        accepted = self._num_accepted / self._num_verifications
        self._reset()
        if self._expected < _MIN_EXPECTED or accepted >= _LOST_SHARE * self._expected:
            self._expected, self._pushed_again = accepted, False
            return Remedy.NONE
        remedy = Remedy.SPECULATION_OFF if self._pushed_again else Remedy.PUSH_AGAIN
        self._pushed_again = True
        return remedy

    def _reset(self) -> None:
        self._num_verifications = self._num_accepted = 0

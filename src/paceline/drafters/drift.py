"""Decides when to train the drafter, when to publish the result, and when a published drafter is lost. Pure logic.

RL moves the policy away from its drafter, but not always: a frozen drafter can hold for dozens of steps. So training
follows what is measured. Accepted length `alpha` is compared with a baseline that follows a rise at once and a fall
slowly. The shortfall from the baseline is the drift, which training might win back; an update may also win more than
was ever there, as the last one did. The time of a rollout phase goes as 1 / alpha, so a relative gain g of alpha is
worth

    expected_gain_s = generation_s x g / (1 + g) x horizon_steps

and an update is made when that exceeds its cost: on idle engines that of publishing, inline that of training as well.
An untrained drafter gains less than noise at first, so a few rounds of it must gain nothing before it is left alone.

    observe (every step) ──▶ decide ──▶ training ──▶ judge on the held-out slice ──▶ published or not ──▶ note_update
                                                                │
                                                 sync ──▶ LostDrafter.observe ──▶ go on, push again, speculation off
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from paceline.config import DriftConfig

RECENT = 0.4
"""Weight of the newest step in the smoothed accepted length: steps differ by their prompts."""
_FORGET = 0.05
"""Share of a fall by which the baseline follows in one step."""
_LOST_SHARE = 0.1
"""Share of the expected acceptance below which a drafter is lost. Drift does not fall this low: a policy that has moved
far still agrees with its drafter on easy tokens."""
_MIN_EXPECTED = 0.2
"""Accepted drafts per verification below which a drafter is untrained, and so cannot be a lost one."""
_PATIENCE = 3
"""Rounds in a row that an untrained drafter may change by less than noise and still be trained on."""
_MIN_VERIFICATIONS = 200
"""Verifications before the alarm may ring. At 0.2 independently accepted drafts per verification, fewer than a tenth of
200 x 0.2 come by chance once in 10^11 times."""

_FOLLOWED = ("recent", "baseline", "generation_s", "last_gain", "cost_s", "num_idle")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingDecision:
    """Whether to train, with the figures that decided."""

    train: bool
    why: str
    accepted_length: float
    baseline: float
    drift: float
    """Relative: 0.1 is a tenth below the baseline."""
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


class DriftMonitor:
    """Follows acceptance and updates of one run."""

    def __init__(self, config: DriftConfig) -> None:
        self._config = config
        self._recent: float | None = None
        self._baseline = 0.0
        self._generation_s = 0.0
        self._last_gain: float | None = None
        self._cost_s = 0.0
        self._num_idle = 0
        """Rounds in a row in which an untrained drafter changed by less than noise."""

    def state(self) -> dict[str, float | None]:
        return {name: getattr(self, f"_{name}") for name in _FOLLOWED}

    def restore(self, state: Mapping[str, float | None]) -> None:
        for name in _FOLLOWED:
            setattr(self, f"_{name}", state[name])

    def observe(self, accepted_length: float, generation_s: float) -> None:
        """Take in one RL step's accepted length and the time of its rollout phase; steps without speculation are left
        out."""
        known = self._recent is not None
        self._recent = (
            accepted_length if self._recent is None else self._recent + RECENT * (accepted_length - self._recent)
        )
        self._generation_s = (
            self._generation_s + RECENT * (generation_s - self._generation_s) if known else generation_s
        )
        self._baseline = max(self._recent, self._baseline + _FORGET * (self._recent - self._baseline))

    def note_update(self, verdict: Verdict, cost_s: float) -> None:
        """Take in what an update gained on the held-out slice and what it cost.

        An update that gained nothing makes the present acceptance the baseline: it has fallen for a reason that
        training does not mend, such as harder prompts. Training is tried again when acceptance falls further."""
        self._last_gain = max(0.0, verdict.gain)
        self._cost_s = cost_s
        idle = abs(verdict.gain) <= self._config.noise and verdict.before < 1 + _MIN_EXPECTED
        self._num_idle = self._num_idle + 1 if idle else 0
        if not verdict.publish and self._recent is not None:
            self._baseline = self._recent

    def decide(self) -> TrainingDecision:
        recent = self._recent
        if recent is None:
            return self._decision(False, "nothing measured yet", 0.0, 0.0)
        drift = max(0.0, 1 - recent / self._baseline)
        if self._last_gain is None:
            return self._decision(True, "what training brings is not known yet", drift, drift)
        # Back to the baseline is a rise by drift / (1 - drift).
        gain = max(drift / (1 - drift), self._last_gain)
        if 0 < self._num_idle <= _PATIENCE:
            return self._decision(True, "untrained drafters learn little at first", drift, gain)
        if gain <= self._config.noise:
            return self._decision(False, "acceptance holds", drift, gain)
        worth = self.worth_s(gain) > self._cost_s
        return self._decision(worth, "gain exceeds cost" if worth else "cost exceeds gain", drift, gain)

    def worth_s(self, gain: float) -> float:
        """Seconds that a relative gain of accepted length saves over the horizon."""
        return self._generation_s * gain / (1 + gain) * self._config.horizon_steps

    def _decision(self, train: bool, why: str, drift: float, gain: float) -> TrainingDecision:
        return TrainingDecision(
            train=train,
            why=why,
            accepted_length=self._recent or 0.0,
            baseline=self._baseline,
            drift=drift,
            expected_gain_s=self.worth_s(gain),
            cost_s=self._cost_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a trained drafter replaces the one in the engines."""

    publish: bool
    why: str
    before: float
    """Accepted length of the published drafter on the held-out slice."""
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


def judge(*, before: float, after: float, num_tokens: int, config: DriftConfig) -> Verdict:
    """Compare accepted lengths of the published drafter and of a candidate on the same held-out documents.

    The candidate is published if it is better by more than noise; with too few tokens or a NaN the published one stays.
    """
    if num_tokens * 4 < config.heldout_tokens:
        return Verdict(publish=False, why=f"only {num_tokens} held-out tokens", before=before, after=after)
    better = after > before * (1 + config.noise)  # False for NaN
    return Verdict(publish=better, why="better" if better else "not better", before=before, after=after)


class Remedy(Enum):
    NONE = "none"
    PUSH_AGAIN = "push again"
    SPECULATION_OFF = "speculation off"


class LostDrafter:
    """Alarm for a drafter whose weights did not arrive: speculation then goes on, accepts nothing and only costs.

    After a sync the engines' accepted length is compared with what it should be: what the held-out slice promised for a
    new drafter, and otherwise what it was when it was last seen well. If nearly nothing is accepted, the drafter is
    pushed again; if the next look finds it no better, speculation is switched off. Syncs in between do not start this
    over."""

    def __init__(self) -> None:
        self._expected = 0.0
        self._pushed_again = False
        self._num_verifications = 0
        self._num_accepted = 0
        self.num_alarms = 0

    def state(self) -> dict[str, float]:
        """What a new driver of the run must know; counts since the last sync start anew."""
        return {"expected": self._expected, "pushed_again": self._pushed_again, "num_alarms": self.num_alarms}

    def restore(self, state: Mapping[str, float]) -> None:
        self._expected = state["expected"]
        self._pushed_again = bool(state["pushed_again"])
        self.num_alarms = int(state["num_alarms"])

    def synced(self, promised: float | None = None) -> None:
        """Note that policy or drafter was pushed; either can part them. `promised` is a new drafter's accepted
        length."""
        if promised is not None:
            self._expected = promised - 1
        self._reset()

    def observe(self, *, num_verifications: int, num_accepted: int) -> Remedy:
        """Take in the counts of all engines since the last call, and return what to do."""
        self._num_verifications += num_verifications
        self._num_accepted += num_accepted
        if self._num_verifications < _MIN_VERIFICATIONS:
            return Remedy.NONE
        accepted = self._num_accepted / self._num_verifications
        self._reset()
        if self._expected < _MIN_EXPECTED or accepted >= _LOST_SHARE * self._expected:
            self._expected = accepted
            self._pushed_again = False
            return Remedy.NONE
        self.num_alarms += 1
        if self._pushed_again:
            return Remedy.SPECULATION_OFF
        self._pushed_again = True
        return Remedy.PUSH_AGAIN

    def _reset(self) -> None:
        self._num_verifications = self._num_accepted = 0

"""What the learner trains on, made of a batch: every rollout with its advantage over its group."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.config import ObjectiveConfig
from paceline.learner.objective import advantages, is_trained_on
from paceline.metrics import Mean
from paceline.orchestrator.journal import Journal, Rewards
from paceline.types import Group, Sample


def make_samples(
    groups: Sequence[Group], rewards: Rewards, objective: ObjectiveConfig, journal: Journal
) -> list[Sample]:
    """Rollouts with their advantages, without groups that teach nothing or of which a reward failed."""
    samples: list[Sample] = []
    for group, group_rewards in zip(groups, rewards, strict=True):
        keep = is_trained_on(group_rewards, objective)
        journal.metrics.add("policy/groups_kept_share", Mean(float(keep)))
        if keep:
            group_advantages = advantages(group_rewards, objective.advantage)
            samples += [Sample.of(r, float(a)) for r, a in zip(group.rollouts, group_advantages, strict=True)]
    return samples

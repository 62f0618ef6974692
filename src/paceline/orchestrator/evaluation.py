"""Evaluate the policy on held-out prompts with the training engines."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.config import Config
from paceline.orchestrator.fleet import Fleet
from paceline.orchestrator.groups import Sampling
from paceline.orchestrator.journal import Journal
from paceline.orchestrator.rewards import Score
from paceline.types import Prompt


async def evaluate(
    config: Config,
    fleet: Fleet,
    heldout: Sequence[Prompt],
    score: Score,
    journal: Journal,
) -> None:
    """Sample held-out prompts and record their mean reward."""
    settings, prompts = config.eval, heldout[: config.eval.num_prompts]
    if not settings.every or not prompts:
        return
    sampling = Sampling(
        group_size=settings.samples_per_prompt,
        temperature=settings.temperature,
        max_tokens=config.rollout.max_tokens,
        seed=(config.run.seed, 1, journal.step) if config.rollout.engine.deterministic else None,
    )
    with journal.stage("eval"):
        groups = await fleet.open(prompts, sampling).wait()
        rewards = await score(groups)
    journal.evaluation(groups, rewards)

"""Stages of a training step: evaluate, calibrate KV scales, push the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.config import Config
from paceline.orchestrator.fleet import Fleet
from paceline.orchestrator.groups import Sampling
from paceline.orchestrator.journal import Journal
from paceline.orchestrator.members import Members
from paceline.orchestrator.rewards import Score
from paceline.types import Learner, PacelineError, Prompt, Sample, Sender

_WITHOUT_QK_NORM = "its keys are unbounded: watch the mismatch, and above a share of about 0.2 keep kv_cache full"


async def evaluate(
    config: Config,
    fleet: Fleet,
    heldout: Sequence[Prompt],
    score: Score,
    journal: Journal,
) -> None:
    settings, prompts = config.eval, heldout[: config.eval.num_prompts]
    if not settings.every or not prompts:
        return
    sampling = Sampling(
        group_size=settings.samples_per_prompt,
        temperature=settings.temperature,
        max_tokens=config.rollout.max_tokens,
        seed=(config.run.seed, 1, journal.step),
    )
    with journal.stage("eval"):
        groups = await fleet.open(prompts, sampling).wait()
        rewards = await score(groups)
    journal.evaluation(groups, rewards)


async def calibrate(learner: Learner, samples: Sequence[Sample], version: int, journal: Journal) -> Mapping[str, float]:
    """Compute the KV scales of an FP8 cache for this version; a push without them is refused."""
    with journal.stage("calibrate"):
        found = await learner.calibrate(samples, version)
    journal.metrics.add_means(found)
    return found


async def calibrate_on_prompts(learner: Learner, prompts: Sequence[Prompt], journal: Journal) -> None:
    """Compute the scales of the initial policy from the prompts of the first batch."""
    found = await calibrate(learner, [Sample.of_prompt(prompt) for prompt in prompts], 0, journal)
    if not found["precision/qk_norm"]:
        share = round(found["precision/underflow_share"], 4)
        journal.event("fp8_kv_cache_without_qk_norm", underflow_share=share, advice=_WITHOUT_QK_NORM)


async def push_policy(sender: Sender, version: int, members: Members, journal: Journal) -> None:
    """Push a version and record the receipts; retry a refused push once, and drop engines that refuse it twice."""
    for last_try in (False, True):
        receipts = await sender.send(version)
        if receipts:
            journal.receipts(receipts, version)
        failed = [receipt for receipt in receipts if not receipt.ok]
        for receipt in failed:
            why = receipt.error or f"fingerprints differ: {', '.join(receipt.mismatched[:3])}"
            journal.event("push_failed", engine=receipt.engine, version=version, why=why)
            if receipt.lost or last_try:
                members.lose(receipt.engine, why)
        if all(receipt.lost for receipt in failed):
            break
    if members.hopeless:  # otherwise restarted engines get this version
        raise PacelineError(f"no engine took policy version {version}; the push_failed events in metrics.jsonl say why")

"""KV scales of an FP8 cache at the right moments of a run: for its first policy, and for every new version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.orchestrator.journal import Journal
from paceline.types import Learner, Prompt, Sample

_WITHOUT_QK_NORM = "nothing bounds its keys: watch the mismatch, and above a share of about 0.2 keep kv_cache full"


async def calibrate(learner: Learner, samples: Sequence[Sample], version: int, journal: Journal) -> Mapping[str, float]:
    """Find the KV scales of this version; they go out with the weights, which are refused without."""
    with journal.stage("calibrate"):
        found = await learner.calibrate(samples, version)
    journal.metrics.add_means(found)
    return found


async def calibrate_on_prompts(learner: Learner, prompts: Sequence[Prompt], journal: Journal) -> None:
    """Find the first policy's scales from the prompts of the first batch: nothing has been sampled yet."""
    found = await calibrate(learner, [Sample.of_prompt(prompt) for prompt in prompts], 0, journal)
    if not found["precision/qk_norm"]:
        share = round(found["precision/underflow_share"], 4)
        journal.event("fp8_kv_cache_without_qk_norm", underflow_share=share, advice=_WITHOUT_QK_NORM)

"""Raw importance ratios between the sampling engine and the trainer, from a trainer's padded batches.

Ratios that trainers log after truncation or masking hide problems (TRL issue 5231). These are computed before, over
tokens and over rollouts, and have the names of Paceline's own metrics (docs/metrics.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from paceline.learner.correction import Ratios, diagnose
from paceline.learner.objective import MAX_LOG_RATIO
from paceline.types import Floats


def mismatch_metrics(batches: Sequence[Mapping[str, torch.Tensor]], *, cap: float) -> dict[str, float]:
    """Return metrics of all completions in TRL's batches, or none if a batch lacks either log-probability.

    `cap` is the trainer's largest ratio. Tokens that the trainer masks (padding, tool output, truncated completions)
    are left out."""
    engine, own = list[Floats](), list[Floats]()
    for batch in batches:
        if "sampling_per_token_logps" not in batch or "old_per_token_logps" not in batch:
            return {}
        mask_BT = batch["completion_mask"].bool()
        if "tool_mask" in batch:
            mask_BT = mask_BT & batch["tool_mask"].bool()
        for logps, key in ((engine, "sampling_per_token_logps"), (own, "old_per_token_logps")):
            rows = zip(batch[key].float().cpu(), mask_BT.cpu(), strict=True)
            logps += [logp_T[mask_T].numpy() for logp_T, mask_T in rows]
    ratios = Ratios.of(engine, own)
    found = diagnose(ratios, cap=cap)
    if not found.num_tokens:
        return {}
    finite = np.isfinite(ratios.log_N)
    sums_R = np.bincount(ratios.rollout_N[finite], ratios.log_N[finite], ratios.num_rollouts)
    some_R = np.bincount(ratios.rollout_N[finite], minlength=ratios.num_rollouts) > 0
    whole_R = np.exp(sums_R[some_R].clip(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    values = found.metrics() | {
        "k3": found.k3,
        "max_abs": found.max_abs,
        "sequence_ratio_mean": float(whole_R.mean()),
        "sequence_ratio_max": float(whole_R.max()),
    }
    return {f"mismatch/{key}": value for key, value in values.items()}

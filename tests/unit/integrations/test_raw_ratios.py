"""Raw importance ratios of a trainer's batches: what truncation hides, and nothing of padding or tools."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.integrations.raw_ratios import mismatch_metrics


def batch(gaps: list[list[float]], *, width: int = 4, tools: list[list[int]] | None = None) -> dict[str, torch.Tensor]:
    """Completions whose tokens the trainer finds exp(gap) times as probable as the engine; padding is far off."""
    engine, own, mask = torch.full((len(gaps), width), -2.0), torch.full((len(gaps), width), 50.0), []
    for row, gap in enumerate(gaps):
        own[row, : len(gap)] = engine[row, : len(gap)] + torch.tensor(gap)
        mask.append([1] * len(gap) + [0] * (width - len(gap)))
    found = {"sampling_per_token_logps": engine, "old_per_token_logps": own, "completion_mask": torch.tensor(mask)}
    return found if tools is None else found | {"tool_mask": torch.tensor(tools)}


def test_ratio_that_the_trainer_would_truncate_is_seen_whole() -> None:
    """TRL issue 5231: capped at 3 it looks like a healthy run."""
    found = mismatch_metrics([batch([[0.0, 0.0], [5.0]]), batch([[0.1, -0.1, 0.2]])], cap=3.0)
    ratios = np.exp([0.0, 0.0, 5.0, 0.1, -0.1, 0.2])
    assert found["mismatch/max_abs"] == pytest.approx(5.0)
    assert found["mismatch/ratio_mean"] == pytest.approx(ratios.mean(), rel=1e-5)
    assert found["mismatch/k3"] == pytest.approx((ratios - 1 - np.log(ratios)).mean(), rel=1e-5)
    assert found["mismatch/clip_share"] == pytest.approx(1 / 6)
    assert found["mismatch/sequence_ratio_max"] == pytest.approx(np.exp(5.0), rel=1e-5)
    assert found["mismatch/sequence_ratio_mean"] == pytest.approx(np.mean(np.exp([0.0, 5.0, 0.2])), rel=1e-5)


def test_tools_and_tokens_that_vllm_could_not_score_are_left_out() -> None:
    given = batch([[9.0, 0.0, 0.0]], tools=[[0, 1, 1, 1]])
    given["sampling_per_token_logps"][0, 1] = float("nan")
    found = mismatch_metrics([given], cap=3.0)
    assert found["mismatch/max_abs"] == 0 and found["mismatch/num_not_finite"] == 1


def test_without_the_trainers_own_logp_there_is_nothing_to_tell() -> None:
    given = batch([[0.0]])
    del given["old_per_token_logps"]
    assert mismatch_metrics([given], cap=3.0) == {} == mismatch_metrics([], cap=3.0)
    assert mismatch_metrics([batch([[]])], cap=3.0) == {}, "everything was truncated"

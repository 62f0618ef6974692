"""V2's rejection sampler by itself, on known distributions. `test_eagle.py` has it inside an engine."""

from __future__ import annotations

from paceline.certify.lossless import examine
from paceline.rollout.internals import rejection_sampler_v2 as sampler


def test_sampler_draws_from_the_policy() -> None:
    """Two temperatures in one batch, drafts with their logits: a row that is misplaced shows."""
    cells = list(
        examine(
            sampler.rejection_sample,
            sampler.draft,
            num_rows=300,
            vocabulary=8,
            kinds=("model-like",),
            lengths=(1,),
        )
    )
    assert len(cells) >= 3, "too few tokens at some position"
    assert max(cell.excess for cell in cells) < 5

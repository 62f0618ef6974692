"""What the bench of TRL's generation compares, and with which prompts."""

from pathlib import Path

import pytest

from benchmarks.harness import Record
from benchmarks.hosts import ACTIVE, GROUP_SIZE, MANY_ACTIVE, Pair, compare, siblings, speculation_file
from benchmarks.stock_trl.generation import GeneratedBatch
from benchmarks.workload import asked_for, past_end_share
from paceline import assets
from paceline.rollout.hosts import fill


def pair(plain_s: float, paceline_s: float, *, verified: float = 10.0, accepted: float = 20.0) -> Pair:
    counters = {"selector/verifications": verified, "selector/accepted_tokens": accepted}
    return {
        "plain": GeneratedBatch(seconds=plain_s, token_ids=[], counters={}),
        "paceline": GeneratedBatch(seconds=paceline_s, token_ids=[], counters=counters),
    }


def test_speedup_is_of_batches_with_the_same_prompts():
    """A machine that slows down slows the batches of one pair; batches of different pairs would be compared else."""
    pairs = {ACTIVE: [pair(20, 10), pair(60, 30), pair(2, 1)], MANY_ACTIVE: [pair(30, 20), pair(3, 2)]}
    record = Record()
    compare(record, pairs)
    figures, spread, details = record.figures, record.spread, record.details["paired"]
    assert (figures["trl_generation_speedup"], spread["trl_generation_speedup"]) == pytest.approx((2, 0))
    assert figures["trl_generation_speedup_16"] == pytest.approx(1.5)
    assert figures["accepted_length"] == pytest.approx(3)
    assert details["trl_generation_speedup"]["ratios"] == pytest.approx([2, 2, 2])


def test_engine_that_never_drafted_has_an_accepted_length_of_one():
    """The selector may choose to draft nothing at all, which must not end the bench."""
    pairs = {ACTIVE: [pair(1, 1, verified=0, accepted=0)], MANY_ACTIVE: [pair(1, 1)]}
    record = Record()
    compare(record, pairs)
    assert record.figures["accepted_length"] == 1


def test_batches_are_groups_of_different_prompts_of_like_length():
    """One prompt in two batches would come from the prefix cache; batches of ever longer prompts are no repetitions."""
    batches = siblings(assets.policy("tiny"), num_batches=3, num_groups=2)
    assert [len(batch) for batch in batches] == [2 * GROUP_SIZE] * 3
    groups = [tuple(batch[first]) for batch in batches for first in (0, GROUP_SIZE)]
    assert len(set(groups)) == 6
    assert all(batch[0] == batch[GROUP_SIZE - 1] != batch[GROUP_SIZE] for batch in batches)
    lengths = [sum(map(len, batch)) for batch in batches]
    assert max(lengths) < 1.1 * min(lengths)


def test_the_variable_names_the_drafter_that_was_asked_for(tmp_path: Path):
    """Another drafter than the recorded one would have been measured."""
    asked = asked_for(["speculation.drafter.kind=dflash", "speculation.max_draft_length=5"])
    file = tmp_path / "speculation.toml"
    file.write_text(speculation_file(asked, assets.drafter("small", "dflash")))
    filled = fill({"model": str(assets.policy("small"))}, str(file), on_gpu=False).arguments["speculative_config"]
    assert filled["model"] == str(assets.drafter("small", "dflash")) and filled["num_speculative_tokens"] == 5


def test_share_of_tokens_after_an_end():
    assert past_end_share([[5, 1, 5, 5], [5, 5, 5, 1]], {1}) == pytest.approx(2 / 8)

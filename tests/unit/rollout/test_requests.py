"""What vLLM says about the tokens of a finished request, as our records have it."""

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.rollout.internals.requests import version_spans


def completion(num_tokens: int, *labels: tuple[str, int, int]) -> Any:
    spans = [SimpleNamespace(version=version, start=start, end=end) for version, start, end in labels]
    return SimpleNamespace(token_ids=list(range(num_tokens)), weight_versions=spans)


def test_every_token_keeps_the_version_that_drew_it():
    """Two syncs in one rollout: with its first and last version alone, the tokens between would be of either."""
    found = version_spans(completion(9, ("3", 0, 4), ("4", 4, 5), ("5", 5, 9)), 3, 6)
    assert found == ((3, 4), (4, 1), (5, 4))


def test_a_label_without_tokens_is_no_version_of_a_rollout():
    """A rollout that began after the sync would count as old."""
    assert version_spans(completion(4, ("3", 0, 0), ("4", 0, 4)), 3, 4) == ((4, 4),)


def test_labels_that_do_not_cover_the_response_are_refused():
    with pytest.raises(AssertionError, match="cover all tokens"):
        version_spans(completion(5, ("3", 0, 4)), 3, 3)


@pytest.mark.parametrize(
    ("num_tokens", "now", "expected"),
    [(5, 2, ((2, 5),)), (5, 3, ((2, 4), (3, 1))), (1, 3, ((2, 1),))],
)
def test_without_labels_a_rollout_counts_from_its_submission(num_tokens, now, expected):
    """vLLM 0.30 and 0.31."""
    unlabeled: Any = SimpleNamespace(token_ids=[0] * num_tokens)
    assert version_spans(unlabeled, 2, now) == expected

"""`drafters/history.py` as a proposer of vLLM (`method="custom_class"`).

    speculative_config = {
        "method": "custom_class", "model": "paceline.rollout.proposer.HistoryProposer", "num_speculative_tokens": k
    }

vLLM builds it in the worker and calls `propose` after every step, with rows of tokens only. It always drafts `k`
tokens; the scheduler cuts them. Its settings are a `config.HistoryDrafter` in
`additional_config["paceline"]["drafter"]`, with defaults.

Errors here must not fail rollouts: they give empty drafts, a counter and one log line.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
from vllm.logger import init_logger

from paceline.config import HistoryDrafter
from paceline.drafters.history import History
from paceline.drafters.history_exchange import HistoryExchange
from paceline.rollout.speculation import own_settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

COUNTERS = (
    "num_proposals",
    "num_rows",
    "num_matched",  # rows with a draft
    "num_drafted",  # tokens
    "seconds",
    "full_batch_seconds",  # part of `seconds` at a full batch
    "full_batch_step_seconds",  # between two calls at a full batch: whole steps
    "failures",
    "shared_rollouts",
    "merged_rollouts",
)

_MIN_MATCH, _MAX_MATCH = 2, 16
"""Tokens that must match for a candidate, and tokens by which candidates are compared."""


class HistoryProposer:
    """The history drafter of one worker."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        settings = HistoryDrafter.model_validate(own_settings(vllm_config.additional_config).get("drafter", {}))
        vocabulary_size = vllm_config.model_config.get_vocab_size()
        self._history = _build(settings, vllm_config, vocabulary_size)
        self._share: HistoryExchange | None = None
        if (directory := settings.share_directory) is not None:
            self._share = HistoryExchange(directory, vocabulary_size=vocabulary_size, capacity_mb=settings.capacity_mb)
        self._counts = dict.fromkeys(COUNTERS, 0.0)
        self._max_rows = vllm_config.scheduler_config.max_num_seqs
        self._last_full_s: float | None = None

    def load_model(self, *_: object) -> None:
        """Do nothing: there is no model."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Draft up to `num_speculative_tokens` tokens for each row that has sampled."""
        began_s = time.perf_counter()
        try:
            num_sampled = np.fromiter(map(len, sampled_token_ids), np.int64, len(sampled_token_ids))
            drafts = self._history.propose(num_sampled, num_tokens_no_spec, token_ids_cpu)
        except Exception:  # noqa: BLE001  an error must not fail rollouts
            self._fail("the history drafter failed; this step has no drafts")
            drafts = [[] for _ in sampled_token_ids]
        if self._share is not None:
            try:
                self._exchange(self._share)
            except Exception:  # noqa: BLE001  a full disk must not stop drafts
                self._fail("the history drafter cannot share rollouts; it continues with its own")
        self._counts["num_proposals"] += 1
        self._counts["num_rows"] += len(drafts)
        self._counts["num_matched"] += sum(map(bool, drafts))
        self._counts["num_drafted"] += sum(map(len, drafts))
        self._time(began_s, time.perf_counter(), full=len(drafts) == self._max_rows)
        return drafts

    def counters(self) -> dict[str, float]:
        """Return sums since the start by the names in COUNTERS, and `broken_files`."""
        broken = 0.0 if self._share is None else float(self._share.num_broken)
        return self._counts | {"broken_files": broken}

    def _time(self, began_s: float, ended_s: float, *, full: bool) -> None:
        self._counts["seconds"] += ended_s - began_s
        if full and self._last_full_s is not None:
            self._counts["full_batch_seconds"] += ended_s - began_s
            self._counts["full_batch_step_seconds"] += ended_s - self._last_full_s
        self._last_full_s = ended_s if full else None

    def _exchange(self, share: HistoryExchange) -> None:
        finished = self._history.take_finished()
        share.put(finished)
        self._counts["shared_rollouts"] += len(finished)
        for record in share.take():
            self._history.add(record)
            self._counts["merged_rollouts"] += 1

    def _fail(self, what: str) -> None:
        if not self._counts["failures"]:
            logger.exception("%s. Later failures are counted, not logged.", what)
        self._counts["failures"] += 1


def _build(settings: HistoryDrafter, vllm_config: VllmConfig, vocabulary_size: int) -> History:
    """Compile on a temporary index, so the first steps need not (numba, about five seconds)."""
    speculative = vllm_config.speculative_config
    assert speculative is not None and speculative.num_speculative_tokens is not None
    max_rows = vllm_config.scheduler_config.max_num_seqs

    def build(capacity_mb: float) -> History:
        return History(
            min_match=_MIN_MATCH,
            max_match=_MAX_MATCH,
            capacity_mb=capacity_mb,
            max_rows=max_rows,
            draft_length=speculative.num_speculative_tokens,
            vocabulary_size=vocabulary_size,
        )

    trial = build(1.0)
    row_ids = np.ones((max_rows, vllm_config.model_config.max_model_len), np.int32)
    for num_rows in (1, 0):
        trial.propose(np.ones(num_rows, np.int64), np.full(max_rows, 4, np.int32), row_ids)
    for record in trial.take_finished():
        trial.add(record)
    return build(settings.capacity_mb)

"""Model-free drafter: proposes what sibling rollouts and earlier epochs of the same prompt said next.

In RL the same prompt is answered many times: by the rollouts of its group in this step, and again in every later epoch.
This index stores those responses and proposes the continuation that they agree on. It is exact in the sense of
speculative sampling: a proposal is a one-hot draft that the policy accepts with its own probability, so a bad one costs
time and nothing else.

**Which token is proposed.** The best one-hot draft is the argmax of the policy at this context, and the index has to
guess it from few samples drawn at temperature 1. A longest-suffix match (SuffixDecoding, arXiv:2411.04975) is misled by
one sampled synonym: "16 gives" has never been seen although "16 yields 11" has been, eight times. So a match may have
holes. A *place* in an earlier rollout of the same prompt is a candidate if `min_match` tokens in a row agree with the
context and end at most `MAX_GAP` tokens before its end; the token that follows the place gets

    2 ** (agreement - 2 * gap)        agreement = equal tokens among the last `max_match`, compared place by place

votes, and the token with most votes is proposed; the newest place wins a tie. Then the proposed token joins the context
and the next one is voted for. Only the newest `MAX_PLACES` places vote: the policy moves, and old rollouts describe an
old policy. Replayed on two epochs of the arena (k = 4) the accepted length is 2.2 for the longest match, 2.7 with gaps,
and 2.9 with holes.

**Where rollouts are stored.** In a ring of pages of tokens. A running rollout takes one page after the other, so that
its siblings profit at once, and the oldest page is overwritten when a new one is needed. Every place is linked into a
chain of places with the same last `min_match` tokens and the same prompt, newest first, as in LZ77 compressors:

    heads[hash(prompt, last tokens)] ──▶ place ──older──▶ place ──older──▶ ... until a page that was overwritten

Positions only grow (page number times page size), so a stale pointer is recognised by its number, and nothing is ever
deleted or moved.

**Which request a row belongs to.** The caller passes rows of a batch, not requests, and rows are moved and reused
without notice. A row is matched to its request by its length and its last tokens (`_continues`). Two requests that
cannot be told apart by these have the same last tokens, and since the index never looks back further than `max_match`,
it does not matter which is which. A row that continues no request is a new one: it has just got its first tokens, and
what is before them is its prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.drafters import history_kernels as kernels
from paceline.drafters.history_kernels import MAX_GAP, MAX_PLACES, PAGE, Pages, Rollouts, Scratch

_TAIL = 32  # tokens by which a row is recognised; at least max_match where that is larger
_BYTES_PER_TOKEN = 4 + 8 + 8 + 1  # token, older and a head for each, and a share of what a page needs


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A rollout as engines exchange it: `num_context` tokens of its prompt, then its response."""

    prompt: int
    """Hash of the whole prompt; the same in every process."""
    num_context: int
    token_ids: np.ndarray


class History:
    """The index and the rows that feed it. One call of `propose` per engine step, in one thread."""

    def __init__(
        self,
        *,
        min_match: int,
        max_match: int,
        capacity_mb: float,
        max_rows: int,
        draft_length: int,
        vocabulary_size: int,
    ) -> None:
        if not 1 <= min_match <= max_match:
            raise ValueError(
                f"min_match: got {min_match}; must be from 1 to max_match ({max_match}) because it is the shorter one"
            )
        # A power of two, so that slots are found by a mask.
        num_pages = 1 << max(2, (int(capacity_mb * 2**20) // (_BYTES_PER_TOKEN * PAGE)).bit_length() - 1)
        self._min_match, self._max_match = min_match, max_match
        self._vocabulary_size = vocabulary_size
        # Zeros are given out by the system when they are first touched: an index costs what is in it.
        self._pages = Pages(
            tokens=np.zeros(num_pages * PAGE, np.int32),
            older=np.zeros(num_pages * PAGE, np.int64),
            heads=np.zeros(num_pages * PAGE, np.int64),
            prompt=np.zeros(num_pages, np.uint64),
            before=np.zeros(num_pages, np.int64),
            after=np.zeros(num_pages, np.int64),
            fill=np.zeros(num_pages, np.int64),
            newest=np.zeros(1, np.int64),
        )
        num_entries = 2 * max_rows
        self._rollouts = Rollouts(
            prompt=np.zeros(num_entries, np.uint64),
            length=np.zeros(num_entries, np.int64),
            position=np.zeros(num_entries, np.int64),
            tail=np.zeros((num_entries, max(_TAIL, max_match)), np.int32),
            seen=np.zeros(num_entries, np.int64),
            unshared=np.zeros(num_entries, np.int64),
        )
        self._step = 0
        self._entry_of_row = np.full(max_rows, -1, np.int64)
        self._scratch = Scratch(
            context=np.zeros(max_match + MAX_GAP + draft_length, np.int32),
            candidates=np.zeros((MAX_GAP + 1) * MAX_PLACES, np.int32),
            votes=np.zeros((MAX_GAP + 1) * MAX_PLACES),
            powers=2.0 ** np.arange(max_match + 2 * MAX_GAP + 1),
        )
        self._drafts = np.zeros((max_rows, draft_length), np.int32)
        self._num_drafts = np.zeros(max_rows, np.int64)

    def propose(self, num_sampled: np.ndarray, num_tokens: np.ndarray, token_ids: np.ndarray) -> list[list[int]]:
        """Take in the tokens that each row has got since the last call, and draft for it.

        Row i holds `num_tokens[i]` tokens, of which `num_sampled[i]` are new; a row without new ones (its prompt is not
        yet read) is left alone and gets no draft. Rows may have moved since the last call."""
        self._check(num_sampled, num_tokens, token_ids)
        self._step += 1
        num_rows = len(num_sampled)
        entry_of_row = self._entry_of_row
        kernels.observe(
            self._pages, self._rollouts, entry_of_row, self._step, num_sampled, num_tokens, token_ids, self._min_match
        )
        kernels.draft_rows(
            self._pages,
            self._rollouts,
            entry_of_row[:num_rows],
            num_tokens,
            token_ids,
            self._min_match,
            self._max_match,
            self._scratch,
            self._drafts,
            self._num_drafts,
        )
        drafts, counts = self._drafts[:num_rows].tolist(), self._num_drafts[:num_rows].tolist()
        return [draft[:count] for draft, count in zip(drafts, counts, strict=True)]

    def _check(self, num_sampled: np.ndarray, num_tokens: np.ndarray, token_ids: np.ndarray) -> None:
        """Check shapes: compiled code does not check where it writes."""
        num_rows = len(num_sampled)
        lengths = num_tokens[:num_rows]
        shaped = token_ids.ndim == 2 and num_rows <= min(len(token_ids), len(num_tokens), len(self._entry_of_row))
        if not shaped or (lengths < num_sampled).any() or (lengths > token_ids.shape[1]).any():
            raise ValueError(
                f"token_ids: got shape {token_ids.shape} for {num_rows} rows of up to {lengths.max(initial=0)} tokens; "
                f"must be a matrix that holds them, of at most {len(self._entry_of_row)} rows, because the index was "
                "built for these"
            )

    def take_finished(self) -> list[Record]:
        """Return the rollouts that left the batch in the last call of `propose`; of one that came back, only what is
        new."""
        rollouts = self._rollouts
        records = []
        for entry in np.flatnonzero((rollouts.seen == self._step - 1) & (rollouts.unshared > 0)):
            wanted = int(rollouts.unshared[entry])
            token_ids = kernels.read(self._pages, rollouts.position[entry], wanted + self._max_match)
            rollouts.unshared[entry] = 0
            if len(token_ids) > wanted:  # else the ring has already overwritten its start
                prompt = int(rollouts.prompt[entry])
                records.append(Record(prompt=prompt, num_context=len(token_ids) - wanted, token_ids=token_ids))
        return records

    def add(self, record: Record) -> None:
        """Take in another engine's rollout. A token outside of the vocabulary would kill the engine that verifies
        it."""
        token_ids = np.ascontiguousarray(record.token_ids, np.int32)
        if token_ids.size == 0 or token_ids.min() < 0 or token_ids.max() >= self._vocabulary_size:
            raise ValueError(f"token_ids: got an empty rollout or ids beyond the vocabulary of {self._vocabulary_size}")
        kernels.insert(self._pages, np.uint64(record.prompt), token_ids, record.num_context, self._min_match)

"""Model-free drafter that continues sibling rollouts and earlier epochs of the same prompt.

In RL the same prompt is answered many times: by the rollouts of a group, and again in every epoch. This index proposes
the continuation on which the responses agree, a one-hot draft that the policy accepts with its own probability.

**Choice of token.** The best one-hot draft is the policy's argmax, estimated from few samples at temperature 1. A
longest-suffix match (SuffixDecoding, arXiv:2411.04975) fails on one sampled synonym: "16 gives" is unseen although
"16 yields 11" has occurred eight times. A match may therefore have holes. A *place* in an earlier rollout of the same
prompt is a candidate if `min_match` consecutive tokens agree with the context and end at most `MAX_GAP` tokens before
its end; the token after the place gets

    2 ** (agreement - 2 * gap)        agreement = equal tokens among the last `max_match`, compared place by place

votes. The token with most votes is proposed, the newest place wins ties, and the proposed token joins the context for
the next vote. Only the newest `MAX_PLACES` places vote, because old rollouts describe an old policy. Replayed on two
epochs of the arena (k = 4), the accepted length is 2.2 for the longest match, 2.7 with gaps, and 2.9 with holes.

**Storage.** A ring of pages of tokens. A running rollout fills one page after another, so its siblings can use it
immediately, and new pages overwrite the oldest ones. Every place is linked into a chain of places with the same last
`min_match` tokens and the same prompt, newest first, as in LZ77 compressors:

    heads[hash(prompt, last tokens)] ──▶ place ──older──▶ place ──older──▶ ... until a page that was overwritten

Positions only grow (page number times page size), so a stale pointer is recognized by its number, and nothing is
deleted or moved.

**Rows and requests.** The caller passes rows of a batch, not requests, and moves and reuses rows without notice. A row
is matched to a request by its length and last tokens (`_continues`). Requests that agree in both are interchangeable,
because the index never looks back further than `max_match`. A row that continues no request is new: its first tokens
have just been sampled, and all tokens before them are its prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.drafters import history_kernels as kernels
from paceline.drafters.history_kernels import MAX_GAP, MAX_PLACES, PAGE, Pages, Rollouts, Scratch

_TAIL = 32  # tokens that identify a row, or max_match if larger
_BYTES_PER_TOKEN = 4 + 8 + 8 + 1  # token, older, head, and a share of the page header


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A rollout for exchange between engines: `num_context` tokens of its prompt, then its response."""

    prompt: int
    """Hash of the whole prompt, equal in every process."""
    num_context: int
    token_ids: np.ndarray


class History:
    """The index and its rows. Call `propose` once per engine step, from one thread."""

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
            raise ValueError(f"min_match: got {min_match}; must be from 1 to max_match ({max_match})")
        # A power of two, so that a mask gives the slot.
        num_pages = 1 << max(2, (int(capacity_mb * 2**20) // (_BYTES_PER_TOKEN * PAGE)).bit_length() - 1)
        self._min_match, self._max_match = min_match, max_match
        self._vocabulary_size = vocabulary_size
        # The system allocates zeros on first touch, so memory follows the contents.
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
        """Add each row's new tokens and return its drafts.

        Row i holds `num_tokens[i]` tokens, of which `num_sampled[i]` are new. A row without new tokens (its prompt is
        in prefill) gets no draft. Rows may have moved since the last call."""
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
        """Check shapes, because compiled code does not check bounds."""
        num_rows = len(num_sampled)
        lengths = num_tokens[:num_rows]
        shaped = token_ids.ndim == 2 and num_rows <= min(len(token_ids), len(num_tokens), len(self._entry_of_row))
        if not shaped or (lengths < num_sampled).any() or (lengths > token_ids.shape[1]).any():
            raise ValueError(
                f"token_ids: got shape {token_ids.shape} for {num_rows} rows of up to {lengths.max(initial=0)} tokens; "
                f"must be a matrix that holds them, of at most {len(self._entry_of_row)} rows"
            )

    def take_finished(self) -> list[Record]:
        """Return the rollouts that left the batch in the last call of `propose`, or their new tokens if they had left
        before."""
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
        """Add another engine's rollout. Refuse tokens outside the vocabulary, which would crash the engine."""
        token_ids = np.ascontiguousarray(record.token_ids, np.int32)
        if token_ids.size == 0 or token_ids.min() < 0 or token_ids.max() >= self._vocabulary_size:
            raise ValueError(f"token_ids: got an empty rollout or ids beyond the vocabulary of {self._vocabulary_size}")
        kernels.insert(self._pages, np.uint64(record.prompt), token_ids, record.num_context, self._min_match)

"""Packing of rollouts with the policy's hidden states, for training all kinds of drafters.

After the policy has read x_0..x_t and sampled x_{t+1}, a drafter guesses x_{t+2}, x_{t+3}, ...: steps 0, 1, ... of the
"anchor" t. Training covers every anchor of a response at once. As in the engine, each anchor sees the keys of positions
up to t, which the policy has confirmed, and the keys of its own guesses. Documents packed into one pass attend to their
own blocks only, and only these blocks are computed.

Dimension suffixes: N packed input positions, A anchors, D policy hidden size, H drafter hidden size, K taps, V
vocabulary, J steps; inside attention H key heads, G queries per key head, R rows, Q queries and S keys in a row, E head
dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from paceline.types import Floats, Tokens

_BLOCK_SCORES = 1 << 20
"""Attention scores per block and head. Longer documents are cut into slices of queries, so memory is linear in their
length."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Document:
    """One rollout with the policy's hidden states."""

    token_ids: Tokens
    """Prompt and response."""
    num_prompt_tokens: int
    taps: Floats
    """Hidden states that the drafter reads: [tokens, taps, policy's hidden size]."""
    last: Floats
    """Input of the policy's output head, after the final norm: [tokens, policy's hidden size]."""

    @property
    def num_anchors(self) -> int:
        """Number of anchors, from the last prompt token to the anchor of the last response token."""
        return max(0, len(self.token_ids) - self.num_prompt_tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """A part of the attention that fits in memory: rows of queries with the keys of their documents."""

    query_RQ: torch.Tensor
    """Index into the queries; padding repeats index 0 and is dropped again."""
    key_RS: torch.Tensor
    """Index into the keys of all positions."""
    last_seen_RQ: torch.Tensor
    """Last key of its row that each query sees."""
    kept_A: torch.Tensor
    """Index of the queries that are not padding, into the flattened rows."""

    @property
    def num_scores(self) -> int:
        return self.query_RQ.numel() * self.key_RS.shape[1]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pack:
    """Documents of one pass, concatenated without padding."""

    token_N: torch.Tensor
    """Token after each position: x_{t+1} at t."""
    position_N: torch.Tensor
    taps_NKD: torch.Tensor
    anchor_A: torch.Tensor
    """Index of each anchor into N; the anchors of a document are contiguous."""
    steps_A: torch.Tensor
    """Steps with a known answer: fewer near the end of a document."""
    last_AD: torch.Tensor
    """The policy's last hidden state for the target of step 0; step j is j rows further."""
    drawn_A: torch.Tensor
    """Token that step 0 guesses; step j is j rows further."""
    everywhere: tuple[Block, ...]
    """Attention in which every position is a query."""
    anchored: tuple[Block, ...]
    """Attention in which only anchors are queries."""


def make_pack(documents: Sequence[Document], device: torch.device) -> Pack:
    """Concatenate documents; each must have anchors."""
    assert all(document.num_anchors for document in documents), "no anchors"
    # The last two tokens of a document are guessed but never guessed from.
    lengths = [len(document.token_ids) - 2 for document in documents]
    starts = np.cumsum([0, *lengths])
    prompts = [document.num_prompt_tokens - 1 for document in documents]
    pairs = list(zip(documents, lengths, prompts, strict=True))
    anchors = [np.arange(prompt, length) for _, length, prompt in pairs]

    def tensor(parts: Sequence[np.ndarray], dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(device=device, dtype=dtype)

    return Pack(
        token_N=tensor([document.token_ids[1 : length + 1] for document, length, _ in pairs], torch.long),
        position_N=tensor([np.arange(length) for length in lengths], torch.long),
        taps_NKD=tensor([document.taps[:length] for document, length, _ in pairs], torch.float32),
        anchor_A=tensor([start + a for start, a in zip(starts, anchors, strict=False)], torch.long),
        steps_A=tensor([length - a for length, a in zip(lengths, anchors, strict=True)], torch.long),
        last_AD=tensor([document.last[prompt + 1 : length + 1] for document, length, prompt in pairs], torch.float32),
        drawn_A=tensor([document.token_ids[prompt + 2 :] for document, _, prompt in pairs], torch.long),
        everywhere=tuple(_blocks(lengths, [0] * len(lengths), device)),
        anchored=tuple(_blocks(lengths, prompts, device)),
    )


def _blocks(lengths: Sequence[int], firsts: Sequence[int], device: torch.device) -> Iterator[Block]:
    """Yield blocks for the queries from positions `firsts` on. Neighbors share a block while it has room."""
    rows: list[tuple[int, int, int, int]] = []  # first query, its position, number of queries, first key
    num_queries = num_keys = 0
    for length, first in zip(lengths, firsts, strict=True):
        slice_size = max(1, _BLOCK_SCORES // length)
        for position in range(first, length, slice_size):
            size = min(slice_size, length - position)
            rows.append((num_queries, position, size, num_keys))
            num_queries += size
        num_keys += length
    pending: list[tuple[int, int, int, int]] = []
    for row in rows:
        wider = [*pending, row]
        padded = len(wider) * max(r[2] for r in wider) * max(r[1] + r[2] for r in wider)
        # A short document beside a long one would be mostly padding.
        if pending and padded > min(_BLOCK_SCORES, 1.4 * sum(r[2] * (r[1] + r[2]) for r in wider)):
            yield _block(pending, device)
            pending = []
        pending.append(row)
    yield _block(pending, device)


def _block(rows: Sequence[tuple[int, int, int, int]], device: torch.device) -> Block:
    """Build a block on the host, where sizes are known, to avoid a GPU synchronization."""
    first_query, position, size, first_key = np.array(rows).T[:, :, None]
    query_1Q = np.arange(size.max())[None]
    key_1S = np.arange((position + size).max())[None]
    real_RQ = query_1Q < size

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    return Block(
        query_RQ=tensor(np.where(real_RQ, first_query + query_1Q, 0)),
        key_RS=tensor(np.where(key_1S < position + size, first_key + key_1S, 0)),
        last_seen_RQ=tensor(np.where(real_RQ, position + query_1Q, 0)),  # padding sees one key: its softmax is a number
        kept_A=tensor(np.flatnonzero(real_RQ)),
    )


def attend_blocks(
    query_AHGE: torch.Tensor,
    key_NHE: torch.Tensor,
    value_NHE: torch.Tensor,
    chain_AHGJ: torch.Tensor | None,
    blocks: Sequence[Block],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend to the positions up to each query's own.

    Also return the attention weights of the keys of the query's own anchor, which have the scores `chain_AHGJ`.
    """
    num_scores = sum(block.num_scores for block in blocks)
    run: Callable[..., Any] = _attend_block if num_scores <= _BLOCK_SCORES else _attend_block_again
    parts = [run(query_AHGE, key_NHE, value_NHE, chain_AHGJ, block) for block in blocks]
    outs, shares = zip(*parts, strict=True)
    return torch.cat(outs), None if chain_AHGJ is None else torch.cat(shares)


def _attend_block_again(*inputs: Any) -> Any:
    """Recompute in the backward pass: the scores of all blocks would not fit in memory."""
    return checkpoint(_attend_block, *inputs, use_reentrant=False, preserve_rng_state=False)


def _attend_block(
    query_AHGE: torch.Tensor,
    key_NHE: torch.Tensor,
    value_NHE: torch.Tensor,
    chain_AHGJ: torch.Tensor | None,
    block: Block,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the output of one block's queries and the weights of their own anchor's keys."""
    query_RHGQE = _take(query_AHGE, block.query_RQ).permute(0, 2, 3, 1, 4)
    key_RHES = _take(key_NHE, block.key_RS).permute(0, 2, 3, 1)
    value_RHSE = _take(value_NHE, block.key_RS).transpose(1, 2)
    score_RHGQS = (query_RHGQE.flatten(2, 3) @ key_RHES).unflatten(2, query_RHGQE.shape[2:4]).float()
    hidden_RQS = torch.arange(key_RHES.shape[-1], device=key_NHE.device) > block.last_seen_RQ[..., None]
    score_RHGQS = score_RHGQS.masked_fill(hidden_RQS[:, None, None], -math.inf)
    if chain_AHGJ is not None:
        score_RHGQS = torch.cat([score_RHGQS, _take(chain_AHGJ, block.query_RQ).permute(0, 2, 3, 1, 4).float()], -1)
    share_RHGQS = score_RHGQS.softmax(-1).to(value_NHE.dtype)
    num_keys = key_RHES.shape[-1]
    context = share_RHGQS[..., :num_keys].flatten(2, 3) @ value_RHSE
    out_RQHGE = context.unflatten(2, query_RHGQE.shape[2:4]).permute(0, 3, 1, 2, 4)
    share_RQHGJ = share_RHGQS[..., num_keys:].permute(0, 3, 1, 2, 4)
    out_AHGE = out_RQHGE.flatten(0, 1).index_select(0, block.kept_A)
    return out_AHGE, None if chain_AHGJ is None else share_RQHGJ.flatten(0, 1).index_select(0, block.kept_A)


def _take(rows: torch.Tensor, index_RQ: torch.Tensor) -> torch.Tensor:
    # The backward pass is twice as fast as with rows[index_RQ].
    return rows.index_select(0, index_RQ.flatten()).unflatten(0, index_RQ.shape)

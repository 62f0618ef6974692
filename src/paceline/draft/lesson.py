"""What a learned drafter of any kind is taught: rollouts with the policy's hidden states ("taps"), packed, and the loss of guesses.

After the policy has read x_0..x_t and the token x_{t+1} was drawn, a drafter guesses x_{t+2}, x_{t+3}, ...: steps 0, 1, ... of the
"anchor" t. It is trained as it will be used, from every anchor of a response at once. Each sees what it would see in the engine:
the keys of positions up to t, which the policy has confirmed, and what its own guessing has added. Documents that are packed into
one pass attend inside their own blocks only: what is computed is what the mask leaves.

The teacher is the policy's whole distribution at temperature 1, not the token that was drawn: an engine accepts a draft with
probability sum_v min(p_v, q_v) ("overlap"), so all of p matters, and the soft target has no sampling noise. Cross-entropy finds
the distribution from any start. Overlap is what counts, but it has no gradient where q has no mass: it finishes.

Dimension suffixes: N packed input positions, A anchors among them, D hidden size of the policy, H of the drafter, K taps, V
vocabulary, J steps; inside attention H is heads, G queries that share a key head and its keys, R rows, Q queries and S keys in a
row, E head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from paceline.types import Floats, Tokens

if TYPE_CHECKING:
    from paceline.draft.checkpoint import Drafter

_BLOCK_SCORES = 1 << 20
"""Attention scores of one block and head. Longer documents are cut into slices of queries: memory grows with their length, not with
its square."""
_CHUNK_LOGITS = 1 << 25
"""Logits held at once, as in the learner."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Document:
    """One rollout with what the policy thought of it: the drafter's whole lesson."""

    token_ids: Tokens
    """Prompt and response."""
    num_prompt_tokens: int
    taps: Floats
    """[tokens, taps, policy's hidden size]"""
    last: Floats
    """[tokens, policy's hidden size]: after the final norm; the policy's head makes the teacher's distribution of it."""

    @property
    def num_anchors(self) -> int:
        """The first anchor is the last prompt token; the last is the one whose guess is the last response token."""
        return max(0, len(self.token_ids) - self.num_prompt_tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """A piece of attention that fits into memory: rows of queries, each with the keys of its own document."""

    query_RQ: torch.Tensor
    """Index into the queries; padding repeats index 0 and is dropped again."""
    key_RS: torch.Tensor
    """Index into the keys of all positions."""
    last_seen_RQ: torch.Tensor
    """The last key of its row that each query sees."""
    kept_A: torch.Tensor
    """Index of the queries that are no padding, into the flattened rows."""

    @property
    def num_scores(self) -> int:
        return self.query_RQ.numel() * self.key_RS.shape[1]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pack:
    """Documents in one pass, end to end, without padding."""

    token_N: torch.Tensor
    """The token after each position: x_{t+1} at t."""
    position_N: torch.Tensor
    taps_NKD: torch.Tensor
    anchor_A: torch.Tensor
    """Index of each anchor into N; the anchors of a document are neighbours."""
    steps_A: torch.Tensor
    """Steps for which the document knows the answer: fewer near its end."""
    last_AD: torch.Tensor
    """Teacher's hidden state for step 0; that of step j is j rows further."""
    drawn_A: torch.Tensor
    """The token that step 0 guesses; that of step j is j rows further."""
    everywhere: tuple[Block, ...]
    """Attention in which every position asks."""
    anchored: tuple[Block, ...]
    """Attention in which only anchors ask."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Guesses:
    """What a pass gave: the loss summed over all guesses, and by step (detached) what an engine would do with them."""

    loss: torch.Tensor
    divergence_J: torch.Tensor
    """KL(p || q), summed over guesses."""
    overlap_J: torch.Tensor
    """sum_v min(p_v, q_v), summed over guesses."""
    count_J: torch.Tensor
    accept_AJ: torch.Tensor
    """min(1, q(x) / p(x)) of the token that was drawn: how probable it is that it was drafted and accepted, given that it came."""


def make_pack(documents: Sequence[Document], device: torch.device) -> Pack:
    """Lay documents end to end. A document without anchors teaches nothing and has no place here."""
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
    """Queries from position `firsts` on, of documents of these lengths: neighbours share a block as far as it holds them."""
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
    first_query, position, size, first_key = torch.tensor(rows, device=device).T[:, :, None]
    query_1Q = torch.arange(int(size.max()), device=device)[None]
    key_1S = torch.arange(int((position + size).max()), device=device)[None]
    real_RQ = query_1Q < size
    return Block(
        query_RQ=torch.where(real_RQ, first_query + query_1Q, 0),
        key_RS=torch.where(key_1S < position + size, first_key + key_1S, 0),
        last_seen_RQ=torch.where(real_RQ, position + query_1Q, 0),  # padding sees one key, so that its softmax is a number
        kept_A=real_RQ.flatten().nonzero()[:, 0],
    )


def attend_blocks(
    query_AHGE: torch.Tensor,
    key_NHE: torch.Tensor,
    value_NHE: torch.Tensor,
    chain_AHGJ: torch.Tensor | None,
    blocks: Sequence[Block],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of queries to the positions up to their own, and the share that is left for keys whose scores are `chain_AHGJ`:
    those that belong to the query's own anchor."""
    num_scores = sum(block.num_scores for block in blocks)
    run: Callable[..., Any] = _attend_block if num_scores <= _BLOCK_SCORES else _attend_block_again
    parts = [run(query_AHGE, key_NHE, value_NHE, chain_AHGJ, block) for block in blocks]
    return torch.cat([part[0] for part in parts]), None if chain_AHGJ is None else torch.cat([part[1] for part in parts])


def _attend_block_again(*inputs: Any) -> Any:
    """Recomputed in the backward pass: the scores of all blocks together are what must not be held."""
    return checkpoint(_attend_block, *inputs, use_reentrant=False, preserve_rng_state=False)


def _attend_block(
    query_AHGE: torch.Tensor, key_NHE: torch.Tensor, value_NHE: torch.Tensor, chain_AHGJ: torch.Tensor | None, block: Block
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Of the block's queries: attention to the positions, and the shares of their own anchor's keys."""
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
    return rows.index_select(0, index_RQ.flatten()).unflatten(0, index_RQ.shape)  # twice as fast backwards as rows[index_RQ]


def judge(
    drafter: Drafter, pack: Pack, normed: Sequence[torch.Tensor], head_VD: torch.Tensor, *, overlap_share: float = 0.0
) -> Guesses:
    """Guesses against the policy's distribution. `normed` is, by step, what every anchor hands to the drafter's output head;
    `head_VD` is the policy's. The loss is cross-entropy, but for `overlap_share` of it, which is the share of drafts that are not
    accepted."""
    num_anchors = len(pack.anchor_A)
    teach = partial(_teach, drafter, head_VD=head_VD, overlap_share=overlap_share)
    size = max(1, _CHUNK_LOGITS // len(head_VD))
    columns: list[tuple[torch.Tensor, ...]] = []
    for step, normed_AH in enumerate(normed):
        row_A = (torch.arange(num_anchors, device=pack.anchor_A.device) + step).clamp(max=num_anchors - 1)
        taught_A = pack.steps_A > step
        columns.append(_in_chunks(teach, (normed_AH, pack.last_AD[row_A], pack.drawn_A[row_A], taught_A), size))
    loss_J, divergence_J, overlap_J, accept_JA = (torch.stack(column) for column in zip(*columns, strict=True))
    return Guesses(
        loss=loss_J.sum(),
        divergence_J=divergence_J,
        overlap_J=overlap_J,
        count_J=torch.stack([(pack.steps_A > step).sum() for step in range(len(normed))]),
        accept_AJ=accept_JA.T,
    )


def _in_chunks(teach: Callable[..., tuple[torch.Tensor, ...]], rows: Sequence[torch.Tensor], size: int) -> tuple[torch.Tensor, ...]:
    """What `teach` makes of all rows, at most `size` at a time, which bounds memory."""
    if len(rows[0]) <= size:
        return teach(*rows)
    chunks = zip(*(tensor.split(size) for tensor in rows), strict=True)
    parts = [checkpoint(teach, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    loss, divergence, overlap, accept = zip(*cast("list[tuple[torch.Tensor, ...]]", parts), strict=True)
    return torch.stack(loss).sum(), torch.stack(divergence).sum(), torch.stack(overlap).sum(), torch.cat(accept)


def _teach(
    drafter: Drafter,
    normed_AH: torch.Tensor,
    last_AD: torch.Tensor,
    drawn_A: torch.Tensor,
    taught_A: torch.Tensor,
    *,
    head_VD: torch.Tensor,
    overlap_share: float,
) -> tuple[torch.Tensor, ...]:
    """One step's loss, divergence and overlap, each summed, and the acceptance of each drawn token."""
    with torch.no_grad():
        # In float32 whatever autocast says: the teacher is what the engine will verify with.
        with torch.autocast(last_AD.device.type, enabled=False):
            p_AV = (last_AD @ head_VD.T).softmax(-1)
        p_drawn_A = p_AV.gather(-1, drawn_A[:, None])[:, 0]
        if drafter.t2d is not None:
            p_AV = p_AV[:, drafter.t2d]
    logq_AV = drafter.lm_head(normed_AH).float().log_softmax(-1)
    q_AV = logq_AV.exp()
    cross_A = -(p_AV * logq_AV).sum(-1)
    overlap_A = torch.minimum(p_AV, q_AV).sum(-1)
    loss = (((1 - overlap_share) * cross_A + overlap_share * (1 - overlap_A)) * taught_A).sum()
    with torch.no_grad():
        entropy_A = torch.special.entr(p_AV).sum(-1)
        if drafter.t2d is None:
            q_drawn_A = q_AV.gather(-1, drawn_A[:, None])[:, 0]
        else:
            draft_id_V = drafter.t2d.long().cumsum(0) - 1
            q_drawn_A = q_AV.gather(-1, draft_id_V[drawn_A][:, None].clamp(min=0))[:, 0] * drafter.t2d[drawn_A]
        accept_A = (q_drawn_A / p_drawn_A.clamp(min=1e-30)).clamp(max=1.0) * taught_A
    return loss, ((cross_A - entropy_A) * taught_A).sum().detach(), (overlap_A * taught_A).sum().detach(), accept_A

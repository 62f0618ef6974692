"""Training-time test: what an EAGLE-3 drafter guesses, unrolled as an engine would ask it, and the loss of these guesses.

EAGLE-3 (https://arxiv.org/abs/2503.01840) is one decoder layer that rides on the policy's own hidden states ("taps"). After the
policy has read x_0..x_t and the token x_{t+1} was drawn, the drafter guesses x_{t+2}, x_{t+3}, ...:

    step 0   in: fc(taps at t),               token x_{t+1}   position t       out: q_0 = guess of p(x_{t+2} | ...)
    step j   in: own output of step j - 1,    token x_{t+1+j} position t + j   out: q_j = guess of p(x_{t+2+j} | ...)

In the first step every position has taps; later ones have none, because the policy has not been there yet, so the drafter feeds
itself. It must be trained as it will be used: all steps are unrolled, from every position t of a response at once. An anchor t sees
in step j what it would see in the engine: the step-0 keys of positions up to t, which the policy has confirmed, and its own chain
of steps 1..j. As a mask over the keys of steps 0, 1, 2 of a document with four positions:

             step 0     step 1     step 2
    t = 0    x . . .    x . . .    x . . .
    t = 1    x x . .    . x . .    . x . .
    t = 2    x x x .    . . x .    . . x .
    t = 3    x x x x    . . . x    . . . x

The diagonals are dot products, never a square matrix, and documents that are packed into one pass attend inside their own blocks
only: what is computed is what the mask leaves. speculators' own forward pass does it with a dense mask; the tests hold both equal.

The teacher is the policy's whole distribution at temperature 1, not the token that was drawn: an engine accepts a draft with
probability sum_v min(p_v, q_v) ("overlap"), so all of p matters, and the soft target has no sampling noise. Cross-entropy finds
the distribution from any start. Overlap is what counts, but it has no gradient where q has no mass: it finishes.

Dimension suffixes: N packed input positions, A anchors among them, D hidden size of the policy, H of the drafter, K taps, V
vocabulary, J steps; inside attention H is heads, G queries that share a key head, R rows, Q queries and S keys in a row, E head
dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from paceline.types import Floats, Tokens

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel

ATTENTION = "paceline_chain"
"""Name of our attention in transformers; a drafter's layers must have been made with it."""
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
    """Index into the step-0 keys."""
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
    first: tuple[Block, ...]
    """Attention of step 0, in which every position asks."""
    later: tuple[Block, ...]
    """Attention of the later steps, in which only anchors ask."""


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
        first=tuple(_blocks(lengths, [0] * len(lengths), device)),
        later=tuple(_blocks(lengths, prompts, device)),
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


class _Chain:
    """Keys and values of every step so far, handed to the layers in place of transformers' cache."""

    def __init__(self) -> None:
        self._keys: dict[int, list[torch.Tensor]] = {}
        self._values: dict[int, list[torch.Tensor]] = {}

    def update(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        keys, values = self._keys.setdefault(layer, []), self._values.setdefault(layer, [])
        # [1, heads, tokens, E] -> [tokens, heads, E]
        keys.append(key[0].transpose(0, 1))
        values.append(value[0].transpose(0, 1))
        return keys, values


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    blocks: Sequence[Block],
    *,
    scaling: float,
    **unused: object,
) -> tuple[torch.Tensor, None]:
    """Attention over the mask drawn above, in the form of transformers' attention functions; keys and values come from `_Chain`."""
    del module, unused
    query_AHE = query[0].transpose(0, 1) * scaling
    num_heads = keys[0].shape[1]
    group = query_AHE.shape[1] // num_heads
    query_AHGE = query_AHE.unflatten(1, (num_heads, group))
    chain_score_AHGJ = torch.stack([(query_AHGE * key[:, :, None]).sum(-1) for key in keys[1:]], -1) if keys[1:] else None
    num_scores = sum(block.num_scores for block in blocks)
    run: Callable[..., Any] = _attend_block if num_scores <= _BLOCK_SCORES else _attend_block_again
    parts = [run(query_AHGE, keys[0], values[0], chain_score_AHGJ, block) for block in blocks]
    out_AHGE = torch.cat([part[0] for part in parts])
    if chain_score_AHGJ is not None:
        share_AHGJ = torch.cat([part[1] for part in parts])
        for j, value in enumerate(values[1:]):
            out_AHGE = out_AHGE + share_AHGJ[..., j, None] * value[:, :, None]
    return out_AHGE.flatten(1, 2)[None], None


def _attend_block_again(*inputs: Any) -> Any:
    """Recomputed in the backward pass: the scores of all blocks together are what must not be held."""
    return checkpoint(_attend_block, *inputs, use_reentrant=False, preserve_rng_state=False)


def _attend_block(
    query_AHGE: torch.Tensor, key_NHE: torch.Tensor, value_NHE: torch.Tensor, chain_AHGJ: torch.Tensor | None, block: Block
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Of the block's queries: attention to step 0, and the shares of their own chain's keys."""
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


AttentionInterface.register(ATTENTION, cast("Any", _attend))


def guess(drafter: Eagle3DraftModel, pack: Pack, head_VD: torch.Tensor, num_steps: int, *, overlap_share: float = 0.0) -> Guesses:
    """Unroll `num_steps` steps from every anchor against the policy's distribution; `head_VD` is the policy's output head. The loss
    is cross-entropy, but for `overlap_share` of it, which is the share of drafts that are not accepted."""
    chain = cast("Any", _Chain())
    num_anchors = len(pack.anchor_A)
    hidden_NH = _combine(drafter, pack.taps_NKD.flatten(1))
    token_N, position_N, blocks = pack.token_N, pack.position_N, pack.first
    columns: list[tuple[torch.Tensor, ...]] = []
    for step in range(num_steps):
        inputs = torch.cat([drafter.embed_tokens(token_N), hidden_NH.to(drafter.embed_tokens.weight.dtype)], -1)[None]
        rope = drafter.rotary_emb(inputs, position_N[None])
        hidden = inputs
        for layer in drafter.layers:
            hidden = layer(hidden, attention_mask=blocks, past_key_values=chain, position_embeddings=rope)
        hidden_NH = hidden[0]
        if step == 0:
            hidden_NH, blocks = hidden_NH[pack.anchor_A], pack.later
        normed_AH = drafter.norm(hidden_NH)
        if drafter.config.norm_output:
            hidden_NH = normed_AH
        row_A = torch.arange(num_anchors, device=pack.anchor_A.device) + step
        taught_A = pack.steps_A > step
        row_A = row_A.clamp(max=num_anchors - 1)
        columns.append(_teach(drafter, normed_AH, pack.last_AD[row_A], pack.drawn_A[row_A], taught_A, head_VD, overlap_share))
        next_A = (pack.anchor_A + step + 1).clamp(max=len(pack.token_N) - 1)
        token_N, position_N = pack.token_N[next_A], pack.position_N[pack.anchor_A] + step + 1
    loss_J, divergence_J, overlap_J, accept_JA = (torch.stack(column) for column in zip(*columns, strict=True))
    return Guesses(
        loss=loss_J.sum(),
        divergence_J=divergence_J,
        overlap_J=overlap_J,
        count_J=torch.stack([(pack.steps_A > step).sum() for step in range(num_steps)]),
        accept_AJ=accept_JA.T,
    )


def _combine(drafter: Eagle3DraftModel, taps_NC: torch.Tensor) -> torch.Tensor:
    """The drafter's input in place of the policy's hidden states, as vLLM's `combine_hidden_states`."""
    if drafter.input_norm is not None:
        taps_NC = drafter.input_norm(taps_NC)
    if drafter.fc_norm is not None:
        chunks = taps_NC.chunk(len(drafter.fc_norm), -1)
        taps_NC = torch.cat([norm(chunk) for norm, chunk in zip(drafter.fc_norm, chunks, strict=True)], -1)
    return drafter.fc(taps_NC)


def _teach(
    drafter: Eagle3DraftModel,
    normed_AH: torch.Tensor,
    last_AD: torch.Tensor,
    drawn_A: torch.Tensor,
    taught_A: torch.Tensor,
    head_VD: torch.Tensor,
    overlap_share: float,
) -> tuple[torch.Tensor, ...]:
    """One step's loss, divergence and overlap, each summed, and the acceptance of each drawn token; in chunks that bound memory."""
    size = max(1, _CHUNK_LOGITS // len(head_VD))
    if len(normed_AH) <= size:
        return _teach_chunk(drafter, normed_AH, last_AD, drawn_A, taught_A, head_VD, overlap_share)
    chunks = zip(*(tensor.split(size) for tensor in (normed_AH, last_AD, drawn_A, taught_A)), strict=True)
    parts = [
        checkpoint(_teach_chunk, drafter, *chunk, head_VD, overlap_share, use_reentrant=False, preserve_rng_state=False)
        for chunk in chunks
    ]
    loss, divergence, overlap, accept = zip(*cast("list[tuple[torch.Tensor, ...]]", parts), strict=True)
    return torch.stack(loss).sum(), torch.stack(divergence).sum(), torch.stack(overlap).sum(), torch.cat(accept)


def _teach_chunk(
    drafter: Eagle3DraftModel,
    normed_AH: torch.Tensor,
    last_AD: torch.Tensor,
    drawn_A: torch.Tensor,
    taught_A: torch.Tensor,
    head_VD: torch.Tensor,
    overlap_share: float,
) -> tuple[torch.Tensor, ...]:
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

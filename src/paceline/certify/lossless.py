"""Tests of whether speculation leaves the distribution unchanged.

Speculative sampling (Leviathan et al. 2022, arXiv 2211.17192) draws x from the drafter's q and keeps it with
probability min(1, p(x) / q(x)). Otherwise, with probability sum(max(p - q, 0)), it draws from the normalized residual
max(p - q, 0):

    P(x) = q(x) min(1, p(x) / q(x)) + max(p(x) - q(x), 0) = min(q(x), p(x)) + max(p(x) - q(x), 0) = p(x)

The token always has the policy's distribution p. "Lossless" is a statement about distributions, and is tested as such:

* `examine` gives a sampler a known p and q. Token j of its output, among the rows that reached it, must have the
  distribution p_j, like the bonus token. Pearson's chi-square, rare tokens merged, may not exceed df + 10 sqrt(2 df),
  ten standard deviations, so that false alarms are unlikely in any number of tests. Requests with different
  temperatures share a batch, which reveals misplaced rows.
* `two_sample` compares two engines on the same prompts. Its p-value is exact by construction: under the null
  hypothesis the labels "with" and "without" are exchangeable within a prompt, so the statistic is compared with its
  values under shuffled labels. This assumes nothing about its distribution; counts along a sequence are dependent, so
  the usual chi-square would be invalid.
* `surprise` compares one engine with the learner's exact distribution: -log p(token) - entropy has mean 0 at every
  position given the prefix, so its sum is a martingale and its z-score standard normal. It detects a wrong temperature
  with few samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from paceline.rollout.internals.rejection_sampler import Verification
from paceline.types import Floats, Tokens

Sampler = Callable[[Verification], torch.Tensor]
Drafter = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
Drafts = Literal["one-hot", "model-like", "adversarial"]
Counts = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]

DEVIATIONS = 10.0
"""Limit of a chi-square, in its standard deviations above its mean."""
SURPRISE_LIMIT = 5.0
FALSE_POSITIVE_RATE = 1e-3
"""False-positive rate of the two-sample test, by far the highest among the tests."""

KINDS: tuple[Drafts, ...] = ("one-hot", "model-like", "adversarial")
LENGTHS = (1, 3, 5)
VOCABULARY = 1024
_TEMPERATURES = (0.6, 1.0)
_SURE = 3.09
"""Quantile 0.001 of the standard normal distribution, negated."""
_FEWEST_EXPECTED = 20.0
_FEWEST_DEGREES = 3  # with fewer, a chi-square is so skewed that ten deviations are not rare enough
_CHUNK = 500
"""Most rows of each temperature in one call of a sampler."""

# Dimensions: B rows, K drafts, L = K + 1 positions, V vocabulary; N samples, T tokens, F counted events, M shuffles.


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerCell:
    """One chi-square: a sampler's tokens at one position."""

    drafts: Drafts
    draft_length: int
    temperature: float
    position: int
    num_tokens: int
    statistic: float
    degrees: int

    @property
    def excess(self) -> float:
        """Return standard deviations above the mean."""
        return (self.statistic - self.degrees) / np.sqrt(2.0 * self.degrees)

    @property
    def effect_found(self) -> float:
        """Return the smallest effect that exceeds the limit with probability 0.999: Cohen's w, the square root of the
        sum of (p' - p)^2 / p over tokens.

        An effect w shifts the statistic's mean by n w^2 and makes its variance 2 df + 4 n w^2; at the returned
        shift, the normal approximation is below the limit with probability 0.001.
        """
        limit = DEVIATIONS * np.sqrt(2.0 * self.degrees)
        shift = limit + 2 * _SURE**2 + _SURE * np.sqrt(4 * limit + 2 * self.degrees + 4 * _SURE**2)
        return float(np.sqrt(shift / self.num_tokens))


def num_cells(kinds: Sequence[Drafts], lengths: Sequence[int]) -> int:
    """Return the number of `examine`'s chi-squares if every position is reached often enough."""
    return len(kinds) * len(_TEMPERATURES) * sum(length + 1 for length in lengths)


def examine(
    sampler: Sampler,
    drafter: Drafter,
    *,
    num_rows: int = 20_000,
    vocabulary: int = VOCABULARY,
    seed: int = 0,
    kinds: Sequence[Drafts] = KINDS,
    lengths: Sequence[int] = LENGTHS,
) -> Iterator[SamplerCell]:
    """Yield the sampler's chi-squares, with `num_rows` verifications per case and temperature. Positions that too few
    rows reach are left out."""
    num_calls = -(-num_rows // _CHUNK)
    rows = -(-num_rows // num_calls)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for drafts in kinds:
            for length in lengths:
                target_LV, draft_KV = _distributions(drafts, length, vocabulary, generator)
                counts_CLV = np.zeros((len(_TEMPERATURES), length + 1, vocabulary), np.int64)
                for _ in range(num_calls):
                    temperature_B = torch.tensor(_TEMPERATURES).repeat(rows)
                    step = _step(drafts, target_LV, draft_KV, temperature_B, drafter)
                    ids_BL = sampler(step).numpy()
                    for which in range(len(_TEMPERATURES)):
                        for position in range(length + 1):
                            ids_B = ids_BL[which :: len(_TEMPERATURES), position]
                            counts_CLV[which, position] += np.bincount(ids_B[ids_B >= 0], minlength=vocabulary)
                for which, temperature in enumerate(_TEMPERATURES):
                    p_LV = target_LV.double().softmax(-1).numpy()
                    for position, (counts_V, p_V) in enumerate(zip(counts_CLV[which], p_LV, strict=True)):
                        statistic, degrees = chi_square(counts_V, p_V)
                        if degrees < _FEWEST_DEGREES:
                            continue
                        yield SamplerCell(
                            drafts=drafts,
                            draft_length=length,
                            temperature=temperature,
                            position=position,
                            num_tokens=int(counts_V.sum()),
                            statistic=statistic,
                            degrees=degrees,
                        )


def _distributions(
    drafts: Drafts, length: int, vocabulary: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return unnormalized log-probabilities of policy and drafter: Zipf's law, shuffled at each position. An
    adversarial drafter puts a third of its mass on a rare token of the policy, and none on the most likely one."""
    rank_LV = torch.stack([torch.randperm(vocabulary, generator=generator) for _ in range(length + 1)])
    rank_KV = rank_LV[:-1]
    target_LV = -0.8 * (rank_LV + 1.0).log()
    match drafts:
        case "one-hot":
            others = (1.0 / torch.arange(2, vocabulary + 1)).sum()
            # The drafted token has two thirds of the mass, so that later positions are reached.
            target_LV = torch.where(rank_LV == 0, (2 * others).log(), -(rank_LV + 1.0).log())
            draft_KV = target_LV[:-1]
        case "model-like":
            draft_KV = target_LV[:-1] + 0.6 * torch.randn((length, vocabulary), generator=generator)
        case "adversarial":
            third = (target_LV[0].exp().sum() / 2).log()
            seldom = max(vocabulary // 10, 5)
            draft_KV = target_LV[:-1].masked_fill(rank_KV == seldom, third).masked_fill(rank_KV == 0, -100.0)
    return target_LV, draft_KV


def _step(
    drafts: Drafts, target_LV: torch.Tensor, draft_KV: torch.Tensor, temperature_B: torch.Tensor, drafter: Drafter
) -> Verification:
    """Multiply logits by the temperature that the sampler divides by, so that every row has the same distribution. The
    drafter's logits are in bfloat16, as in an engine."""
    scale_B = temperature_B[:, None, None]
    if drafts == "one-hot":
        ids_BK, proposal_BKV = draft_KV.argmax(-1).expand(len(temperature_B), -1), None
    else:
        ids_BK, proposal_BKV = drafter((scale_B * draft_KV).to(torch.bfloat16), temperature_B)
    return Verification(
        draft_ids_BK=ids_BK, proposal_BKV=proposal_BKV, logits_BLV=scale_B * target_LV, temperature_B=temperature_B
    )


def chi_square(counts_V: Counts, p_V: Doubles) -> tuple[float, int]:
    """Return Pearson's statistic and its degrees of freedom; tokens expected fewer than 20 times are merged."""
    if not counts_V.any():
        return 0.0, 0
    expected_V = p_V * counts_V.sum()
    order_V = np.argsort(-expected_V)
    expected_V, observed_V = expected_V[order_V], counts_V[order_V].astype(np.float64)
    common = max(1, int((expected_V >= _FEWEST_EXPECTED).sum()))
    while common > 1 and expected_V[common:].sum() < _FEWEST_EXPECTED:
        common -= 1  # the merged token must be expected often enough too
    expected = np.append(expected_V[:common], expected_V[common:].sum())
    observed = np.append(observed_V[:common], observed_V[common:].sum())
    return float(((observed - expected) ** 2 / expected).sum()), common


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoSample:
    p_value: float
    total_variation: float
    """Mean over prompts and positions of half the sum of absolute differences in token frequency."""
    noise: float
    """The same between two random halves of all samples: its value without a difference."""
    noise_999: float
    """Exceeded by 0.1 % of such halves."""
    num_samples: int
    num_shuffles: int


def two_sample(
    first: Sequence[Tokens], second: Sequence[Tokens], *, num_shuffles: int = 9_999, seed: int = 0
) -> TwoSample:
    """Run an exact permutation test over prompts; `first[i]` and `second[i]` are ids_NT sampled for prompt i, -1 after
    the end.

    Three counts are compared: tokens by position, prefixes, and pairs of neighbors at any position. Each gives a sum of
    (difference of frequency)^2 / frequency; the statistic is the largest of the three in standard deviations of its own
    shuffles, so that the noise of the other counts does not hide a difference in dependence."""
    rng = np.random.default_rng(seed)
    sum_GM = np.zeros((len(_EVENTS), num_shuffles + 1))
    variation_M = np.zeros(num_shuffles + 1)
    for mine_NT, theirs_NT in zip(first, second, strict=True):
        ids_NT = np.concatenate([mine_NT, theirs_NT])
        num, num_mine = len(ids_NT), len(mine_NT)
        count_GNF = [events(ids_NT) for events in _EVENTS]
        # The difference of frequencies is linear in the labels, so its weighted square is a quadratic form with this
        # matrix.
        form_GNN = [(count_NF / count_NF.sum(0)) @ count_NF.T for count_NF in count_GNF]
        for begin in range(0, num_shuffles + 1, 1000):
            end = min(begin + 1000, num_shuffles + 1)
            is_mine_MN = rng.random((end - begin, num)).argsort(1) < num_mine
            if begin == 0:
                is_mine_MN[0] = np.arange(num) < num_mine  # the actual labels
            weight_MN = np.where(is_mine_MN, 1 / num_mine, -1 / (num - num_mine)).astype(np.float32)
            for sum_M, form_NN in zip(sum_GM, form_GNN, strict=True):
                sum_M[begin:end] += ((weight_MN @ form_NN) * weight_MN).sum(1)
            variation_M[begin:end] += 0.5 * np.abs(weight_MN @ count_GNF[0]).sum(1) / ids_NT.shape[1]
    variation_M /= len(first)
    scale_G1 = np.maximum(sum_GM.std(1, keepdims=True), 1e-12)
    statistic_M = ((sum_GM - sum_GM.mean(1, keepdims=True)) / scale_G1).max(0)
    # Rounding must not make the actual labels look rarer than an equal shuffle.
    at_least = int((statistic_M[1:] >= statistic_M[0] - 1e-4).sum())
    return TwoSample(
        p_value=(1 + at_least) / (1 + num_shuffles),
        total_variation=float(variation_M[0]),
        noise=float(variation_M[1:].mean()),
        noise_999=float(np.quantile(variation_M[1:], 0.999)),
        num_samples=sum(len(ids_NT) for ids_NT in (*first, *second)),
        num_shuffles=num_shuffles,
    )


def padded(rollouts: Sequence[Sequence[int] | Tokens], num_tokens: int) -> Tokens:
    """Return ids_NT of rollouts, -1 after their end."""
    ids_NT = np.full((len(rollouts), num_tokens), -1, np.int32)
    for row_T, token_ids in zip(ids_NT, rollouts, strict=True):
        row_T[: len(token_ids)] = token_ids
    return ids_NT


def _tokens(ids_NT: Tokens) -> Floats:
    """Return a column per token and position: 1 for samples that have it."""
    return np.concatenate([token_N[:, None] == np.unique(token_N) for token_N in ids_NT.T], axis=1).astype(np.float32)


def _prefixes(ids_NT: Tokens) -> Floats:
    """Return a column per prefix of more than one sample: a unique prefix contributes equally under all labels."""
    columns: list[Floats] = []
    prefix_N = np.zeros(len(ids_NT), np.int64)
    for token_N in ids_NT.T:
        token_U, index_N = np.unique(token_N, return_inverse=True)
        prefix_N = np.unique(prefix_N * len(token_U) + index_N, return_inverse=True)[1]
        shared_U = np.flatnonzero(np.bincount(prefix_N) > 1)
        columns.append((prefix_N[:, None] == shared_U).astype(np.float32))
    shared_NF = np.concatenate(columns, axis=1)
    return shared_NF if shared_NF.size else np.ones((len(ids_NT), 1), np.float32)


def _pairs(ids_NT: Tokens) -> Floats:
    """Return a column per pair of neighbors: its count in each sample."""
    base = int(ids_NT.max()) + 2
    pair_NT = (ids_NT[:, :-1].astype(np.int64) + 1) * base + ids_NT[:, 1:] + 1
    if not pair_NT.size:
        return np.ones((len(ids_NT), 1), np.float32)
    pair_U, index = np.unique(pair_NT, return_inverse=True)
    count_NF = np.zeros((len(ids_NT), len(pair_U)), np.float32)
    np.add.at(count_NF, (np.arange(len(ids_NT))[:, None], index.reshape(pair_NT.shape)), 1.0)
    return count_NF


_EVENTS = (_tokens, _prefixes, _pairs)


def surprise(logp: Sequence[Floats], entropy: Sequence[Floats]) -> float:
    """Return the z-score of sampled tokens against an exact distribution, from log-probabilities and entropies."""
    logp_N, entropy_N = np.concatenate(logp).astype(np.float64), np.concatenate(entropy).astype(np.float64)
    gap_N = -logp_N - entropy_N
    scale = np.sqrt((gap_N**2).sum())
    return float(gap_N.sum() / scale) if scale else 0.0


TokenClass = Literal["plain", "accepted", "recovered", "bonus"]
CLASSES: tuple[TokenClass, ...] = ("plain", "accepted", "recovered", "bonus")


def token_classes(steps: Sequence[tuple[int, int]], num_tokens: int) -> list[TokenClass]:
    """Classify each token of a rollout from the (draft tokens, emitted tokens) of its engine steps in order. All
    emitted tokens but the last are accepted drafts; the last is the bonus token if every draft was accepted, else
    recovered. An end-of-sequence token among accepted drafts ends the rollout before the last emitted token."""
    classes: list[TokenClass] = []
    for num_drafts, num_emitted in steps:
        if num_emitted == 0:
            continue  # a step of prefill
        if num_drafts == 0:
            classes.extend("plain" for _ in range(num_emitted))
        else:
            classes.extend("accepted" for _ in range(num_emitted - 1))
            classes.append("bonus" if num_emitted == num_drafts + 1 else "recovered")
    if len(classes) < num_tokens:
        raise ValueError(
            f"steps: got {len(classes)} emitted tokens; must be at least {num_tokens}, the tokens of the rollout"
        )
    return classes[:num_tokens]


Verdict = Literal["LOSSLESS", "NOT LOSSLESS", "INCONCLUSIVE"]
VERDICT_NUMBER: dict[Verdict, int] = {"LOSSLESS": 1, "NOT LOSSLESS": 0, "INCONCLUSIVE": -1}


def verdict(*, failed: Sequence[str], missing: Sequence[str]) -> Verdict:
    """Return the verdict: a failed test decides; tests that did not run, or hardly drafted, prove nothing."""
    if failed:
        return "NOT LOSSLESS"
    return "INCONCLUSIVE" if missing else "LOSSLESS"

"""The losslessness monitor: false alarms, tokens to the alarm of each fault, and cost.

    false_alarms              alarms in 10,000 simulated runs of a right sampler of 1 M tokens each, at every token
    crossings_of_1_percent    share of the same runs in which a test exceeds 100 at any time; at most 0.01 is allowed
    tokens_to_alarm_*         examined tokens until the alarm, median over seeds: planted faults inside V1's rejection
                              sampler on the CPU, below the real wrapper, on known distributions; the same for vLLM's
                              lossy settings; and log-probabilities that are shifted by one token
    us_per_token              seconds of the monitor per generated token, and as a share of the engine's steps: one
    share_of_step             engine with the arena's small policy and its EAGLE-3 drafter

vLLM 0.32's CPU kernels lack synthetic acceptance, and FLy (arXiv 2511.22972) is not in it. Both acceptance rules are
applied here, in place of the stock function: `synthetic` accepts each draft with probability 0.7; `fly` also accepts a
rejected draft where the policy's three likeliest tokens have an entropy of at least 0.3 nats and the next six drafts
are accepted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numba import njit, prange

from benchmarks.harness import Record
from benchmarks.planted import SAMPLER_FAULTS, SMALL_SHARE, faulty_v1
from benchmarks.workload import arena_requests
from paceline.config import EngineConfig, SpeculationConfig
from paceline.context import Context
from paceline.measure import Goal
from paceline.monitor import ALPHA, BETS, Martingale, group_evidence, limit_log10, log_factors, ratios_of
from paceline.rollout.engine import VllmEngine
from paceline.rollout.internals import rejection_sampler, sampler_fix
from paceline.rollout.internals.rejection_sampler import Verification
from paceline.rollout.internals.verification_monitor import V1Monitor
from paceline.sessions.workloads import resolve_drafter, resolve_policy

if TYPE_CHECKING:
    from vllm.v1.sample.metadata import SamplingMetadata

GOALS: dict[str, Goal] = {
    "false_alarms": ("<=", 0.0),
    "crossings_of_1_percent": ("<=", 0.01),
    "us_per_token": ("<=", 1.0),
    "share_of_step": ("<=", 1e-3),
}
NUM_RUNS, NUM_TOKENS = 10_000, 1_000_000
SEEDS = (0, 1, 2, 3, 4)
_PAIRS, _FEW = 64, 16
"""Pairs of p and q that a simulated run draws from, and their vocabulary."""
_MOST_TOKENS = 3_000_000
"""Examined tokens after which a fault counts as not found."""
_REQUESTS, _DRAFTS, _VOCABULARY, _TEMPERATURE = 64, 8, 128, 0.8
_RATE = 0.7
_WINDOW, _ENTROPY = 6, 0.3
_MODEL = "arena:small"
_ENGINE_S = 60.0
_ENGINE = EngineConfig(max_model_len=768, max_num_seqs=64, kv_cache_gb=0.5)

# Dimensions: T tests, P pairs, X tokens of the small vocabulary, E bets; others as in planted.py.


def run(overrides: Sequence[str], context: Context) -> Record:
    del overrides
    record = Record(goals=GOALS, seeds=SEEDS)
    context.progress(f"simulating {NUM_RUNS} runs")
    crossed = simulate(NUM_RUNS, NUM_TOKENS, [limit_log10(1), 2.0])
    record.add("false_alarms", crossed[0])
    record.add("crossings_of_1_percent", crossed[1] / NUM_RUNS / 3)
    for name, seen in faults().items():
        context.progress(f"fault {name}")
        record.median(f"tokens_to_alarm_{name}", [seen(seed) for seed in SEEDS])
    context.progress("one engine")
    asyncio.run(_cost(record, context))
    return record


# Simulated right runs.


def simulate(num_runs: int, num_tokens: int, limits_log10: Sequence[float], seed: int = 0) -> list[int]:
    """Return how many runs' tests exceed each limit at any time."""
    factors_PXTE, threshold_PX, other_PX = _tables(np.random.default_rng(seed))
    peak_RT = _peaks(num_runs, num_tokens, factors_PXTE, threshold_PX, other_PX, seed) / np.log(10)
    return [int((peak_RT > limit).sum()) for limit in limits_log10]


def _tables(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return log factors of every token, and alias tables that draw tokens from p."""
    p_PX = rng.dirichlet(np.full(_FEW, 0.3), _PAIRS) + 1e-9
    p_PX /= p_PX.sum(1, keepdims=True)
    q_PX = p_PX * np.exp(rng.normal(0, 1, p_PX.shape))
    q_PX[: _PAIRS // 2] = np.eye(_FEW)[p_PX[: _PAIRS // 2].argmax(1)]  # drafts without a distribution
    q_PX /= q_PX.sum(1, keepdims=True)
    learner_PX = p_PX * np.exp(rng.normal(0, 0.05, p_PX.shape))
    learner_PX /= learner_PX.sum(1, keepdims=True)
    residual_PX = np.maximum(p_PX - q_PX, 0)
    ratios_TPX = np.stack([q_PX / p_PX, residual_PX / residual_PX.sum(1, keepdims=True) / p_PX, learner_PX / p_PX])
    factors_TPXE = log_factors(ratios_TPX.ravel()).reshape(3, _PAIRS, _FEW, len(BETS))
    threshold_PX, other_PX = np.ones_like(p_PX), np.zeros(p_PX.shape, np.int64)
    for pair in range(_PAIRS):  # Vose's alias method
        weight_X = p_PX[pair] * _FEW
        small = [token for token in range(_FEW) if weight_X[token] < 1]
        large = [token for token in range(_FEW) if weight_X[token] >= 1]
        while small and large:
            less, more = small.pop(), large.pop()
            threshold_PX[pair, less], other_PX[pair, less] = weight_X[less], more
            weight_X[more] -= 1 - weight_X[less]
            (small if weight_X[more] < 1 else large).append(more)
    return np.ascontiguousarray(factors_TPXE.transpose(1, 2, 0, 3)), threshold_PX, other_PX


@njit(parallel=True, cache=True)
def _peaks(num_runs, num_tokens, factors_PXTE, threshold_PX, other_PX, seed):  # noqa: ANN001, ANN202  compiled
    """Return the highest log of the mean over bets in each run, by test. Looks after every token."""
    num_pairs, num_x, num_tests, num_bets = factors_PXTE.shape
    peak_RT = np.zeros((num_runs, num_tests))
    for number in prange(num_runs):
        state = np.uint64(seed * 1_000_003 + number + 1) * np.uint64(0x9E3779B97F4A7C15)
        log_TE = np.zeros((num_tests, num_bets))
        for _ in range(num_tokens):
            # xorshift64*: its high 53 bits choose pair, column and side
            state ^= state >> np.uint64(12)
            state ^= state << np.uint64(25)
            state ^= state >> np.uint64(27)
            bits = (state * np.uint64(0x2545F4914F6CDD1D)) >> np.uint64(11)
            pair = np.int64(bits & np.uint64(num_pairs - 1))
            column = np.int64((bits >> np.uint64(6)) & np.uint64(num_x - 1))
            uniform = np.float64(bits >> np.uint64(10)) / np.float64(1 << 43)
            token = column if uniform < threshold_PX[pair, column] else other_PX[pair, column]
            for test in range(num_tests):
                highest = -np.inf
                for bet in range(num_bets):
                    log_TE[test, bet] += factors_PXTE[pair, token, test, bet]
                    highest = max(highest, log_TE[test, bet])
                if highest > peak_RT[number, test]:  # the mean is at most the highest
                    total = 0.0
                    for bet in range(num_bets):
                        total += np.exp(log_TE[test, bet] - highest)
                    peak_RT[number, test] = max(peak_RT[number, test], highest + np.log(total / num_bets))
    return peak_RT


# Faults.


def faults() -> dict[str, Callable[[int], float]]:
    """Return for each fault a function of a seed that counts examined tokens until the alarm."""
    inside: dict[str, Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]]] = {
        fault: partial(faulty_v1, fault=fault, share=SMALL_SHARE) for fault in SAMPLER_FAULTS
    }
    lossy = {"synthetic": _lenient(_synthetic), "fly": _lenient(_fly)}
    found = {name: partial(tokens_to_alarm, plant) for name, plant in {**inside, **lossy}.items()}
    greedy = {f"{name}_greedy": partial(tokens_to_alarm, plant, sampled=False) for name, plant in inside.items()}
    del greedy["stale_greedy"]  # greedy drafts have no distribution
    return {**found, **greedy, "logp_shift": _logp_shift}


def tokens_to_alarm(
    plant: Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]],
    seed: int,
    *,
    sampled: bool = True,
    most_tokens: int = _MOST_TOKENS,
) -> float:
    """Verify drafts with V1's sampler and a fault below the monitor. Return the examined tokens until the alarm."""
    from vllm.v1.sample import rejection_sampler as vllm_sampler

    sampler_fix.mend_sampler()
    stock = vllm_sampler.rejection_sample
    monitor = V1Monitor(plant(stock), time_share=1e9, token_s=1e9)
    generator = torch.Generator().manual_seed(seed)
    setattr(vllm_sampler, "rejection_sample", monitor)  # noqa: B010
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            while (found := monitor.figures())["monitor/positions"] < most_tokens:
                if max(found["monitor/draft_log10"], found["monitor/residual_log10"]) > limit_log10(1):
                    return found["monitor/positions"]
                for _ in range(4):
                    rejection_sampler.rejection_sample(_verification(generator, sampled=sampled))
    finally:
        setattr(vllm_sampler, "rejection_sample", stock)  # noqa: B010
    return float("inf")


def _verification(generator: torch.Generator, *, sampled: bool) -> Verification:
    """Return a step of requests with Zipf's law at every position, and a drafter that knows it roughly."""
    shape = (_REQUESTS, _DRAFTS + 1, _VOCABULARY)
    rank = torch.rand(shape, generator=generator).argsort(-1)
    logits_BLV = -1.2 * (rank + 1.0).log()
    drafter_BKV = logits_BLV[:, :-1] + 0.7 * torch.randn(logits_BLV[:, :-1].shape, generator=generator)
    temperature_B = torch.full((_REQUESTS,), _TEMPERATURE)
    if sampled:
        ids_BK, proposal_BKV = rejection_sampler.draft(drafter_BKV, temperature_B)
    else:
        ids_BK, proposal_BKV = drafter_BKV.argmax(-1), None
    return Verification(
        draft_ids_BK=ids_BK, proposal_BKV=proposal_BKV, logits_BLV=logits_BLV, temperature_B=temperature_B
    )


Accept = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From p(draft), q(draft) and p, which drafts are accepted where they are reached."""


def _lenient(accept: Accept) -> Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]]:
    """Return a replacement of V1's `rejection_sample` with another rule of acceptance."""

    def sample(
        draft_N: torch.Tensor,
        num_drafts: list[int],
        most_drafts: int,
        end_B: torch.Tensor,
        draft_NV: torch.Tensor,
        logits_NV: torch.Tensor,
        bonus_B1: torch.Tensor,
        metadata: SamplingMetadata,
        **options: Any,
    ) -> torch.Tensor:
        del end_B, metadata, options
        shape = (len(num_drafts), most_drafts)
        p_NV, at_N1 = logits_NV.softmax(-1), draft_N.long()[:, None]
        p_BK, q_BK = (x_NV.gather(1, at_N1).view(shape) for x_NV in (p_NV, draft_NV))
        accepted_BK = accept(p_BK, q_BK, p_NV.view(*shape, -1))
        recovered_BK = ((p_NV - draft_NV).clamp(min=0) + 1e-12).multinomial(1).view(shape)
        kept_BK = accepted_BK.cumprod(1).bool()
        ids_BL = torch.cat([torch.where(kept_BK, draft_N.view(shape), recovered_BK), bonus_B1], 1)
        last_B = kept_BK.sum(1)
        return ids_BL.masked_fill(torch.arange(most_drafts + 1) > last_B[:, None], -1).int()

    return lambda _: sample


def _synthetic(p_BK: torch.Tensor, q_BK: torch.Tensor, p_BKV: torch.Tensor) -> torch.Tensor:
    return torch.rand(p_BK.shape) < _RATE


def _fly(p_BK: torch.Tensor, q_BK: torch.Tensor, p_BKV: torch.Tensor) -> torch.Tensor:
    accepted_BK = torch.rand(p_BK.shape) < p_BK / q_BK
    top_BK3 = p_BKV.topk(3).values
    unsure_BK = -(top_BK3 * top_BK3.log()).sum(-1) >= _ENTROPY
    followed_BK = torch.zeros_like(accepted_BK)
    followed_BK[:, :-_WINDOW] = accepted_BK[:, 1:].unfold(1, _WINDOW, 1).all(-1)
    return accepted_BK | (unsure_BK & followed_BK & (p_BK > 0))


def _logp_shift(seed: int, *, num_tokens: int = 100, groups: int = 1000) -> float:
    """Report each token's log-probability for the next token. Half of the groups are scored."""
    rng = np.random.default_rng(seed)
    p_V = 1 / np.arange(1, _VOCABULARY + 1) ** 1.2
    p_V /= p_V.sum()
    martingale = Martingale.new()
    for group in range(groups):
        logp_N = np.log(rng.choice(p_V, num_tokens, p=p_V)).astype(np.float32)
        evidence = group_evidence(ratios_of(np.roll(logp_N, 1), logp_N), np.zeros(num_tokens, np.int64), 1)
        scored = rng.random() < 0.5
        martingale.add_groups(evidence if scored else [], int(not scored))
        if martingale.log10 > limit_log10(1):
            return float((group + 1) * num_tokens)
    return float("inf")


# Cost.


async def _cost(record: Record, context: Context) -> None:
    model_path = resolve_policy(_MODEL, context)
    drafter = resolve_drafter(f"{_MODEL}/eagle3", context)
    speculation = SpeculationConfig.model_validate({"drafter": {"kind": "eagle3", "path": str(drafter)}})
    engine = await VllmEngine.start("engine-0", model_path, _ENGINE, seed=0, speculation=speculation)
    try:
        began_s, number = time.monotonic(), 0
        while time.monotonic() < began_s + _ENGINE_S:
            number += 1
            requests = arena_requests(model_path, num_prompts=8, group_size=8, max_tokens=640, seed=number)
            await engine.submit(requests)
            done = 0
            while done < len(requests):
                done += len(await engine.collect())
        found = await engine.metrics()
    finally:
        await engine.close()
    record.add("us_per_token", 1e6 * found["monitor/seconds"] / found["engine/generated_tokens"])
    record.add("share_of_step", found["monitor/seconds"] / found["selector/step_s"])
    record.add("examined_share", found["monitor/positions"] / found["engine/generated_tokens"])
    record.details |= {"engine": dict(found), "alpha": ALPHA, "batches": number}

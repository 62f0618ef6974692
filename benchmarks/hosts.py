"""How much faster is TRL's own generation with the variable PACELINE than without?

    plain        stock TRL's colocated generation (`VLLMGeneration`) in a process of its own
    paceline     the same program with PACELINE=speculation.toml, which names the arena's DFlash drafter; overrides may
                 name another

Both engines are alive at once on all cores, with the same precision, and take turns batch by batch, each first every
other time; ratios are of batches with the same prompts. A batch is groups of siblings of the arena's large policy, all
of them active from the first step to the last. Every answer has the same number of tokens (`ignore_eos`, by TRL's own
`generation_kwargs`), so both arms do the same work. Prompts are the arena's longest, whose answers are longer than that
by themselves; the share of tokens after an end all the same is reported (`past_end_share`). There is no tail in which
few requests are active, as there is in RL and where speculation gains most (`python -m benchmarks rollout`). The first
batches, in which the selector learns, do not count.

    trl_generation_speedup       seconds of a batch without Paceline over with it, 8 active; median of the pairs
    trl_generation_speedup_16    the same with 16 active
    accepted_length              tokens that a request gains by a verification, 8 active
    ridge_tokens                 tokens of a step at which computing takes as long as reading the weights: prefill
                                 tokens per second x seconds of a step of one token, plain. A step with speculation has
                                 active requests x (draft length + 1) tokens, which cost little below the ridge only
    active_over_ridge            8 over ridge_tokens: drafts of k tokens are nearly free while this times (k + 1) is
                                 below 1, which bounds the speed-up on the machine whatever the drafter

Both arms read the prompts first, which no draft makes faster. What share of a plain batch that takes, by the rate of
`ridge`, is in `details.prefill_share`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.stock_trl.environment import host_environment, trl_site
from benchmarks.stock_trl.generation import GeneratedBatch, GenerationSettings
from benchmarks.stock_trl.process import HostProcess
from benchmarks.workload import arena_requests, asked_for, long_requests, past_end_share
from paceline.config import LearnedDrafter, SpeculationConfig
from paceline.context import Context
from paceline.devices import fast_precision
from paceline.measure import CpuTimes, Result, environment, meanwhile, middle, paired
from paceline.rollout.arguments import end_tokens
from paceline.sessions.workloads import resolve_drafter, resolve_policy

ARMS = ("plain", "paceline")
GROUP_SIZE = 4
ACTIVE, MANY_ACTIVE = 8, 16
WARMUP = 2
"""Pairs of batches of each size that are not counted."""
KV_CACHE_GB = 2
BUDGET_S = 28 * 60
"""No counted pair but the first of its size is begun that would end later than this after the start."""
SHARES = {ACTIVE: 0.65, MANY_ACTIVE: 1.0}
"""By number of active requests, how much of what starting has left of the budget may be spent when its pairs end. An
engine that has to compile first takes minutes to start."""
_SETTLE_S = 0.5
"""Pause before a turn: threads of the engine that rests spin for a moment after their last step."""

Prompts = list[list[int]]
Pair = Mapping[str, GeneratedBatch]
"""Batches of the same prompts, by arm."""


def run(
    *,
    context: Context,
    environ: Mapping[str, str],
    overrides: Sequence[str] = (),
    model: str = "arena:large",
    repetitions: int = 10,
    max_tokens: int = 256,
    seed: int = 0,
) -> Result:
    """Time `repetitions` pairs of batches of each size, after some that are not counted; fewer where time is short."""
    before, began_s = CpuTimes.now(), time.monotonic()
    asked = asked_for(overrides, model, bench="hosts")
    assert isinstance(asked.drafter, LearnedDrafter)
    model_path = resolve_policy(model, context)
    settings = GenerationSettings(
        model=str(model_path), dtype=fast_precision(), max_model_len=768, max_num_seqs=MANY_ACTIVE, speculates=False
    )
    drafter = resolve_drafter(asked.drafter.path, context)
    with _hosts(settings, speculation_file(asked, drafter), environ, context) as (hosts, versions):
        ridges = [_ridge(hosts["plain"], model_path, seed + 1 + number) for number in range(3)]
        pairs: dict[int, list[Pair]] = {}
        prompt_tokens: dict[int, int] = {}
        ready_s = time.monotonic()
        for active, share in SHARES.items():
            batches = siblings(model_path, num_batches=WARMUP + repetitions, num_groups=active // GROUP_SIZE, seed=seed)
            until_s = ready_s + share * (began_s + BUDGET_S - ready_s)
            pairs[active] = _measure(hosts, batches, max_tokens, until_s, context)[WARMUP:]
            prompt_tokens[active] = sum(map(len, batches[0]))
    figures, spread, details = compare(pairs)
    tokens = [ridge["tokens"] for ridge in ridges]
    figures["ridge_tokens"], spread["ridge_tokens"] = middle(tokens)
    figures["active_over_ridge"], spread["active_over_ridge"] = middle([ACTIVE / one for one in tokens])
    subject = {
        "model": model,
        "drafter": asked.drafter.kind,
        "max_draft_length": asked.max_draft_length,
        "max_tokens": max_tokens,
        "group_size": GROUP_SIZE,
        **versions,
    }
    return Result(
        name="hosts",
        figures=figures,
        spread=spread,
        goals={"trl_generation_speedup": (">=", 2.0)},
        environment=environment(seeds=[seed], config=subject | {"engine": asdict(settings)}),
        details={
            "active": [ACTIVE, MANY_ACTIVE],
            "warmup_pairs": WARMUP,
            "paired": details,
            "ridge": ridges,
            "prefill_share": {active: _prefill_share(prompt_tokens[active], ridges, pairs[active]) for active in pairs},
            "past_end_share": {
                arm: past_end_share(
                    [ids for found in pairs.values() for pair in found for ids in pair[arm].token_ids],
                    end_tokens(model_path),
                )
                for arm in ARMS
            },
            "seconds": {
                active: {arm: [pair[arm].seconds for pair in found] for arm in ARMS} for active, found in pairs.items()
            },
            "counters": {active: _sum(found) for active, found in pairs.items()},
            "machine": meanwhile(before),
        },
    )


def speculation_file(asked: SpeculationConfig, drafter: Path) -> str:
    """What PACELINE names."""
    return (
        f"[speculation]\nmax_draft_length = {asked.max_draft_length}\n"
        f'drafter = {{kind = "{asked.drafter.kind}", path = "{drafter}"}}\n'
    )


@contextmanager
def _hosts(
    settings: GenerationSettings, speculation: str, environ: Mapping[str, str], context: Context
) -> Iterator[tuple[dict[str, HostProcess], Mapping[str, str]]]:
    """Start both arms, one after another, because compiling uses every core. Yields versions of TRL and vLLM too."""
    site = trl_site(context)
    with TemporaryDirectory() as directory, ExitStack() as stack:
        file = Path(directory, "speculation.toml")
        file.write_text(speculation, encoding="utf-8")
        hosts: dict[str, HostProcess] = {}
        versions: Mapping[str, str] = {}
        for arm in ARMS:
            context.progress(f"starting TRL's engine, {arm}")
            named = file if arm == "paceline" else None
            hosts[arm] = stack.enter_context(
                HostProcess(
                    "benchmarks.stock_trl.generation",
                    asdict(settings) | {"speculates": named is not None},
                    environ=host_environment(environ, site, kv_cache_gb=KV_CACHE_GB, speculation=named),
                    log=Path(directory, f"{arm}.log"),
                )
            )
            versions = hosts[arm].read()
        yield hosts, versions


def siblings(model_path: Path, *, num_batches: int, num_groups: int, seed: int) -> list[Prompts]:
    """Batches of groups, each of another long prompt; no batch has longer prompts than the others."""
    requests = long_requests(model_path, num_requests=num_batches * num_groups, max_tokens=1, seed=seed)
    prompts = [request.prompt_ids.tolist() for request in requests]
    return [
        [prompt for prompt in prompts[number::num_batches] for _ in range(GROUP_SIZE)] for number in range(num_batches)
    ]


def _measure(
    hosts: Mapping[str, HostProcess], batches: Sequence[Prompts], max_tokens: int, until_s: float, context: Context
) -> list[Pair]:
    found: list[Pair] = []
    for number, prompts in enumerate(batches):
        longest_s = max((sum(batch.seconds for batch in pair.values()) for pair in found), default=0.0)
        if number > WARMUP and time.monotonic() + longest_s > until_s:
            break
        pair = {arm: _generate(hosts[arm], prompts, max_tokens) for arm in (ARMS if number % 2 else reversed(ARMS))}
        found.append(pair)
        context.progress(
            f"batch {number + 1} of {len(batches)}, {len(prompts)} active: plain {pair['plain'].seconds:.2f} s, "
            f"paceline {pair['paceline'].seconds:.2f} s"
        )
    return found


def _generate(host: HostProcess, prompts: Prompts, max_tokens: int) -> GeneratedBatch:
    time.sleep(_SETTLE_S)
    batch = GeneratedBatch(**host.ask({"prompts": prompts, "max_tokens": max_tokens}))
    assert [len(ids) for ids in batch.token_ids] == [max_tokens] * len(prompts), "arms did not do the same work"
    return batch


def _ridge(host: HostProcess, model_path: Path, seed: int) -> dict[str, float]:
    """Measure with prompts that nobody has read before."""
    requests = arena_requests(model_path, num_prompts=MANY_ACTIVE, group_size=1, max_tokens=1, seed=seed)
    prompts: Prompts = [request.prompt_ids.tolist() for request in requests]
    reading, first, more = (
        _generate(host, asked, max_tokens).seconds
        for asked, max_tokens in ((prompts, 1), (prompts[:1], 1), (prompts[:1], 25))
    )
    prefill_rate, step_s = sum(map(len, prompts)) / reading, (more - first) / 24
    return {"prefill_tokens_per_s": prefill_rate, "one_token_s": step_s, "tokens": prefill_rate * step_s}


def _prefill_share(num_tokens: int, ridges: Sequence[Mapping[str, float]], pairs: Sequence[Pair]) -> float:
    """Share of a plain batch that reading its prompts takes. Siblings share none of it: vLLM's blocks on the CPU are
    longer than the arena's prompts."""
    rate = median(ridge["prefill_tokens_per_s"] for ridge in ridges)
    return num_tokens / rate / median(pair["plain"].seconds for pair in pairs)


def _sum(pairs: Sequence[Pair]) -> dict[str, float]:
    """What the engine that speculates has counted."""
    total: Counter[str] = Counter()
    for pair in pairs:
        total.update(pair["paceline"].counters)
    return dict(total)


def compare(
    pairs: Mapping[int, Sequence[Pair]],
) -> tuple[dict[str, float], dict[str, float], dict[str, dict[str, Any]]]:
    """Figures, spread and `details.paired` of pairs by number of active requests."""
    speedups = {
        active: [pair["plain"].seconds / pair["paceline"].seconds for pair in found] for active, found in pairs.items()
    }
    return paired(
        {
            "trl_generation_speedup": speedups[ACTIVE],
            f"trl_generation_speedup_{MANY_ACTIVE}": speedups[MANY_ACTIVE],
            "accepted_length": [_accepted_length(pair["paceline"].counters) for pair in pairs[ACTIVE]],
        }
    )


def _accepted_length(counters: Mapping[str, float]) -> float:
    verified = counters["selector/verifications"]
    return 1 + counters["selector/accepted_tokens"] / verified if verified else 1.0

"""TRL's own generation with the variable PACELINE against without.

    plain        stock TRL's colocated generation (`VLLMGeneration`) in a process of its own
    paceline     the same program with PACELINE=speculation.toml, which names the arena's DFlash drafter

Both engines are alive at once on all cores, with the same precision, and take turns batch by batch. Ratios are of
batches with the same prompts, without the first ones, in which the selector learns. A batch is groups of siblings of
arena:large. Every answer has the same number of tokens (`ignore_eos`), so there is no tail with few active requests,
where speculation gains most (see the bench `rollout`). Prompts are the arena's longest: few tokens come after an end.

    trl_generation_speedup       seconds of a batch, plain over paceline, 8 active; median of the pairs
    trl_generation_speedup_16    the same with 16 active
    accepted_length              tokens per request and verification, 8 active
    ridge_tokens                 tokens of a step at which computing takes as long as reading the weights: prefill
                                 tokens per second x seconds of a step of one token, plain
    active_over_ridge            8 over ridge_tokens: drafts of k tokens are nearly free while this times (k + 1) is
                                 below 1, which bounds the speedup on the machine for every drafter
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness import Record
from benchmarks.stock_trl.generation import GeneratedBatch, GenerationSettings
from benchmarks.stock_trl.process import HostProcess, host_environment, trl_site
from benchmarks.workload import MODEL, Ridge, arena_requests, asked_for, drafter_path, long_requests
from paceline.config import SpeculationConfig
from paceline.context import Context
from paceline.devices import fast_precision
from paceline.sessions.workloads import resolve_policy

ARMS = ("plain", "paceline")
GROUP_SIZE = 4
ACTIVE, MANY_ACTIVE = 8, 16
WARMUP, REPETITIONS = 2, 10
"""Pairs of batches of each size, uncounted and counted."""
MAX_TOKENS = 256
_SETTLE_S = 0.5
"""Pause before a turn: threads of the other engine spin for a moment after their last step."""

Prompts = list[list[int]]
Pair = Mapping[str, GeneratedBatch]
"""Batches of the same prompts, by arm."""


def run(overrides: Sequence[str], context: Context) -> Record:
    asked = asked_for(overrides, bench="hosts")
    model_path = resolve_policy(MODEL, context)
    settings = GenerationSettings(
        model=str(model_path), dtype=fast_precision(), max_model_len=768, max_num_seqs=MANY_ACTIVE
    )
    with _hosts(settings, speculation_file(asked, drafter_path(asked, context)), context) as (hosts, versions):
        ridges = [_ridge(hosts["plain"], model_path, seed) for seed in (1, 2, 3)]
        pairs: dict[int, list[Pair]] = {}
        for active in (ACTIVE, MANY_ACTIVE):
            batches = siblings(model_path, num_batches=WARMUP + REPETITIONS, num_groups=active // GROUP_SIZE)
            pairs[active] = _measure(hosts, batches, context)[WARMUP:]
    subject = {"model": MODEL, "drafter": asked.drafter.kind, "max_draft_length": asked.max_draft_length, **versions}
    record = Record(
        goals={"trl_generation_speedup": (">=", 2.0)},
        config=subject | {"max_tokens": MAX_TOKENS, "group_size": GROUP_SIZE, "engine": asdict(settings)},
    )
    compare(record, pairs)
    record.median("ridge_tokens", [ridge.tokens for ridge in ridges])
    record.median("active_over_ridge", [ACTIVE / ridge.tokens for ridge in ridges])
    record.details |= {
        "ridge": [asdict(ridge) for ridge in ridges],
        "seconds": {n: [{arm: pair[arm].seconds for arm in ARMS} for pair in found] for n, found in pairs.items()},
        "counters": {active: [pair["paceline"].counters for pair in found] for active, found in pairs.items()},
    }
    return record


def speculation_file(asked: SpeculationConfig, drafter: Path) -> str:
    """Return the file that PACELINE names."""
    return (
        f"[speculation]\nmax_draft_length = {asked.max_draft_length}\n"
        f'drafter = {{kind = "{asked.drafter.kind}", path = "{drafter}"}}\n'
    )


@contextmanager
def _hosts(
    settings: GenerationSettings, speculation: str, context: Context
) -> Iterator[tuple[dict[str, HostProcess], Mapping[str, str]]]:
    """Start both arms, one after another, because compiling uses every core. Yield versions of TRL and vLLM too."""
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
                    asdict(settings),
                    environ=host_environment(os.environ, site, kv_cache_gb=2, speculation=named),
                    log=Path(directory, f"{arm}.log"),
                )
            )
            versions = hosts[arm].read()
        yield hosts, versions


def siblings(model_path: Path, *, num_batches: int, num_groups: int) -> list[Prompts]:
    """Return batches of groups, each with another long prompt, and all batches with prompts of like length."""
    requests = long_requests(model_path, num_requests=num_batches * num_groups, max_tokens=1, seed=0)
    prompts = [request.prompt_ids.tolist() for request in requests]
    return [
        [prompt for prompt in prompts[number::num_batches] for _ in range(GROUP_SIZE)] for number in range(num_batches)
    ]


def _measure(hosts: Mapping[str, HostProcess], batches: Sequence[Prompts], context: Context) -> list[Pair]:
    found: list[Pair] = []
    for number, prompts in enumerate(batches):
        pair = {arm: _generate(hosts[arm], prompts, MAX_TOKENS) for arm in (ARMS if number % 2 else reversed(ARMS))}
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


def _ridge(host: HostProcess, model_path: Path, seed: int) -> Ridge:
    """Measure with prompts that are not in the prefix cache."""
    requests = arena_requests(model_path, num_prompts=MANY_ACTIVE, group_size=1, max_tokens=1, seed=seed)
    prompts: Prompts = [request.prompt_ids.tolist() for request in requests]
    reading, first, more = (
        _generate(host, asked, max_tokens).seconds
        for asked, max_tokens in ((prompts, 1), (prompts[:1], 1), (prompts[:1], 25))
    )
    return Ridge(prefill_tokens_per_s=sum(map(len, prompts)) / reading, one_token_s=(more - first) / 24)


def compare(record: Record, pairs: Mapping[int, Sequence[Pair]]) -> None:
    speedups = {
        active: [pair["plain"].seconds / pair["paceline"].seconds for pair in found] for active, found in pairs.items()
    }
    record.ratios(
        {
            "trl_generation_speedup": speedups[ACTIVE],
            f"trl_generation_speedup_{MANY_ACTIVE}": speedups[MANY_ACTIVE],
            "accepted_length": [_accepted_length(pair["paceline"].counters) for pair in pairs[ACTIVE]],
        }
    )


def _accepted_length(counters: Mapping[str, float]) -> float:
    verified = counters["selector/verifications"]
    return 1 + counters["selector/accepted_tokens"] / verified if verified else 1.0

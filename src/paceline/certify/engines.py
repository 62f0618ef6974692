"""`paceline certify`: is speculation lossless on this engine, with these flags?

    sampler       the rejection sampler of the engine, on known distributions      chi-square at every position
    engines       the user's engine with speculation and without, same prompts     exact two-sample test
    greedy        the same two in FP32 at temperature 0                            equal tokens
    learner       samples of the FP32 engine, scored by the learner                log-probabilities by class, surprise

With coupled verification one part suffices: `exact.py` compares tokens.

vLLM has two model runners with different samplers: V2 on GPUs, V1 on CPUs and for features that V2 lacks. Certify tests
the sampler of the runner that vLLM uses for the user's engine."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from paceline.certify.exact import exact_part
from paceline.certify.fp32 import learner_part
from paceline.certify.lossless import (
    DEVIATIONS,
    FALSE_POSITIVE_RATE,
    VERDICT_NUMBER,
    SamplerCell,
    examine,
    num_cells,
    padded,
    two_sample,
    verdict,
)
from paceline.certify.subject import Effort, Fault, Findings, Subject, generate
from paceline.config import Config
from paceline.context import Context, time_left
from paceline.measure import Result, environment
from paceline.rollout.arguments import engine_args, leave_sampler_stock
from paceline.rollout.internals import rejection_sampler, rejection_sampler_v2
from paceline.rollout.internals.model_runner import planned_runner
from paceline.rollout.internals.platform import on_cpu
from paceline.rollout.internals.sampler_fix import mend_sampler
from paceline.rollout.speculation import refuse_lossy
from paceline.types import Prompt, Rollout, RolloutRequest

_FEWEST_DRAFTED = 1000


def certify(
    model_path: Path,
    prompts: Sequence[Prompt],
    config: Config,
    *,
    context: Context,
    fault: Fault | None = None,
    without_shim: bool = False,
    effort: Effort | None = None,
    seed: int = 0,
) -> Result:
    """Run all parts, or with a planted `fault` the parts that it affects."""
    effort = effort or Effort()
    is_coupled = config.speculation is not None and config.speculation.verification == "coupled"
    if without_shim and is_coupled:
        raise ValueError(
            "without_shim: got True with speculation.verification 'coupled'; must be False because coupling replaces "
            "the sampler that the shim mends"
        )
    if without_shim:
        leave_sampler_stock()  # before vLLM makes its config, which loads plugins into this process
    runner = planned_runner(engine_args(model_path, config.rollout.engine, seed, config.speculation))
    if without_shim and runner == "v2":
        raise ValueError("without_shim: got True with vLLM's V2 runner; must be False because V2's sampler has no shim")
    subject = Subject(
        model_path=model_path,
        prompts=prompts,
        config=config,
        without_shim=without_shim,
        seed=seed,
        runner=runner,
        fault=fault,
    )
    refuse_lossy(_vllm_settings(subject))
    found = Findings()
    began_s = time.monotonic()
    if is_coupled:
        exact_part(found, subject, effort, context)
    else:
        _statistical_parts(found, subject, effort, context)
    if runner == "v2" and on_cpu():
        found.notes.append("V2's kernels ran on the CPU, under Triton's interpreter; a GPU runs them compiled")
    if not effort.conclusive:
        found.missing.append("--quick samples so little that only gross faults show; without it the verdict counts")
    found.add("seconds", time.monotonic() - began_s, ("<=", effort.max_seconds) if fault is None else None)
    return _result(found, subject, effort)


def _statistical_parts(found: Findings, subject: Subject, effort: Effort, context: Context) -> None:
    fault = subject.fault
    if fault is None or fault.sampler is not None:
        _sampler_part(found, subject, effort, context)
    if fault is None or fault.engine is not None:
        _engine_part(found, subject, effort, context)
    if fault is None or fault.engine is not None or fault.shifts_logp:
        learner_part(found, subject, effort, context, shift_logp=fault is not None and fault.shifts_logp)


def _vllm_settings(subject: Subject) -> Mapping[str, Any]:
    from paceline.rollout.speculation import speculative_config

    return speculative_config(subject.speculation, subject.config.rollout.engine)


# The sampler.

SAMPLERS = {"v1": rejection_sampler, "v2": rejection_sampler_v2}
"""vLLM's rejection sampler and its drafts, by model runner."""


def _sampler_part(found: Findings, subject: Subject, effort: Effort, context: Context) -> None:
    if subject.runner == "v1" and not subject.without_shim:
        mend_sampler()
    sampler = SAMPLERS[subject.runner]
    sample = sampler.rejection_sample
    if subject.fault is not None and subject.fault.sampler is not None:
        sample = subject.fault.sampler(sample)
    threads = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    cells: list[SamplerCell] = []
    expected = num_cells(effort.kinds, effort.lengths)
    context.progress(f"sampler: {expected} tests on known distributions")
    began_s = time.monotonic()
    try:
        for cell in examine(
            sample,
            sampler.draft,
            num_rows=effort.sampler_rows,
            vocabulary=effort.vocabulary,
            kinds=effort.kinds,
            lengths=effort.lengths,
            seed=subject.seed,
        ):
            if not cells or (cells[-1].drafts, cells[-1].draft_length) != (cell.drafts, cell.draft_length):
                # Tests of one kind and length share their draws.
                share = (len(cells) + num_cells((cell.drafts,), (cell.draft_length,))) / expected
                left = time_left((time.monotonic() - began_s) * (1 / share - 1))
                context.progress(f"sampler: {cell.drafts} drafts of length {cell.draft_length}, {left}")
            cells.append(cell)
    finally:
        torch.set_num_threads(threads)
    found.add("sampler_tests", len(cells))
    if len(cells) < expected:
        found.missing.append(
            f"{len(cells)} of {expected} positions of the sampler were tested; the others need more rows"
        )
    if not cells:
        return
    worst = max(cells, key=lambda cell: cell.excess)
    found.add("sampler_worst_excess", worst.excess, ("<=", DEVIATIONS))
    found.add("sampler_effect_found", max(cell.effect_found for cell in cells))
    found.details["sampler_worst"] = asdict(worst)
    found.details["sampler_cells"] = [
        asdict(cell) | {"excess": cell.excess, "effect_found": cell.effect_found} for cell in cells
    ]


# Two engines.


def _engine_part(found: Findings, subject: Subject, effort: Effort, context: Context) -> None:
    """Compare the user's engine with itself without speculation."""
    prompts = subject.prompts[: effort.num_prompts]
    tokens = min(effort.tokens, subject.config.rollout.max_tokens)
    requests = [
        RolloutRequest.of(prompt, which, index=index, max_tokens=tokens, temperature=subject.config.rollout.temperature)
        for index in range(effort.samples_per_prompt)
        for which, prompt in enumerate(prompts)
    ]
    arms: dict[str, list[Rollout]] = {}
    for name, seed in (("without", 2 * subject.seed + 1), ("with", 2 * subject.seed + 2)):
        context.progress(f"engines: {len(requests)} rollouts of up to {tokens} tokens {name} speculation")
        arms[name], _ = asyncio.run(
            generate(subject, subject.config.rollout.engine, requests, speculate=name == "with", seed=seed)
        )
    tables = [
        [
            padded([rollout.token_ids for rollout in arm if rollout.group_id.number == which], tokens)
            for which in range(len(prompts))
        ]
        for arm in arms.values()
    ]
    context.progress("engines: two-sample test")
    outcome = two_sample(*tables, seed=subject.seed)
    found.add("two_sample_p", outcome.p_value, (">=", FALSE_POSITIVE_RATE))
    found.add("total_variation", outcome.total_variation)
    found.add("total_variation_noise", outcome.noise)
    found.add("total_variation_noise_999", outcome.noise_999)
    drafted = sum(rollout.num_drafted for rollout in arms["with"])
    accepted = sum(rollout.num_accepted for rollout in arms["with"])
    verifications = sum(rollout.num_verifications for rollout in arms["with"])
    found.add("drafted_tokens", drafted)
    found.add("accepted_length", (accepted + verifications) / verifications if verifications else 0.0)
    if drafted < _FEWEST_DRAFTED:
        found.missing.append(f"{drafted} tokens were drafted; fewer than {_FEWEST_DRAFTED} say nothing")
    found.details["two_sample"] = asdict(outcome) | {"prompts": len(prompts), "tokens": tokens}


def _result(found: Findings, subject: Subject, effort: Effort) -> Result:
    fault = subject.fault
    if fault is not None:
        found.missing.append(f"{fault.name!r} is planted; without it the verdict counts")
    spread = dict.fromkeys(found.figures, 0.0)
    met = Result(name="", figures=found.figures, spread=spread, goals=found.goals, environment={})
    failed = [name for name in found.goals if not met.met(name) and name != "seconds"]
    word = verdict(failed=failed, missing=found.missing)
    found.add("verdict", VERDICT_NUMBER[word], (">=", 1.0))
    details = {
        "verdict": word,
        "failed": failed,
        "missing": found.missing,
        "notes": found.notes,
        "fault": None if fault is None else fault.name,
        "fault_about": None if fault is None else fault.about,
        "runner": subject.runner,
        "sampler": SAMPLERS[subject.runner].SAMPLER,
        "verification": subject.speculation.verification,
        "without_shim": subject.without_shim,
        "speculative_config": dict(_vllm_settings(subject)),
        "false_positive_rate": FALSE_POSITIVE_RATE,
        "effort": asdict(effort),
        **found.details,
    }
    return Result(
        name="certify",
        figures=found.figures,
        spread=dict.fromkeys(found.figures, 0.0),
        goals=found.goals,
        environment=environment(seeds=[subject.seed], config=subject.config.model_dump(mode="json")),
        details=details,
    )

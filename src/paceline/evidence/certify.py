"""`paceline certify`: is speculation lossless on this engine, with these flags?

    sampler       vLLM's rejection sampler on known distributions                  chi-square at every position
    engines       the user's engine with speculation and without, same prompts     exact two-sample test
    greedy        the same two in FP32 at temperature 0                            equal tokens
    learner       what the FP32 engine sampled, scored by the learner              log-probabilities by token class, surprise

The tests are in lossless.py; here the engines are started, one after another, and their words collected. With a planted fault only
the part runs that has to find it.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import torch

from paceline.config import Config, EngineConfig, LearnedDrafter, LearnerConfig, ObjectiveConfig, SpeculationConfig
from paceline.evidence.lossless import (
    CLASSES,
    DEVIATIONS,
    FALSE_POSITIVE_RATE,
    LOGP_FAULT,
    NUM_CELLS,
    SURPRISE_LIMIT,
    VERDICT_NUMBER,
    Cell,
    SamplerFault,
    TokenClass,
    examine,
    plant,
    surprise,
    token_classes,
    two_sample,
    verdict,
)
from paceline.evidence.measure import Goal, Result, environment
from paceline.policy.learner import FsdpLearner
from paceline.policy.objective import Mismatch, mismatch
from paceline.rollout import compat, sampler
from paceline.rollout.engine import VllmEngine
from paceline.types import Prompt, Rollout, RolloutRequest, Sample, Tokens

_FEWEST_DRAFTED = 1000
_LOGP_LIMIT = 1e-4
_TIE = 1e-4
_NOT_A_LOGP = -1e6
_GREEDY = 1_000_000  # added to the group of a greedy request


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is sampled; the default takes under five minutes on two cores with the arena's small policy."""

    sampler_rows: int = 20_000
    num_prompts: int = 12
    samples_per_prompt: int = 192
    tokens: int = 32
    """Length up to which two engines are compared."""
    long_rollouts: int = 48
    long_tokens: int = 128
    """Greedy rollouts and those that the learner scores."""


@dataclass(slots=True, kw_only=True)
class Findings:
    """What the parts have found so far."""

    figures: dict[str, float] = field(default_factory=dict)
    goals: dict[str, Goal] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    """Why the verdict cannot be LOSSLESS even if every test is passed."""
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, value: float, goal: Goal | None = None) -> None:
        self.figures[name] = float(value)
        if goal is not None:
            self.goals[name] = goal


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Whose losslessness is in question."""

    model_path: Path
    prompts: Sequence[Prompt]
    config: Config
    without_shim: bool
    seed: int

    @property
    def speculation(self) -> SpeculationConfig:
        if self.config.speculation is None:
            raise ValueError("speculation: got None; must be set because without speculation there is nothing to certify")
        return self.config.speculation


def certify(
    model_path: Path,
    prompts: Sequence[Prompt],
    config: Config,
    *,
    progress: Callable[[str], None],
    fault: str | None = None,
    without_shim: bool = False,
    effort: Effort | None = None,
    seed: int = 0,
) -> Result:
    """All parts, or with a planted `fault` (`lossless.SAMPLER_FAULTS`, `lossless.LOGP_FAULT`) the part that it is planted in."""
    effort = effort or Effort()
    if fault is not None and fault not in (*get_args(SamplerFault), LOGP_FAULT):
        raise ValueError(f"fault: got {fault!r}; must be one of {', '.join((*get_args(SamplerFault), LOGP_FAULT))}")
    subject = Subject(model_path=model_path, prompts=prompts, config=config, without_shim=without_shim, seed=seed)
    sampler.refuse_lossy(_vllm_settings(subject))
    found = Findings()
    began_s = time.monotonic()
    if fault != LOGP_FAULT:
        _sampler_part(found, subject, cast("SamplerFault | None", fault), effort, progress)
    if fault is None:
        _engine_part(found, subject, effort, progress)
    if fault is None or fault == LOGP_FAULT:
        _learner_part(found, subject, effort, progress, shift_logp=fault == LOGP_FAULT)
    found.add("seconds", time.monotonic() - began_s, ("<=", 300.0) if fault is None else None)
    return _result(found, subject, fault, effort)


def _vllm_settings(subject: Subject) -> Mapping[str, Any]:
    from paceline.rollout.speculation import speculative_config

    return speculative_config(subject.speculation, subject.config.rollout.engine)


# The sampler.


def _sampler_part(
    found: Findings, subject: Subject, fault: SamplerFault | None, effort: Effort, progress: Callable[[str], None]
) -> None:
    if not subject.without_shim:
        compat.mend_sampler()
    sample = sampler.rejection_sample if fault is None else plant(sampler.rejection_sample, fault)
    threads = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    cells: list[Cell] = []
    try:
        for cell in examine(sample, sampler.draft, num_rows=effort.sampler_rows, seed=subject.seed):
            if not cells or (cells[-1].drafts, cells[-1].draft_length) != (cell.drafts, cell.draft_length):
                progress(f"sampler: {cell.drafts} drafts of length {cell.draft_length}")
            cells.append(cell)
    finally:
        torch.set_num_threads(threads)
    worst = max(cells, key=lambda cell: cell.excess)
    found.add("sampler_worst_excess", worst.excess, ("<=", DEVIATIONS))
    found.add("sampler_tests", len(cells))
    if len(cells) < NUM_CELLS:
        found.missing.append(f"{len(cells)} of {NUM_CELLS} positions of the sampler were tested; the others need more rows")
    found.details["sampler_worst"] = asdict(worst)
    found.details["sampler_cells"] = [asdict(cell) | {"excess": cell.excess} for cell in cells]


# Two engines.


def _engine_part(found: Findings, subject: Subject, effort: Effort, progress: Callable[[str], None]) -> None:
    """The user's engine against itself without speculation."""
    prompts = subject.prompts[: effort.num_prompts]
    tokens = min(effort.tokens, subject.config.rollout.max_tokens)
    requests = [
        RolloutRequest(
            group_id=which,
            index=index,
            prompt_ids=prompt.token_ids,
            max_tokens=tokens,
            temperature=subject.config.rollout.temperature,
        )
        for index in range(effort.samples_per_prompt)
        for which, prompt in enumerate(prompts)
    ]
    arms: dict[str, list[Rollout]] = {}
    for name, seed in (("without", 2 * subject.seed + 1), ("with", 2 * subject.seed + 2)):
        progress(f"engines: {len(requests)} rollouts of up to {tokens} tokens {name} speculation")
        arms[name], _ = asyncio.run(
            _generate(subject, subject.config.rollout.engine, requests, speculate=name == "with", seed=seed)
        )
    tables = [
        [_padded([rollout for rollout in arm if rollout.group_id == which], tokens) for which in range(len(prompts))]
        for arm in arms.values()
    ]
    progress("engines: two-sample test")
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


async def _generate(
    subject: Subject, config: EngineConfig, requests: Sequence[RolloutRequest], *, speculate: bool, seed: int
) -> tuple[list[Rollout], dict[tuple[int, int], list[tuple[int, int]]]]:
    """Rollouts in order of their key; and of each, drafts and emitted tokens step by step."""
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory, "steps.jsonl")
        engine = await VllmEngine.start(
            "with" if speculate else "without",
            subject.model_path,
            config,
            seed=seed,
            cpus=sorted(os.sched_getaffinity(0)),
            speculation=_speculation(subject, config) if speculate else None,
            trace=trace if speculate else None,
            stock_sampler=subject.without_shim and speculate,
        )
        try:
            rollouts: list[Rollout] = []
            # Greedy requests come last: a drafter that learns from rollouts then has something to say about them.
            for part in ([r for r in requests if r.temperature], [r for r in requests if not r.temperature]):
                expected = len(rollouts) + len(part)
                await engine.submit(part)
                while len(rollouts) < expected:
                    rollouts += await engine.collect()
        finally:
            await engine.close()
        steps = read_trace(trace) if trace.is_file() else {}
    return sorted(rollouts, key=lambda rollout: rollout.key), steps


def _speculation(subject: Subject, config: EngineConfig) -> SpeculationConfig:
    speculation = subject.speculation
    if config.dtype == "bfloat16" or not isinstance(speculation.drafter, LearnedDrafter):
        return speculation
    drafter = speculation.drafter.model_copy(update={"weights": "full"})  # vLLM quantises from BF16 only
    return speculation.model_copy(update={"drafter": drafter})


def read_trace(trace: Path) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """(draft tokens, emitted tokens) of each step of each rollout, from the scheduler's trace."""
    steps: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for line in trace.read_text(encoding="utf-8").splitlines():
        for request_id, num_drafts, num_emitted in json.loads(line)["requests"]:
            group_id, index = request_id.split("-")[0].split(":")  # vLLM adds something random to our "group:index"
            steps[int(group_id), int(index)].append((num_drafts, num_emitted))
    return steps


def _padded(rollouts: Sequence[Rollout], tokens: int) -> Tokens:
    ids_NT = np.full((len(rollouts), tokens), -1, np.int32)
    for row_T, rollout in zip(ids_NT, rollouts, strict=True):
        row_T[: len(rollout.token_ids)] = rollout.token_ids
    return ids_NT


# FP32: greedy equality, and what the learner says.


def _learner_part(found: Findings, subject: Subject, effort: Effort, progress: Callable[[str], None], *, shift_logp: bool) -> None:
    # Also without FP8, whose gap to the learner is not speculation's: the two engines above have it, both alike.
    config = subject.config.rollout.engine.in_full_precision.model_copy(update={"dtype": "float32"})
    temperature = subject.config.rollout.temperature
    tokens = min(effort.long_tokens, subject.config.rollout.max_tokens)
    prompts = [subject.prompts[i % len(subject.prompts)] for i in range(effort.long_rollouts)]
    sampled, greedy = (
        [
            RolloutRequest(group_id=base + i, index=0, prompt_ids=prompt.token_ids, max_tokens=tokens, temperature=heat)
            for i, prompt in enumerate(prompts)
        ]
        for base, heat in ((0, temperature), (_GREEDY, 0.0))
    )
    progress(f"fp32: {len(sampled)} sampled and {len(greedy)} greedy rollouts with speculation")
    speaking, steps = asyncio.run(_generate(subject, config, [*sampled, *greedy], speculate=True, seed=2 * subject.seed + 3))
    rollouts = [rollout for rollout in speaking if rollout.group_id < _GREEDY]
    learner = FsdpLearner(
        subject.model_path, LearnerConfig(dtype="float32", microbatch_tokens=4096), ObjectiveConfig(), temperature=temperature
    )
    try:
        progress(f"fp32: scoring {sum(len(rollout.token_ids) for rollout in rollouts)} tokens with the learner")
        _score(found, learner, rollouts, steps, shift_logp=shift_logp)
        if not shift_logp:
            progress(f"fp32: {len(greedy)} greedy rollouts without speculation")
            plain, _ = asyncio.run(_generate(subject, config, greedy, speculate=False, seed=2 * subject.seed + 3))
            _greedy(found, learner, [r for r in speaking if r.group_id >= _GREEDY], plain, temperature)
    finally:
        learner.close()


def _score(
    found: Findings,
    learner: FsdpLearner,
    rollouts: Sequence[Rollout],
    steps: Mapping[tuple[int, int], Sequence[tuple[int, int]]],
    *,
    shift_logp: bool,
) -> None:
    scores = learner.logp([_sample(rollout) for rollout in rollouts])
    gaps: dict[TokenClass, Mismatch] = dict.fromkeys(CLASSES, Mismatch())
    for rollout, logp_T in zip(rollouts, scores.logp, strict=True):
        # A broken sampler reports NaN, which compares as no gap at all.
        engine_logp_T = np.nan_to_num(rollout.logp, nan=_NOT_A_LOGP, neginf=_NOT_A_LOGP)
        if shift_logp:
            engine_logp_T = np.roll(engine_logp_T, 1)
        class_T = np.array(token_classes(steps[rollout.key], len(rollout.token_ids)))
        for name in CLASSES:
            gaps[name] = gaps[name].merge(mismatch(engine_logp_T[class_T == name], logp_T[class_T == name]))
    for name in ("accepted", "recovered", "bonus"):
        if gaps[name].count:
            found.add(f"logp_max_abs_{name}", gaps[name].max_abs, ("<=", _LOGP_LIMIT))
        elif name == "bonus":
            found.notes.append("no draft was accepted whole, so the log-probabilities of bonus tokens were not seen")
        else:
            found.missing.append(f"no {name} token was seen")
    found.add("surprise_z", abs(surprise(scores.logp, scores.entropy)), ("<=", SURPRISE_LIMIT))
    found.details["logp_by_class"] = {name: asdict(gap) for name, gap in gaps.items()}


def _greedy(found: Findings, learner: FsdpLearner, spoken: Sequence[Rollout], plain: Sequence[Rollout], temperature: float) -> None:
    """Where greedy rollouts part, the learner must see a tie between the two tokens: then rounding decides, not speculation."""
    partings: list[dict[str, Any]] = []
    for mine, theirs in zip(spoken, plain, strict=True):
        position = first_difference(mine.token_ids, theirs.token_ids)
        if position is None:
            continue
        either = [_sample(rollout, position + 1) for rollout in (mine, theirs)]
        first, second = (float(logp_T[-1]) for logp_T in learner.logp(either).logp)
        gap = abs(first - second) * temperature
        partings.append({"rollout": mine.group_id - _GREEDY, "position": position, "logit_gap": gap})
    ties = sum(parting["logit_gap"] < _TIE for parting in partings)
    found.add("greedy_differences", len(partings) - ties, ("<=", 0.0))
    found.add("greedy_ties", ties)
    found.add("greedy_tokens", sum(len(rollout.token_ids) for rollout in plain))
    found.details["greedy_partings"] = partings


def _sample(rollout: Rollout, num_tokens: int | None = None) -> Sample:
    """For scoring only: the learner takes no NaN, so it is not given the engine's log-probabilities."""
    ids_T = rollout.token_ids[:num_tokens]
    return Sample(
        token_ids=np.concatenate([rollout.prompt_ids, ids_T]),
        num_prompt_tokens=len(rollout.prompt_ids),
        logp=np.zeros(len(ids_T), np.float32),
        advantage=0.0,
        policy_version=0,
    )


def first_difference(mine_T: Tokens, theirs_T: Tokens) -> int | None:
    """First position at which two rollouts differ; None when they are the same."""
    common = min(len(mine_T), len(theirs_T))
    differ = np.flatnonzero(mine_T[:common] != theirs_T[:common])
    if len(differ):
        return int(differ[0])
    assert len(mine_T) == len(theirs_T), "greedy rollouts end at the same token or at the same length"
    return None


def _result(found: Findings, subject: Subject, fault: str | None, effort: Effort) -> Result:
    if fault is not None:
        found.missing.append(f"only the part in which {fault!r} is planted was run")
    met = Result(name="", figures=found.figures, spread=dict.fromkeys(found.figures, 0.0), goals=found.goals, environment={})
    failed = [name for name in found.goals if not met.met(name) and name != "seconds"]
    word = verdict(failed=failed, missing=found.missing)
    found.add("verdict", VERDICT_NUMBER[word], (">=", 1.0))
    details = {
        "verdict": word,
        "failed": failed,
        "missing": found.missing,
        "notes": found.notes,
        "fault": fault,
        "sampler": "stock" if subject.without_shim else "mended where it is wrong",
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

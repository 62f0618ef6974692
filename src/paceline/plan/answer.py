"""`paceline plan`: the gain of speculation, drafter training, FP8 and asynchrony for a model, a cluster and a batch.

question ──▶ divide the GPUs ──▶ simulate plain, each lever alone, all together ──▶ answer: table, limits, range, config
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.context import Context
from paceline.measure import Result, environment
from paceline.plan.engine_model import EngineModel, StepModel
from paceline.plan.hardware import Precision
from paceline.plan.question import AT, Layout, Question, best_layout, engine_model, scenario
from paceline.plan.run_model import STAGES, Times, simulate

ROUND_TOKENS = 1_000_000
"""Tokens of one drafter training round for a policy with billions of parameters."""
HELDOUT_P90 = 0.20
"""Error of nine in ten held-out published figures (benchmarks/results/plan.json): the range of every answer."""
LEVERS = ("plain", "speculation", "idle-worker drafting", "FP8", "asynchrony", "together")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    layout: Layout
    times: Times


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    question: Question
    arms: Mapping[str, Arm]
    sensitivity: Mapping[str, float]
    """Speed-up of speculation with one input changed."""
    limits: tuple[str, ...]
    warnings: tuple[str, ...]

    def speedup(self, lever: str) -> float:
        return self.arms["plain"].times.step_s / self.arms[lever].times.step_s

    def range_of(self, lever: str) -> tuple[float, float]:
        """Return the range of a lever's speed-up that held nine of ten held-out published cells."""
        return self.speedup(lever) / (1 + HELDOUT_P90), self.speedup(lever) * (1 + HELDOUT_P90)


def simulate_arm(question: Question, lever: str) -> Arm:
    """Simulate one lever. Training is not simulated: its arm has the trained drafter from the start."""
    together = lever == "together"
    precision: Precision = "fp8" if lever == "FP8" or (together and question.has_fp8) else "bf16"
    max_age = question.max_age if together or lever == "asynchrony" else 0
    layout = best_layout(question, gain=0.6 * question.accepted_length if together else 1.0, max_age=max_age)
    alpha = None
    if lever == "idle-worker drafting" or (together and question.has_training):
        alpha = question.trained_length
    elif together or lever == "speculation":
        alpha = question.accepted_length
    asked = scenario(question, layout, alpha=alpha, precision=precision, max_age=max_age)
    return Arm(layout=layout, times=simulate(asked))


def answer(question: Question, *, context: Context, sensitive: bool = True) -> Answer:
    arms: dict[str, Arm] = {}
    possible = {"FP8": question.has_fp8, "idle-worker drafting": question.has_training}
    for lever in LEVERS:
        if not possible.get(lever, True):
            continue
        arms[lever] = simulate_arm(question, lever)
        context.progress(f"{lever}: {arms[lever].times.step_s:.1f} s a step")
    sensitivity = _sensitivity(question, arms, context) if sensitive else {}
    return Answer(
        question=question,
        arms=arms,
        sensitivity=sensitivity,
        limits=_limits(question, arms),
        warnings=_warnings(question, arms),
    )


def _sensitivity(question: Question, arms: Mapping[str, Arm], context: Context) -> dict[str, float]:
    found: dict[str, float] = {}
    plain_s = arms["plain"].times.step_s
    if question.costs is None:
        for change in (-0.2, 0.2):
            length = min(1 + (question.accepted_length - 1) * (1 + change), AT + 0.98)
            asked = replace(question, accepted_length=length, trained_length=max(length, question.trained_length))
            found[f"accepted length {length:.2f}"] = plain_s / simulate_arm(asked, "speculation").times.step_s
    for factor in (0.5, 2.0):
        asked = replace(question, lengths=question.lengths.scaled(factor))
        plain_s, fast_s = (simulate_arm(asked, lever).times.step_s for lever in ("plain", "speculation"))
        found[f"responses {factor:g} times as long"] = plain_s / fast_s
    context.progress("sensitivity: done")
    return found


def _limits(question: Question, arms: Mapping[str, Arm]) -> tuple[str, ...]:
    plain = arms["plain"]
    times = plain.times
    share = times.generation_s / times.step_s
    lines = [
        f"generation is {share:.0%} of a plain step: faster rollouts alone gain at most "
        f"{1 / max(1 - share, 1e-3):.1f} times",
        f"engines are idle {times.idle_share:.0%} of the time, waiting for the longest responses, the learner and "
        "the sync",
    ]
    if question.has_training:
        tokens = _trainable_tokens(question, arms["idle-worker drafting"])
        lines.append(
            f"idle engines can train a drafter on {tokens:,.0f} tokens a step; a training round takes {ROUND_TOKENS:,}"
        )
    for costs in (question.costs, question.fp8_costs):
        if costs is not None:
            lines.append(
                f"step times were measured on {costs.measured_on or 'an engine that the cost file does not name'}"
            )
    model = engine_model(question, plain.layout.tensor_parallel, alpha=None)
    if isinstance(model, EngineModel):
        for size, what in ((_first_batch(question, plain), "at first"), (1, "in the tail")):
            parts = model.parts_s(size, 0, question.mean_context if size > 1 else question.lengths.maximum)
            most = max(parts, key=parts.__getitem__)
            lines.append(
                f"{what} ({size} requests an engine) {parts[most] / sum(parts.values()):.0%} of an engine's step is "
                f"{most}"
            )
        if times.num_preempted:
            lines.append(
                f"the KV cache overflows: {times.num_preempted} preemptions; FP8 or more GPUs for each engine make room"
            )
    return tuple(lines)


def _first_batch(question: Question, arm: Arm) -> int:
    """Return the requests of an engine at the start of a step."""
    return min(-(-question.num_rollouts // arm.layout.num_engines), question.max_num_seqs)


def _trainable_tokens(question: Question, arm: Arm) -> float:
    """Return the tokens that a drafter could be trained on in the idle time of one step."""
    size = arm.layout.tensor_parallel
    model = engine_model(question, size, alpha=question.trained_length)
    assert isinstance(model, EngineModel), "drafter training is planned by roofline only"
    flops = question.gpu.flops("bf16") * question.constants.learner_efficiency * size
    idle_s = arm.times.idle_share * arm.times.step_s * arm.layout.num_engines
    return idle_s * flops / (6 * model.draft_params)


def step_gain(model: StepModel, batch: int, context: float) -> tuple[int, float]:
    """Return the best draft length for a constant batch, and its speed-up."""
    plain_s = model.step_s(batch, 0, context)
    gains = {k: draft.alpha * plain_s / model.step_s(batch, k, context) for k, draft in model.options.items()}
    best = max(gains, key=gains.__getitem__)
    return best, gains[best]


def _warnings(question: Question, arms: Mapping[str, Arm]) -> tuple[str, ...]:
    plain, fast = arms["plain"], arms["speculation"]
    batch, context = _first_batch(question, plain), question.mean_context
    model = engine_model(question, plain.layout.tensor_parallel, alpha=question.accepted_length)
    lines = []
    gain = plain.times.step_s / fast.times.step_s
    k, at_first = step_gain(model, batch, context)
    if gain < 1.05:
        faster = plain.times.generation_s / fast.times.generation_s
        busy = (
            f"{batch} requests keep the compute of a {question.gpu.name} busy, so that every token to verify costs time"
        )
        small = f"generation is only {plain.times.generation_s / plain.times.step_s:.0%} of a step"
        lines.append(
            f"speculation will not pay here: {gain:.2f} times plain, {faster:.2f} in generation. "
            f"{busy if faster < 1.1 else small}; fewer rollouts for each engine, or more acceptance, would change that"
        )
    elif k == 0 or at_first < 1.05:
        pays = next((size for size in range(batch, 0, -1) if step_gain(model, size, context)[1] >= 1.05), 0)
        lines.append(
            f"with all {batch} requests of an engine active drafts do not pay; they do from {pays} requests down, in "
            "the tail. A fixed draft length would lose at first: leave the choice to the selector"
        )
    if (
        question.lengths.maximum > 0
        and plain.times.generation_s > 0.9 * plain.times.step_s
        and plain.times.idle_share > 0.5
    ):
        lines.append(
            "a few long responses delay the whole step: more GPUs will not help, asynchrony and speculation will"
        )
    return tuple(lines)


def result(found: Answer, *, details: Mapping[str, Any] | None = None) -> Result:
    """Return the answer as a `Result`; the spread is the range of nine in ten held-out cells."""
    figures: dict[str, float] = {}
    spread: dict[str, float] = {}
    for lever, arm in found.arms.items():
        word = lever.replace(" ", "_").replace("-", "_").lower()
        figures[f"step_s_{word}"], spread[f"step_s_{word}"] = arm.times.step_s, 0.0
        if lever != "plain":
            low, high = found.range_of(lever)
            figures[f"speedup_{word}"], spread[f"speedup_{word}"] = found.speedup(lever), high - low
    question = found.question
    config = {
        "model": question.shape.name,
        "gpus": f"{question.num_gpus}x{question.gpu.name}",
        "batch": question.num_rollouts,
        "lengths": question.lengths.source,
        "accepted_length": [question.accepted_length, question.trained_length],
    }
    arms = {
        lever: {
            "layout": asdict(arm.layout),
            "stages_s": dict(arm.times.stages_s),
            "accepted_length": arm.times.accepted_length,
        }
        for lever, arm in found.arms.items()
    }
    return Result(
        name="plan",
        figures=figures,
        spread=spread,
        goals={},
        environment=environment(config=config),
        details={
            "arms": arms,
            "sensitivity": dict(found.sensitivity),
            "limits": found.limits,
            "warnings": found.warnings,
            "constants": asdict(question.constants),
            **(details or {}),
        },
    )


def text(found: Answer) -> str:
    question = found.question
    lines = [
        f"{question.shape.name} on {question.num_gpus} {question.gpu.name}: {question.num_rollouts} rollouts a step, "
        f"mean {question.lengths.mean:.0f} tokens, longest {question.lengths.maximum} ({question.lengths.source})",
        "",
        f"{'':22}{'step':>8}"
        + "".join(f"{stage:>12}" for stage in STAGES if stage != "prepare")
        + "   speed-up (range)      layout",
    ]
    for lever, arm in found.arms.items():
        stages = "".join(f"{arm.times.stages_s[stage]:11.1f}s" for stage in STAGES if stage != "prepare")
        gain = ""
        if lever != "plain":
            low, high = found.range_of(lever)
            gain = f"{found.speedup(lever):.2f} ({low:.2f} to {high:.2f})"
        layout = f"{arm.layout.num_engines} engines x {arm.layout.tensor_parallel}, learner {arm.layout.learner_gpus}"
        lines.append(f"{lever:22}{arm.times.step_s:7.1f}s{stages}   {gain:22}{layout}")
    lines += ["", "what limits it"] + [f"  {line}" for line in found.limits]
    if found.sensitivity:
        lines += ["", "speculation, if"] + [
            f"  {name:32}{gain:.2f} times plain" for name, gain in found.sensitivity.items()
        ]
    lines += [f"\nWARNING: {line}" for line in found.warnings]
    return "\n".join(lines)

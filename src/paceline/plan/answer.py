"""`paceline plan`: what speculation, drafter training, FP8 and asynchrony gain for a model, a cluster and a batch.

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
from paceline.plan.idle_training import idle_training, leased_share
from paceline.plan.published import HELDOUT_P90
from paceline.plan.question import (
    AT,
    Layout,
    Question,
    best_layout,
    engine_model,
    scenario,
)
from paceline.plan.run_model import STAGES, Times, simulate

MOST_LEASED = 256
"""Most engines whose leases are simulated; the cost of that grows with the square of their number."""
LEVERS = ("plain", "speculation", "idle-worker drafting", "FP8", "asynchrony", "together")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One simulated run."""

    layout: Layout
    times: Times


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a plan has found."""

    question: Question
    arms: Mapping[str, Arm]
    sensitivity: Mapping[str, float]
    """Speed-up of speculation if one thing were otherwise."""
    limits: tuple[str, ...]
    warnings: tuple[str, ...]

    def speedup(self, lever: str) -> float:
        return self.arms["plain"].times.step_s / self.arms[lever].times.step_s

    def generation_speedup(self, lever: str) -> float:
        return self.arms["plain"].times.generation_s / self.arms[lever].times.generation_s

    def range_of(self, speedup: float) -> tuple[float, float]:
        """Nine of ten held-out published cells were nearer than this."""
        return speedup / (1 + HELDOUT_P90), speedup * (1 + HELDOUT_P90)


def simulate_arm(question: Question, lever: str, *, leases: bool = True) -> Arm:
    """Without leases, and in a fleet too large to simulate them, the drafter is as good as a trained one from the
    start."""
    together = lever == "together"
    precision: Precision = "fp8" if lever == "FP8" or (together and question.has_fp8) else "bf16"
    max_age = question.max_age if together or lever == "asynchrony" else 0
    speculates = together or lever in ("speculation", "idle-worker drafting")
    layout = best_layout(question, gain=0.6 * question.accepted_length if together else 1.0, max_age=max_age)
    trains = question.has_training and (together or lever == "idle-worker drafting")
    leased = trains and leases and layout.num_engines <= MOST_LEASED
    length = question.trained_length if trains and not leased else question.accepted_length
    arm = scenario(question, layout, alpha=length if speculates else None, precision=precision, max_age=max_age)
    if not leased:
        return Arm(layout=layout, times=simulate(arm))
    trained = engine_model(question, layout.tensor_parallel, alpha=question.trained_length, precision=precision)
    rate = question.gpu.flops("bf16") * question.constants.learner_efficiency * layout.tensor_parallel
    training = idle_training(
        trained=trained,
        accepted_length=(question.accepted_length, question.trained_length),
        tokens_per_s=rate / (6 * draft_params(arm.model)),
    )
    # Trained in the first step, judged in the second, published after it.
    return Arm(layout=layout, times=simulate(replace(arm, warmup=2), training=training))


def draft_params(model: StepModel) -> float:
    return max(model.draft_params, 1e8) if isinstance(model, EngineModel) else 1e8


def levers(question: Question) -> list[str]:
    absent = {"FP8"} if not question.has_fp8 else set()
    absent |= {"idle-worker drafting"} if not question.has_training else set()
    return [lever for lever in LEVERS if lever not in absent]


def answer(question: Question, *, context: Context, sensitive: bool = True) -> Answer:
    arms: dict[str, Arm] = {}
    for lever in levers(question):
        arms[lever] = simulate_arm(question, lever)
        context.progress(f"{lever}: {arms[lever].times.step_s:.1f} s a step")
    plain = arms["plain"]
    sensitivity = _sensitivity(question, arms, context) if sensitive else {}
    return Answer(
        question=question,
        arms=arms,
        sensitivity=sensitivity,
        limits=_limits(question, plain),
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
        arm = simulate_arm(asked, "plain")
        found[f"responses {factor:g} times as long"] = (
            arm.times.step_s / simulate_arm(asked, "speculation").times.step_s
        )
    context.progress("sensitivity: done")
    return found


def _limits(question: Question, plain: Arm) -> tuple[str, ...]:
    times = plain.times
    share = times.generation_s / times.step_s
    lines = [
        f"generation is {share:.0%} of a plain step: faster rollouts alone gain at most "
        f"{1 / max(1 - share, 1e-3):.1f} times",
        f"engines are idle {times.idle_share:.0%} of the time, waiting for the longest responses, the learner and "
        "the sync",
    ]
    for costs in (question.costs, question.fp8_costs):
        if costs is not None:
            lines.append(
                f"step times were measured on {costs.measured_on or 'an engine that the cost file does not name'}"
            )
    batch = min(-(-question.num_rollouts // plain.layout.num_engines), question.max_num_seqs)
    model = engine_model(question, plain.layout.tensor_parallel, alpha=None)
    if isinstance(model, EngineModel):
        context = question.prompt_tokens + question.lengths.mean / 2
        for size, what in ((batch, "at first"), (1, "in the tail")):
            parts = model.parts_s(size, 0, context if size > 1 else question.lengths.maximum)
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


def step_gain(model: StepModel, batch: int, context: float) -> tuple[int, float]:
    """The best draft length for a batch that stays as it is, and its speed-up."""
    plain_s = model.step_s(batch, 0, context)
    gains = {k: draft.alpha * plain_s / model.step_s(batch, k, context) for k, draft in model.options.items()}
    best = max(gains, key=gains.__getitem__)
    return best, gains[best]


def _warnings(question: Question, arms: Mapping[str, Arm]) -> tuple[str, ...]:
    plain, fast = arms["plain"], arms["speculation"]
    batch = min(-(-question.num_rollouts // plain.layout.num_engines), question.max_num_seqs)
    context = question.prompt_tokens + question.lengths.mean / 2
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
            f"with all {batch} requests of an engine active drafts do not pay; they do from {pays} requests down, "
            "in the tail. "
            "A fixed draft length would lose at first: leave the choice to the selector"
        )
    if (
        question.lengths.maximum > 0
        and plain.times.generation_s > 0.9 * plain.times.step_s
        and plain.times.idle_share > 0.5
    ):
        lines.append("a few long responses hold everybody up: more GPUs will not help, asynchrony and speculation will")
    return tuple(lines)


def result(found: Answer, *, details: Mapping[str, Any] | None = None) -> Result:
    """The answer in the contract of every measurement; the spread is the range of nine in ten held-out cells."""
    figures: dict[str, float] = {}
    spread: dict[str, float] = {}
    for lever, arm in found.arms.items():
        word = lever.replace(" ", "_").replace("-", "_").lower()
        figures[f"step_s_{word}"], spread[f"step_s_{word}"] = arm.times.step_s, 0.0
        if lever != "plain":
            speedup = found.speedup(lever)
            low, high = found.range_of(speedup)
            figures[f"speedup_{word}"], spread[f"speedup_{word}"] = speedup, high - low
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
            "idle_time_lent": leased_share(found.arms["together"].times.drafting),
            **(details or {}),
        },
    )


def text(found: Answer) -> str:
    """The answer as a person reads it."""
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
            low, high = found.range_of(found.speedup(lever))
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

"""`paceline plan`: what speculation, idle-worker drafting, FP8 and asynchrony gain for a model, a cluster, a batch and lengths.

    question ──▶ share the GPUs out ──▶ simulate plain, each lever alone, all together ──▶ answer: table, limits, range, config

Engines and learner have GPUs of their own, as in `paceline train`. A synchronous run lets one group wait for the other; with a lag
both work at once, so each arm gets the division of the GPUs that suits it best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.config import MeasuredSelector
from paceline.evidence.engine_model import PLAIN, Constants, DrafterKind, EngineModel, MeasuredModel, StepModel, drafts
from paceline.evidence.hardware import Gpu, ModelShape, Precision
from paceline.evidence.lending import coaching, leased_share
from paceline.evidence.lengths import Lengths
from paceline.evidence.measure import Result, environment
from paceline.evidence.published import HELDOUT_P90
from paceline.evidence.run_model import STAGES, Scenario, Times, simulate
from paceline.strategy.cost import Costs

FROZEN_LENGTH, TRAINED_LENGTH, NGRAM_LENGTH = 2.64, 2.80, 2.26
"""Accepted length with k = 3, means of RL-Zero and RL-Think in arXiv 2604.26779: EAGLE-3 from elsewhere, frozen (2.88 and 2.40) and
trained along (3.04 and 2.55); n-grams (2.47 and 2.05). A drafter trained for the policy's own domain reached 3.32 and 2.77."""
AT = 3
"""Draft length at which accepted lengths are told."""
LONGEST = 7
SYNC_GB_S = 20.0
"""Of one GPU's share of the weights between nodes: 400 Gb/s a GPU, of which broadcasts reach less than half."""
LEARNER_BYTES = 18.0
"""For each weight of the policy: FP32 master, two moments and gradient, BF16 copy."""
MOST_LEASED = 256
"""Engines; what leases cost to simulate grows with the square of their number."""
LEVERS = ("plain", "speculation", "idle-worker drafting", "FP8", "asynchrony", "together")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    shape: ModelShape
    gpu: Gpu
    num_gpus: int
    num_rollouts: int
    lengths: Lengths
    group_size: int = 16
    prompt_tokens: int = 256
    drafter: DrafterKind = "eagle3"
    accepted_length: float = FROZEN_LENGTH
    trained_length: float = TRAINED_LENGTH
    tensor_parallel: int | None = None
    learner_gpus: int | None = None
    max_num_seqs: int = 256
    lag: int = 1
    """Of the asynchronous arms."""
    costs: Costs | None = None
    """Measured step times of one engine, in place of the roofline."""
    fp8_costs: Costs | None = None
    """The same in FP8, which is left out if only BF16 was measured."""
    constants: Constants = Constants()  # noqa: RUF009  frozen

    def __post_init__(self) -> None:
        if self.num_rollouts < self.group_size or self.num_rollouts % self.group_size:
            raise ValueError(
                f"batch: got {self.num_rollouts} rollouts a step; must be a multiple of --group-size {self.group_size}"
            )
        if not self.accepted_length <= self.trained_length <= AT + 1:
            raise ValueError(
                f"accepted length: got {self.accepted_length} frozen and {self.trained_length} trained; must be at most {AT + 1} "
                f"(drafts of {AT} and the token that comes free), and trained not below frozen"
            )

    @property
    def has_training(self) -> bool:
        """Whether there is a drafter to train, and a model of what it then costs."""
        return self.costs is None and self.drafter in ("eagle3", "dflash")

    @property
    def has_fp8(self) -> bool:
        return self.fp8_costs is not None if self.costs is not None else self.gpu.fp8_tflops > self.gpu.bf16_tflops


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Who has how many GPUs."""

    tensor_parallel: int
    num_engines: int
    learner_gpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    layout: Layout
    times: Times


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
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


def engine_model(question: Question, tensor_parallel: int, *, alpha: float | None, precision: Precision = "bf16") -> StepModel:
    """`alpha` None does not speculate."""
    costs = question.fp8_costs if precision == "fp8" else question.costs
    if costs is not None:
        measured = MeasuredModel.of(costs, longest=LONGEST)
        return measured if alpha is not None else replace(measured, options={0: PLAIN})
    kind = question.drafter
    return EngineModel(
        gpu=question.gpu,
        shape=question.shape,
        tensor_parallel=tensor_parallel,
        weights=precision,
        kv_cache=precision,
        drafter=None if alpha is None else kind,
        options={0: PLAIN} if alpha is None else drafts(kind, alpha=alpha, at=AT, longest=LONGEST),
        constants=question.constants,
    )


# ── sharing the GPUs out


def tensor_parallel(question: Question) -> int:
    """GPUs of one engine: the fewest that hold the policy and the contexts of 16 usual requests and of the longest one."""
    if question.tensor_parallel is not None:
        return question.tensor_parallel
    wanted = max(16 * (question.prompt_tokens + question.lengths.mean / 2), question.prompt_tokens + question.lengths.maximum)
    size, error = 1, None
    while size <= min(64, question.num_gpus):
        try:
            model = engine_model(question, size, alpha=question.accepted_length)
        except ValueError as why:
            error = why
        else:
            error = None
            if model.capacity_tokens >= wanted:
                return size
        size *= 2
    raise error or ValueError(
        f"gpus: got {question.num_gpus} {question.gpu.name}; must be more, because one engine needs room for {wanted:.0f} tokens"
    )


def layouts(question: Question) -> list[Layout]:
    """Divisions of the GPUs that fit: the learner gets as many as hold its state, or more."""
    size = tensor_parallel(question)
    need = LEARNER_BYTES * question.shape.total_params / (0.75 * question.gpu.memory_gb * 1e9)
    least = question.learner_gpus or 2 ** max(math.ceil(math.log2(max(need, 1.0))), 0)
    found: list[Layout] = []
    learner = least
    while learner + size <= question.num_gpus:
        found.append(Layout(tensor_parallel=size, num_engines=(question.num_gpus - learner) // size, learner_gpus=learner))
        if question.learner_gpus is not None:
            break
        learner *= 2
    if not found:
        raise ValueError(
            f"gpus: got {question.num_gpus} {question.gpu.name}; must be at least {least + size}, {size} for an engine and {least} "
            f"for the learner ({LEARNER_BYTES * question.shape.total_params / 1e9:.0f} GB of weights and optimizer state)"
        )
    return found


def scenario(question: Question, layout: Layout, *, alpha: float | None, precision: Precision, lag: int) -> Scenario:
    flops = layout.learner_gpus * question.gpu.flops("bf16") * question.constants.learner_efficiency
    sync_s = 1.0 + question.shape.weight_bytes(precision) / layout.tensor_parallel / (SYNC_GB_S * 1e9)
    return Scenario(
        model=engine_model(question, layout.tensor_parallel, alpha=alpha, precision=precision),
        num_engines=layout.num_engines,
        num_groups=question.num_rollouts // question.group_size,
        group_size=question.group_size,
        lengths=question.lengths,
        prompt_tokens=question.prompt_tokens,
        max_num_seqs=question.max_num_seqs,
        selector=None if alpha is None else MeasuredSelector(),
        lag=lag,
        learner_s_per_token=6 * question.shape.active_params / flops,
        sync_s=sync_s,
        steps=1 + lag,
    )


def _estimate_s(question: Question, layout: Layout, *, gain: float, lag: int) -> float:
    """Of a step, roughly, to choose a layout before anything is simulated: tokens over rate, not below the longest response."""
    plain = scenario(question, layout, alpha=None, precision="bf16", lag=lag)
    batch = min(max(question.num_rollouts // layout.num_engines, 1), question.max_num_seqs)
    context = question.prompt_tokens + question.lengths.mean / 2
    tokens = question.num_rollouts * question.lengths.mean
    rate = layout.num_engines * batch / plain.model.step_s(batch, 0, context)
    tail_s = question.lengths.maximum * plain.model.step_s(max(batch // 8, 1), 0, 2 * context)
    learner_s = 4 / 3 * plain.learner_s_per_token * tokens
    if lag:
        return max(tokens / rate / gain, learner_s) + plain.sync_s
    return max(tokens / rate, tail_s) / gain + learner_s + plain.sync_s


def best_layout(question: Question, *, gain: float = 1.0, lag: int = 0) -> Layout:
    return min(layouts(question), key=lambda layout: _estimate_s(question, layout, gain=gain, lag=lag))


# ── the answer


def simulate_arm(question: Question, lever: str, *, leases: bool = True) -> Arm:
    """Without leases, and in a fleet too large to simulate them, the drafter is as good as a trained one from the start."""
    together = lever == "together"
    precision: Precision = "fp8" if lever == "FP8" or (together and question.has_fp8) else "bf16"
    lag = question.lag if together or lever == "asynchrony" else 0
    speculates = together or lever in ("speculation", "idle-worker drafting")
    layout = best_layout(question, gain=0.6 * question.accepted_length if together else 1.0, lag=lag)
    trains = question.has_training and (together or lever == "idle-worker drafting")
    lends = trains and leases and layout.num_engines <= MOST_LEASED
    length = question.trained_length if trains and not lends else question.accepted_length
    arm = scenario(question, layout, alpha=length if speculates else None, precision=precision, lag=lag)
    if not lends:
        return Arm(layout=layout, times=simulate(arm))
    trained = engine_model(question, layout.tensor_parallel, alpha=question.trained_length, precision=precision)
    rate = question.gpu.flops("bf16") * question.constants.learner_efficiency * layout.tensor_parallel
    coach = coaching(
        trained=trained,
        accepted_length=(question.accepted_length, question.trained_length),
        tokens_per_s=rate / (6 * draft_params(arm.model)),
    )
    # Trained in the first step, judged in the second, published after it.
    return Arm(layout=layout, times=simulate(replace(arm, warmup=2), coaching=coach))


def draft_params(model: StepModel) -> float:
    return max(model.draft_params, 1e8) if isinstance(model, EngineModel) else 1e8


def levers(question: Question) -> list[str]:
    absent = {"FP8"} if not question.has_fp8 else set()
    absent |= {"idle-worker drafting"} if not question.has_training else set()
    return [lever for lever in LEVERS if lever not in absent]


def answer(question: Question, *, progress: Callable[[str], None], sensitive: bool = True) -> Answer:
    arms: dict[str, Arm] = {}
    for lever in levers(question):
        arms[lever] = simulate_arm(question, lever)
        progress(f"{lever}: {arms[lever].times.step_s:.1f} s a step")
    plain = arms["plain"]
    sensitivity = _sensitivity(question, arms, progress) if sensitive else {}
    return Answer(
        question=question,
        arms=arms,
        sensitivity=sensitivity,
        limits=_limits(question, plain),
        warnings=_warnings(question, arms),
    )


def _sensitivity(question: Question, arms: Mapping[str, Arm], progress: Callable[[str], None]) -> dict[str, float]:
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
        found[f"responses {factor:g} times as long"] = arm.times.step_s / simulate_arm(asked, "speculation").times.step_s
    progress("sensitivity: done")
    return found


def _limits(question: Question, plain: Arm) -> tuple[str, ...]:
    times = plain.times
    share = times.generation_s / times.step_s
    lines = [
        f"generation is {share:.0%} of a plain step: faster rollouts alone gain at most {1 / max(1 - share, 1e-3):.1f} times",
        f"engines are idle {times.idle_share:.0%} of the time, waiting for the longest responses, the learner and the sync",
    ]
    batch = min(-(-question.num_rollouts // plain.layout.num_engines), question.max_num_seqs)
    model = engine_model(question, plain.layout.tensor_parallel, alpha=None)
    if isinstance(model, EngineModel):
        context = question.prompt_tokens + question.lengths.mean / 2
        for size, what in ((batch, "at first"), (1, "in the tail")):
            parts = model.parts_s(size, 0, context if size > 1 else question.lengths.maximum)
            most = max(parts, key=parts.__getitem__)
            lines.append(
                f"{what} ({size} requests an engine) {parts[most] / sum(parts.values()):.0%} of an engine's step is {most}"
            )
        if times.num_preempted:
            lines.append(f"the KV cache overflows: {times.num_preempted} preemptions; FP8 or more GPUs for each engine make room")
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
        busy = f"{batch} requests keep the compute of a {question.gpu.name} busy, so that every token to verify costs time"
        small = f"generation is only {plain.times.generation_s / plain.times.step_s:.0%} of a step"
        lines.append(
            f"speculation will not pay here: {gain:.2f} times plain, {faster:.2f} in generation. "
            f"{busy if faster < 1.1 else small}; fewer rollouts for each engine, or more acceptance, would change that"
        )
    elif k == 0 or at_first < 1.05:
        pays = next((size for size in range(batch, 0, -1) if step_gain(model, size, context)[1] >= 1.05), 0)
        lines.append(
            f"with all {batch} requests of an engine active drafts do not pay; they do from {pays} requests down, in the tail. "
            "A fixed draft length would lose at first: leave the choice to the selector"
        )
    if question.lengths.maximum > 0 and plain.times.generation_s > 0.9 * plain.times.step_s and plain.times.idle_share > 0.5:
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
        lever: {"layout": asdict(arm.layout), "stages_s": dict(arm.times.stages_s), "accepted_length": arm.times.accepted_length}
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
        lines += ["", "speculation, if"] + [f"  {name:32}{gain:.2f} times plain" for name, gain in found.sensitivity.items()]
    lines += [f"\nWARNING: {line}" for line in found.warnings]
    return "\n".join(lines)

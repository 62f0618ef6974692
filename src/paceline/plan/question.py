"""Inputs of a plan, and the division of its GPUs between engines and learner.

Engines and learner have separate GPUs, as in `paceline train`. They take turns in a synchronous run and work at once in
asynchronous training, so each arm gets the division with its shortest step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from paceline.config import MeasuredSelector
from paceline.plan.engine_model import PLAIN, Constants, DrafterKind, EngineModel, MeasuredModel, StepModel, drafts
from paceline.plan.hardware import Gpu, ModelShape, Precision
from paceline.plan.lengths import Lengths
from paceline.plan.run_model import Scenario
from paceline.selector.cost_file import Costs

FROZEN_LENGTH, TRAINED_LENGTH, NGRAM_LENGTH = 2.64, 2.80, 2.26
"""Accepted length with k = 3, means of RL-Zero and RL-Think in arXiv 2604.26779: EAGLE-3 of another domain, frozen
(2.88 and 2.40) and trained online (3.04 and 2.55); n-grams (2.47 and 2.05). A drafter trained for the policy's domain
reached 3.32 and 2.77."""
AT = 3
"""Draft length of all accepted lengths here."""
LONGEST = 7
SYNC_GB_S = 20.0
"""Bandwidth per GPU of a broadcast between nodes: less than half of 400 Gb/s."""
LEARNER_BYTES = 18.0
"""Bytes per parameter: FP32 master, two moments and gradient, BF16 copy."""


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
    max_age: int = 1
    """Lag of the asynchronous arms."""
    costs: Costs | None = None
    """Measured step times of one engine, instead of the roofline."""
    fp8_costs: Costs | None = None
    """Step times in FP8. Without them, measured plans have no FP8 arm."""
    constants: Constants = Constants()  # noqa: RUF009  frozen

    def __post_init__(self) -> None:
        if self.num_rollouts < self.group_size or self.num_rollouts % self.group_size:
            raise ValueError(
                f"batch: got {self.num_rollouts} rollouts a step; must be a multiple of --group-size {self.group_size}"
            )
        if not self.accepted_length <= self.trained_length <= AT + 1:
            raise ValueError(
                f"accepted length: got {self.accepted_length} frozen and {self.trained_length} trained; must be at "
                f"most {AT + 1} (drafts of {AT} and one token of the policy), and trained not below frozen"
            )

    @property
    def mean_context(self) -> float:
        """Return the mean context of a request over its generation."""
        return self.prompt_tokens + self.lengths.mean / 2

    @property
    def has_training(self) -> bool:
        """Whether drafter training can be planned: a learned drafter and no measured costs."""
        return self.costs is None and self.drafter in ("eagle3", "dflash")

    @property
    def has_fp8(self) -> bool:
        return self.fp8_costs is not None if self.costs is not None else self.gpu.fp8_tflops > self.gpu.bf16_tflops


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    tensor_parallel: int
    num_engines: int
    learner_gpus: int


def engine_model(
    question: Question, tensor_parallel: int, *, alpha: float | None, precision: Precision = "bf16"
) -> StepModel:
    """Return the step model of one engine. If `alpha`, the accepted length, is None, it does not speculate."""
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


def tensor_parallel(question: Question) -> int:
    """Return the fewest GPUs that hold the policy and the contexts of 16 usual requests and of the longest."""
    if question.tensor_parallel is not None:
        return question.tensor_parallel
    wanted = max(16 * question.mean_context, question.prompt_tokens + question.lengths.maximum)
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
        f"gpus: got {question.num_gpus} {question.gpu.name}; must be more, because one engine needs room for "
        f"{wanted:.0f} tokens"
    )


def layouts(question: Question) -> list[Layout]:
    """Return the divisions of the GPUs in which the learner's state fits."""
    size = tensor_parallel(question)
    need = LEARNER_BYTES * question.shape.total_params / (0.75 * question.gpu.memory_gb * 1e9)
    least = question.learner_gpus or 2 ** max(math.ceil(math.log2(max(need, 1.0))), 0)
    found: list[Layout] = []
    learner = least
    while learner + size <= question.num_gpus:
        found.append(
            Layout(tensor_parallel=size, num_engines=(question.num_gpus - learner) // size, learner_gpus=learner)
        )
        if question.learner_gpus is not None:
            break
        learner *= 2
    if not found:
        raise ValueError(
            f"gpus: got {question.num_gpus} {question.gpu.name}; must be at least {least + size}, {size} for an engine "
            f"and {least} for the learner ({LEARNER_BYTES * question.shape.total_params / 1e9:.0f} GB of weights and "
            "optimizer state)"
        )
    return found


def scenario(
    question: Question, layout: Layout, *, alpha: float | None, precision: Precision, max_age: int
) -> Scenario:
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
        max_age=max_age,
        learner_s_per_token=6 * question.shape.active_params / flops,
        sync_s=sync_s,
        steps=1 + max_age,
    )


def _estimate_s(question: Question, layout: Layout, *, gain: float, max_age: int) -> float:
    """Estimate the seconds of a step without simulation: tokens over rate, or the longest response."""
    plain = scenario(question, layout, alpha=None, precision="bf16", max_age=max_age)
    batch = min(max(question.num_rollouts // layout.num_engines, 1), question.max_num_seqs)
    context = question.mean_context
    tokens = question.num_rollouts * question.lengths.mean
    rate = layout.num_engines * batch / plain.model.step_s(batch, 0, context)
    tail_s = question.lengths.maximum * plain.model.step_s(max(batch // 8, 1), 0, 2 * context)
    learner_s = 4 / 3 * plain.learner_s_per_token * tokens
    if max_age:
        return max(tokens / rate / gain, learner_s) + plain.sync_s
    return max(tokens / rate, tail_s) / gain + learner_s + plain.sync_s


def best_layout(question: Question, *, gain: float = 1.0, max_age: int = 0) -> Layout:
    return min(layouts(question), key=lambda layout: _estimate_s(question, layout, gain=gain, max_age=max_age))

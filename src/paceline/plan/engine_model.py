"""Duration of an engine step: by roofline from hardware and model, or from a measured cost file.

    step = linear + attention + layers + host + sampling + communication + drafting

    linear         a smooth maximum of reading the weights and of multiplying n tokens with them
    attention      reading the KV cache of every request, and the products with it
    layers         latency of a layer's kernels at any batch: small inside a captured graph, large outside
    host           scheduling, for every request
    sampling       passes over the logits of every token, in FP32, by one GPU
    communication  two all-reduces a layer under tensor parallelism
    drafting       passes of the drafter (one after another for EAGLE, one for DFlash), or the host's search for n-grams

A draft of length k makes n = requests x (k + 1) tokens to verify. `Constants` holds the parameters that the formulas do
not give; they are fitted on one half of the published figures (`python -m benchmarks fit`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import exp, inf, log
from typing import Literal, Protocol

import numpy as np

from paceline.plan.hardware import BYTES, Gpu, ModelShape, Precision
from paceline.selector.cost_file import CostPoint, Costs

GRAPH_TOKENS = 512
"""Tokens of the largest step that vLLM captures as a graph by default (`max_cudagraph_capture_size` in its
config/compilation.py). A larger step launches every kernel from the host."""
RESERVE_GB = 2.7
"""GPU memory for activations and graphs: the rest of 0.7 x 80 GB beside weights and KV cache in FP8-RL's capacities
(arXiv 2601.18150: 249,952 tokens of Qwen3-8B in BF16)."""
DFLASH_LAYERS = 5
"""Layers of z-lab/Qwen3-8B-DFlash, which shares the policy's output head."""
EAGLE_VOCAB = 32_000
"""Size of an EAGLE-3 drafter's vocabulary, in the paper and in the checkpoints of speculators."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Parameters beyond the roofline, fitted on the fitting half of the published cells."""

    memory_efficiency: float = 0.87
    """Share of the peak bandwidth."""
    compute_efficiency: float = 0.687
    """Share of the peak in matrix products of many tokens."""
    knee: float = 1.64
    """Exponent of the smooth maximum of reading and computing."""
    layer_s: float = 1.72e-05
    """Latency of one layer inside a captured graph."""
    eager_layer_s: float = 0.00139
    """Latency of one layer outside a graph."""
    request_s: float = 8.49e-06
    """Host time per request and step."""
    sampler_passes: float = 5.49
    """Reads and writes of a token's logits to sample or verify it."""
    draft_pass_s: float = 0.00075
    """Latency of one pass of a learned drafter, in addition to the roofline."""
    ngram_request_s: float = 0.000512
    """Host time to look up an n-gram for one request; it also blocks asynchronous scheduling."""
    all_reduce_s: float = 1.03e-05
    """Latency of one."""
    learner_efficiency: float = 0.412
    """Share of the peak in the learner, waits included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    verified: int
    """Tokens per request in the policy's step, the undrafted token included."""
    passes: float
    """Sequential passes of the drafter."""
    width: int
    """Tokens per request in a pass."""
    first_width: int = 0
    """Extra tokens in the first pass: EAGLE reads all verified tokens."""
    alpha: float
    """Accepted length: mean tokens per step."""


PLAIN = Draft(verified=1, passes=0, width=0, alpha=1.0)
DrafterKind = Literal["eagle3", "dflash", "ngram", "history", "tree"]


def accepted_length(acceptance: float, k: int) -> float:
    """Return 1 + h + ... + h^k: each position is accepted with probability h if all before it were."""
    return sum(acceptance**j for j in range(k + 1))


def acceptance_of(alpha: float, k: int) -> float:
    """Invert `accepted_length`."""
    if not 1 <= alpha <= k + 1:
        raise ValueError(f"acceptance: got accepted length {alpha} at draft length {k}; must be between 1 and {k + 1}")
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if accepted_length(middle, k) < alpha else (low, middle)
    return (low + high) / 2


def drafts(kind: DrafterKind, *, alpha: float, at: int, longest: int) -> dict[int, Draft]:
    """Return all draft lengths of a drafter with accepted length `alpha` at draft length `at`."""
    acceptance = acceptance_of(alpha, at)
    found = {0: PLAIN}
    for k in range(1, longest + 1):
        passes, width = {"eagle3": (k, 1), "dflash": (1, k + 1)}.get(kind, (0, 0))
        first = k if kind == "eagle3" else 0
        found[k] = Draft(
            verified=k + 1, passes=passes, width=width, first_width=first, alpha=accepted_length(acceptance, k)
        )
    return found


class StepModel(Protocol):
    """Step times of a simulated engine."""

    @property
    def options(self) -> Mapping[int, Draft]: ...

    @property
    def capacity_tokens(self) -> float:
        """KV cache size in tokens."""
        ...

    def step_s(self, num_requests: int, k: int, context: float) -> float:
        """Return seconds of a step that verifies and makes drafts of length k; `context` is the mean over requests."""
        ...

    def prefill_s(self, num_tokens: float) -> float: ...


@dataclass(frozen=True, kw_only=True)
class EngineModel:
    """One engine: `tensor_parallel` GPUs with one copy of the policy."""

    gpu: Gpu
    shape: ModelShape
    tensor_parallel: int = 1
    weights: Precision = "bf16"
    kv_cache: Precision = "bf16"
    drafter: DrafterKind | None = None
    draft_vocab: int | None = None
    """Output vocabulary of a learned drafter. If None, the default of its kind."""
    options: Mapping[int, Draft] = field(default_factory=lambda: {0: PLAIN})
    memory_utilization: float = 0.85
    graph_tokens: float = GRAPH_TOKENS
    """Tokens of the largest captured step."""
    constants: Constants = Constants()
    _seconds: dict[tuple[int, int, int], float] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.capacity_tokens <= 0:
            need = self.shape.weight_bytes(self.weights) / 1e9
            raise ValueError(
                f"gpus: {self.tensor_parallel} {self.gpu.name} hold {self.tensor_parallel * self.gpu.memory_gb:.0f} GB "
                f"and {self.shape.name} needs {need:.0f} GB in {self.weights}, without a KV cache; must be more GPUs "
                "for each engine (--tensor-parallel), larger ones, or FP8"
            )

    @property
    def capacity_tokens(self) -> float:
        return self._capacity

    @cached_property
    def _capacity(self) -> float:
        room = self.tensor_parallel * (self.memory_utilization * self.gpu.memory_gb - RESERVE_GB) * 1e9
        room -= self.shape.weight_bytes(self.weights) + self.draft_params * BYTES["bf16"]
        return room / self._kv_bytes_per_token

    @property
    def _kv_bytes_per_token(self) -> float:
        copies = self.tensor_parallel if self.shape.kv_rank else max(1.0, self.tensor_parallel / self.shape.kv_heads)
        return self.shape.kv_bytes_per_token(self.kv_cache) * copies

    def step_s(self, num_requests: int, k: int, context: float) -> float:
        key = (num_requests, k, round(log(max(context, 1.0)) / 0.03))  # round contexts to 3 % for cache hits
        if key not in self._seconds:
            self._seconds[key] = sum(self.parts_s(num_requests, k, exp(key[2] * 0.03)).values())
        return self._seconds[key]

    def prefill_s(self, num_tokens: float) -> float:
        return self._linear_s(num_tokens) + self._communication_s(num_tokens)

    def parts_s(self, num_requests: int, k: int, context: float) -> dict[str, float]:
        """Split the step time by cause."""
        draft = self.options[k]
        tokens = num_requests * draft.verified
        eager = tokens > self.graph_tokens
        c = self.constants
        return {
            "weights and products": self._linear_s(tokens),
            "attention": self._attention_s(num_requests, tokens, context),
            "kernel latency": self.shape.layers * (c.eager_layer_s if eager else c.layer_s),
            "host": num_requests * c.request_s,
            "sampling": tokens * self.shape.vocab * 4 * c.sampler_passes / self._bandwidth * self.tensor_parallel,
            "communication": self._communication_s(tokens),
            "drafting": self._drafting_s(num_requests, draft),
        }

    @property
    def _bandwidth(self) -> float:
        return self.gpu.memory_tb_s * 1e12 * self.constants.memory_efficiency * self.tensor_parallel

    def _flops(self, precision: Precision) -> float:
        return self.gpu.flops(precision) * self.constants.compute_efficiency * self.tensor_parallel

    def _smooth_max(self, a: float, b: float) -> float:
        knee = self.constants.knee
        return (a**knee + b**knee) ** (1 / knee)

    def _linear_s(self, num_tokens: float) -> float:
        reading = self.shape.read_bytes(num_tokens, self.weights) / self._bandwidth
        return self._smooth_max(reading, 2 * self.shape.active_params * num_tokens / self._flops(self.weights))

    def _attention_s(self, num_requests: int, num_tokens: float, context: float) -> float:
        shape = self.shape
        reading = num_requests * context * self._kv_bytes_per_token / self._bandwidth
        products = 4 * num_tokens * context * shape.heads * shape.head_dim * shape.kv_layers / self._flops("bf16")
        return self._smooth_max(reading, products)

    def _communication_s(self, num_tokens: float) -> float:
        gpus = self.tensor_parallel
        if gpus == 1:
            return 0.0
        sent = (gpus - 1) / gpus * 2.0 * num_tokens * self.shape.hidden
        return 2 * self.shape.layers * (self.constants.all_reduce_s + 2 * sent / (self.gpu.link_gb_s * 1e9))

    @cached_property
    def draft_params(self) -> float:
        if self.drafter not in ("eagle3", "dflash", "tree"):
            return 0.0
        shape = self.shape
        layers, own_vocab = (DFLASH_LAYERS, shape.vocab) if self.drafter == "dflash" else (1, EAGLE_VOCAB)
        layer = (
            shape.hidden * shape.head_dim * (3 * shape.heads + 4 * shape.kv_heads)
            + 3.0 * shape.hidden * shape.intermediate
        )
        return layers * layer + shape.hidden * (self.draft_vocab or own_vocab)

    def _drafting_s(self, num_requests: int, draft: Draft) -> float:
        if draft is PLAIN or draft.verified == 1:
            return 0.0
        if not draft.passes:
            return num_requests * self.constants.ngram_request_s
        reading = self.draft_params * BYTES["bf16"] / self._bandwidth
        product_s = 2 * self.draft_params / self._flops("bf16")
        reducing = 3 * self.constants.all_reduce_s if self.tensor_parallel > 1 else 0.0
        pass_s = (
            self.constants.draft_pass_s + reducing + self._smooth_max(reading, num_requests * draft.width * product_s)
        )
        return draft.passes * pass_s + num_requests * draft.first_width * product_s


@dataclass(frozen=True, kw_only=True)
class MeasuredModel:
    """An engine measured by `paceline tune`; log seconds are interpolated between the points of the file."""

    costs: Costs
    options: Mapping[int, Draft]
    capacity_tokens: float = inf

    @classmethod
    def of(cls, costs: Costs, *, longest: int) -> MeasuredModel:
        """Read accepted lengths from the file; extrapolate the last position's acceptance."""
        if not costs.acceptance:
            raise ValueError("costs: got a file without acceptance; must be written by `paceline tune`")
        options, alpha, survival = {0: PLAIN}, 1.0, 1.0
        for k in range(1, longest + 1):
            survival *= costs.acceptance[min(k, len(costs.acceptance)) - 1]
            alpha += survival
            options[k] = Draft(verified=k + 1, passes=k, width=1, alpha=alpha)
        return cls(costs=costs, options=options)

    def step_s(self, num_requests: int, k: int, context: float) -> float:
        lengths = sorted(self._log_curves)
        above = next((length for length in lengths if length >= k), lengths[-1])
        below = max((length for length in lengths if length <= k), default=lengths[0])
        share = (k - below) / (above - below) if above > below else 0.0
        at = log(num_requests)
        return exp((1 - share) * self._at(below, at) + share * self._at(above, at))

    def prefill_s(self, num_tokens: float) -> float:
        return 0.0  # a cost file has decode steps only

    def _at(self, length: int, log_requests: float) -> float:
        batches, seconds = self._log_curves[length]
        return float(np.interp(log_requests, batches, seconds))

    @cached_property
    def _log_curves(self) -> dict[int, tuple[list[float], list[float]]]:
        """Log requests and log seconds by draft length."""
        curves: dict[int, tuple[list[float], list[float]]] = {}
        for point in sorted(self.costs.points, key=lambda point: point.num_requests):
            batches, seconds = curves.setdefault(point.drafted, ([], []))
            batches.append(log(point.num_requests))
            seconds.append(log(point.seconds))
        return curves


def cost_file(model: StepModel, *, batches: tuple[int, ...], context: float) -> Costs:
    """Return the cost file of a simulated engine, as the prior of its selector."""
    points = tuple(
        CostPoint(
            num_requests=batch,
            verified=k,
            drafted=k,
            context_tokens=int(batch * context),
            seconds=model.step_s(batch, k, context),
            num_steps=14,
        )
        for batch in batches
        for k in model.options
    )
    alphas = [draft.alpha for draft in model.options.values()]
    gains = [b - a for a, b in pairwise(alphas)]
    acceptance = tuple(gain / before if before else 0.0 for before, gain in pairwise([1.0, *gains]))
    return Costs(points=points, acceptance=acceptance, num_trials=1000)

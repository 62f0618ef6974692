"""Published figures with their predictions, and assumptions for quantities that papers omit.

One engine is simulated for all of a run, because engines share the work evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from paceline.config import FixedSelector, SelectorConfig
from paceline.plan.engine_model import PLAIN, Constants, Draft, DrafterKind, EngineModel, drafts
from paceline.plan.hardware import Gpu, ModelShape
from paceline.plan.lengths import Lengths, lognormal
from paceline.plan.run_model import Scenario, simulate

FILE = Path(__file__).parent / "published.json"
"""All published figures, with their sources."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """Quantities that papers omit. Means are response lengths in tokens, shares are generation's in a plain step."""

    nvidia_rollouts: float = 135.0
    """Rollouts of one engine (one GB200) in a step."""
    nvidia_zero_mean: float = 1580.0
    nvidia_think_mean: float = 3120.0
    tlt_context: float = 10200.0
    """Context of each request in tokens, for speedups by batch size."""
    tlt_stream_alpha: float = 4.6
    """Accepted length of one stream of Qwen2.5-7B."""
    tlt_stream_depth: float = 2.81
    """Passes of the drafter for that stream."""
    tlt_rollouts: float = 880.0
    """Rollouts of a step, for any number of nodes."""
    tlt_mean: float = 4400.0
    fp8_rollouts: float = 95.9
    """Rollouts of one engine in a step."""
    fp8_mean: float = 5870.0
    codraft_rollouts: float = 33.0
    """Rollouts of one engine in a step."""
    codraft_dense_share: float = 0.834
    codraft_moe_share: float = 0.43
    simulated_share: float = 0.659
    """Share of generation in the step that NVIDIA's simulator speeds up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """All fitted numbers."""

    constants: Constants = field(default_factory=Constants)
    assumptions: Assumptions = field(default_factory=Assumptions)


Predict = Callable[[World], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One published figure."""

    name: str
    family: str
    paper: str
    measured: bool
    """Measured on GPUs; otherwise by the authors' simulator."""
    value: float
    """Speedup over the plain run of the same system, or ratio of capacities."""
    predict: Predict


def make_cell(name: str, family: str, row: Mapping[str, Any], value: float, predict: Predict) -> Cell:
    return Cell(
        name=name,
        family=family,
        paper=row["paper"],
        measured=row.get("kind", "measured") == "measured",
        value=value,
        predict=predict,
    )


def amdahl(gain: float, share: float) -> float:
    """Return the speedup of a step if `share` of its time gets faster by `gain`."""
    return 1 / (1 - share + share / gain)


def generation_s(
    model: EngineModel,
    lengths: Lengths,
    rollouts: float,
    selector: SelectorConfig | None = None,
    *,
    max_num_seqs: int = 256,
) -> float:
    """Return seconds to generate `rollouts`, interpolated between whole groups, so the fit has a smooth function."""
    few = max(int(rollouts / 8), 1)
    share = rollouts / 8 - few

    def seconds(num_groups: int) -> float:
        scenario = Scenario(
            model=model,
            num_engines=1,
            num_groups=num_groups,
            group_size=8,
            lengths=lengths,
            selector=selector,
            max_num_seqs=max_num_seqs,
        )
        return simulate(scenario).generation_s

    return seconds(few) if share <= 0 else (1 - share) * seconds(few) + share * seconds(few + 1)


def fixed_gain(
    model: EngineModel, kind: DrafterKind, k: int, alpha: float, lengths: tuple[float, int], rollouts: float
) -> float:
    """Return the speedup of drafts of one length over none; `lengths` are mean and maximum."""
    fast = replace(model, drafter=kind, options={0: PLAIN, **fixed_drafts(kind, k, alpha)})
    plain_s = _plain_s(model.gpu, model.shape, model.tensor_parallel, model.constants, lengths, rollouts)
    return plain_s / generation_s(fast, lognormal(*lengths), rollouts, FixedSelector(draft_length=k))


@lru_cache(maxsize=64)
def _plain_s(
    gpu: Gpu, shape: ModelShape, gpus: int, constants: Constants, lengths: tuple[float, int], rollouts: float
) -> float:
    """Return seconds of the plain run, which many cells share."""
    plain = EngineModel(gpu=gpu, shape=shape, tensor_parallel=gpus, constants=constants)
    return generation_s(plain, lognormal(*lengths), rollouts)


def fixed_drafts(kind: DrafterKind, k: int, alpha: float) -> dict[int, Draft]:
    return drafts(kind, alpha=alpha, at=k, longest=k)


def gain_at(model: EngineModel, k: int, batch: int, context: float) -> float:
    """Return the speedup of drafts of length k at a constant batch."""
    return model.options[k].alpha * model.step_s(batch, 0, context) / model.step_s(batch, k, context)

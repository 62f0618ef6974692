"""Fit the simulator's constants and assumptions to published cells by damped least squares with a prior.

Every number is positive, and its logarithm is fitted. The prior holds numbers that no cell determines: a deviation of
one `PRIOR` costs as much as an error of `ERROR` in one cell. Errors count by Huber's loss, to limit outliers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import numpy.typing as npt

from benchmarks.harness import Record
from benchmarks.published.cells import Assumptions, Cell, World
from benchmarks.published.figures import SPLIT_SEED, cells, split
from paceline.context import Context
from paceline.plan.engine_model import Constants

ERROR = 0.08
PRIOR = 0.7
NARROW = {
    "memory_efficiency": 0.08,
    "compute_efficiency": 0.2,
    "knee": 0.4,
    "simulated_share": 0.1,
    "codraft_dense_share": 0.15,
}
"""Narrower priors: bandwidth and products reach a known part of their peak, shares are below 1."""
HUBER = 2.0
STEP = 0.02
Array = npt.NDArray[np.float64]

START = World(
    constants=Constants(
        memory_efficiency=0.85,
        compute_efficiency=0.65,
        knee=3.0,
        layer_s=3.0e-5,
        eager_layer_s=4.0e-4,
        request_s=1.0e-5,
        sampler_passes=6.0,
        draft_pass_s=4.0e-4,
        ngram_request_s=1.5e-4,
        all_reduce_s=1.2e-5,
        learner_efficiency=0.35,
    ),
    assumptions=Assumptions(
        nvidia_rollouts=96,
        nvidia_zero_mean=3000,
        nvidia_think_mean=5000,
        tlt_context=6000,
        tlt_stream_alpha=4,
        tlt_stream_depth=5,
        tlt_rollouts=1024,
        tlt_mean=4000,
        fp8_rollouts=96,
        fp8_mean=6000,
        codraft_rollouts=32,
        codraft_dense_share=0.85,
        codraft_moe_share=0.6,
        simulated_share=0.65,
    ),
)
"""Guesses before the fit."""


def run(overrides: Sequence[str], context: Context) -> Record:
    """Fit again on the fitting half. The figures are the new constants and assumptions."""
    del overrides
    world, loss = fit(split(cells())[0], context=context)
    record = Record(seeds=[SPLIT_SEED], details={"loss": loss})
    for name, value in (asdict(world.constants) | asdict(world.assumptions)).items():
        record.add(name, value)
    return record


def fit(cells: Sequence[Cell], start: World = START, *, rounds: int = 8, context: Context) -> tuple[World, float]:
    """Minimize the loss by Gauss-Newton with numerical derivatives, from the prior `start`; return the loss too."""
    names = [*asdict(start.constants), *asdict(start.assumptions)]
    origin = np.log([*asdict(start.constants).values(), *asdict(start.assumptions).values()])
    width = np.array([NARROW.get(name, PRIOR) for name in names])
    here, damping = origin.copy(), 1.0
    errors = _errors(cells, _world(names, here))
    loss = _loss(errors, (here - origin) / width)
    for number in range(rounds):
        slope_CP = np.empty((len(cells), len(names)))
        for place in range(len(names)):
            moved = here.copy()
            moved[place] += STEP
            world = _world(names, moved)
            for row, cell in enumerate(cells):
                slope_CP[row, place] = (
                    (_error(cell, world) - errors[row]) / STEP if concerns(names[place], cell) else 0.0
                )
        weight = (
            np.where(np.abs(errors) <= HUBER * ERROR, 1.0, HUBER * ERROR / np.maximum(np.abs(errors), 1e-9)) / ERROR**2
        )
        normal = slope_CP.T @ (weight[:, None] * slope_CP) + np.diag(1 / width**2)
        gradient = slope_CP.T @ (weight * errors) + (here - origin) / width**2
        for _ in range(6):
            whole = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -gradient)
            move = np.asarray(np.clip(whole, -0.5, 0.5), np.float64)
            tried = _bounded(names, here + move)
            tried_errors = _errors(cells, _world(names, tried))
            tried_loss = _loss(tried_errors, (tried - origin) / width)
            if tried_loss < loss:
                gain, here, errors, loss, damping = loss - tried_loss, tried, tried_errors, tried_loss, damping / 3
                break
            damping *= 4
        else:
            break
        context.progress(f"round {number + 1}: loss {loss:.2f}, median error {np.median(np.abs(np.expm1(errors))):.3f}")
        if gain < 1e-3 * loss:
            break
    return _world(names, here), loss


def _world(names: Sequence[str], log_values: Array) -> World:
    values = dict(zip(names, np.exp(log_values).tolist(), strict=True))
    return World(
        constants=Constants(**{name: values[name] for name in asdict(Constants())}),
        assumptions=Assumptions(**{name: values[name] for name in asdict(Assumptions())}),
    )


def _bounded(names: Sequence[str], log_values: Array) -> Array:
    """Bound efficiencies and shares by 1, accepted lengths by their trees."""
    most = {"memory_efficiency": 0.98, "compute_efficiency": 0.95, "learner_efficiency": 0.7, "tlt_stream_alpha": 10.0}
    bound = [most.get(name, 0.95 if name.endswith("_share") else np.inf) for name in names]
    return np.minimum(log_values, np.log(bound))


def concerns(name: str, cell: Cell) -> bool:
    """Return whether a number can matter to a cell: constants to all, assumptions to cells of their paper."""
    paper = {"simulated": "nvidia", "fp8": "fp8rl"}.get(prefix := name.partition("_")[0], prefix)
    return name in asdict(START.constants) or paper == cell.paper


def _errors(cells: Sequence[Cell], world: World) -> Array:
    return np.array([_error(cell, world) for cell in cells])


def _error(cell: Cell, world: World) -> float:
    return float(np.log(cell.predict(world) / cell.value))


def _loss(errors: Array, deviations: Array) -> float:
    size = np.abs(errors) / ERROR
    return float(np.where(size <= HUBER, size**2, 2 * HUBER * size - HUBER**2).sum() + (deviations**2).sum())

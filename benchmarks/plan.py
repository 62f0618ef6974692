"""The simulator of `paceline plan` against published figures, half of them held out.

cells        every published speedup that is stated with enough to predict it; fitting half and held-out half
scaling      TLT's on 1 to 8 nodes, NVIDIA's with a lag
235B         Qwen3-235B-A22B on 2,048 GB200: duration of the plan, and the assumptions under which 2.5x holds
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from benchmarks.harness import Record
from benchmarks.published.cells import Cell, World
from benchmarks.published.figures import SPLIT_SEED, cells, split
from paceline.config import MeasuredSelector
from paceline.context import Context
from paceline.measure import Goal
from paceline.plan.answer import answer
from paceline.plan.engine_model import Constants, acceptance_of, accepted_length
from paceline.plan.hardware import GPUS, SHAPES
from paceline.plan.lengths import Lengths, lognormal
from paceline.plan.question import AT, Question, best_layout, scenario
from paceline.plan.run_model import simulate

GOALS: dict[str, Goal] = {
    "heldout_median_error": ("<=", 0.10),
    "heldout_p90_error": ("<=", 0.25),
    "sign_errors": ("<=", 0),
    "tlt_scaling_worst_error": ("<=", 0.15),
    "lag_error": ("<=", 0.15),
    "seconds_235b": ("<=", 60),
    "num_heldout": (">=", 20),
    "num_cells": (">=", 45),
}


def run(overrides: Sequence[str], context: Context) -> Record:
    del overrides
    fitting, held = split(cells())
    world = World()
    rows = [_row(cell, "fit", world) for cell in fitting] + [_row(cell, "held out", world) for cell in held]
    context.progress(f"{len(rows)} cells")
    record = Record(goals=GOALS, seeds=[SPLIT_SEED])
    for name, value in (_figures(rows) | _plan_235b(context)).items():
        record.add(name, value)
    record.details |= {
        "cells": rows,
        "median_error_by_family": _by_family(rows),
        "when_2.5_holds": _conditions(world.constants),
    }
    return record


def _row(cell: Cell, half: str, world: World) -> dict[str, Any]:
    predicted = cell.predict(world)
    return {
        "cell": cell.name,
        "family": cell.family,
        "half": half,
        "measured": cell.measured,
        "published": cell.value,
        "predicted": predicted,
        "error": predicted / cell.value - 1,
    }


def _figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    errors: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        errors[row["half"]].append(abs(row["error"]))
    wrong = [row for row in rows if row["measured"] and (row["published"] - 1) * (row["predicted"] - 1) < 0]
    scaling = [abs(row["error"]) for row in rows if row["family"] == "tlt step Qwen2.5-7B"]
    lag = next(row for row in rows if row["cell"] == "nvidia RL-Think lag 1")
    return {
        "heldout_median_error": median(errors["held out"]),
        "heldout_p90_error": float(np.quantile(errors["held out"], 0.9)),
        "sign_errors": float(len(wrong)),
        "fit_median_error": median(errors["fit"]),
        "fit_p90_error": float(np.quantile(errors["fit"], 0.9)),
        "num_cells": float(len(rows)),
        "num_heldout": float(len(errors["held out"])),
        "tlt_scaling_worst_error": max(scaling),
        "lag_error": abs(lag["error"]),
    }


def _by_family(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        found[row["family"]][row["half"]].append(abs(row["error"]))
    return {family: {half: median(errors) for half, errors in halves.items()} for family, halves in found.items()}


def _question_235b(constants: Constants, *, num_gpus: int = 2048, num_rollouts: int = 4096) -> Question:
    alpha = accepted_length(acceptance_of(4.0, 5), AT)  # NVIDIA's 4 at k = 5, converted to k = 3
    return Question(
        shape=SHAPES["Qwen3-235B-A22B"],
        gpu=GPUS["GB200"],
        num_gpus=num_gpus,
        num_rollouts=num_rollouts,
        lengths=lognormal(8000, 32_768),
        accepted_length=alpha,
        trained_length=alpha,
        max_age=2,
        tensor_parallel=8,
        constants=constants,
    )


def _plan_235b(context: Context) -> dict[str, float]:
    began_s = time.perf_counter()
    found = answer(_question_235b(World().constants), context=replace(context, report=lambda line: None))
    return {
        "seconds_235b": time.perf_counter() - began_s,
        "speedup_235b_speculation": found.speedup("speculation"),
        "speedup_235b_together": found.speedup("together"),
    }


def _conditions(constants: Constants) -> dict[str, dict[str, float]]:
    """Predict speculation over none with FP8 and lag 2, as in NVIDIA's 2.5, with an eighth of cluster and batch."""
    ideal = replace(constants, layer_s=0.0, eager_layer_s=0.0, request_s=0.0, draft_pass_s=0.0)
    long_tailed = lognormal(8000, 32_768)
    equal = Lengths(values=np.full(64, 8000.0), source="all 8000")
    variants = {
        "GPU time alone, responses of one length": (ideal, equal, None),
        "GPU time alone, long-tailed": (ideal, long_tailed, None),
        "launches and hosts as fitted, responses of one length": (constants, equal, None),
        "launches and hosts as fitted, long-tailed": (constants, long_tailed, None),
        "the same, accepted length 2.5 at k = 3": (constants, long_tailed, 2.5),
    }
    found: dict[str, dict[str, float]] = {}
    for name, (used, lengths, alpha) in variants.items():
        question = replace(_question_235b(used, num_gpus=256, num_rollouts=512), lengths=lengths)
        if alpha is not None:
            question = replace(question, accepted_length=alpha, trained_length=alpha)
        layout = best_layout(question, gain=2.0, max_age=2)
        plain = scenario(question, layout, alpha=None, precision="fp8", max_age=2)
        fast = scenario(question, layout, alpha=question.accepted_length, precision="fp8", max_age=2)
        step = simulate(plain).step_s / simulate(replace(fast, selector=MeasuredSelector())).step_s
        slow, quick = (simulate(replace(one, learner_s_per_token=0.0)).step_s for one in (plain, fast))
        found[name] = {"step": step, "generation": slow / quick}
    return found

"""Published figures as cells with the simulator's predictions, split into a half to fit and a half held out.

Quantities that a paper omits (rollouts per engine, their lengths, generation's share of a step) are `Assumptions`,
fitted with the `Constants` of engine_model.py on the fitting half. Cells of one mechanism form a family; a generator
with a fixed seed splits each family before anything is predicted.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.published.cells import (
    FILE,
    Cell,
    Predict,
    World,
    amdahl,
    fixed_drafts,
    fixed_gain,
    gain_at,
    generation_s,
    make_cell,
)
from benchmarks.published.tlt import tlt_cells, tlt_step
from paceline.config import FixedSelector
from paceline.plan.engine_model import DrafterKind, EngineModel
from paceline.plan.hardware import GPUS, SHAPES, Precision
from paceline.plan.lengths import lognormal
from paceline.plan.run_model import Scenario, simulate

SPLIT_SEED = 6


def cells(source: Path = FILE) -> list[Cell]:
    published = json.loads(source.read_text(encoding="utf-8"))
    return [
        *_generation_cells(published["generation_speedup"]),
        *_end_to_end_cells(published["end_to_end"], published["step_time_seconds"]),
        *tlt_cells(published),
        *_fp8_cells(published["fp8"]),
    ]


def split(all_cells: Sequence[Cell], seed: int = SPLIT_SEED) -> tuple[list[Cell], list[Cell]]:
    """Return cells to fit and cells held out: half of each family, the odd one to fit. Single cells are held out."""
    families: dict[str, list[Cell]] = {}
    for cell in all_cells:
        families.setdefault(cell.family, []).append(cell)
    fit: list[Cell] = []
    held: list[Cell] = []
    for name in sorted(families):
        family = sorted(families[name], key=lambda cell: cell.name)
        random.Random(f"{seed} {name}").shuffle(family)  # noqa: S311
        half = (len(family) + 1) // 2 if len(family) > 1 else 0
        fit += family[:half]
        held += family[half:]
    return fit, held


# ── generation


def _nvidia_8b(world: World, *, workload: str, kind: DrafterKind, k: int, alpha: float) -> float:
    a = world.assumptions
    model = EngineModel(gpu=GPUS["GB200"], shape=SHAPES["Qwen3-8B"], constants=world.constants)
    mean = a.nvidia_zero_mean if workload == "RL-Zero" else a.nvidia_think_mean
    return fixed_gain(model, kind, k, alpha, (mean, 20_480), a.nvidia_rollouts)


CODRAFT: Mapping[str, tuple[str, int, str]] = {
    "Qwen3-8B": ("Qwen3-8B", 1, "H100"),
    "Qwen3.5-122B-A10B": ("Qwen3.5-122B-A10B", 4, "GB200"),
    "GPT-OSS-120B": ("gpt-oss-120b", 2, "GB200"),
}
CODRAFT_BLOCK: Mapping[str, int] = {"Qwen3-8B": 15, "Qwen3.5-122B-A10B": 15, "GPT-OSS-120B": 9}
"""Draft lengths are not published. These follow from the blocks of the public DFlash checkpoints (16 in
z-lab/Qwen3-8B-DFlash-b16, 10 in z-lab/gpt-oss-120b-DFlash), also for DSpark. EAGLE-3 gets 3, NVIDIA's best."""


def _codraft(world: World, *, workload: str, drafter: str, alpha: float) -> float:
    shape, gpus, gpu = CODRAFT[workload]
    kind: DrafterKind = "eagle3" if drafter == "eagle3" else "dflash"
    k = 3 if kind == "eagle3" else CODRAFT_BLOCK[workload]
    model = EngineModel(gpu=GPUS[gpu], shape=SHAPES[shape], tensor_parallel=gpus, constants=world.constants)
    return fixed_gain(model, kind, k, alpha, (4000, 16_384), world.assumptions.codraft_rollouts)


def _codraft_step(world: World, *, moe: bool, gain: Predict) -> float:
    a = world.assumptions
    return amdahl(gain(world), a.codraft_moe_share if moe else a.codraft_dense_share)


def _generation_cells(rows: Sequence[Mapping[str, Any]]) -> Iterator[Cell]:
    for row in rows:
        workload, drafter, alpha = row["workload"], row["drafter"], row["alpha"]
        if row["paper"] == "nvidia":
            kind: DrafterKind = "ngram" if drafter == "ngram" else "eagle3"
            family = "n-gram" if kind == "ngram" else "out of domain" if "domain" in drafter else "draft length"
            predict = partial(_nvidia_8b, workload=workload, kind=kind, k=row["k"], alpha=alpha)
            name = f"nvidia {workload} {drafter} k={row['k']}"
            yield make_cell(name, f"nvidia {family}", row, row["speedup"], predict)
        else:
            moe = workload != "Qwen3-8B"
            name, family = f"codraft {workload} {drafter}", f"codraft {'moe' if moe else 'dense'}"
            gain = partial(_codraft, workload=workload, drafter=drafter, alpha=alpha)
            step = partial(_codraft_step, moe=moe, gain=gain)
            yield make_cell(f"{name}, generation", f"{family} generation", row, row["speedup"], gain)
            yield make_cell(f"{name}, step", f"{family} step", row, row["end_to_end"], step)


# ── whole steps


def _end_to_end_cells(rows: Sequence[Mapping[str, Any]], stages: Sequence[Mapping[str, Any]]) -> Iterator[Cell]:
    plain = {row["workload"]: row for row in stages if row["mode"] == "plain"}
    alphas = {"RL-Zero": 3.32, "RL-Think": 2.77}  # of k = 3, from generation_speedup
    for row in rows:
        workload, note = row["workload"], row.get("note", "")
        if row["paper"] == "tlt":
            model = "Qwen2.5-7B" if "7B" in workload else "Qwen2.5-32B"
            nodes = int(workload.partition(", ")[2].split()[0])
            scaling = partial(tlt_step, shape=model, nodes=nodes)
            yield make_cell(f"tlt {model} {nodes} nodes", f"tlt step {model}", row, row["speedup"], scaling)
        elif row["kind"] == "simulated":
            if note != "best cell":
                yield from _simulated_cells(row)
        elif "lag" in note:
            lag = partial(_nvidia_lag, alpha=alphas[workload])
            yield make_cell(f"nvidia {workload} lag 1", "nvidia step", row, row["speedup"], lag)
        else:
            share = plain[workload]["generation"] / plain[workload]["step"]
            step = partial(_nvidia_step, workload=workload, share=share, alpha=alphas[workload])
            yield make_cell(f"nvidia {workload} synchronous", "nvidia step", row, row["speedup"], step)


def _nvidia_step(world: World, *, workload: str, share: float, alpha: float) -> float:
    return amdahl(_nvidia_8b(world, workload=workload, kind="eagle3", k=3, alpha=alpha), share)


def _nvidia_lag(world: World, *, alpha: float) -> float:
    """Predict RL-Think with lag 1, where 12 nodes of 4 GPUs generate while the learner works. The learner's time is
    chosen so that the exposed part of generation in the plain run is the published one, 10.4 of 75.0 s."""
    a = world.assumptions
    plain = EngineModel(gpu=GPUS["GB200"], shape=SHAPES["Qwen3-8B"], constants=world.constants)
    fast = replace(plain, drafter="eagle3", options=fixed_drafts("eagle3", 3, alpha))
    base = Scenario(
        model=plain,
        num_engines=1,
        num_groups=max(round(a.nvidia_rollouts * 32 / 48 / 8), 1),
        group_size=8,
        lengths=lognormal(a.nvidia_think_mean, 20_480),
        max_age=1,
        steps=4,
    )
    alone = simulate(base)
    usual = alone.step_s / (4 / 3 * (alone.tokens + base.prompt_tokens * base.num_rollouts))
    low, high = 0.1, 4.0
    for _ in range(8):
        middle = (low + high) / 2
        times = simulate(replace(base, learner_s_per_token=middle * usual))
        low, high = (middle, high) if times.generation_s / times.step_s > 10.4 / 75.0 else (low, middle)
    slow = replace(base, learner_s_per_token=(low + high) / 2 * usual)
    return simulate(slow).step_s / simulate(replace(slow, model=fast, selector=FixedSelector(draft_length=3))).step_s


def _simulated_cells(row: Mapping[str, Any]) -> Iterator[Cell]:
    """NVIDIA's simulator is private. We assume GPU time alone, without launches and hosts, and a full batch: with a
    tail, where few tokens reach few experts, a speedup of 2.72 at an accepted length of 3 would be impossible."""
    words = dict(part.split("=") for part in row["note"].split())
    k, alpha = int(words["k"]), float(words["alpha"])
    gpus = 2048 if "2048" in row["workload"] else 512
    lag = 2 if "lag 2" in row["workload"] else 0

    def rollout(world: World) -> float:
        ideal = replace(world.constants, layer_s=0.0, eager_layer_s=0.0, request_s=0.0, draft_pass_s=0.0)
        model = EngineModel(
            gpu=GPUS["GB200"],
            shape=SHAPES["Qwen3-235B-A22B"],
            tensor_parallel=8,
            weights="fp8",
            kv_cache="fp8",
            constants=ideal,
            drafter="eagle3",
            options=fixed_drafts("eagle3", k, alpha),
        )
        batch = (1 + lag) * 4096 * model.tensor_parallel // gpus  # with a lag, more batches share the engines
        return gain_at(model, k, batch, 5000.0)

    def step(world: World) -> float:
        share = world.assumptions.simulated_share
        gain = rollout(world)
        # With a lag, a step takes the longer of generation and learning.
        return max(share, 1 - share) / max(share / gain, 1 - share) if lag else amdahl(gain, share)

    name = f"nvidia 235B on {gpus}, {row['note']}"
    yield make_cell(f"{name}, generation", "nvidia simulated generation", row, row["rollout"], rollout)
    yield make_cell(f"{name}, step", "nvidia simulated step", row, row["speedup"], step)


# ── FP8


Kinds = tuple[Precision, Precision]
"""Precision of weights and of the KV cache."""
BF16: Kinds = ("bf16", "bf16")


def _fp8_model(world: World, *, shape: str, gpus: int, kinds: Kinds) -> EngineModel:
    return EngineModel(
        gpu=GPUS["H100"],
        shape=SHAPES[shape],
        tensor_parallel=gpus,
        weights=kinds[0],
        kv_cache=kinds[1],
        memory_utilization=0.7,
        constants=world.constants,
    )


def _fp8_capacity(world: World, *, kinds: Kinds) -> float:
    plain, fp8 = (_fp8_model(world, shape="Qwen3-8B", gpus=1, kinds=one) for one in (BF16, kinds))
    return fp8.capacity_tokens / plain.capacity_tokens


def _fp8_gain(world: World, *, shape: str, gpus: int, kinds: Kinds) -> float:
    a = world.assumptions
    lengths = lognormal(a.fp8_mean, 20_480)
    plain_s, fp8_s = (
        generation_s(_fp8_model(world, shape=shape, gpus=gpus, kinds=one), lengths, a.fp8_rollouts, max_num_seqs=1024)
        for one in (BF16, kinds)
    )
    return plain_s / fp8_s


FP8_KINDS: Mapping[str, Kinds] = {
    "W8A8 linear only": ("fp8", "bf16"),
    "KV cache only": ("bf16", "fp8"),
    "linear + KV + attention": ("fp8", "fp8"),
}


def _fp8_cells(rows: Sequence[Mapping[str, Any]]) -> Iterator[Cell]:
    for row in rows:
        shape, gpus = ("Qwen3-30B-A3B", 2) if "30B" in row["workload"] else ("Qwen3-8B", 1)
        if "tokens" in row:
            base, linear, both = row["tokens"]
            for what, tokens in (("W8A8 linear only", linear), ("linear + KV + attention", both)):
                capacity = partial(_fp8_capacity, kinds=FP8_KINDS[what])
                yield make_cell(f"fp8 capacity {what}", "fp8 capacity", row, tokens / base, capacity)
        else:
            gain = partial(_fp8_gain, shape=shape, gpus=gpus, kinds=FP8_KINDS[row["what"]])
            yield make_cell(f"fp8 {shape} {row['what']}", "fp8 gain", row, 1 + sum(row["rollout_gain"]) / 2, gain)

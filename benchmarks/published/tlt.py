"""TLT's published figures as cells: trees of depth 10 and width 8, with verified tokens chosen by batch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache, partial
from math import inf
from typing import Any

from benchmarks.published.cells import FILE, Cell, World, gain_at, generation_s, make_cell
from paceline.config import TableSelector
from paceline.plan.engine_model import PLAIN, Draft, EngineModel
from paceline.plan.hardware import GPUS, SHAPES
from paceline.plan.lengths import lognormal

TREE_DEPTH, TREE_WIDTH = 10, 8
ELASTIC = 32
"""TLT speculates below this number of active requests."""


def _tree(verified: int, alpha: float) -> Draft:
    return Draft(verified=verified, passes=TREE_DEPTH, width=TREE_WIDTH, alpha=alpha)


@cache
def _trees() -> tuple[tuple[int, float], ...]:
    rows = json.loads(FILE.read_text(encoding="utf-8"))["decode_by_batch"]["rows"]
    return tuple((row["verify_tokens"], row["alpha_at_batch_1"]) for row in rows)


def _tlt_model(
    world: World, shape: str, gpu: str, gpus: int, options: Mapping[int, Draft] | None = None
) -> EngineModel:
    if options is None:
        options = {0: PLAIN} | {i: _tree(verified, alpha) for i, (verified, alpha) in enumerate(_trees(), start=1)}
    return EngineModel(
        gpu=GPUS[gpu],
        shape=SHAPES[shape],
        tensor_parallel=gpus,
        drafter="tree",
        draft_vocab=SHAPES[shape].vocab,
        options=options,
        graph_tokens=inf,  # TLT captures a graph for every pair of batch and tree
        constants=world.constants,
    )


def _table(model: EngineModel, context: float) -> TableSelector:
    """Return the best tree at each batch size below the threshold, as TLT's bandit finds it."""
    best = [
        max(model.options, key=lambda k, batch=batch: gain_at(model, k, batch, context)) for batch in range(1, ELASTIC)
    ]
    return TableSelector(ranges=(*((batch, batch, k) for batch, k in enumerate(best, start=1)), (ELASTIC, 4096, 0)))


def tlt_step(world: World, *, shape: str, nodes: int) -> float:
    """Return the speedup of a TLT step over veRL: generation, then log-probabilities and update, all on every GPU."""
    a = world.assumptions
    gpus = 2 if shape == "Qwen2.5-7B" else 4
    model = _tlt_model(world, shape, "H100", gpus)
    lengths = lognormal(a.tlt_mean, 32_768)
    engines = nodes * 8 // gpus
    flops = nodes * 8 * GPUS["H100"].flops("bf16") * world.constants.learner_efficiency
    # Update 6, log-probabilities of the policy and of the reference 2 each, operations for each weight and token.
    learner_s = 10 * SHAPES[shape].active_params * lengths.mean * a.tlt_rollouts / flops
    rollouts = a.tlt_rollouts / engines
    plain_s = generation_s(model, lengths, rollouts)
    return (plain_s + learner_s) / (generation_s(model, lengths, rollouts, _table(model, a.tlt_context)) + learner_s)


def _stream(world: World, *, gpu: str) -> float:
    a = world.assumptions
    draft = Draft(verified=16, passes=a.tlt_stream_depth, width=TREE_WIDTH, alpha=a.tlt_stream_alpha)
    return gain_at(_tlt_model(world, "Qwen2.5-7B", gpu, 1, {0: PLAIN, 1: draft}), 1, 1, 1000.0)


def _at_batch(world: World, *, tree: int, batch: int) -> float:
    return gain_at(_tlt_model(world, "Qwen2.5-32B", "H100", 4), tree, batch, world.assumptions.tlt_context)


def _long_tail(world: World) -> float:
    a = world.assumptions
    model, lengths = _tlt_model(world, "Qwen2.5-32B", "H100", 4), lognormal(a.tlt_mean, 32_768)
    return generation_s(model, lengths, 128) / generation_s(model, lengths, 128, _table(model, a.tlt_context))


def tlt_cells(published: Mapping[str, Any]) -> Iterator[Cell]:
    single = published["decode_single_stream"]
    for row in single["rows"]:
        predict, value = partial(_stream, gpu=row["gpu"].replace(" ", "")), row["speculative"] / row["plain"]
        yield make_cell(f"tlt one stream {row['gpu']}", "tlt one stream", single, value, predict)
    by_batch = published["decode_by_batch"]
    for tree, row in enumerate(by_batch["rows"], start=1):
        for batch, value in zip(by_batch["batch"], row["speedup"], strict=True):
            name, predict = (
                f"tlt batch {batch}, verify {row['verify_tokens']}",
                partial(_at_batch, tree=tree, batch=batch),
            )
            yield make_cell(name, "tlt by batch", by_batch, value, predict)
    case = published["long_tail_case"]
    yield make_cell("tlt 128 requests", "tlt long tail", case, case["rollout_speedup"], _long_tail)

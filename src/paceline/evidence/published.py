"""Published figures as cells, each with what the simulator says about it; and their split into a half to fit and one held out.

What a paper does not state (how many rollouts an engine has, how long they are, what share of a step is generation) is an
`Assumption` with a name, fitted together with the `Constants` of engine_model.py on the fitting half. Cells of one mechanism form a
family; within each family a generator with a fixed seed decides which half a cell is in, before anything is predicted.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from math import inf
from pathlib import Path
from typing import Any

from paceline.config import FixedSelector, SelectorConfig, TableSelector
from paceline.evidence.engine_model import PLAIN, Constants, Draft, DrafterKind, EngineModel, drafts
from paceline.evidence.hardware import GPUS, SHAPES, Gpu, ModelShape, Precision
from paceline.evidence.lengths import Lengths, lognormal
from paceline.evidence.run_model import Scenario, simulate

SPLIT_SEED = 6
HELDOUT_P90 = 0.20
"""Error that nine of ten held-out cells stay below, as recorded in benchmarks/plan.json: the range of every answer."""
FILE = Path(__file__).parent / "published.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """What the papers leave open. Lengths in tokens, shares of the plain step."""

    nvidia_rollouts: float = 135.0
    """Of one engine (one GB200) in a step."""
    nvidia_zero_mean: float = 1580.0
    nvidia_think_mean: float = 3120.0
    tlt_context: float = 10200.0
    """Of each request, where speed-ups are by batch size."""
    tlt_stream_alpha: float = 4.6
    """Accepted length of one stream of Qwen2.5-7B."""
    tlt_stream_depth: float = 2.81
    """Passes of the drafter for it."""
    tlt_rollouts: float = 880.0
    """Of a step, on any number of nodes."""
    tlt_mean: float = 4400.0
    fp8_rollouts: float = 95.9
    """Of one engine in a step."""
    fp8_mean: float = 5870.0
    codraft_rollouts: float = 33.0
    """Of one engine in a step."""
    codraft_dense_share: float = 0.834
    codraft_moe_share: float = 0.43
    simulated_share: float = 0.659
    """Of generation in the step that NVIDIA's simulator speeds up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    constants: Constants = field(default_factory=Constants)
    assumptions: Assumptions = field(default_factory=Assumptions)


Predict = Callable[[World], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    name: str
    family: str
    paper: str
    measured: bool
    """On GPUs; otherwise by the authors' own simulator."""
    value: float
    """Speed-up over the plain run of the same system, or ratio of capacities."""
    predict: Predict


NOT_REPRODUCED: Mapping[str, str] = {
    "nvidia: simulated best cell, rollout 6.49 and step 2.22": "its draft length and accepted length are not published",
    "nvidia: seconds by stage": "prompts, rollouts and lengths of a step are not published; their shares are inputs here",
    "tlt: tokens/s of one stream": "they are not speed-ups",
    "tlt: graph memory, checkpoint latency, packing": "properties of TLT's own code; ours are measured by other benches",
    "tlt: accepted length stale 4.59, trained 6.53": "an outcome of learning; the plan takes accepted lengths as given",
}
"""Published figures that are not cells, and why."""


def cells(source: Path = FILE) -> list[Cell]:
    published = json.loads(source.read_text(encoding="utf-8"))
    return [
        *_generation_cells(published["generation_speedup"]),
        *_end_to_end_cells(published["end_to_end"], published["step_time_seconds"]),
        *_tlt_cells(published),
        *_fp8_cells(published["fp8"]),
    ]


def split(all_cells: Sequence[Cell], seed: int = SPLIT_SEED) -> tuple[list[Cell], list[Cell]]:
    """Cells to fit and cells held out: half of each family, the odd one to fit; a cell without family is held out."""
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


# ── generation: one engine stands for all, they share the work evenly


def _generation_s(
    model: EngineModel,
    lengths: Lengths,
    rollouts: float,
    selector: SelectorConfig | None = None,
    *,
    max_num_seqs: int = 256,
) -> float:
    """Of a batch of `rollouts`, interpolated between whole numbers so that a fit sees a smooth function."""
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


def _fixed_gain(model: EngineModel, kind: DrafterKind, k: int, alpha: float, lengths: tuple[float, int], rollouts: float) -> float:
    """Of drafts of one length over none; `lengths`: mean and maximum."""
    fast = replace(model, drafter=kind, options={0: PLAIN, **_only(kind, k, alpha)})
    plain_s = _plain_s(model.gpu, model.shape, model.tensor_parallel, model.constants, lengths, rollouts)
    return plain_s / _generation_s(fast, lognormal(*lengths), rollouts, FixedSelector(draft_length=k))


@lru_cache(maxsize=64)
def _plain_s(gpu: Gpu, shape: ModelShape, gpus: int, constants: Constants, lengths: tuple[float, int], rollouts: float) -> float:
    """Many cells have the same plain run."""
    plain = EngineModel(gpu=gpu, shape=shape, tensor_parallel=gpus, constants=constants)
    return _generation_s(plain, lognormal(*lengths), rollouts)


def _only(kind: DrafterKind, k: int, alpha: float) -> dict[int, Draft]:
    return drafts(kind, alpha=alpha, at=k, longest=k)


def _nvidia_8b(world: World, workload: str, kind: DrafterKind, k: int, alpha: float) -> float:
    a = world.assumptions
    model = EngineModel(gpu=GPUS["GB200"], shape=SHAPES["Qwen3-8B"], constants=world.constants)
    mean = a.nvidia_zero_mean if workload == "RL-Zero" else a.nvidia_think_mean
    return _fixed_gain(model, kind, k, alpha, (mean, 20_480), a.nvidia_rollouts)


CODRAFT: Mapping[str, tuple[str, int, str]] = {
    "Qwen3-8B": ("Qwen3-8B", 1, "H100"),
    "Qwen3.5-122B-A10B": ("Qwen3.5-122B-A10B", 4, "GB200"),
    "GPT-OSS-120B": ("gpt-oss-120b", 2, "GB200"),
}
CODRAFT_BLOCK: Mapping[str, int] = {"Qwen3-8B": 15, "Qwen3.5-122B-A10B": 15, "GPT-OSS-120B": 9}
"""Draft lengths are not published. These are of the public DFlash checkpoints (z-lab/Qwen3-8B-DFlash-b16: blocks of 16;
z-lab/gpt-oss-120b-DFlash: of 10); DSpark is taken to cost the same. For EAGLE-3 it is 3, NVIDIA's best."""


def _codraft(world: World, workload: str, drafter: str, alpha: float) -> float:
    shape, gpus, gpu = CODRAFT[workload]
    kind: DrafterKind = "eagle3" if drafter == "eagle3" else "dflash"
    k = 3 if kind == "eagle3" else CODRAFT_BLOCK[workload]
    model = EngineModel(gpu=GPUS[gpu], shape=SHAPES[shape], tensor_parallel=gpus, constants=world.constants)
    return _fixed_gain(model, kind, k, alpha, (4000, 16_384), world.assumptions.codraft_rollouts)


def _generation_cells(rows: Sequence[Mapping[str, Any]]) -> Iterator[Cell]:
    for row in rows:
        workload, drafter, alpha = row["workload"], row["drafter"], row["alpha"]
        if row["paper"] == "nvidia":
            kind: DrafterKind = "ngram" if drafter == "ngram" else "eagle3"
            family = "n-gram" if kind == "ngram" else "out of domain" if "domain" in drafter else "draft length"

            def predict(
                world: World, workload: str = workload, kind: DrafterKind = kind, k: int = row["k"], alpha: float = alpha
            ) -> float:
                return _nvidia_8b(world, workload, kind, k, alpha)

            name = f"nvidia {workload} {drafter} k={row['k']}"
            yield _cell(name, f"nvidia {family}", row, row["speedup"], predict)
        else:
            moe = "dense" if workload == "Qwen3-8B" else "moe"
            name = f"codraft {workload} {drafter}"

            def gain(world: World, workload: str = workload, drafter: str = drafter, alpha: float = alpha) -> float:
                return _codraft(world, workload, drafter, alpha)

            def step(world: World, gain: Predict = gain, moe: str = moe) -> float:
                a = world.assumptions
                return _amdahl(gain(world), a.codraft_dense_share if moe == "dense" else a.codraft_moe_share)

            yield _cell(f"{name}, generation", f"codraft {moe} generation", row, row["speedup"], gain)
            yield _cell(f"{name}, step", f"codraft {moe} step", row, row["end_to_end"], step)


def _cell(name: str, family: str, row: Mapping[str, Any], value: float, predict: Predict) -> Cell:
    return Cell(
        name=name,
        family=family,
        paper=row["paper"],
        measured=row.get("kind", "measured") == "measured",
        value=value,
        predict=predict,
    )


def _amdahl(gain: float, share: float) -> float:
    return 1 / (1 - share + share / gain)


# ── whole steps


def _end_to_end_cells(rows: Sequence[Mapping[str, Any]], stages: Sequence[Mapping[str, Any]]) -> Iterator[Cell]:
    plain = {row["workload"]: row for row in stages if row["mode"] == "plain"}
    alphas = {"RL-Zero": 3.32, "RL-Think": 2.77}  # of k = 3, from generation_speedup
    for row in rows:
        workload, note = row["workload"], row.get("note", "")
        if row["paper"] == "tlt":
            model = "Qwen2.5-7B" if "7B" in workload else "Qwen2.5-32B"
            nodes = int(workload.partition(", ")[2].split()[0])

            def scaling(world: World, model: str = model, nodes: int = nodes) -> float:
                return _tlt_step(world, model, nodes)

            yield _cell(f"tlt {model} {nodes} nodes", f"tlt step {model}", row, row["speedup"], scaling)
        elif row["kind"] == "simulated":
            if note == "best cell":
                continue
            yield from _simulated_cells(row)
        elif "lag" in note:

            def lag(world: World, alpha: float = alphas[workload]) -> float:
                return _nvidia_lag(world, alpha)

            yield _cell(f"nvidia {workload} lag 1", "nvidia step", row, row["speedup"], lag)
        else:
            share = plain[workload]["generation"] / plain[workload]["step"]

            def step(world: World, workload: str = workload, share: float = share, alpha: float = alphas[workload]) -> float:
                return _amdahl(_nvidia_8b(world, workload, "eagle3", 3, alpha), share)

            yield _cell(f"nvidia {workload} synchronous", "nvidia step", row, row["speedup"], step)


def _nvidia_lag(world: World, alpha: float) -> float:
    """RL-Think with lag 1: 12 nodes of 4 generate while the learner works. The learner's time is what makes the exposed part of
    generation the published one in the plain run, 10.4 of 75.0 s."""
    a = world.assumptions
    plain = EngineModel(gpu=GPUS["GB200"], shape=SHAPES["Qwen3-8B"], constants=world.constants)
    fast = replace(plain, drafter="eagle3", options=_only("eagle3", 3, alpha))
    base = Scenario(
        model=plain,
        num_engines=1,
        num_groups=max(round(a.nvidia_rollouts * 32 / 48 / 8), 1),
        group_size=8,
        lengths=lognormal(a.nvidia_think_mean, 20_480),
        lag=1,
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
    """NVIDIA's simulator is private. It is taken to be of GPU time alone, without launches and hosts, and of a batch that stays
    full: with a tail, where few tokens meet few experts, 2.72 of an accepted length of 3 could not be."""
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
            options=_only("eagle3", k, alpha),
        )
        batch = (1 + lag) * 4096 * model.tensor_parallel // gpus  # with a lag so many more batches share the engines
        return _step_gain(model, k, batch, 5000.0)

    def step(world: World) -> float:
        share = world.assumptions.simulated_share
        gain = rollout(world)
        # With a lag the longer of generation and learning is what a step takes.
        return max(share, 1 - share) / max(share / gain, 1 - share) if lag else _amdahl(gain, share)

    name = f"nvidia 235B on {gpus}, {row['note']}"
    yield _cell(f"{name}, generation", "nvidia simulated generation", row, row["rollout"], rollout)
    yield _cell(f"{name}, step", "nvidia simulated step", row, row["speedup"], step)


# ── TLT: trees of depth 10 and width 8, the number of verified tokens chosen for each batch

TREE_DEPTH, TREE_WIDTH = 10, 8
ELASTIC = 32
"""TLT speculates below so many active requests."""


def _tree(verified: int, alpha: float) -> Draft:
    return Draft(verified=verified, passes=TREE_DEPTH, width=TREE_WIDTH, alpha=alpha)


@cache
def _trees() -> tuple[tuple[int, float], ...]:
    rows = json.loads(FILE.read_text(encoding="utf-8"))["decode_by_batch"]["rows"]
    return tuple((row["verify_tokens"], row["alpha_at_batch_1"]) for row in rows)


def _tlt_model(world: World, shape: str, gpu: str, gpus: int, options: Mapping[int, Draft] | None = None) -> EngineModel:
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


def _step_gain(model: EngineModel, k: int, batch: int, context: float) -> float:
    return model.options[k].alpha * model.step_s(batch, 0, context) / model.step_s(batch, k, context)


def _table(model: EngineModel, context: float) -> TableSelector:
    """The best tree at each batch size below the threshold: what TLT's bandit finds."""
    best = [max(model.options, key=lambda k, batch=batch: _step_gain(model, k, batch, context)) for batch in range(1, ELASTIC)]
    return TableSelector(ranges=(*((batch, batch, k) for batch, k in enumerate(best, start=1)), (ELASTIC, 4096, 0)))


def _tlt_step(world: World, shape: str, nodes: int) -> float:
    """A step of TLT over one of veRL: generation on every GPU, then log-probabilities and update on every GPU."""
    a = world.assumptions
    gpus = 2 if shape == "Qwen2.5-7B" else 4
    model = _tlt_model(world, shape, "H100", gpus)
    lengths = lognormal(a.tlt_mean, 32_768)
    engines = nodes * 8 // gpus
    flops = nodes * 8 * GPUS["H100"].flops("bf16") * world.constants.learner_efficiency
    # Update 6, log-probabilities of the policy and of the reference 2 each, operations for each weight and token.
    learner_s = 10 * SHAPES[shape].active_params * lengths.mean * a.tlt_rollouts / flops
    rollouts = a.tlt_rollouts / engines
    plain_s = _generation_s(model, lengths, rollouts)
    return (plain_s + learner_s) / (_generation_s(model, lengths, rollouts, _table(model, a.tlt_context)) + learner_s)


def _tlt_cells(published: Mapping[str, Any]) -> Iterator[Cell]:
    single = published["decode_single_stream"]
    for row in single["rows"]:
        name = row["gpu"].replace(" ", "")

        def stream(world: World, gpu: str = name) -> float:
            a = world.assumptions
            draft = Draft(verified=16, passes=a.tlt_stream_depth, width=TREE_WIDTH, alpha=a.tlt_stream_alpha)
            return _step_gain(_tlt_model(world, "Qwen2.5-7B", gpu, 1, {0: PLAIN, 1: draft}), 1, 1, 1000.0)

        yield _cell(f"tlt one stream {row['gpu']}", "tlt one stream", single, row["speculative"] / row["plain"], stream)
    by_batch = published["decode_by_batch"]
    for index, row in enumerate(by_batch["rows"], start=1):
        for batch, value in zip(by_batch["batch"], row["speedup"], strict=True):

            def at(world: World, index: int = index, batch: int = batch) -> float:
                return _step_gain(_tlt_model(world, "Qwen2.5-32B", "H100", 4), index, batch, world.assumptions.tlt_context)

            yield _cell(f"tlt batch {batch}, verify {row['verify_tokens']}", "tlt by batch", by_batch, value, at)

    def tail(world: World) -> float:
        a = world.assumptions
        model, lengths = _tlt_model(world, "Qwen2.5-32B", "H100", 4), lognormal(a.tlt_mean, 32_768)
        plain_s = _generation_s(model, lengths, 128)
        return plain_s / _generation_s(model, lengths, 128, _table(model, a.tlt_context))

    case = published["long_tail_case"]
    yield _cell("tlt 128 requests", "tlt long tail", case, case["rollout_speedup"], tail)


# ── FP8


def _fp8_generation_s(world: World, shape: str, gpus: int, weights: Precision, kv_cache: Precision) -> float:
    a = world.assumptions
    model = _fp8_model(world, shape, gpus, weights, kv_cache)
    return _generation_s(model, lognormal(a.fp8_mean, 20_480), a.fp8_rollouts, max_num_seqs=1024)


def _fp8_model(world: World, shape: str, gpus: int, weights: Precision, kv_cache: Precision) -> EngineModel:
    return EngineModel(
        gpu=GPUS["H100"],
        shape=SHAPES[shape],
        tensor_parallel=gpus,
        weights=weights,
        kv_cache=kv_cache,
        memory_utilization=0.7,
        constants=world.constants,
    )


Kinds = tuple[Precision, Precision]
"""Of weights and of the KV cache."""
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
                kinds = FP8_KINDS[what]

                def capacity(world: World, kinds: Kinds = kinds) -> float:
                    plain = _fp8_model(world, "Qwen3-8B", 1, "bf16", "bf16").capacity_tokens
                    return _fp8_model(world, "Qwen3-8B", 1, *kinds).capacity_tokens / plain

                yield _cell(f"fp8 capacity {what}", "fp8 capacity", row, tokens / base, capacity)
            continue
        kinds = FP8_KINDS[row["what"]]

        def gain(world: World, shape: str = shape, gpus: int = gpus, kinds: Kinds = kinds) -> float:
            plain_s = _fp8_generation_s(world, shape, gpus, "bf16", "bf16")
            return plain_s / _fp8_generation_s(world, shape, gpus, *kinds)

        yield _cell(f"fp8 {shape} {row['what']}", "fp8 gain", row, 1 + sum(row["rollout_gain"]) / 2, gain)

"""`paceline bench drafter`: does the drafter follow the policy, at no cost, and give way at once?

Two engines of one core each, and a learner on the first of the two cores: the second engine stands apart from it and may be lent
while it works, as an engine with a GPU of its own may.

Drift. Three RL runs of one seed: with the offline drafter frozen and with the same drafter trained on idle engines, both at a
learning rate that moves the policy; and with an untrained drafter trained on idle engines, at the arena's own. Draft length is
fixed, so that accepted lengths can be compared; each is the mean of the last steps.

    online_over_frozen          accepted length at the end, trained over frozen
    from_scratch_over_offline   of the untrained drafter at the end, over the offline one before the policy has moved
    idle_used                   seconds of training over seconds in which an engine without rollouts could be lent

Cost. One run in which every batch of prompts comes twice, with places lent and not lent, the order changing from pair to pair. It
samples almost greedily and learns almost nothing, so that both steps of a pair do the same work.

    step_time_ratio, makespan_ratio     lent over not lent, medians of pairs

Give way. A place is lent, and after a random moment its engine gets a request for one token.

    recall_p99_ms               from the request to the token, here in the driver
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from paceline.arena.policy import resolve
from paceline.arena.problems import arena_task
from paceline.config import Config, load_config
from paceline.evidence.measure import CpuTimes, Result, environment, middle
from paceline.metrics import JsonlSink, Recorder, read_metrics
from paceline.run.cluster import Cluster, start_cluster
from paceline.run.journal import Journal
from paceline.run.loop import Parts, train
from paceline.run.task import scorer
from paceline.run.warmstart import WarmStart, train_drafter
from paceline.session import load_tokenizer, with_drafter
from paceline.session import run as run_session
from paceline.types import EngineLostError, Prompt, RolloutRequest

DRAFT_LENGTH = 5
LAST_STEPS = 5
SPECULATION = [
    "speculation.drafter.kind=eagle3",
    f"speculation.max_draft_length={DRAFT_LENGTH}",
    "speculation.selector.kind=fixed",
    f"speculation.selector.draft_length={DRAFT_LENGTH}",
]
ARENA = ["learner.cpus=1", "eval.every=0"]
STRONG = ["learner.learning_rate=3e-4", "rollout.max_tokens=384"]
"""Six times what the arena learns best with: the policy unlearns its task, and responses would grow without end."""
LENT = ["speculation.training.mode=idle", "speculation.training.when=always"]
SAME_WORK = [
    "rollout.temperature=0.01",
    "rollout.group_size=1",
    "rollout.prompts_per_step=128",
    "objective.drop_uniform_groups=false",
    "learner.learning_rate=1e-12",
]


def run(
    *,
    progress: Callable[[str], None],
    cache_root: Path,
    config_file: Path,
    overrides: Sequence[str] = (),
    seeds: Sequence[int] = (0,),
    steps: int = 40,
    pairs: int = 16,
    recalls: int = 210,
) -> Result:
    before = CpuTimes.now()
    offline = [*ARENA, *SPECULATION, "speculation.drafter.path=arena", *overrides]
    curves: dict[str, list[list[float]]] = {"frozen": [], "online": [], "from scratch": []}
    idle_used = []
    with TemporaryDirectory() as scratch:
        untrained = _untrained(cache_root, Path(scratch, "untrained"), progress)
        for seed in seeds:
            shared = [*offline, f"run.seed={seed}", f"run.steps={steps}"]
            for arm, settings in (
                ("frozen", [*shared, *STRONG]),
                ("online", [*shared, *STRONG, *LENT]),
                ("from scratch", [*shared, *LENT, f'speculation.drafter.path="{untrained}"']),
            ):
                records = _train(config_file, settings, scratch, f"{arm.replace(' ', '-')}-{seed}", cache_root, progress)
                curves[arm].append([record["metrics"]["rollout/accepted_length"] for record in records["step"]])
                progress(f"seed {seed}, {arm}: accepted length {_start(curves[arm][-1]):.2f} -> {_end(curves[arm][-1]):.2f}")
                if arm != "frozen":
                    idle_used.append(_idle_used(records))
        config = load_config(config_file, [*offline, *LENT, *SAME_WORK, f"run.steps={2 * pairs}"])
        config = with_drafter(config, cache_root=cache_root, progress=progress)
        paired, recall_s = asyncio.run(_cost(config, cache_root, Path(scratch, "pairs.jsonl"), pairs, recalls, progress))
    over_frozen = [_end(online) / _end(frozen) for online, frozen in zip(curves["online"], curves["frozen"], strict=True)]
    over_offline = [_end(own) / _start(frozen) for own, frozen in zip(curves["from scratch"], curves["frozen"], strict=True)]
    measured = {
        "online_over_frozen": middle(over_frozen),
        "from_scratch_over_offline": middle(over_offline),
        "step_time_ratio": middle([on["time/step"] / off["time/step"] for on, off in paired]),
        "makespan_ratio": middle([on["rollout/makespan_s"] / off["rollout/makespan_s"] for on, off in paired]),
        "recall_p99_ms": (1000 * float(np.quantile(recall_s, 0.99)), 1000 * (max(recall_s) - min(recall_s))),
        "idle_used": middle(idle_used),
    }
    return Result(
        name="drafter",
        figures={name: figure for name, (figure, _) in measured.items()},
        spread={name: spread for name, (_, spread) in measured.items()},
        goals={
            "online_over_frozen": (">=", 1.2),
            "from_scratch_over_offline": (">=", 0.8),
            "step_time_ratio": ("<=", 1.01),
            "makespan_ratio": ("<=", 1.01),
            "recall_p99_ms": ("<=", 150.0),
            "idle_used": (">=", 0.8),
        },
        environment=environment(seeds=seeds, config=config.model_dump(mode="json")),
        details={
            "accepted_length": curves,
            "pairs": len(paired),
            "ratio_of_sums": sum(on["time/step"] for on, _ in paired) / sum(off["time/step"] for _, off in paired),
            "recalls": len(recall_s),
            "recall_median_ms": 1000 * float(np.median(recall_s)),
            "steal_share": CpuTimes.now().steal_share_since(before),
        },
    )


def _untrained(cache_root: Path, out: Path, progress: Callable[[str], None]) -> Path:
    """A drafter as `paceline draft train` makes it, before it has learnt anything: one optimizer step of its warm-up."""
    model_path = resolve("arena:small", cache_root=cache_root, progress=progress)
    prompts = arena_task(load_tokenizer(model_path), seed=7, num_heldout=0).prompts
    recipe = WarmStart(train_tokens=1, rollout_tokens=2_000, heldout_tokens=1_000, max_num_seqs=64)
    evaluation = train_drafter(
        "eagle3", model_path, prompts, out, recipe, policy="arena:small", data="arena problems, seed 7", progress=progress
    )
    progress(f"untrained drafter: accepted length {evaluation.accepted_length[DRAFT_LENGTH - 1]:.2f}")
    return out


def _train(
    config_file: Path, settings: Sequence[str], directory: str, name: str, cache_root: Path, progress: Callable[[str], None]
) -> dict[str, list[dict[str, Any]]]:
    config = load_config(config_file, [*settings, f'run.directory="{directory}"', f"run.name={name}"])
    return read_metrics(run_session(config, cache_root=cache_root, progress=progress) / "metrics.jsonl")


def _start(curve: Sequence[float]) -> float:
    return sum(curve[:LAST_STEPS]) / len(curve[:LAST_STEPS])


def _end(curve: Sequence[float]) -> float:
    return sum(curve[-LAST_STEPS:]) / len(curve[-LAST_STEPS:])


def _idle_used(records: dict[str, list[dict[str, Any]]]) -> float:
    """Over all steps; a place could be lent from the second on, when the buffer holds something."""
    total = {name: sum(record["metrics"][f"draft/{name}"] for record in records["step"]) for name in ("training_s", "leasable_s")}
    return total["training_s"] / total["leasable_s"]


Pair = tuple[dict[str, float], dict[str, float]]


async def _cost(
    config: Config, cache_root: Path, metrics: Path, pairs: int, recalls: int, progress: Callable[[str], None]
) -> tuple[list[Pair], list[float]]:
    model_path = resolve(config.policy.model, cache_root=cache_root, progress=progress)
    tokenizer = load_tokenizer(model_path)
    task = arena_task(tokenizer, seed=config.run.seed, num_heldout=0)
    recorder = Recorder(JsonlSink(metrics))
    async with start_cluster(config, model_path) as cluster:
        assert cluster.coach is not None
        lent: list[bool] = []
        parts = Parts(
            engines=cluster.engines,
            learner=cluster.learner,
            sender=cluster.sender,
            prompts=_twice(task.prompts, config.rollout.prompts_per_step, cluster, lent),
            heldout=[],
            score=scorer(task.reward, tokenizer),
            coach=cluster.coach,
        )
        progress(f"{pairs} pairs of steps, places lent and not")
        await train(parts, config, recorder)
        cluster.coach.lends = cluster.learner.hands_over = True
        prompt_ids = next(task.prompts).token_ids
        request = RolloutRequest(group_id=0, index=0, prompt_ids=prompt_ids, max_tokens=1, temperature=1.0)
        recall_s = await _recalls(cluster, recorder, request, recalls, progress)
    recorder.close()
    steps = [record["metrics"] for record in read_metrics(metrics)["step"]]
    # The first pair has nothing to train on yet.
    both = [(steps[i], steps[i + 1]) if lent[i] else (steps[i + 1], steps[i]) for i in range(2, 2 * pairs, 2)]
    return both, recall_s


def _twice(prompts: Iterator[Prompt], size: int, cluster: Cluster, lent: list[bool]) -> Iterator[Prompt]:
    """Each batch of prompts, and then the same once more; in one of the two, by turns, no place is lent and nothing handed over."""
    assert cluster.coach is not None
    first = True
    while True:
        batch = list(islice(prompts, size))
        for lends in (first, not first):
            cluster.coach.lends = cluster.learner.hands_over = lends
            lent.append(lends)
            yield from batch
        first = not first


async def _recalls(
    cluster: Cluster, recorder: Recorder, request: RolloutRequest, number: int, progress: Callable[[str], None]
) -> list[float]:
    """Seconds from a request for a lent place to its first token."""
    coach = cluster.coach
    assert coach is not None
    rng = np.random.default_rng(0)

    def lose(engine: str, why: str) -> None:
        raise EngineLostError(engine, why)

    async def once(index: int) -> float:
        engine = cluster.engines[index % len(cluster.engines)]
        await coach.leased(engine.name)
        await asyncio.sleep(rng.uniform(0.0, 0.1))
        began_s = time.monotonic()
        coach.on_work(engine.name)
        await coach.awake(engine.name)
        await engine.submit([request])
        await engine.collect()
        spent_s = time.monotonic() - began_s
        coach.on_drained(engine.name)
        return spent_s

    async with coach.conduct(Journal(recorder), lose):
        coach.open_phase()
        times = []
        for index in range(number):
            times.append(await once(index))
            if (index + 1) % 50 == 0:
                progress(f"{index + 1} recalls, median {1000 * float(np.median(times)):.0f} ms")
        await coach.close_phase()
    return times

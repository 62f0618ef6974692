"""A config in, a run directory out: what `paceline train` does.

runs/NAME/config.json      the resolved config
         metrics.jsonl     everything that was measured
         policy/step-N/    Hugging Face checkpoints of the policy
         report.html       made at the end, or by `paceline report`
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import cast

from paceline.arena.drafter import resolve_drafter
from paceline.arena.policy import resolve
from paceline.arena.problems import arena_task
from paceline.config import ArenaData, Config, EagleDrafter, LearnedDrafter, MeasuredSelector, ParallelDrafter
from paceline.console import ConsoleSink
from paceline.draft.provenance import Provenance
from paceline.evidence.measure import environment
from paceline.metrics import JsonlSink, Recorder, Sink, WandbSink
from paceline.run.loop import Parts, train
from paceline.run.task import Task, Tokenizer, load_task, scorer
from paceline.strategy.cost import load_costs


def run(config: Config, *, cache_root: Path, progress: Callable[[str], None]) -> Path:
    """Train as the config says; returns the run directory. Ctrl-C and SIGTERM end every process before this returns."""
    model_path = resolve(config.policy.model, cache_root=cache_root, progress=progress)
    config = with_drafter(config, cache_root=cache_root, progress=progress)
    check_costs(config)
    tokenizer = load_tokenizer(model_path)
    task = make_task(config, tokenizer)
    check_lengths(config, task)
    directory = new_directory(config)
    (directory / "config.json").write_text(config.model_dump_json(indent=2) + "\n", encoding="utf-8")
    recorder = Recorder(JsonlSink(directory / "metrics.jsonl"), _sinks(config))
    progress(f"run directory {directory}; starting {config.rollout.num_engines} engines and the learner")
    try:
        asyncio.run(_run(config, model_path, task, tokenizer, recorder, directory))
    finally:
        recorder.close()
    return directory


async def _run(config: Config, model_path: Path, task: Task, tokenizer: Tokenizer, recorder: Recorder, directory: Path) -> None:
    from paceline.run.cluster import start_cluster  # imports ray and torch, which takes seconds

    this_task = asyncio.current_task()
    assert this_task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this_task.cancel)
    resolved = json.loads(config.model_dump_json())
    record = {
        "config": resolved,
        "environment": environment(seeds=[config.run.seed]),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    engine = config.rollout.engine
    async with start_cluster(config, model_path) as cluster:
        recorder.write("run", record)
        if cluster.coach is not None:
            cluster.coach.keep_in(directory / "drafter.safetensors")
        parts = Parts(
            engines=cluster.engines,
            learner=cluster.learner,
            sender=cluster.sender,
            prompts=task.prompts,
            heldout=task.heldout,
            score=scorer(task.reward, tokenizer),
            coach=cluster.coach,
            raise_precision=None if engine == engine.in_full_precision else partial(cluster.raise_precision, engine),
        )
        await train(parts, config, recorder, save_to=str(directory.resolve() / "policy"))
        if cluster.coach is not None:
            cluster.coach.save(directory / "drafter", _provenance(config, directory))


def _provenance(config: Config, directory: Path) -> Provenance:
    """Of the drafter that a run has trained."""
    assert config.speculation is not None and isinstance(config.speculation.drafter, LearnedDrafter)
    facts = {key: value for key, value in config.data.model_dump(mode="json").items() if value is not None}
    return Provenance(
        policy=f"{directory.resolve()}/policy/step-{config.run.steps} ({config.policy.model} after RL)",
        data=", ".join(f"{key} {value}" for key, value in facts.items()),
        start=config.speculation.drafter.path,
        num_tokens=0,
        seed=config.run.seed,
        rl_steps=config.run.steps,
    )


def check_costs(config: Config) -> None:
    """Refuse a prior that is not there, or is of other steps than these engines'."""
    selector = None if config.speculation is None else config.speculation.selector
    if not isinstance(selector, MeasuredSelector) or selector.costs is None:
        return
    costs, engine = load_costs(selector.costs), config.rollout.engine
    if (costs.weights, costs.kv_cache) != (engine.weights, engine.kv_cache):
        raise ValueError(
            f"speculation.selector.costs: got {selector.costs}, measured with weights={costs.weights} and "
            f"kv_cache={costs.kv_cache}; must be of these engines, as measured by `paceline bench costs --costs FILE "
            f"rollout.engine.weights={engine.weights} rollout.engine.kv_cache={engine.kv_cache}`"
        )


def with_drafter(config: Config, *, cache_root: Path, progress: Callable[[str], None]) -> Config:
    """The config with the drafter's path spelled out, where it says `arena`; that drafter is trained if it is not there yet."""
    speculation = config.speculation
    if speculation is None or not isinstance(speculation.drafter, EagleDrafter | ParallelDrafter):
        return config
    drafter = speculation.drafter
    path = resolve_drafter(drafter.path, config.policy.model, kind=drafter.kind, cache_root=cache_root, progress=progress)
    drafter = drafter.model_copy(update={"path": str(path)})
    return config.model_copy(update={"speculation": speculation.model_copy(update={"drafter": drafter})})


def load_tokenizer(model_path: Path) -> Tokenizer:
    from transformers import AutoTokenizer

    return cast("Tokenizer", AutoTokenizer.from_pretrained(model_path))


def make_task(config: Config, tokenizer: Tokenizer) -> Task:
    num_heldout = config.eval.num_prompts if config.eval.every else 0
    if isinstance(config.data, ArenaData):
        return arena_task(tokenizer, seed=config.data.seed + config.run.seed, num_heldout=num_heldout)
    return load_task(config.data, tokenizer, seed=config.run.seed, num_heldout=num_heldout)


def check_lengths(config: Config, task: Task) -> None:
    """Refuse a run whose responses would be cut by the context instead of by rollout.max_tokens."""
    longest = max((len(prompt.token_ids) for prompt in task.heldout), default=0)
    room = config.rollout.engine.max_model_len
    if longest + config.rollout.max_tokens > room:
        raise ValueError(
            f"rollout.engine.max_model_len: got {room}; must be at least {longest + config.rollout.max_tokens} because prompts "
            f"have up to {longest} tokens and rollout.max_tokens is {config.rollout.max_tokens}"
        )


def new_directory(config: Config) -> Path:
    """A directory of this run's own; an existing one is never written into."""
    for number in range(1, 10_000):
        name = config.run.name if number == 1 else f"{config.run.name}-{number}"
        directory = config.run.directory / name
        try:
            directory.mkdir(parents=True)
        except FileExistsError:
            continue
        return directory
    raise ValueError(f"run.name: got {config.run.name!r}; every numbered variant of it exists in {config.run.directory}")


def _sinks(config: Config) -> list[Sink]:
    sinks: list[Sink] = []
    if "console" in config.run.sinks:
        sinks.append(ConsoleSink())
    if "wandb" in config.run.sinks:
        sinks.append(WandbSink("paceline", config.run.name, config.model_dump(mode="json")))
    return sinks

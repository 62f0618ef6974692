"""`paceline train`: turn a config into a run directory.

runs/NAME/config.json      the resolved config
         metrics.jsonl     all metrics
         policy/step-N/    Hugging Face checkpoints of the policy
         state/step-N/     checkpoints of the run, for `--resume`
         batches/          rollouts and rewards since the last checkpoint
         report.html       written at the end, or by `paceline report`
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

from paceline.config import (
    Config,
    EagleDrafter,
    LearnedDrafter,
    MeasuredSelector,
    ParallelDrafter,
    VllmDrafter,
    adjustable_keys,
    load_config,
)
from paceline.console import ConsoleSink
from paceline.context import Context, RunInterruptedError
from paceline.drafters.provenance import Provenance
from paceline.files import atomic_file, lock, move_file
from paceline.measure import environment
from paceline.metrics import JsonlSink, Recorder
from paceline.orchestrator.loop import Parts, train
from paceline.orchestrator.recovery import Recovery
from paceline.orchestrator.rewards import open_scorer
from paceline.orchestrator.task import Task
from paceline.selector.cost_file import Conditions, require_same
from paceline.sessions.workloads import arena_policy, make_task, resolve_drafter, resolve_policy
from paceline.sinks import open_sinks
from paceline.types import Tokenizer


def run(config: Config, context: Context, *, resume: Path | None = None) -> Path:
    """Train in a new run directory, or resume the run in `resume`, and return the directory. Ctrl-C and SIGTERM end
    every process before RunInterruptedError is raised."""
    check_data(config)
    check_groups(config)
    model_path = resolve_policy(config.policy.model, context)
    config = with_drafter(config, context)
    check_costs(config, model_path)
    tokenizer = load_tokenizer(model_path)
    task = make_task(config, tokenizer)
    check_lengths(config, task)
    directory = resume or new_directory(config)

    def refuse() -> None:
        raise ValueError(f"resume: got {directory}, which another process is running; only one process can drive a run")

    with lock(directory / ".lock", on_wait=refuse):
        return _run_in(directory, config, context, model_path, task, tokenizer)


def _run_in(
    directory: Path, config: Config, context: Context, model_path: Path, task: Task, tokenizer: Tokenizer
) -> Path:
    recovery = Recovery(directory, config)
    metrics = directory / "metrics.jsonl"
    num_dropped = recovery.drop_records(metrics) if metrics.is_file() else 0
    with atomic_file(directory / "config.json") as partial_path:
        partial_path.write_text(config.model_dump_json(indent=2) + "\n", encoding="utf-8")
    console = [ConsoleSink()] if "console" in config.run.sinks else []
    recorder = Recorder(JsonlSink(metrics), [*console, *open_sinks(config, directory)])
    for problem in recovery.problems:
        context.progress(f"a damaged checkpoint was set aside; using the previous one: {problem}")
    resumed = f", resumed after step {recovery.step}" if num_dropped else ""
    context.progress(
        f"run directory {directory}{resumed}; starting {config.rollout.num_engines} engines and the learner"
    )
    try:
        asyncio.run(_run(config, model_path, task, tokenizer, recorder, directory, recovery))
    except (asyncio.CancelledError, KeyboardInterrupt) as error:
        preempted = isinstance(error, asyncio.CancelledError) or context.cancelled.is_set()
        number = signal.SIGTERM if preempted else signal.SIGINT
        raise RunInterruptedError(number, directory if config.run.checkpoint_every else None) from None
    finally:
        recorder.close()
        if lost := recorder.counts["metrics/records_lost"]:
            context.report(
                f"{directory / 'metrics.jsonl'} lacks {lost:,} records that could not be written; check for a full disk"
            )
    return directory


def resumed_config(directory: Path, overrides: Sequence[str]) -> Config:
    """Return the config of an earlier run with overrides of adjustable settings."""
    if not (directory / "config.json").is_file():
        raise ValueError(f"resume: got {directory}, which has no config.json; must be a run's directory")
    allowed = [key for key in adjustable_keys() if key not in ("run.name", "run.directory")]
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key not in allowed:
            raise ValueError(
                f"{key}: cannot change at a resume because it would be another run; {', '.join(allowed)} can"
            )
    if not (directory / "state").is_dir():
        raise ValueError(f"resume: got {directory}, which has no checkpoints (run.checkpoint_every=0); start a new run")
    return load_config(directory / "config.json", overrides)


async def _run(
    config: Config,
    model_path: Path,
    task: Task,
    tokenizer: Tokenizer,
    recorder: Recorder,
    directory: Path,
    recovery: Recovery,
) -> None:
    from paceline.cluster.placement import start_cluster  # imports ray and torch, which takes seconds

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
    async with start_cluster(config, model_path) as cluster, open_scorer(task.reward, tokenizer, recorder) as score:
        recorder.write("run", record)
        cluster.drafter.keep_in(directory / "drafter.safetensors")
        if config.run.checkpoint_every:
            cluster.learner.heal(recorder.event)
        parts = Parts(
            members=cluster.members,
            learner=cluster.learner,
            sender=cluster.sender,
            prompts=task.prompts,
            heldout=task.heldout,
            score=score,
            decode=lambda token_ids: tokenizer.decode(token_ids.tolist(), skip_special_tokens=True),
            drafter=cluster.drafter,
            healer=cluster.healer,
            raise_precision=None if engine == engine.in_full_precision else cluster.raise_precision,
            stop_speculation=cluster.stop_speculation,
        )
        await train(parts, config, recorder, save_to=str(directory.resolve() / "policy"), recovery=recovery)
        if (directory / "drafter").exists():  # saved by an earlier end of the run
            move_file(directory / "drafter", directory / f"drafter-of-step-{recovery.step}")
        cluster.drafter.save(directory / "drafter", _provenance(config, directory))


def _provenance(config: Config, directory: Path) -> Provenance | None:
    """Return the origin of the run's drafter, or None without a learned drafter."""
    if config.speculation is None or not isinstance(config.speculation.drafter, LearnedDrafter):
        return None
    assert config.data is not None
    facts = {key: value for key, value in config.data.model_dump(mode="json").items() if value is not None}
    return Provenance(
        policy=f"{directory.resolve()}/policy/step-{config.run.steps} ({config.policy.model} after RL)",
        data=", ".join(f"{key} {value}" for key, value in facts.items()),
        start="random weights" if config.speculation.has_random_drafter else config.speculation.drafter.path,
        num_tokens=0,
        seed=config.run.seed,
        rl_steps=config.run.steps,
    )


def check_costs(config: Config, model_path: Path) -> None:
    """Refuse a missing cost file, or one that was measured on another model, machine or engine."""
    if config.speculation is None:
        return
    selector, drafter = config.speculation.selector, config.speculation.drafter
    if isinstance(selector, MeasuredSelector) and selector.costs is not None:
        here = Conditions.here(model_path, drafter=drafter.kind, engine=config.rollout.engine)
        path = drafter.path if isinstance(drafter, LearnedDrafter) else None
        require_same(selector.costs, here, model=config.policy.model, drafter_path=path)


def with_drafter(config: Config, context: Context) -> Config:
    """Return the config with the local path of its drafter or draft model."""
    speculation = config.speculation
    if speculation is None or speculation.has_random_drafter:
        return config
    match speculation.drafter:
        case (EagleDrafter() | ParallelDrafter()) as drafter:
            drafter = drafter.model_copy(update={"path": str(resolve_drafter(drafter.path, context))})
        case VllmDrafter(settings={"model": str(model), **rest}) as drafter if arena_policy(model) is not None:
            drafter = drafter.model_copy(update={"settings": {**rest, "model": str(resolve_policy(model, context))}})
        case _:
            return config
    return config.model_copy(update={"speculation": speculation.model_copy(update={"drafter": drafter})})


def load_tokenizer(model_path: Path) -> Tokenizer:
    from transformers import AutoTokenizer

    return cast("Tokenizer", AutoTokenizer.from_pretrained(model_path))


def check_data(config: Config) -> None:
    """Refuse a run without data of its own."""
    if config.data is None:
        raise ValueError(
            "data: is missing; must name prompts and a reward function, for example with this line at the top of the "
            'TOML file:\ndata = {kind = "jsonl", path = "prompts.jsonl", reward = "reward.py:reward"}'
        )


def check_groups(config: Config) -> None:
    """Refuse groups of one rollout, with which a run cannot learn."""
    if config.rollout.group_size < 2:
        raise ValueError(
            f"rollout.group_size: got {config.rollout.group_size} with objective.advantage "
            f"{config.objective.advantage!r}; must be at least 2 because an advantage is a reward above its group's "
            "mean, which is 0 for a single rollout"
        )


def check_lengths(config: Config, task: Task) -> None:
    """Refuse a run in which the context would truncate responses before rollout.max_tokens."""
    longest = max((len(prompt.token_ids) for prompt in task.heldout), default=0)
    room = config.rollout.engine.max_model_len
    if longest + config.rollout.max_tokens > room:
        raise ValueError(
            f"rollout.engine.max_model_len: got {room}; must be at least {longest + config.rollout.max_tokens} because "
            f"prompts have up to {longest} tokens and rollout.max_tokens is {config.rollout.max_tokens}"
        )


def new_directory(config: Config) -> Path:
    """Create the run's directory, with a number if the name exists."""
    for number in range(1, 10_000):
        name = config.run.name if number == 1 else f"{config.run.name}-{number}"
        directory = config.run.directory / name
        try:
            directory.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise ValueError(
                f"run.directory: got {config.run.directory}, in which {name} cannot be created ({error.strerror}); "
                "must be a directory that you can write to: set run.directory=PATH"
            ) from None
        return directory
    raise ValueError(f"run.name: got {config.run.name!r}; all its numbered variants exist in {config.run.directory}")

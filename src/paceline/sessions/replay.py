"""`paceline replay`: generate one rollout of a run again, with and without speculation, and compare its tokens.

A rollout's tokens follow from the policy, the prompt and the rollout's seed, if the run had no speculation or coupled
verification. The policy comes from `policy/step-N`, from a checkpoint, or is the initial one. Where the run has not
kept the rollout's tokens (`run.keep_rollouts`), their checksum in metrics.jsonl decides.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from paceline.config import Config, EngineConfig, SpeculationConfig
from paceline.context import Context
from paceline.files import sha256_of
from paceline.measure import Result, environment
from paceline.metrics import stream_metrics
from paceline.orchestrator.batch_log import read_group
from paceline.orchestrator.groups import Sampling
from paceline.report.equality import first_difference
from paceline.rollout.stepped import Order, SteppedEngine
from paceline.sessions.train import load_tokenizer, with_drafter
from paceline.sessions.workloads import make_task, resolve_policy
from paceline.types import RolloutId, RolloutRequest, Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """What a run recorded of one rollout."""

    step: int
    length: int
    sha256: str
    """Beginning of the checksum of its tokens."""
    version: int | None
    """Policy version of all its tokens; None if only the rollout itself would tell."""
    saved: dict[int, Path | None]
    """Where the policy versions on disk are; None is the initial policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    arm: str
    token_ids: list[int]
    equal: bool
    first_difference: int | None
    """None also if the run has not kept the tokens."""


def replay(run: Path, rollout_id: RolloutId, overrides: Sequence[str], config: Config, context: Context) -> Result:
    """Generate a rollout of the run in a directory again. `config` is the run's, with `overrides` of speculation."""
    for override in overrides:
        if not override.startswith("speculation."):
            raise ValueError(
                f"{override.partition('=')[0]}: cannot change in a replay; only settings of speculation can"
            )
    found = find(run, rollout_id)
    group = read_group(run / "batches", rollout_id.group_id.number)
    rollout = None if group is None or group.group_id != rollout_id.group_id else group.rollouts[rollout_id.index]
    version = found.version
    if rollout is not None:
        if len({version for version, _ in rollout.version_spans}) > 1:
            raise ValueError(f"rollout: got {rollout_id}, which a sync divided; must be of one policy version")
        version = rollout.policy_version
    if version is None:
        raise ValueError(
            f"rollout: got {rollout_id}, whose policy version is unknown because run.max_age is above 0 and the run "
            "has not kept it; run.keep_rollouts=true keeps all"
        )
    tokens = None if rollout is None else rollout.token_ids
    prompt_ids = _prompt_of(config, rollout_id, context) if rollout is None else rollout.prompt_ids
    request = RolloutRequest(
        group_id=rollout_id.group_id,
        index=rollout_id.index,
        prompt_ids=prompt_ids,
        max_tokens=config.rollout.max_tokens,
        temperature=config.rollout.temperature,
        seed=Sampling.to_train(config, attempt=rollout_id.group_id.attempt).seed_of(
            rollout_id.group_id.number, rollout_id.index
        ),
    )
    arms: dict[str, SpeculationConfig | None] = {"without speculation": None}
    if (speculation := with_drafter(config, context).speculation) is not None:
        speculation = speculation.from_history if speculation.has_random_drafter else speculation
        speculation = speculation.model_copy(update={"verification": "coupled"})
        arms[f"with {speculation.drafter.kind}"] = speculation
    with _policy(found, version, rollout_id, config, context) as model_path:
        context.progress(f"generating {rollout_id} from policy version {version} on {len(arms)} engines")
        answers = _generate(model_path, config.rollout.engine, arms, request, seed=config.run.seed)
    replayed = [judge(arm, answer, found, tokens) for arm, answer in answers.items()]
    figures = {"logged_tokens": float(found.length), "policy_version": float(version)}
    figures |= {f"equal_{one.arm.replace(' ', '_')}": float(one.equal) for one in replayed}
    return Result(
        name="replay",
        figures=figures,
        spread=dict.fromkeys(figures, 0.0),
        goals={name: (">=", 1.0) for name in figures if name.startswith("equal_")},
        environment=environment(seeds=[config.run.seed], config=config.model_dump(mode="json")),
        details={"rollout": str(rollout_id), "step": found.step, "arms": [asdict(one) for one in replayed]},
    )


def judge(arm: str, answer: list[int], logged: Logged, tokens: Tokens | None) -> Replayed:
    """Compare an answer with the kept tokens, or with their checksum."""
    again = np.asarray(answer, np.int32)
    return Replayed(
        arm=arm,
        token_ids=answer,
        equal=sha256_of([again.data])[: len(logged.sha256)] == logged.sha256,
        first_difference=None if tokens is None else first_difference(tokens, again),
    )


def rows(result: Result) -> list[str]:
    """Return the lines of a short table."""
    lines = [f"{'':22} {'tokens':>6}  {'first difference':16}  verdict"]
    lines.append(f"{'logged':22} {result.figures['logged_tokens']:6.0f}  {'':16}  step {result.details['step']}")
    for one in result.details["arms"]:
        at = "none" if one["equal"] else "unknown" if one["first_difference"] is None else str(one["first_difference"])
        verdict = "EQUAL" if one["equal"] else "DIFFERENT"
        lines.append(f"{one['arm']:22} {len(one['token_ids']):6}  {at:16}  {verdict}")
    return lines


def find(run: Path, rollout_id: RolloutId) -> Logged:
    """Find a rollout and the policies on disk. A saved policy has the version of the last sync of its step."""
    if not (run / "metrics.jsonl").is_file():
        raise ValueError(f"run: got {run}, which has no metrics.jsonl; must be a run's directory, such as runs/arena")
    versions = {0: 0}
    config: dict[str, Any] = {}
    place: tuple[int, int, str] | None = None
    last = ""
    for kind, record in stream_metrics(run / "metrics.jsonl"):
        if kind == "run":
            config = record["config"]
        elif kind == "step":
            versions[record["step"]] = int(record["metrics"].get("sync/version", max(versions.values())))
        elif kind == "rollouts":
            for number, (name, index) in enumerate(zip(record["group"], record["index"], strict=True)):
                last = f"{name}:{index}"
                if last == str(rollout_id) and "tokens" in record:
                    place = record["step"], record["length"][number], record["tokens"][number]
    if place is None:
        raise ValueError(f"rollout: got {rollout_id}, which {run / 'metrics.jsonl'} does not have; such as {last}")
    check_seeded(config, run)
    step, length, sha256 = place
    before = max(versions[earlier] for earlier in versions if earlier < step)
    saved: dict[int, Path | None] = {0: None}
    for directory in (*run.glob("state/step-*"), *run.glob("policy/step-*")):  # the cheaper one wins
        number = int(directory.name.removeprefix("step-"))
        if number in versions:
            saved[versions[number]] = directory
    version = None if config["run"]["max_age"] else before
    return Logged(step=step, length=length, sha256=sha256, version=version, saved=saved)


def check_seeded(config: Mapping[str, Any], run: Path) -> None:
    """Refuse runs whose tokens do not follow from seeds."""
    speculation = config.get("speculation")
    if speculation is not None and speculation.get("verification") != "coupled":
        raise ValueError(
            f"run: got {run}, whose drafts were verified by 'standard'; must have speculation.verification='coupled' "
            "or no speculation because other tokens depend on the drafts"
        )


def _prompt_of(config: Config, rollout_id: RolloutId, context: Context) -> Tokens:
    """Return the prompt at the group's position in the data."""
    task = make_task(config, load_tokenizer(resolve_policy(config.policy.model, context)))
    position = rollout_id.group_id.number
    return next(islice(task.prompts, position, position + 1)).token_ids


@contextmanager
def _policy(found: Logged, version: int, rollout_id: RolloutId, config: Config, context: Context) -> Iterator[Path]:
    """Yield the directory of a policy version. A checkpoint is converted in a temporary directory."""
    initial = resolve_policy(config.policy.model, context)
    if version not in found.saved:
        there = ", ".join(str(number) for number in sorted(found.saved))
        raise ValueError(
            f"rollout: got {rollout_id} of policy version {version}, which is not on disk; versions {there} are. "
            "run.save_every=1 keeps all"
        )
    directory = found.saved[version]
    if directory is None or directory.parent.name == "policy":
        yield directory or initial
        return
    from paceline.learner.fsdp import FsdpLearner  # imports torch, which takes seconds

    settings = config.learner.model_copy(update={"world_size": 1})
    learner = FsdpLearner(initial, settings, config.objective, temperature=config.rollout.temperature)
    with TemporaryDirectory() as scratch:
        try:
            learner.load_state(directory / "learner")
            learner.save(Path(scratch) / "policy")
        finally:
            learner.close()
        yield Path(scratch) / "policy"


def _generate(
    model_path: Path,
    engine: EngineConfig,
    arms: dict[str, SpeculationConfig | None],
    request: RolloutRequest,
    *,
    seed: int,
) -> dict[str, list[int]]:
    # Both engines share a GPU.
    engine = engine.model_copy(update={"gpu_memory_utilization": engine.gpu_memory_utilization / len(arms)})
    with ExitStack() as stack:
        cpus = sorted(os.sched_getaffinity(0))
        engines = {arm: SteppedEngine(model_path, engine, seed=seed, cpus=cpus, speculation=arms[arm]) for arm in arms}
        for started in engines.values():
            stack.callback(started.close)
        answers: dict[str, list[int]] = {}
        for arm, started in engines.items():
            started.wait()
            speculation = arms[arm]
            order = Order(requests=[request], selector=None if speculation is None else speculation.selector, name=arm)
            (answers[arm],) = started.run(order).token_ids
        return answers

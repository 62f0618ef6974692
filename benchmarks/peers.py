"""Our loop against stock TRL's on the same policy, prompts, lengths and number of updates.

    trl         GRPOTrainer with its colocated engine, in a process of its own and an environment that this bench makes
    paceline    `paceline train` with a DFlash drafter, the faster one where nobody trains it

Both arms are GRPO on the arena with one optimizer step a batch, every group trained on, clipped alike and corrected by
truncated importance weights of tokens. They have the same vLLM, PyTorch and cores, engines compiled and in the
precision that is fastest here, float32 learners, and the same prompts in the same steps. TRL's settings follow from our
config, so an override holds for both; beyond those it has no gradient checkpointing, which would slow it down, and
`microbatch` rollouts in a pass. The arms take turns, in another order for each seed; ratios are of runs of one seed,
and the first steps, in which selectors and caches warm up, do not count. The policy is the config's, arena:small, whose
steps take seconds. On two cores arena:large takes half an hour, one engine, a learning rate of 1e-6 and few rollouts
(with eight, TRL's process was killed at 22 GB): benchmarks/README.md has the command.

    generation_over_trl     seconds of generation for a token, TRL's over ours; median of the seeds
    rest_of_step_over_trl   seconds of a step outside of generation, weight sync included, ours over TRL's
    step_over_trl           seconds of a whole step, TRL's over ours
    tokens_over_trl         response tokens, ours over TRL's: how equal the work was
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import gcd
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.step import WARMUP, summarise
from benchmarks.stock_trl.environment import host_environment, trl_site
from benchmarks.stock_trl.process import HostProcess
from benchmarks.stock_trl.training import TrainingSettings
from paceline.config import ArenaData, Config, load_config
from paceline.context import Context
from paceline.devices import fast_precision, on_gpu
from paceline.measure import CpuTimes, Result, environment, meanwhile, middle, paired
from paceline.report.recorded import read_run
from paceline.sessions.train import run as run_session
from paceline.sessions.workloads import resolve_policy

ARMS = ("trl", "paceline")
MICROBATCH = 8
"""Most rollouts in a pass of TRL's learner, padded to the longest of the step; as many as divide the batch."""
BUDGET_S = 28 * 60
"""No seed but the first is begun that would end later than this after the start."""
_SETTINGS = (
    "run.steps=11",
    "run.checkpoint_every=0",
    "run.sinks=[]",
    "rollout.prompts_per_step=4",
    "rollout.group_size=8",
    "rollout.engine.compile=true",  # as TRL's
    "objective.drop_uniform_groups=false",  # as TRL, which trains on all
    "correction.kind=token-tis",
    "eval.every=0",
    "speculation.drafter.kind=dflash",
    "speculation.drafter.path=arena:small/eagle3",
    "speculation.training.mode=off",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRun:
    """Means over the counted steps of one run."""

    step_s: float
    generation_s: float
    sync_s: float
    num_tokens: float
    engine_steps: float
    """Forward passes of the policy, of all engines together."""

    @property
    def rest_s(self) -> float:
        return self.step_s - self.generation_s


def run(
    *,
    context: Context,
    config_file: Path,
    environ: Mapping[str, str],
    overrides: Sequence[str] = (),
    seeds: Sequence[int] = (0, 1, 2),
) -> Result:
    """Train both arms once per seed, by turns; with fewer seeds where time is short."""
    before, began_s = CpuTimes.now(), time.monotonic()
    settings = [*_SETTINGS, f"rollout.engine.dtype={fast_precision()}", *overrides]
    resolved = load_config(config_file, settings)
    if resolved.run.steps <= WARMUP:
        raise ValueError(f"run.steps: got {resolved.run.steps}; must be above {WARMUP}, because those are not counted")
    site = trl_site(context)
    runs: dict[str, list[PeerRun]] = {arm: [] for arm in ARMS}
    versions: Mapping[str, str] = {}
    for turn, seed in enumerate(seeds):
        if is_late(turn, time.monotonic() - began_s):
            context.progress(f"time is up after {turn} of {len(seeds)} seeds")
            seeds = seeds[:turn]
            break
        config = load_config(config_file, [*settings, f"run.seed={seed}"])
        for arm in reversed(ARMS) if turn % 2 else ARMS:
            if arm == "trl":
                one, versions = _train_trl(config, environ, site, context)
            else:
                one = _train_ours(config, context)
            runs[arm].append(one)
            context.progress(
                f"seed {seed}, {arm}: {one.step_s:.2f} s a step, {one.generation_s:.2f} s of it generation, "
                f"{one.sync_s:.2f} s sync; {one.num_tokens:.0f} tokens"
            )
    figures, spread, details = compare(runs)
    return Result(
        name="peers",
        figures=figures,
        spread=spread,
        goals={"generation_over_trl": (">=", 2.5), "rest_of_step_over_trl": ("<=", 1.0)},
        environment=environment(seeds=seeds, config=resolved.model_dump(mode="json") | {"trl": dict(versions)}),
        details={
            "warmup_steps": WARMUP,
            "microbatch_trl": MICROBATCH,
            "runs": {arm: dict(zip(seeds, map(asdict, found), strict=True)) for arm, found in runs.items()},
            "paired": details,
            "machine": meanwhile(before),
        },
    )


def is_late(num_done: int, elapsed_s: float) -> bool:
    """Whether another seed would end after the budget, at the pace so far. The first never does."""
    return num_done > 0 and elapsed_s * (num_done + 1) / num_done > BUDGET_S


def _train_ours(config: Config, context: Context) -> PeerRun:
    with TemporaryDirectory() as directory:
        placed = config.run.model_copy(update={"directory": Path(directory), "name": "run"})
        recorded = read_run(run_session(config.model_copy(update={"run": placed}), context))
    found = summarise(recorded)
    lengths = [recorded.series(key) for key in recorded.metrics if key.startswith("selector/steps_at_k")]
    return PeerRun(
        step_s=found.step_s,
        generation_s=found.generation_s,
        sync_s=found.sync_s,
        num_tokens=found.num_tokens,
        engine_steps=float(sum(np.mean(counted[WARMUP:]) for counted in lengths)),
    )


def _train_trl(
    config: Config, environ: Mapping[str, str], site: Path, context: Context
) -> tuple[PeerRun, Mapping[str, str]]:
    """Return also the versions of TRL and vLLM."""
    with TemporaryDirectory() as directory:
        settings = trl_settings(config, resolve_policy(config.policy.model, context), Path(directory))
        with HostProcess(
            "benchmarks.stock_trl.training",
            asdict(settings),
            environ=host_environment(environ, site, kv_cache_gb=1),
            log=Path(directory, "log"),
        ) as host:
            versions = host.read()
            steps: list[Mapping[str, float]] = []
            for number in range(1, config.run.steps + 1):
                steps.append(host.read())
                context.progress(f"TRL's step {number}: {steps[-1]}")
            return average(steps), versions


def trl_settings(config: Config, model_path: Path, output_dir: Path) -> TrainingSettings:
    """Return what makes TRL's run the same as ours."""
    assert isinstance(config.data, ArenaData)
    rollout, learner = config.rollout, config.learner
    return TrainingSettings(
        model=str(model_path),
        output_dir=str(output_dir),
        engine_dtype=rollout.engine.dtype,
        learner_dtype=learner.dtype,
        on_gpu=on_gpu(),
        seed=config.run.seed,
        data_seed=config.data.seed + config.run.seed,
        num_steps=config.run.steps,
        prompts_per_step=rollout.prompts_per_step,
        group_size=rollout.group_size,
        microbatch=gcd(MICROBATCH, rollout.prompts_per_step * rollout.group_size),
        max_tokens=rollout.max_tokens,
        max_model_len=rollout.engine.max_model_len,
        temperature=rollout.temperature,
        learning_rate=learner.learning_rate,
        warmup_steps=learner.warmup_steps,
        betas=learner.betas,
        weight_decay=learner.weight_decay,
        max_grad_norm=learner.max_grad_norm,
        clip_low=config.objective.clip_low,
        clip_high=config.objective.clip_high,
        weight_cap=config.correction.cap,
    )


def average(steps: Sequence[Mapping[str, float]]) -> PeerRun:
    """Means of what TRL's program has told of its steps, the first ones left out."""
    counted = steps[WARMUP:]
    means = {key: float(np.mean([step[key] for step in counted])) for key in PeerRun.__dataclass_fields__}
    return PeerRun(**means)


def compare(
    runs: Mapping[str, Sequence[PeerRun]],
) -> tuple[dict[str, float], dict[str, float], dict[str, dict[str, Any]]]:
    """Figures, spread and `details.paired` of the arms, whose runs are in the order of their seeds."""
    pairs = list(zip(runs["trl"], runs["paceline"], strict=True))
    figures, spread, details = paired(
        {
            "generation_over_trl": [
                (trl.generation_s / trl.num_tokens) / (ours.generation_s / ours.num_tokens) for trl, ours in pairs
            ],
            "rest_of_step_over_trl": [ours.rest_s / trl.rest_s for trl, ours in pairs],
            "step_over_trl": [trl.step_s / ours.step_s for trl, ours in pairs],
            "tokens_over_trl": [ours.num_tokens / trl.num_tokens for trl, ours in pairs],
        }
    )
    for arm, found in runs.items():
        for name in ("step_s", "generation_s", "rest_s"):
            figures[f"{name}_{arm}"], spread[f"{name}_{arm}"] = middle([getattr(one, name) for one in found])
    return figures, spread, details

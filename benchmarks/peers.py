"""Our loop against stock TRL's, with the same policy, prompts, lengths and number of updates.

    trl         GRPOTrainer with its colocated engine, in a process and an environment of its own
    paceline    `paceline train` with a DFlash drafter that is not trained

Both arms are GRPO on the arena with one optimizer step per batch, every group trained on, the same clipping and
truncated importance weights of tokens. They have the same vLLM, PyTorch and cores, compiled engines in the fastest
precision of the machine, float32 learners, and the same prompts in the same steps. TRL's settings follow from our
config, so an override holds for both. The arms take turns, in another order for each seed. Ratios are of runs of one
seed, without the first steps. benchmarks/README.md has a command for arena:large.

    generation_over_trl     seconds of generation per token, TRL's over ours; median of the seeds
    rest_of_step_over_trl   seconds of a step outside of generation, weight sync included, ours over TRL's
    step_over_trl           seconds of a whole step, TRL's over ours
    tokens_over_trl         response tokens, ours over TRL's
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import gcd
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks import step
from benchmarks.harness import ARENA, Record, by_seed, resolved, train
from benchmarks.step import WARMUP
from benchmarks.stock_trl.process import HostProcess, host_environment, trl_site
from benchmarks.stock_trl.training import TrainingSettings
from paceline.config import ArenaData, Config, load_config
from paceline.context import Context
from paceline.devices import fast_precision, on_gpu
from paceline.report.recorded import RecordedRun
from paceline.sessions.workloads import resolve_policy

ARMS = ("trl", "paceline")
SEEDS = (0, 1, 2)
MICROBATCH = 8
"""Most rollouts in a pass of TRL's learner, padded to the longest of the step; as many as divide the batch."""
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
    "speculation.drafter.path=arena:small/dflash",
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


def run(overrides: Sequence[str], context: Context) -> Record:
    settings = [*_SETTINGS, f"rollout.engine.dtype={fast_precision()}", *overrides]
    steps = load_config(ARENA, settings).run.steps
    if steps <= WARMUP:
        raise ValueError(f"run.steps: got {steps}; must be above {WARMUP}, because those are not counted")
    site = trl_site(context)
    runs: dict[str, list[PeerRun]] = {arm: [] for arm in ARMS}
    for turn, seed in enumerate(SEEDS):
        own = [*settings, f"run.seed={seed}"]
        for arm in reversed(ARMS) if turn % 2 else ARMS:
            found = _train_trl(load_config(ARENA, own), site, context) if arm == "trl" else train(own, context, _ours)
            runs[arm].append(found)
            context.progress(f"seed {seed}, {arm}: {found}")
    record = Record(
        goals={"generation_over_trl": (">=", 2.5), "rest_of_step_over_trl": ("<=", 1.0)},
        seeds=SEEDS,
        config=resolved(ARENA, settings),
        details={"warmup_steps": WARMUP, "microbatch_trl": MICROBATCH, "trl": site.name, "runs": by_seed(runs, SEEDS)},
    )
    compare(record, runs)
    return record


def _ours(recorded: RecordedRun, directory: Path) -> PeerRun:
    found = step.summarize(recorded, directory)
    lengths = [recorded.series(key) for key in recorded.metrics if key.startswith("selector/steps_at_k")]
    return PeerRun(
        step_s=found.step_s,
        generation_s=found.generation_s,
        sync_s=found.sync_s,
        num_tokens=found.num_tokens,
        engine_steps=float(sum(np.mean(counted[WARMUP:]) for counted in lengths)),
    )


def _train_trl(config: Config, site: Path, context: Context) -> PeerRun:
    with TemporaryDirectory() as directory:
        settings = trl_settings(config, resolve_policy(config.policy.model, context), Path(directory))
        with HostProcess(
            "benchmarks.stock_trl.training",
            asdict(settings),
            environ=host_environment(os.environ, site, kv_cache_gb=1),
            log=Path(directory, "log"),
        ) as host:
            context.progress(f"TRL's trainer started: {host.read()}")
            return average([host.read() for _ in range(config.run.steps)])


def trl_settings(config: Config, model_path: Path, output_dir: Path) -> TrainingSettings:
    """Return TRL's settings for the same run as ours."""
    assert isinstance(config.data, ArenaData)
    rollout, learner = config.rollout, config.learner
    num_rollouts = rollout.prompts_per_step * rollout.group_size
    microbatch = gcd(MICROBATCH, num_rollouts)
    return TrainingSettings(
        model=str(model_path),
        engine_dtype=rollout.engine.dtype,
        on_gpu=on_gpu(),
        data_seed=config.data.seed + config.run.seed,
        num_prompts=config.run.steps * rollout.prompts_per_step,
        grpo={
            "output_dir": str(output_dir),
            "seed": config.run.seed,
            "max_steps": config.run.steps,
            "per_device_train_batch_size": microbatch,
            "gradient_accumulation_steps": num_rollouts // microbatch,
            "num_generations": rollout.group_size,
            "max_completion_length": rollout.max_tokens,
            "temperature": rollout.temperature,
            "learning_rate": learner.learning_rate,
            "lr_scheduler_type": "constant_with_warmup",
            "warmup_steps": learner.warmup_steps,
            "adam_beta1": learner.betas[0],
            "adam_beta2": learner.betas[1],
            "weight_decay": learner.weight_decay,
            "max_grad_norm": learner.max_grad_norm,
            "epsilon": config.objective.clip_low,
            "epsilon_high": config.objective.clip_high,
            "loss_type": "dapo",
            "vllm_importance_sampling_mode": "token_truncate",
            "vllm_importance_sampling_clip_max": config.correction.cap,
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_max_model_length": rollout.engine.max_model_len,
            "model_init_kwargs": {"dtype": "float32"},  # master weights, as our learner's
            "bf16": learner.dtype == "bfloat16",
            "gradient_checkpointing": False,  # there is enough memory
            "shuffle_dataset": False,  # prompts in the order of our loop
            "use_cpu": not on_gpu(),
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
        },
    )


def average(steps: Sequence[Mapping[str, float]]) -> PeerRun:
    """Return means of the counted steps that TRL's program reported."""
    means = {key: float(np.mean([one[key] for one in steps[WARMUP:]])) for key in PeerRun.__dataclass_fields__}
    return PeerRun(**means)


def compare(record: Record, runs: Mapping[str, Sequence[PeerRun]]) -> None:
    """Compare runs that are in the order of their seeds."""
    pairs = list(zip(runs["trl"], runs["paceline"], strict=True))
    record.ratios(
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
            record.median(f"{name}_{arm}", [getattr(one, name) for one in found])

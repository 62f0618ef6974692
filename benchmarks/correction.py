"""Does RL with FP8 rollouts learn as well as with BF16, with correction and without it?

    bf16      rollouts in BF16, no correction
    fp8       FP8 weights and KV cache, no correction
    fp8_tis   the same with token-tis, C = 2
    fp8_mis   the same with token-mis

Each arm is trained once per seed, as many runs at a time as there are cores, each on one: what counts is what is
learnt, and a run that has more leaves some of them idle. The guard only observes, so that an arm is what its name says.
`correction_within_spread` is 1 if the mean final accuracy of both corrected arms is no lower than that of BF16 by more
than the range of the BF16 seeds.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from multiprocessing.queues import Queue
from pathlib import Path

from benchmarks.learning import Training, train_once
from paceline.config import load_config
from paceline.context import Context
from paceline.measure import CpuTimes, Result, environment

FP8 = ("rollout.engine.weights=fp8", "rollout.engine.kv_cache=fp8")
ARMS: Mapping[str, tuple[str, ...]] = {
    "bf16": (),
    "fp8": FP8,
    "fp8_tis": (*FP8, "correction.kind=token-tis"),
    "fp8_mis": (*FP8, "correction.kind=token-mis"),
}
_CORRECTED = ("fp8_tis", "fp8_mis")


def run(
    *,
    context: Context,
    config_file: Path,
    seeds: Sequence[int] = (0, 1, 2),
    overrides: Sequence[str] = (),
) -> Result:
    """Train every arm once per seed."""
    before = CpuTimes.now()
    settings = {arm: ["guard.mode=observe", *overrides, *arm_settings] for arm, arm_settings in ARMS.items()}
    for arm in ARMS:  # a wrong key must not show in the second hour
        load_config(config_file, settings[arm])
    trainings = _train_all(config_file, settings, seeds, context=context)
    figures, spread = compare({arm: list(found.values()) for arm, found in trainings.items()})
    config = load_config(config_file, overrides)
    return Result(
        name="correction",
        figures=figures,
        spread=spread,
        goals={"correction_within_spread": (">=", 1.0)},
        environment=environment(seeds=seeds, config=config.model_dump(mode="json")),
        details={
            "arms": settings,
            "final": {
                arm: {seed: training.final for seed, training in found.items()} for arm, found in trainings.items()
            },
            "curves": {
                arm: {seed: training.curve for seed, training in found.items()} for arm, found in trainings.items()
            },
            "heldout_samples": config.eval.num_prompts * config.eval.samples_per_prompt,
            "steal_share": CpuTimes.now().steal_share_since(before),
        },
    )


def _train_all(
    config_file: Path,
    settings: Mapping[str, Sequence[str]],
    seeds: Sequence[int],
    *,
    context: Context,
) -> dict[str, dict[int, Training]]:
    spawn = get_context("spawn")
    cores = spawn.Queue()
    for core in os.sched_getaffinity(0):
        cores.put(core)
    workers = min(len(os.sched_getaffinity(0)), len(seeds) * len(settings))
    with ProcessPoolExecutor(workers, mp_context=spawn, initializer=_settle, initargs=(cores,)) as pool:
        waiting = {
            pool.submit(_train_quietly, config_file, overrides, seed, context.cache_root): (arm, seed)
            for seed in seeds
            for arm, overrides in settings.items()
        }
        trainings: dict[str, dict[int, Training]] = {arm: {} for arm in settings}
        for done in as_completed(waiting):
            (arm, seed), training = waiting[done], done.result()
            trainings[arm][seed] = training
            context.progress(
                f"seed {seed}, {arm}: accuracy {training.curve[0][1]:.3f} -> {training.final:.3f}, k3 {training.k3:.1e}"
            )
    return {arm: dict(sorted(found.items())) for arm, found in trainings.items()}


def _settle(cores: Queue[int]) -> None:
    """Bind this process, and all that it starts, to a core of its own."""
    os.sched_setaffinity(0, {cores.get()})


def _train_quietly(config_file: Path, overrides: Sequence[str], seed: int, cache_root: Path) -> Training:
    """Train in a process of its own, without reports: those of runs at the same time would mix."""
    return train_once(config_file, overrides, seed, context=Context(report=lambda line: None, cache_root=cache_root))


def compare(trainings: Mapping[str, Sequence[Training]]) -> tuple[dict[str, float], dict[str, float]]:
    """Figures and spread (range over seeds) of the arms."""
    figures: dict[str, float] = {}
    spread: dict[str, float] = {}
    for arm, found in trainings.items():
        for name, values in (
            ("accuracy", [training.final for training in found]),
            ("gain", [training.gain for training in found]),
            ("k3", [training.k3 for training in found]),
            ("seconds_per_step", [training.seconds_per_step for training in found]),
        ):
            figures[f"{name}_{arm}"] = sum(values) / len(values)
            spread[f"{name}_{arm}"] = max(values) - min(values)
    least = figures["accuracy_bf16"] - spread["accuracy_bf16"]
    figures["correction_within_spread"] = float(all(figures[f"accuracy_{arm}"] >= least for arm in _CORRECTED))
    return figures, spread | {"correction_within_spread": 0.0}

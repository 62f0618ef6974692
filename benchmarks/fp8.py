"""`python -m benchmarks fp8`: is FP8 exact while the policy moves, and what do calibration and checks cost?

    updates   arena:large is trained for some steps; after each, every quantised tensor and scale that both engines hold
              is read from their memory and compared with the reference. Then faults are planted, which must be found.
    scales    arena:small with keys times 256 and queries over 256: the same function, but keys that a scale of 1 cannot
              hold. k3 with scales of 1, with scales calibrated on the batch before (as a run does), and with an
              oracle's, which come from every token of the measured rollouts
    overhead  calibration, the reference's quantisation and its fingerprints at sender and engine, over the whole of a
              step of arena:small with 128 rollouts

Rewards are made up: here the policy only has to move.
"""

from __future__ import annotations

import asyncio
import math
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import load_file, save_file

from benchmarks.planted.policy import allow_faults
from benchmarks.precision import push, sampled_k3
from benchmarks.workload import arena_requests, one_of
from paceline.config import EngineConfig, LearnerConfig, ObjectiveConfig
from paceline.context import Context
from paceline.fp8 import KvScales
from paceline.learner.fsdp import FsdpLearner
from paceline.measure import CpuTimes, Goal, Result, environment, paired
from paceline.orchestrator.generate import generate_all, generate_on_all
from paceline.rollout.engine import VllmEngine
from paceline.sessions.workloads import resolve_policy
from paceline.types import PacelineError, RolloutRequest, Sample
from paceline.weights.fingerprint import mismatched
from paceline.weights.message import Push
from paceline.weights.shared_memory import ShmSender

KEYS_TIMES = 256.0
"""Factor on keys: a power of two, so that not a bit of the policy's function is lost."""
_PROMPTS, _TRAINED_ON = 1024, 256
CONFIG = EngineConfig(
    max_model_len=768, max_num_seqs=32, kv_cache_gb=0.5, weights="fp8", kv_cache="fp8", deadline_s=600
)
_SECONDS = ("step_s", "calibrate_s", "reference_s", "held_s")
GOALS: dict[str, Goal] = {
    "fp8_tensors_wrong": ("<=", 0.0),
    "faults_found": (">=", 4.0),
    "k3_recalibrated_over_unit": ("<=", 0.5),
    "k3_recalibrated_over_oracle": ("<=", 1.1),
    "overhead_share": ("<=", 0.03),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Step:
    """Seconds of one RL step and of what FP8 adds to it, and how many tensors were wrong after it."""

    step_s: float
    calibrate_s: float
    reference_s: float
    """Seconds of quantising and fingerprinting at the sender."""
    held_s: float
    """Seconds of fingerprinting what the slower engine holds."""
    num_wrong: int
    num_checked: int
    num_changed: int
    """Tensors of the reference that the update changed: where none changes, equality says nothing."""

    @property
    def overhead(self) -> float:
        return (self.calibrate_s + self.reference_s + self.held_s) / self.step_s


def run(
    *,
    context: Context,
    model: str = "arena:large",
    trained: str = "arena:small",
    updates: int = 20,
    seed: int = 0,
) -> Result:
    before = CpuTimes.now()
    path = resolve_policy(model, context)
    small = resolve_policy(trained, context)
    k3 = asyncio.run(_scales(small, seed, context))
    steps, faults = asyncio.run(_updates(path, _short(_requests(path, 4, seed), 32), updates, updates, seed, context))
    whole, _ = asyncio.run(_updates(small, _requests(small, 128, seed), 4, 2, seed, context))
    ratios, spread, pairs = paired(
        {
            "k3_recalibrated_over_unit": [r / u for r, u in zip(k3["recalibrated"], k3["unit"], strict=True)],
            "k3_recalibrated_over_oracle": [r / o for r, o in zip(k3["recalibrated"], k3["oracle"], strict=True)],
            "overhead_share": [step.overhead for step in whole[1:]],
        }
    )
    figures = {"fp8_tensors_wrong": float(sum(s.num_wrong for s in steps)), "faults_found": float(sum(faults.values()))}
    figures |= ratios
    # Pooled: a few tokens with a large gap carry much of k3, and differ from draw to draw.
    figures["k3_recalibrated_over_oracle"] = sum(k3["recalibrated"]) / sum(k3["oracle"])
    return Result(
        name="fp8",
        figures=figures,
        spread=dict.fromkeys(figures, 0.0) | spread,
        goals=GOALS,
        environment=environment(
            seeds=[seed], config={"model": model, "trained": trained, "engine": CONFIG.model_dump()}
        ),
        details={
            "updates": updates,
            "tensors_checked": [step.num_checked for step in steps],
            "tensors_changed": [step.num_changed for step in steps],
            "faults": faults,
            "k3": k3,
            "paired": pairs,
            "seconds": {
                which: {name: median(getattr(step, name) for step in timed) for name in _SECONDS}
                for which, timed in ((model, steps[-1:]), (trained, whole[1:]))
            },
            "steal_share": CpuTimes.now().steal_share_since(before),
        },
    )


# Weights after every update.


async def _updates(
    path: Path, requests: Sequence[RolloutRequest], updates: int, timed_from: int, seed: int, context: Context
) -> tuple[list[Fp8Step], dict[str, bool]]:
    """Run steps of the same requests on both engines, each on a core of its own. From step `timed_from` on, what FP8
    adds is timed, which takes two more stagings. Learner and engines would share one GPU."""
    cores = sorted(os.sched_getaffinity(0))
    config = LearnerConfig(world_size=1, dtype="float32", learning_rate=5e-5, microbatch_tokens=1024)
    learner = FsdpLearner(path, config, ObjectiveConfig(), temperature=1.0, seed=seed)
    sender = ShmSender()
    engines: list[VllmEngine] = []
    try:
        for index in range(2):
            context.progress(f"starting engine {index + 1} of 2 on {path.name}")
            cpus = [cores[index % len(cores)]]
            engine = await VllmEngine.start(
                f"engine-{index}", path, one_of(CONFIG, 3), seed=seed + index, cpus=cpus, adjust=allow_faults
            )
            engines.append(engine)
        bench = _Fp8Bench(learner, sender, engines)
        steps = []
        for version in range(1, updates + 1):
            steps.append(await bench.step(version, requests, timed=version >= timed_from))
            context.progress(
                f"update {version} of {updates}: {steps[-1].num_wrong} of {steps[-1].num_checked} tensors wrong"
            )
        return steps, await bench.faults(updates + 1)
    finally:
        sender.close()
        learner.close()
        await asyncio.gather(*(engine.close() for engine in engines))


def _requests(path: Path, num: int, seed: int) -> list[RolloutRequest]:
    return arena_requests(path, num_prompts=num, group_size=1, max_tokens=640, seed=seed)


def _short(requests: Sequence[RolloutRequest], max_tokens: int) -> list[RolloutRequest]:
    return [replace(request, max_tokens=max_tokens) for request in requests]


class _Fp8Bench:
    def __init__(self, learner: FsdpLearner, sender: ShmSender, engines: Sequence[VllmEngine]) -> None:
        self._learner, self._sender, self._engines = learner, sender, engines
        self._expected: dict[str, str] = {}

    def stage(self, version: int, *, quantised: bool = True) -> Push:
        weights = self._learner.weights(torch.bfloat16)
        return self._sender.stage(version, weights, quantised=quantised, kv_scales=self._learner.kv_scales)

    async def sync(self, version: int) -> Push:
        staged = self.stage(version)
        receipts = await asyncio.gather(*(engine.receive(staged) for engine in self._engines))
        for engine, receipt in zip(self._engines, receipts, strict=True):
            if receipt.mismatched:
                await engine.resume()  # it is counted, and the bench goes on
            elif not receipt.ok:
                raise PacelineError(f"{receipt.engine} did not take version {version}: {receipt.error}")
        return staged

    async def held(self) -> list[dict[str, str]]:
        return [(await engine.rpc("held_fp8"))[0] for engine in self._engines]

    async def step(self, version: int, requests: Sequence[RolloutRequest], *, timed: bool) -> Fp8Step:
        """Run one step as a run does: rollouts, log-probabilities, update, calibration, sync."""
        began_s = time.perf_counter()
        rollouts = await generate_on_all(self._engines, requests)
        samples = [Sample.of(rollout, 1.0 if rollout.group_id.number % 2 else -1.0) for rollout in rollouts]
        await asyncio.to_thread(self._learner.score, samples)
        await asyncio.to_thread(self._learner.apply, samples)
        update_s = time.perf_counter()
        await asyncio.to_thread(self._learner.calibrate, samples, version)
        calibrated_s = time.perf_counter()
        before, self._expected = self._expected, _fp8_part(await self.sync(version))
        done_s = time.perf_counter()
        expected = self._expected
        held = await self.held()
        wrong = sum(len(mismatched(expected, found)) for found in held)
        return Fp8Step(
            step_s=done_s - began_s,
            calibrate_s=calibrated_s - update_s,
            reference_s=self._reference_s(version) if timed else math.nan,
            held_s=await self._held_s() if timed else math.nan,
            num_wrong=wrong,
            num_checked=len(expected) * len(held),
            num_changed=len(mismatched(before, expected)),
        )

    async def _held_s(self) -> float:
        """Seconds of fingerprinting, which engines do at the same time: the slower one counts."""

        async def seconds(engine: VllmEngine) -> float:
            began_s = time.perf_counter()
            await engine.rpc("held_fp8")
            return time.perf_counter() - began_s

        return max(await asyncio.gather(*(seconds(engine) for engine in self._engines)))

    def _reference_s(self, version: int) -> float:
        """Seconds that making the reference adds to staging."""
        seconds = {}
        for quantised in (False, True):
            began_s = time.perf_counter()
            self.stage(version, quantised=quantised)
            seconds[quantised] = time.perf_counter() - began_s
        return max(0.0, seconds[True] - seconds[False])

    async def faults(self, version: int) -> dict[str, bool]:
        """Plant faults: a flipped bit, a wrong scale and forgotten KV scales must be seen, foreign scales refused."""
        scales = self._learner.kv_scales
        assert scales is not None
        found: dict[str, bool] = {}
        expected = _fp8_part(self.stage(scales.version))
        engine = self._engines[0]
        for kind in ("weight", "scale", "kv_scales"):
            await engine.rpc("plant_fault", kind)
            (held,) = await engine.rpc("held_fp8")
            found[kind] = bool(mismatched(expected, held))
            await engine.receive(self.stage(scales.version))
            (held,) = await engine.rpc("held_fp8")
            found[kind] = found[kind] and not mismatched(expected, held)
        receipt = await engine.receive(self.stage(version))  # the learner's scales are of the version before
        found["stale scales"] = (
            receipt.error is not None and receipt.error.startswith("kv_scales:") and not receipt.lost
        )
        return found


def _fp8_part(push: Push) -> dict[str, str]:
    arrived = {entry.name for entry in push.entries}
    return {name: value for name, value in push.fingerprints.items() if name not in arrived}


# KV scales.


async def _scales(model_path: Path, seed: int, context: Context, rounds: int = 3) -> dict[str, list[float]]:
    """k3 by kind of scales, for one update after another."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "policy"
        scale_keys(model_path, path, KEYS_TIMES)
        learner = FsdpLearner(
            path,
            LearnerConfig(world_size=1, dtype="float32", learning_rate=2e-5, microbatch_tokens=4096),
            ObjectiveConfig(),
            temperature=1.0,
            seed=seed,
        )
        sender = ShmSender()
        config = EngineConfig(max_model_len=768, max_num_seqs=64, kv_cache_gb=0.5, kv_cache="fp8")
        engine = await VllmEngine.start("scales", path, config, seed=seed, cpus=sorted(os.sched_getaffinity(0)))
        k3: dict[str, list[float]] = {"recalibrated": [], "oracle": [], "unit": []}
        try:
            requests = arena_requests(
                path, num_prompts=_PROMPTS * (rounds + 1), group_size=1, max_tokens=640, seed=seed
            )
            rollouts = await generate_all(engine, requests[:_TRAINED_ON])
            for version in range(1, rounds + 1):
                samples = [
                    Sample.of(rollout, 1.0 if rollout.group_id.number % 2 else -1.0)
                    for rollout in rollouts[:_TRAINED_ON]
                ]
                learner.apply(samples)
                learner.calibrate(samples, version)
                fresh = requests[_PROMPTS * version : _PROMPTS * (version + 1)]
                await push(engine, learner, sender, version)
                rollouts = await generate_all(engine, fresh)
                k3["recalibrated"].append(sampled_k3(learner, rollouts))
                recalibrated = learner.kv_scales
                assert recalibrated is not None
                learner.calibrate([Sample.of(rollout, 0.0) for rollout in rollouts], version, share=1.0)
                await push(engine, learner, sender, version)
                k3["oracle"].append(sampled_k3(learner, await generate_all(engine, fresh)))
                ones = (1.0,) * len(recalibrated.k)
                await push(engine, learner, sender, version, KvScales(version=version, q=ones, k=ones, v=ones))
                k3["unit"].append(sampled_k3(learner, await generate_all(engine, fresh[:_TRAINED_ON])))
                learner.kv_scales = recalibrated
                context.progress("k3: " + ", ".join(f"{kind} {values[-1]:.2e}" for kind, values in k3.items()))
        finally:
            sender.close()
            learner.close()
            await engine.close()
    return k3


def scale_keys(source: Path, target: Path, factor: float) -> None:
    """Write a checkpoint with the same function: key norms times `factor`, query norms over it."""
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and file.suffix == ".json":
            (target / file.name).write_bytes(file.read_bytes())
    weights = {name: x for file in sorted(source.glob("*.safetensors")) for name, x in load_file(file).items()}
    for name, weight in weights.items():
        if name.endswith("k_norm.weight"):
            weight.mul_(factor)
        elif name.endswith("q_norm.weight"):
            weight.div_(factor)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})

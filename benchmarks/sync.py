"""What a checked push of the policy to every engine costs, and are bad pushes refused?

    copy_ratio = (plain memory copy of all tensors) / (stage + slowest engine's verify)

Both arms move the same bytes in the same run and take turns at going first. Stage is the learner's side (copy into
shared memory, fingerprint), verify the engine's (fingerprint again, look for NaN). vLLM's own loading, which packs
weights for its kernels, is no part of the wire; `copy_ratio_with_load` counts it in. Engines are bound to one core
each, as in a run.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.workload import one_of
from paceline.config import EngineConfig
from paceline.context import Context
from paceline.measure import CpuTimes, Result, environment, middle, paired
from paceline.rollout.engine import VllmEngine
from paceline.sessions.workloads import resolve_policy
from paceline.weights.fingerprint import mismatched
from paceline.weights.message import Push, PushReport
from paceline.weights.shared_memory import ShmSender

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class _TimedUpdate:
    """Seconds of one update, and how many fingerprints were wrong after it, over all engines."""

    copy_s: float
    stage_s: float
    verify_s: float
    load_s: float
    num_bytes: int
    num_mismatched: int

    @property
    def ratio(self) -> float:
        return self.copy_s / (self.stage_s + self.verify_s)

    @property
    def ratio_with_load(self) -> float:
        return self.copy_s / (self.stage_s + self.verify_s + self.load_s)


def run(
    *,
    context: Context,
    model: str = "arena:large",
    updates: int = 20,
    num_engines: int = 2,
    seed: int = 0,
) -> Result:
    """Push `updates` versions of a policy and then five bad ones into every engine."""
    path = resolve_policy(model, context)
    config = EngineConfig(max_model_len=64, max_num_seqs=2, kv_cache_gb=0.25, deadline_s=600)
    before = CpuTimes.now()
    done, refused = asyncio.run(_measure(path, config, context, updates, num_engines, seed))
    figures, spread, pairs = paired(
        {
            "copy_ratio": [update.ratio for update in done],
            "copy_ratio_with_load": [update.ratio_with_load for update in done],
        }
    )
    figures["fingerprint_mismatches"], spread["fingerprint_mismatches"] = (
        float(sum(update.num_mismatched for update in done)),
        0.0,
    )
    figures["bad_pushes_refused"], spread["bad_pushes_refused"] = float(sum(refused.values())), 0.0
    seconds = {
        "memory_copy_s": [update.copy_s for update in done],
        "stage_s": [update.stage_s for update in done],
        "verify_s": [update.verify_s for update in done],
        "load_s": [update.load_s for update in done],
    }
    return Result(
        name="sync",
        figures=figures,
        spread=spread,
        goals={"copy_ratio": (">=", 0.3), "fingerprint_mismatches": ("<=", 0.0), "bad_pushes_refused": (">=", 5.0)},
        environment=environment(seeds=[seed], config={"model": model, "engine": config.model_dump(mode="json")}),
        details={
            "num_engines": num_engines,
            "updates": updates,
            "paired": pairs,
            "bytes": done[0].num_bytes,
            "median_s": {name: middle(values)[0] for name, values in seconds.items()},
            "seconds": seconds,
            "copy_threads": torch.get_num_threads(),
            "refused": refused,
            "steal_share": CpuTimes.now().steal_share_since(before),
        },
    )


async def _measure(
    path: Path, config: EngineConfig, context: Context, updates: int, num_engines: int, seed: int
) -> tuple[list[_TimedUpdate], dict[str, bool]]:
    weights = {
        name: tensor.bfloat16()
        for file in sorted(path.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
    copies = {
        name: tensor.clone() for name, tensor in weights.items()
    }  # touched, so that the copy pays for no page fault
    generator = torch.Generator().manual_seed(seed)
    cores = sorted(os.sched_getaffinity(0))
    config = one_of(config, num_engines)
    engines: list[VllmEngine] = []
    sender = ShmSender()
    done: list[_TimedUpdate] = []
    try:
        for index in range(num_engines):
            context.progress(f"starting engine {index + 1}/{num_engines}")
            cpus = [cores[index % len(cores)]]
            engines.append(await VllmEngine.start(f"engine-{index}", path, config, seed=seed, cpus=cpus))
        # Two rounds unmeasured: the first grows the segment, and every process meets its pages for the first time.
        for version in range(1, updates + 3):
            _change(weights, generator)
            update = await _update(version, weights, copies, sender, engines)
            if version > 2:
                done.append(update)
                context.progress(
                    f"update {len(done)}/{updates}: ratio {update.ratio:.2f}, {update.num_mismatched} mismatches"
                )
        refused = {
            kind: await _refused(engines, name, push) for kind, name, push in _bad_pushes(updates + 3, weights, sender)
        }
        context.progress(f"refused: {', '.join(kind for kind, yes in refused.items() if yes)}")
    finally:
        sender.close()
        await asyncio.gather(*(engine.close() for engine in engines))
    return done, refused


def _change(weights: Weights, generator: torch.Generator) -> None:
    """Change every tensor by at least a percent, which BF16 does not round away; those that are 0 by an offset."""
    for tensor in weights.values():
        share, offset = torch.rand(2, generator=generator).tolist()
        tensor.mul_(1.01 + 0.01 * share if share > 0.5 else 0.99 - 0.01 * share).add_(1e-4 * (offset - 0.5))


async def _update(
    version: int, weights: Weights, copies: Mapping[str, torch.Tensor], sender: ShmSender, engines: Sequence[VllmEngine]
) -> _TimedUpdate:
    copy_s = _copy(weights, copies) if version % 2 else 0.0
    started_s = time.perf_counter()
    push = sender.stage(version, weights.items())
    stage_s = time.perf_counter() - started_s
    receipts = await asyncio.gather(*(engine.receive(push) for engine in engines))
    for receipt in receipts:
        if receipt.error is not None:
            raise RuntimeError(f"{receipt.engine} did not take update {version}: {receipt.error}")
    reports = [await _held(engine) for engine in engines]
    return _TimedUpdate(
        copy_s=copy_s or _copy(weights, copies),
        stage_s=stage_s,
        verify_s=max(report.verify_s for report in reports),
        load_s=max(report.load_s for report in reports),
        num_bytes=push.num_bytes,
        num_mismatched=sum(len(mismatched(push.fingerprints, report.fingerprints)) for report in reports),
    )


def _copy(weights: Weights, copies: Mapping[str, torch.Tensor]) -> float:
    started_s = time.perf_counter()
    for name, tensor in weights.items():
        copies[name].copy_(tensor)
    return time.perf_counter() - started_s


async def _held(engine: VllmEngine) -> PushReport:
    """Ask the engine what it holds, instead of taking it from the receipt."""
    (held,) = await engine.rpc("applied_fingerprints")
    return PushReport.from_dict(held["policy"])


def _bad_pushes(version: int, weights: Weights, sender: ShmSender) -> Iterator[tuple[str, str, Push]]:
    """Yield five bad pushes, each with the name that the refusal must begin with. Staging one ends the last."""
    name = max(weights, key=lambda key: weights[key].numel())
    push = sender.stage(version, weights.items())
    entry = next(entry for entry in push.entries if entry.name == name)
    with (Path("/dev/shm") / push.channel).open("r+b") as file:  # noqa: S108  the segment itself
        file.seek(entry.offset + entry.num_bytes // 2)
        byte = file.read(1)[0]
        file.seek(entry.offset + entry.num_bytes // 2)
        file.write(bytes([byte ^ 1]))
    yield "flipped byte", name, push
    damaged = weights[name].clone()
    damaged.view(-1)[-1] = float("nan")
    yield "NaN", name, sender.stage(version, (weights | {name: damaged}).items())
    yield "missing", name, sender.stage(version, [pair for pair in weights.items() if pair[0] != name])
    yield "unknown", "stranger", sender.stage(version, (weights | {"stranger": torch.zeros(1)}).items())
    yield "misshapen", name, sender.stage(version, (weights | {name: weights[name].reshape(-1)}).items())


async def _refused(engines: Sequence[VllmEngine], name: str, push: Push) -> bool:
    """Whether every engine refuses this push by that name and holds what it held."""
    before = [await _held(engine) for engine in engines]
    receipts = await asyncio.gather(*(engine.receive(push) for engine in engines))
    after = [await _held(engine) for engine in engines]
    named = all(
        receipt.error is not None and receipt.error.startswith(f"{name}: ") and not receipt.lost for receipt in receipts
    )
    return named and before == after

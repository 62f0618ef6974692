"""Weight transfer to every engine against a plain memory copy.

    copy_ratio               plain memory copy of all tensors / (stage + slowest engine's verify)
    copy_ratio_with_load     the same with vLLM's loading, which packs weights for its kernels
    fingerprint_mismatches   fingerprints that differ after the updates, over all engines

Both arms move the same bytes and take turns at going first. Stage is the learner's part (copy into shared memory,
fingerprint), verify the engine's (fingerprint again, look for NaN). Engines have one core each, as in a run.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.harness import Record
from benchmarks.workload import one_of
from paceline.config import EngineConfig
from paceline.context import Context
from paceline.rollout.engine import VllmEngine
from paceline.sessions.workloads import resolve_policy
from paceline.weights.fingerprint import mismatched
from paceline.weights.message import PushReport
from paceline.weights.shared_memory import ShmSender

Weights = dict[str, torch.Tensor]
MODEL = "arena:large"
NUM_ENGINES, UPDATES, WARMUP = 2, 20, 2
"""The first updates are not counted: they grow the segment, and every process touches its pages for the first time."""
CONFIG = EngineConfig(max_model_len=64, max_num_seqs=2, kv_cache_gb=0.25, deadline_s=600)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TimedUpdate:
    """Seconds of one update, and wrong fingerprints after it over all engines."""

    copy_s: float
    stage_s: float
    verify_s: float
    load_s: float
    num_bytes: int
    num_mismatched: int

    @property
    def ratio(self) -> float:
        return self.copy_s / (self.stage_s + self.verify_s)


def run(overrides: Sequence[str], context: Context) -> Record:
    del overrides
    done = asyncio.run(_measure(resolve_policy(MODEL, context), context))
    record = Record(
        goals={"copy_ratio": (">=", 0.3), "fingerprint_mismatches": ("<=", 0.0)},
        config={"model": MODEL, "engine": CONFIG.model_dump(mode="json")},
        details={"updates": [asdict(update) for update in done], "copy_threads": torch.get_num_threads()},
    )
    record.ratios(
        {
            "copy_ratio": [one.ratio for one in done],
            "copy_ratio_with_load": [one.copy_s / (one.stage_s + one.verify_s + one.load_s) for one in done],
        }
    )
    record.add("fingerprint_mismatches", sum(update.num_mismatched for update in done))
    return record


async def _measure(path: Path, context: Context) -> list[_TimedUpdate]:
    weights = {
        name: tensor.bfloat16()
        for file in sorted(path.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
    copies = {name: tensor.clone() for name, tensor in weights.items()}  # touched, so a copy has no page faults
    generator = torch.Generator().manual_seed(0)
    cores = sorted(os.sched_getaffinity(0))
    engines: list[VllmEngine] = []
    sender = ShmSender()
    done: list[_TimedUpdate] = []
    try:
        for index in range(NUM_ENGINES):
            context.progress(f"starting engine {index + 1}/{NUM_ENGINES}")
            cpus, config = [cores[index % len(cores)]], one_of(CONFIG, NUM_ENGINES)
            engines.append(await VllmEngine.start(f"engine-{index}", path, config, seed=0, cpus=cpus))
        for version in range(1, WARMUP + UPDATES + 1):
            _change(weights, generator)
            done.append(await _update(version, weights, copies, sender, engines))
            context.progress(f"update {version}: ratio {done[-1].ratio:.2f}, {done[-1].num_mismatched} mismatches")
    finally:
        sender.close()
        await asyncio.gather(*(engine.close() for engine in engines))
    return done[WARMUP:]


def _change(weights: Weights, generator: torch.Generator) -> None:
    """Change every tensor by at least a percent, which BF16 does not round away, and zeros by an offset."""
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
    for receipt in await asyncio.gather(*(engine.receive(push) for engine in engines)):
        if receipt.error is not None:
            raise RuntimeError(f"{receipt.engine} did not take update {version}: {receipt.error}")
    # Ask the engines for their fingerprints again instead of trusting the receipts.
    reports = [PushReport.from_dict((await engine.rpc("applied_fingerprints"))[0]["policy"]) for engine in engines]
    return _TimedUpdate(
        copy_s=copy_s or _copy(weights, copies),
        stage_s=stage_s,
        verify_s=max(report.verify_s for report in reports),
        load_s=max(report.load_s for report in reports),
        num_bytes=push.num_bytes,
        num_mismatched=sum(len(mismatched(push.fingerprints_of(0), report.fingerprints)) for report in reports),
    )


def _copy(weights: Weights, copies: Mapping[str, torch.Tensor]) -> float:
    started_s = time.perf_counter()
    for name, tensor in weights.items():
        copies[name].copy_(tensor)
    return time.perf_counter() - started_s

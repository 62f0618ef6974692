"""Checks of engine and learner together: log-probabilities and weight pushes."""

from __future__ import annotations

import asyncio

import torch

from paceline.devices import gpu_memory, on_gpu, use_device
from paceline.doctor.finding import Finding, SkippedError, failed, passed
from paceline.doctor.setup import Setup
from paceline.types import Receipt, Rollout, Sample
from paceline.weights.deliver import join
from paceline.weights.distributed import DistributedSender
from paceline.weights.message import Push
from paceline.weights.shared_memory import ShmSender

_K3_LIMIT, _MAX_ABS_LIMIT = 1e-3, 1e-4
"""Limits of `paceline certify logp`: BF16 engine, FP32 engine, against the FP32 learner."""


def log_probabilities(setup: Setup) -> Finding:
    """Engine and learner agree on the log-probabilities of the engine's tokens."""
    return _compare(setup, setup.rollouts)


def push(setup: Setup) -> Finding:
    """After a learner update, a push arrives with every fingerprint and the engine samples from the new weights."""
    samples = [Sample.of(rollout, 1.0 if index % 2 else -1.0) for index, rollout in enumerate(setup.rollouts)]
    metrics = setup.learner.apply(samples)
    if metrics["policy/skipped_steps"] or not metrics["policy/grad_norm"] > 0:
        return failed(f"the learner skipped its update, gradient norm {metrics['policy/grad_norm']:.2g}")
    sender = ShmSender()
    setup.resources.callback(sender.close)
    sent = stage(setup, sender)
    arrived = _arrived(setup, sent, setup.run(setup.engine.receive(sent)))
    if arrived.status == "failed":
        return arrived
    after = _compare(setup, setup.generate(setup.config.rollout.temperature))
    says = f"{arrived.evidence}; {after.evidence}"
    return passed(says, **arrived.figures, **after.figures) if after.status == "passed" else failed(says)


def broadcast(setup: Setup) -> Finding:
    """The same weights arrive by broadcast, the transport between GPUs and machines: NCCL, or gloo on CPUs."""
    workers = setup.engine_config.tensor_parallel_size
    if on_gpu() and len(gpu_memory()) <= workers:
        raise SkippedError("NCCL needs a GPU for the sender beside the engine's")
    sender = DistributedSender(use_device(workers))
    try:
        return setup.run(_broadcast(setup, sender, workers))
    finally:
        sender.close()


async def _broadcast(setup: Setup, sender: DistributedSender, workers: int) -> Finding:
    engine = setup.engine
    address = sender.host("127.0.0.1", workers, setup.engine_config.call_deadline_s)
    _, problem = await asyncio.gather(asyncio.to_thread(sender.join), join(engine, address, 1))
    if problem is not None:
        return failed(problem)
    sent = stage(setup, sender)
    receipt, _ = await asyncio.gather(engine.receive(sent), asyncio.to_thread(sender.transmit))
    return _arrived(setup, sent, receipt)


def stage(setup: Setup, sender: ShmSender | DistributedSender) -> Push:
    """Prepare the learner's weights as the next policy version."""
    setup.version += 1
    return sender.stage(setup.version, setup.learner.weights(getattr(torch, setup.engine_config.dtype)))


def _arrived(setup: Setup, sent: Push, receipt: Receipt) -> Finding:
    if not receipt.ok:
        return failed(receipt.error or f"{len(receipt.mismatched)} fingerprints differ: {receipt.mismatched[:3]}")
    if setup.engine.policy_version != sent.version:
        return failed(f"the engine has version {setup.engine.policy_version}; sent {sent.version}")
    says = f"{receipt.num_tensors} tensors, {receipt.num_bytes / 1e6:,.1f} MB in {receipt.seconds:.2f} s"
    return passed(f"{says}, fingerprints equal", **{f"{sent.transport}_seconds": receipt.seconds})


def _compare(setup: Setup, rollouts: list[Rollout]) -> Finding:
    gap = setup.gap(rollouts)
    k3 = gap.k3_sum / gap.count
    full = setup.engine_config.dtype == "float32"
    limit = f"gap {_MAX_ABS_LIMIT:g}" if full else f"k3 {_K3_LIMIT:g}"
    says = (
        f"k3 {k3:.1e}, largest gap {gap.max_abs:.1e} over {gap.count} tokens; limit of "
        f"{setup.engine_config.dtype}: {limit}"
    )
    ok = gap.max_abs <= _MAX_ABS_LIMIT if full else k3 <= _K3_LIMIT
    return passed(says, k3=k3) if ok else failed(says)

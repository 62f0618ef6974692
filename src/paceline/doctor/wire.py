"""Checks of learner and engine together: log-probabilities, pushes of weights, sleep and wake."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import psutil
import torch
from safetensors.torch import load_file

from paceline.devices import gpu_memory, on_gpu, use_device
from paceline.doctor.check import CheckOutcome, check, failed, passed, skipped
from paceline.doctor.engine import engine_starts, generates
from paceline.doctor.inputs import policy
from paceline.doctor.room import shared_memory
from paceline.doctor.subject import LEARNED, Setup
from paceline.learner.objective import Mismatch
from paceline.rollout.internals.platform import on_cpu
from paceline.types import Receipt, Rollout, Sample
from paceline.weights.deliver import join
from paceline.weights.distributed import DistributedSender
from paceline.weights.fingerprint import mismatched
from paceline.weights.message import Push

_PART = "learner and weights"
_K3_LIMIT, _MAX_ABS_LIMIT = 1e-3, 1e-4
"""Limits of a BF16 and of an FP32 engine against the FP32 learner, as `paceline certify logp` has them."""
_REPORT = "attach the page to a bug report"


@check(
    _PART,
    needs=(policy,),
    advice="see whether transformers loads the policy; docs/support.md has what the learner takes",
)
def learner_loads(setup: Setup) -> CheckOutcome:
    """The learner loads the policy in FP32."""
    if setup.learner_device() is None:
        return skipped(f"neither a GPU nor the host has room for {setup.num_parameters / 1e9:.1f} G parameters in FP32")
    where = setup.learner_device(update=True) or setup.learner_device()
    return passed(f"on the {where}, hidden size {setup.learner.hidden_size}")


@check(
    _PART,
    needs=(generates, learner_loads),
    advice="run `paceline certify logp`: it says in which precision the two part",
)
def logp(setup: Setup) -> CheckOutcome:
    """The engine's log-probabilities of its tokens are the learner's."""
    return _compared(setup, setup.first_rollouts(setup.config.rollout.temperature), "logp")


def _compared(setup: Setup, rollouts: list[Rollout], name: str) -> CheckOutcome:
    gap: Mismatch = setup.gap(rollouts)
    k3 = gap.k3_sum / gap.count
    full = setup.engine_config.dtype == "float32"
    says = (
        f"k3 {k3:.1e}, largest gap {gap.max_abs:.1e} over {gap.count} tokens; limit of {setup.engine_config.dtype}: "
        + (f"gap {_MAX_ABS_LIMIT:g}" if full else f"k3 {_K3_LIMIT:g}")
    )
    ok = gap.max_abs <= _MAX_ABS_LIMIT if full else k3 <= _K3_LIMIT
    return passed(says, **{f"{name}_k3": k3}) if ok else failed(says)


@check(
    _PART,
    needs=(generates, learner_loads),
    advice="lower learner.microbatch_tokens if memory ran out; otherwise " + _REPORT,
)
def learner_updates(setup: Setup) -> CheckOutcome:
    """The learner makes one update, and its log-probabilities move."""
    if setup.learner_device(update=True) is None:
        return skipped("no room for AdamW's state beside the weights; a run shards it over learner.world_size")
    rollouts = setup.first_rollouts(setup.config.rollout.temperature)
    samples = [Sample.of(rollout, 1.0 if index % 2 else -1.0) for index, rollout in enumerate(rollouts)]
    before = np.concatenate(setup.learner.logp(samples).logp)
    metrics = setup.learner.update(samples)
    moved = float(np.abs(np.concatenate(setup.learner.logp(samples).logp) - before).mean())
    says = f"gradient norm {metrics['policy/grad_norm']:.2g}, log-probabilities moved by {moved:.2g} on average"
    ok = metrics["policy/skipped_steps"] == 0 and np.isfinite(moved) and moved > 0
    return passed(says) if ok else failed(says)


@check(
    _PART,
    needs=(engine_starts, learner_loads, shared_memory),
    advice="read the refusal, which begins with the tensor's name; " + _REPORT,
    otherwise="the push did not arrive",
)
def push(setup: Setup) -> CheckOutcome:
    """A push of the learner's weights arrives: every fingerprint and the new version."""
    sent = _stage(setup)
    return _arrived(setup, sent, setup.run(setup.running.receive(sent)))


def _stage(setup: Setup) -> Push:
    setup.version += 1
    return setup.sender.stage(setup.version, setup.learner.weights(getattr(torch, setup.engine_config.dtype)))


def _arrived(setup: Setup, sent: Push, receipt: Receipt) -> CheckOutcome:
    if not receipt.ok:
        return failed(receipt.error or f"{len(receipt.mismatched)} fingerprints differ: {receipt.mismatched[:3]}")
    for held in setup.run(setup.running.rpc("applied_fingerprints")):
        if wrong := mismatched(sent.fingerprints, held[sent.target]["fingerprints"]):
            return failed(f"{len(wrong)} of {receipt.num_tensors} fingerprints differ: {', '.join(wrong[:3])}")
    if sent.target == "policy" and setup.running.policy_version != sent.version:
        return failed(f"the engine says version {setup.running.policy_version}; sent was {sent.version}")
    return passed(
        f"{receipt.num_tensors} tensors, {receipt.num_bytes / 1e6:,.1f} MB in {receipt.seconds:.2f} s by "
        f"{sent.transport.replace('_', ' ')}, all fingerprints equal",
        **{f"push_{sent.target}_{sent.transport}_seconds": receipt.seconds},
    )


@check(_PART, needs=(push,), advice=_REPORT)
def logp_after_push(setup: Setup) -> CheckOutcome:
    """After the push the engine samples from the new weights: its log-probabilities are the updated learner's."""
    return _compared(setup, setup.generate(setup.config.rollout.temperature), "logp_after_push")


@check(_PART, needs=(push,), advice=_REPORT)
def damaged_push(setup: Setup) -> CheckOutcome:
    """A push whose bytes were changed on the way is refused by the tensor's name, and the engine keeps its version."""
    before = setup.version
    sent = _stage(setup)
    setup.version = before
    first, *rest = sent.entries
    flipped = replace(first, fingerprint=first.fingerprint[::-1])
    receipt = setup.run(setup.running.receive(replace(sent, entries=(flipped, *rest))))
    kept = setup.running.policy_version
    if receipt.error is None or receipt.lost or not receipt.error.startswith(first.name) or kept != before:
        return failed(f"answered {receipt.error!r} and holds version {kept}; must be a refusal of {first.name}")
    return passed(f"refused for {first.name}, still at version {kept}")


@check(_PART, needs=(push,), advice="see what the check gloo or nccl says; " + _REPORT)
def broadcast_push(setup: Setup) -> CheckOutcome:
    """The same weights arrive by broadcast, the way they take between GPUs and between machines."""
    workers = setup.engine_config.tensor_parallel_size
    if on_gpu() and len(gpu_memory()) <= workers:
        return skipped("no second GPU: NCCL needs one for the sender")
    sender = DistributedSender(use_device(workers))
    try:
        return setup.run(_broadcast(setup, sender, workers))
    finally:
        sender.close()


async def _broadcast(setup: Setup, sender: DistributedSender, workers: int) -> CheckOutcome:
    engine = setup.running
    address = sender.host("127.0.0.1", workers, setup.engine_config.call_deadline_s)
    _, problem = await asyncio.gather(asyncio.to_thread(sender.join), join(engine, address, 1))
    if problem is not None:
        return failed(problem)
    setup.version += 1
    sent = sender.stage(setup.version, setup.learner.weights(getattr(torch, setup.engine_config.dtype)))
    receipt, _ = await asyncio.gather(engine.receive(sent), asyncio.to_thread(sender.transmit))
    return (
        passed(f"{receipt.num_tensors} tensors, {receipt.seconds:.2f} s") if receipt.ok else failed(str(receipt.error))
    )


@check(
    _PART, needs=(engine_starts, shared_memory), advice="set speculation.training.mode=off if it stays so; " + _REPORT
)
def drafter_push(setup: Setup) -> CheckOutcome:
    """A push of the drafter arrives, as drafter training makes them."""
    if setup.kind not in LEARNED:
        return skipped(f"a drafter of kind {setup.kind} is not trained")
    if setup.kind == "dflash" and on_cpu():
        return skipped("vLLM's CPU backend cannot take new weights of a DFlash drafter")
    path = setup.drafter(setup.kind)
    assert path is not None, "the engine runs with it"
    weights = {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    sent = setup.sender.stage(1, weights.items(), "drafter")
    receipt = setup.run(setup.running.receive(sent))
    if receipt.error is not None and "vLLM shares" in receipt.error:
        return skipped(
            "drafter and policy share their embedding here; drafter training gives the drafter its own first"
        )
    return _arrived(setup, sent, receipt)


@check(
    _PART,
    needs=(logp_after_push,),
    advice="keep engines awake: nothing but idle-engine drafter training needs it; " + _REPORT,
)
def sleep_and_wake(setup: Setup) -> CheckOutcome:
    """The engine sleeps and wakes with the weights that it had."""
    engine = setup.running
    free = [gpu.free for gpu in gpu_memory()]
    setup.run(engine.sleep())
    freed = sum(gpu.free for gpu in gpu_memory()) - sum(free)
    setup.run(engine.wake())
    outcome = _compared(setup, setup.generate(setup.config.rollout.temperature), "logp_after_wake")
    if free and freed <= 0:
        return failed("no GPU memory was given back")
    gave = f"{freed / 1e9:.1f} GB given back" if free else "paused: vLLM's CPU backend gives no memory back"
    return replace(outcome, evidence=f"{gave}; after waking {outcome.evidence}")


@check(_PART, needs=(engine_starts,), advice="end what is left by its process id, and " + _REPORT)
def engine_ends(setup: Setup) -> CheckOutcome:
    """The engine ends, and leaves no process behind."""
    pids = {pid for pair in setup.run(setup.running.rpc("paceline_processes")) for pid in pair}
    setup.stop_engine()
    left = sorted(pid for pid in pids if psutil.pid_exists(pid))
    return failed(f"processes {left} are still there") if left else passed(f"{len(pids)} process(es) ended")


CHECKS = (
    learner_loads,
    logp,
    learner_updates,
    push,
    logp_after_push,
    damaged_push,
    broadcast_push,
    drafter_push,
    sleep_and_wake,
    engine_ends,
)

"""Checks of one short-lived engine for every kind of drafter, and of one in FP8."""

from __future__ import annotations

import torch

from paceline.doctor.check import CheckOutcome, check, failed, passed, skipped
from paceline.doctor.engine import against_evaluation, draft_totals
from paceline.doctor.inputs import policy, prompts
from paceline.doctor.machine import vllm
from paceline.doctor.room import shared_memory
from paceline.doctor.subject import LEARNED, Setup
from paceline.doctor.wire import learner_loads
from paceline.rollout.internals.amx import has_amx
from paceline.rollout.internals.platform import on_cpu
from paceline.types import Sample
from paceline.weights.fingerprint import mismatched

_PART = "engines by drafter"
_NEEDS = (vllm, policy, prompts)
_ADVICE = "choose another speculation.drafter.kind until this is mended; attach the page to a bug report"


@check(_PART, needs=_NEEDS, advice=_ADVICE)
def engine_eagle3(setup: Setup) -> CheckOutcome:
    """An engine with an EAGLE-3 drafter drafts as its evaluation promises."""
    return _engine(setup, "eagle3")


@check(_PART, needs=_NEEDS, advice=_ADVICE)
def engine_dflash(setup: Setup) -> CheckOutcome:
    """An engine with a DFlash drafter drafts as its evaluation promises."""
    return _engine(setup, "dflash")


@check(_PART, needs=_NEEDS, advice=_ADVICE)
def engine_ngram(setup: Setup) -> CheckOutcome:
    """An engine with n-gram drafts drafts."""
    return _engine(setup, "ngram")


@check(_PART, needs=_NEEDS, advice=_ADVICE)
def engine_history(setup: Setup) -> CheckOutcome:
    """An engine with the history drafter drafts on a prompt's second rollout, and its selector chooses."""
    return _engine(setup, "history")


def _engine(setup: Setup, kind: str) -> CheckOutcome:
    if setup.main_started and kind == setup.kind:
        return skipped("this is the drafter of the engine above")
    if kind in LEARNED and setup.drafter(kind) is None:
        return skipped(f"no {kind} drafter was named, and none comes with this policy")
    # The history drafter always drafts, so with it the selector can be left to choose what is used.
    engine = setup.start_engine(kind, setup.speculation(kind, hold=kind != "history"))
    try:
        rollouts = setup.generate(1.0)
        if kind in LEARNED:
            return against_evaluation(setup, kind, rollouts)
        rollouts += setup.generate(1.0)  # the first ones are what the history drafter drafts from
        counted = setup.run(engine.metrics())
    finally:
        setup.stop_engine()
    found = draft_totals(rollouts)
    drafted = counted.get("history/num_drafted", found.drafted)
    failures = sum(value for key, value in counted.items() if key in ("selector/failures", "history/failures"))
    lengths = {key.rpartition("k")[2]: steps for key, steps in counted.items() if "/steps_at_k" in key and steps}
    says = f"{found.says}; draft lengths used: {', '.join(sorted(lengths, key=int))}"
    if kind == "history":
        says = f"{drafted:,.0f} tokens offered, {says}"
    if failures or not drafted:
        return failed(f"{says}; {failures:.0f} failures of drafter or selector")
    return passed(says)


@check(
    _PART,
    needs=(*_NEEDS, learner_loads, shared_memory),
    advice="keep rollout.engine.weights and kv_cache at full; docs/precision.md has what FP8 needs",
)
def engine_fp8(setup: Setup) -> CheckOutcome:
    """An engine in FP8 holds, after a push, the codes and scales of the reference."""
    if on_cpu() and not has_amx():
        return skipped("vLLM's FP8 kernels for CPUs need AMX (Sapphire Rapids or newer)")
    if setup.engine_config.tensor_parallel_size > 1 or setup.engine_config.dtype != "bfloat16":
        return skipped("FP8 engines quantise from BF16 and have one worker")
    setup.learner.calibrate([Sample.of_prompt(prompt) for prompt in setup.prompts], setup.version + 1)
    setup.version += 1
    fp8 = setup.engine_config.model_copy(update={"weights": "fp8", "kv_cache": "fp8"})
    engine = setup.start_engine("fp8", None, fp8)
    try:
        scales = setup.learner.kv_scales
        sent = setup.sender.stage(
            setup.version, setup.learner.weights(torch.bfloat16), quantised=True, kv_scales=scales
        )
        receipt = setup.run(engine.receive(sent))
        if not receipt.ok:
            return failed(str(receipt.error))
        wanted = {
            name: value for name, value in sent.fingerprints.items() if name not in {e.name for e in sent.entries}
        }
        wrong = [name for held in setup.run(engine.rpc("held_fp8")) for name in mismatched(wanted, held)]
        setup.generate(1.0)
    finally:
        setup.stop_engine()
    return (
        failed(f"{len(wrong)} differ: {wrong[:3]}") if wrong else passed(f"{len(wanted)} codes and scales as computed")
    )


CHECKS = (engine_eagle3, engine_dflash, engine_ngram, engine_history, engine_fp8)

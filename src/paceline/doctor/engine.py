"""Checks of one speculating engine: it starts, samples, drafts, and does what it is told about drafts."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from paceline.certify.engines import SAMPLERS
from paceline.certify.faults import plant
from paceline.certify.lossless import DEVIATIONS, examine
from paceline.doctor.check import CheckOutcome, check, failed, passed, skipped
from paceline.doctor.inputs import policy, prompts
from paceline.doctor.machine import vllm
from paceline.doctor.subject import LEARNED, Setup
from paceline.drafters.provenance import EVALUATION_FILE, read_evaluation
from paceline.rollout.arguments import engine_args
from paceline.rollout.internals.model_runner import planned_runner
from paceline.rollout.internals.platform import on_cpu
from paceline.rollout.internals.sampler_fix import mend_sampler
from paceline.rollout.speculation import graph_plan
from paceline.types import Rollout

_PART = "engine"
_SAMPLER_ROWS = 4000
_VOCABULARY = 64
_LEAST_OF_PROMISE = 0.5
"""Share of the gain that the drafter's evaluation promises below which it cannot be this policy's."""


@check(
    _PART,
    needs=(vllm, policy, prompts),
    advice="run again with VLLM_LOGGING_LEVEL=INFO and read vLLM's own message above; attach the page to a bug report",
    otherwise="the engine did not start",
)
def engine_starts(setup: Setup) -> CheckOutcome:
    """An engine starts with the config's drafter, or with the EAGLE-3 drafter that comes with the policy."""
    speculation = setup.speculation(setup.kind, hold=True)
    began_s = time.monotonic()
    setup.start_engine("doctor", speculation)
    setup.main_started = True
    seconds = time.monotonic() - began_s
    says = f"{setup.kind} drafter, draft length {speculation.max_draft_length}, {setup.engine_config.dtype}"
    return passed(f"{says}, {seconds:.0f} s to start", start_seconds=seconds)


@check(
    _PART,
    needs=(engine_starts,),
    advice="attach the page to a bug report: an engine that samples nonsense is a bug",
    otherwise="the engine did not generate",
)
def generates(setup: Setup) -> CheckOutcome:
    """The engine answers every prompt with tokens and finite log-probabilities."""
    rollouts = setup.first_rollouts(setup.config.rollout.temperature)
    logp = np.concatenate([rollout.logp for rollout in rollouts])
    if any(len(rollout.token_ids) == 0 for rollout in rollouts) or not (np.isfinite(logp) & (logp <= 1e-3)).all():
        return failed(f"{int((~np.isfinite(logp)).sum())} of {len(logp)} log-probabilities are not finite")
    ended = sum(rollout.finish_reason == "stop" for rollout in rollouts)
    return passed(f"{len(rollouts)} rollouts of {len(logp)} tokens, {ended} with an end, mean logp {logp.mean():.2f}")


@check(
    _PART,
    needs=(engine_starts,),
    advice="unset VLLM_PLUGINS, or add paceline_sampler to it; then certify: paceline certify",
)
def engine_sampler(setup: Setup) -> CheckOutcome:
    """The engine's workers run a sampler that is not known to be wrong."""
    workers = setup.run(setup.running.rpc("paceline_sampler"))
    setup.runner = workers[0]["runner"]
    says = f"model runner {setup.runner}, {workers[0]['sampler']}, {workers[0]['scheduling']} scheduling"
    return passed(says) if all(worker["sound"] for worker in workers) else failed(f"{says}, wrong by vLLM issue 55005")


@check(
    _PART,
    needs=(vllm, policy),
    advice="do not train with speculation here; paceline certify says more, attach its page to a bug report",
)
def sampler(setup: Setup) -> CheckOutcome:
    """The rejection sampler of this engine draws from the policy's distribution, by chi-square at every position."""
    speculation = setup.speculation(setup.kind, hold=True)
    runner = planned_runner(engine_args(setup.model_path, setup.engine_config, setup.config.run.seed, speculation))
    if runner == "v1":
        mend_sampler()
    vllm_sampler = SAMPLERS[runner]
    sample = vllm_sampler.rejection_sample
    if setup.plant == "sampler":
        sample = plant(sample, "residual")
    cells = list(
        examine(sample, vllm_sampler.draft, num_rows=_SAMPLER_ROWS, vocabulary=_VOCABULARY, seed=setup.config.run.seed)
    )
    worst = max(cells, key=lambda cell: cell.excess)
    says = (
        f"worst of {len(cells)} chi-squares {worst.excess:.1f} deviations above its mean ({worst.drafts} drafts, "
        f"position {worst.position + 1} of {worst.draft_length + 1}), limit {DEVIATIONS:.0f}"
    )
    return passed(says, sampler_worst_excess=worst.excess) if worst.excess <= DEVIATIONS else failed(says)


@check(
    _PART, needs=(generates,), advice="compare with `paceline certify --drafter KIND`; attach the page to a bug report"
)
def drafts(setup: Setup) -> CheckOutcome:
    """The engine drafts, and the policy accepts some of it."""
    found = draft_totals(setup.first_rollouts(setup.config.rollout.temperature))
    return passed(found.says) if found.drafted and found.accepted else failed(found.says)


@check(
    _PART,
    needs=(generates,),
    advice="the drafter belongs to another policy, or the policy has moved: take its own, or `paceline draft train`",
)
def accepted_length(setup: Setup) -> CheckOutcome:
    """The drafter reaches in the engine what its evaluation promises."""
    return against_evaluation(setup, setup.kind, setup.first_rollouts(1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTotals:
    """What came of the drafts of some rollouts."""

    drafted: int
    accepted: int
    verifications: int

    @property
    def length(self) -> float:
        """Tokens a verification, the policy's own included."""
        return 1 + self.accepted / self.verifications if self.verifications else 1.0

    @property
    def says(self) -> str:
        return f"{self.drafted:,} tokens drafted, {self.accepted:,} accepted: {self.length:.2f} tokens a verification"


def draft_totals(rollouts: list[Rollout]) -> DraftTotals:
    return DraftTotals(
        drafted=sum(rollout.num_drafted for rollout in rollouts),
        accepted=sum(rollout.num_accepted for rollout in rollouts),
        verifications=sum(rollout.num_verifications for rollout in rollouts),
    )


def against_evaluation(setup: Setup, kind: str, rollouts: list[Rollout]) -> CheckOutcome:
    """Compare accepted lengths at temperature 1 with those of the drafter's evaluation, at the same draft length."""
    path = setup.drafter(kind) if kind in LEARNED else None
    if path is None:
        return skipped(f"{kind} drafts are not learnt, so nothing is promised")
    if not (path / EVALUATION_FILE).is_file():
        return skipped("the drafter has no evaluation.json that says what it should reach")
    promised = read_evaluation(path).accepted_length
    length = min(setup.speculation(kind, hold=True).max_draft_length, len(promised))
    found, promise = draft_totals(rollouts), promised[length - 1]
    says = f"{found.length:.2f} tokens a verification, its evaluation says {promise:.2f} at draft length {length}"
    if found.length - 1 < _LEAST_OF_PROMISE * (promise - 1):
        return failed(says)
    return passed(says, **{f"{kind}_accepted_length": found.length, f"{kind}_promised_length": promise})


@check(
    _PART,
    needs=(generates,),
    advice="attach the page to a bug report: the scheduler does not keep the draft length that it is given",
)
def draft_length(setup: Setup) -> CheckOutcome:
    """The draft length can be changed from one step to the next: none, one, and as many as configured."""
    drafted: dict[int | None, float] = {}
    try:
        for limit in (0, 1, None):
            setup.run(setup.running.set_draft_limit(limit))
            found = draft_totals(setup.generate(1.0))
            drafted[limit] = found.drafted / found.verifications if found.verifications else 0.0
    finally:
        setup.run(setup.running.set_draft_limit(None))
    says = f"tokens drafted a verification: {drafted[0]:.2f} of 0, {drafted[1]:.2f} of 1, {drafted[None]:.2f} of all"
    # A draft of n-grams may be shorter than allowed, and the last of a rollout is cut by its end.
    ok = drafted[0] == 0 and 0 < drafted[1] <= 1 and (drafted[None] > 1 or setup.kind not in LEARNED)
    return passed(says) if ok else failed(says)


@check(_PART, needs=(generates,), advice="attach the page to a bug report")
def step_times(setup: Setup) -> CheckOutcome:
    """Steps with drafts and without are timed on the same prompts; which is faster depends on the batch."""
    best: dict[int | None, tuple[float, float]] = {}
    try:
        for limit in (0, None, 0, None):
            setup.run(setup.running.set_draft_limit(limit))
            step_s, rate = _timed(setup)
            if limit not in best or rate > best[limit][1]:
                best[limit] = step_s, rate
    finally:
        setup.run(setup.running.set_draft_limit(None))
    (plain_s, plain_rate), (draft_s, draft_rate) = best[0], best[None]
    return passed(
        f"plain {1e3 * plain_s:.1f} ms a step and {plain_rate:,.0f} tokens/s, with drafts {1e3 * draft_s:.1f} ms and "
        f"{draft_rate:,.0f} tokens/s, for {len(setup.prompts)} requests",
        plain_step_seconds=plain_s,
        draft_step_seconds=draft_s,
        draft_speedup=draft_rate / plain_rate,
    )


def _timed(setup: Setup) -> tuple[float, float]:
    """Seconds of a step, and tokens a second."""
    before, began_s = _num_steps(setup), time.monotonic()
    rollouts = setup.generate(1.0)
    seconds = time.monotonic() - began_s
    return seconds / (_num_steps(setup) - before), sum(len(rollout.token_ids) for rollout in rollouts) / seconds


def _num_steps(setup: Setup) -> float:
    found = setup.run(setup.running.metrics())
    return sum(value for key, value in found.items() if key.startswith("selector/steps_at_k"))


@check(
    _PART,
    needs=(engine_starts,),
    advice="raise rollout.engine.cuda_graph_gb, and read what vLLM logs about graphs at its start",
)
def cuda_graphs(setup: Setup) -> CheckOutcome:
    """vLLM has captured every CUDA graph that was asked for."""
    if on_cpu():
        return skipped("no CUDA graphs on the CPU")
    if not setup.engine_config.compiles(gpu=True):
        return skipped("rollout.engine.compile is false, which captures none")
    if setup.runner != "v2":
        return skipped("only the V2 model runner tells which graphs it has")
    (first, *_) = setup.run(setup.running.rpc("captured_graphs"))
    captured = {(num_requests, num_tokens) for num_requests, num_tokens in first}
    plan = graph_plan(setup.speculation(setup.kind, hold=True), setup.engine_config)
    missing = [(n, k) for n, k in plan.pairs if (n, n * (k + 1)) not in captured]
    says = (
        f"{len(plan.pairs) - len(missing)} of {len(plan.pairs)} decode graphs that were asked for, {len(first)} in all"
    )
    return failed(f"{says}; missing (requests, draft length) {missing[:4]}") if missing else passed(says)


CHECKS = (
    engine_starts,
    generates,
    engine_sampler,
    sampler,
    drafts,
    accepted_length,
    draft_length,
    step_times,
    cuda_graphs,
)

"""Checks of the config's policy, prompts and drafter, and of one speculating engine."""

from __future__ import annotations

import numpy as np

from paceline.certify.engines import SAMPLERS
from paceline.certify.lossless import DEVIATIONS
from paceline.certify.lossless import examine as examine_sampler
from paceline.doctor.finding import Finding, SkippedError, failed, passed
from paceline.doctor.setup import Setup
from paceline.drafters.kinds import KINDS
from paceline.drafters.provenance import EVALUATION_FILE, read_evaluation
from paceline.files import verify_checksums
from paceline.rollout.arguments import end_tokens
from paceline.rollout.internals.sampler_fix import mend_sampler
from paceline.sessions.train import check_costs, check_groups, check_lengths, with_drafter

_SAMPLER_ROWS = 4000
_VOCABULARY = 64
_MIN_SHARE = 0.5
"""Smallest accepted share of the gain in the drafter's evaluation; a drafter of another policy gains almost nothing."""


def policy(setup: Setup) -> Finding:
    """The policy's checkpoint is complete and undamaged."""
    has_checksums = verify_checksums(setup.model_path)
    says = f"{setup.config.policy.model}: {setup.num_parameters / 1e6:,.1f} M parameters, {len(setup.tensors)} tensors"
    if not end_tokens(setup.model_path):
        return failed(f"{says}; no eos_token_id in generation_config.json or config.json, so no response would end")
    return passed(f"{says}, {'checksums verified' if has_checksums else 'no SHA256SUMS to verify'}")


def prompts(setup: Setup) -> Finding:
    """Prompts and reward load, and responses fit the context."""
    check_groups(setup.config)
    check_lengths(setup.config, setup.task)
    longest = max(len(prompt.token_ids) for prompt in setup.prompts)
    kind = "arena" if setup.config.data is None else setup.config.data.kind
    return passed(f"{kind} data, prompts of up to {longest} tokens")


def drafter(setup: Setup) -> Finding:
    """Drafter and cost file belong to this policy and machine."""
    if setup.config.speculation is not None:
        check_costs(with_drafter(setup.config, setup.context), setup.model_path)
    if setup.asked_kind not in KINDS:
        return passed(f"{setup.asked_kind} needs no checkpoint")
    if setup.drafter is None:
        raise SkippedError(f"no {setup.asked_kind} drafter is configured, and this policy has none of its own")
    return passed(f"{setup.asked_kind} at {setup.drafter} fits the policy")


def start(setup: Setup) -> Finding:
    """An engine starts with the config's drafter, or the policy's EAGLE-3 drafter, or n-grams."""
    dtype = setup.engine.config.dtype
    return passed(f"{setup.kind} drafter, draft length {setup.speculation.max_draft_length}, {dtype}")


def generate(setup: Setup) -> Finding:
    """Every prompt gets tokens with finite log-probabilities, and some drafted tokens are accepted."""
    logp = np.concatenate([rollout.logp for rollout in setup.rollouts])
    wrong = ~(np.isfinite(logp) & (logp <= 1e-3))
    empty = sum(len(rollout.token_ids) == 0 for rollout in setup.rollouts)
    if wrong.any() or empty:
        return failed(
            f"{int(wrong.sum())} of {len(logp)} log-probabilities are not finite, {empty} responses are empty"
        )
    drafted = sum(rollout.num_drafted for rollout in setup.rollouts)
    accepted = sum(rollout.num_accepted for rollout in setup.rollouts)
    says = (
        f"{len(setup.rollouts)} rollouts, {len(logp)} tokens, mean logp {logp.mean():.2f}; {drafted:,} tokens drafted, "
        f"{accepted:,} accepted"
    )
    return passed(says) if accepted else failed(says)


def sampler(setup: Setup) -> Finding:
    """The engine's rejection sampler draws from the policy's distribution (chi-square at every position)."""
    workers = setup.run(setup.engine.rpc("paceline_sampler"))
    runner, name = workers[0]["runner"], workers[0]["sampler"]
    if not all(worker["sound"] for worker in workers):
        return failed(f"model runner {runner}, {name}: wrong by vLLM issue 55005")
    if runner == "v1":
        mend_sampler()
    vllm = SAMPLERS[runner]
    cells = list(
        examine_sampler(
            vllm.rejection_sample,
            vllm.draft,
            num_rows=_SAMPLER_ROWS,
            vocabulary=_VOCABULARY,
            seed=setup.config.run.seed,
        )
    )
    worst = max(cells, key=lambda cell: cell.excess)
    says = (
        f"{runner}, worst of {len(cells)} chi-squares {worst.excess:.1f} deviations above its mean ({worst.drafts} "
        f"drafts, position {worst.position + 1} of {worst.draft_length + 1}), limit {DEVIATIONS:.0f}"
    )
    return passed(says, sampler_worst_excess=worst.excess) if worst.excess <= DEVIATIONS else failed(says)


def accepted_length(setup: Setup) -> Finding:
    """The drafter's acceptance length in the engine matches its evaluation."""
    path = setup.drafter if setup.kind in KINDS else None
    if path is None:
        raise SkippedError(f"{setup.kind} drafts have no evaluation to compare with")
    if not (path / EVALUATION_FILE).is_file():
        raise SkippedError(f"the drafter has no {EVALUATION_FILE} to compare with")
    expected = read_evaluation(path).accepted_length
    length = min(setup.speculation.max_draft_length, len(expected))
    rollouts, wanted = setup.generate(1.0), expected[length - 1]
    verifications = sum(rollout.num_verifications for rollout in rollouts)
    found = 1 + sum(rollout.num_accepted for rollout in rollouts) / max(verifications, 1)
    says = f"{found:.2f} tokens per verification, evaluation {wanted:.2f} at draft length {length}"
    if found - 1 < _MIN_SHARE * (wanted - 1):
        return failed(says)
    return passed(says, accepted_length=found, evaluated_accepted_length=wanted)

"""Offline warm start: a drafter for a policy, from the policy's own rollouts.

    prompts ──▶ engine (plain, no speculation) ──rollouts──▶ learner.logp with taps ──documents──▶ DrafterTrainer ──▶ checkpoint
                                                                                                      │
                                                        rollouts kept aside ──▶ evaluate ──▶ overlap, accepted length

The drafter must guess what the policy says at the temperature of the rollouts, so it is taught on the policy's own samples, not on
a dataset. Rollouts are gone through several times; hidden states are computed anew each time, a few dozen rollouts at a time,
because they are thousands of times larger than the tokens and the policy's forward pass is cheap beside the drafter's training.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import numpy as np
from transformers import AutoConfig

from paceline.config import EngineConfig, LearnerConfig, ObjectiveConfig
from paceline.draft.checkpoint import save
from paceline.draft.kinds import new_drafter
from paceline.draft.provenance import Provenance, write_evaluation, write_provenance
from paceline.draft.trainer import DrafterTrainer, Evaluation, Schedule, evaluate
from paceline.policy.learner import FsdpLearner
from paceline.policy.teacher import Teacher
from paceline.rollout.engine import VllmEngine
from paceline.run.task import Tokenizer, make_prompt
from paceline.types import Prompt, Rollout, RolloutRequest, Sample

Progress = Callable[[str], None]

_CHUNK_ROLLOUTS = 64
"""Rollouts whose hidden states are held at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart:
    """Everything that determines a drafter, next to the policy and the prompts."""

    train_tokens: int
    """Tokens trained on, prompts included; a rollout counts each time that it is gone through."""
    rollout_tokens: int
    """Response tokens sampled for training."""
    heldout_tokens: int = 12_000
    """Response tokens sampled for the evaluation."""
    draft_length: int = 7
    tokens_per_step: int = 1024
    matrix_lr: float = 0.1
    other_lr: float = 0.01
    max_tokens: int = 640
    """Longest response."""
    max_num_seqs: int = 256
    seed: int = 0
    version: int = 1
    """Raise it when the training code changes what comes out: cached drafters are found by their recipe."""

    def schedule(self) -> Schedule:
        return Schedule(
            num_steps=max(1, self.train_tokens // self.tokens_per_step),
            tokens_per_step=self.tokens_per_step,
            draft_length=self.draft_length,
            matrix_lr=self.matrix_lr,
            other_lr=self.other_lr,
        )


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """Hidden states for the drafter, in vLLM's numbering (i: after i layers). As EAGLE-3 chooses them, early, middle and late; a
    small policy has so few layers that the last one is worth its place, and 0 is the embedding."""
    if num_layers >= 8:
        return (2, num_layers // 2, num_layers - 3)
    return (1, round(0.75 * num_layers), num_layers) if num_layers > 2 else (0, 1, 2)


def read_prompts(file: Path, key: str, tokenizer: Tokenizer) -> Iterator[Prompt]:
    """The prompts of a JSONL file, again and again."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not rows or key not in rows[0]:
        raise ValueError(
            f"data: {file} has {len(rows)} rows without {key!r}; must be JSONL with that field, or name another --prompt-key"
        )
    prompts = [make_prompt(f"{file.name}/{number}", row[key], row, tokenizer) for number, row in enumerate(rows)]
    return cycle(prompts)


def train_drafter(
    kind: str,
    model_path: Path,
    prompts: Iterator[Prompt],
    out: Path,
    recipe: WarmStart,
    *,
    progress: Progress,
    policy: str | None = None,
    data: str = "not stated",
) -> Evaluation:
    """Sample, train a drafter of this kind (`draft.kinds`), evaluate, and write a checkpoint to `out`, which must not exist.

    `policy` (the path, where it has no other name) and `data`, which says what the prompts are, are for those who get the drafter.
    """
    if out.exists():
        raise ValueError(f"out: got {out}, which exists; must be new because a checkpoint is never overwritten")
    config = AutoConfig.from_pretrained(model_path).get_text_config()
    samples = asyncio.run(_sample(model_path, prompts, recipe, config.max_position_embeddings, progress))
    # In the engine's precision: what it hands to the drafter and verifies with is bfloat16 too.
    learner = FsdpLearner(model_path, LearnerConfig(dtype="bfloat16", microbatch_tokens=4096), ObjectiveConfig(), temperature=1.0)
    try:
        result, num_tokens = _train(kind, learner, model_path, samples, out, recipe, progress)
    finally:
        learner.close()
    write_evaluation(out, result)
    write_provenance(
        out,
        Provenance(
            policy=policy or str(model_path), data=data, start="random weights", num_tokens=num_tokens, seed=recipe.seed, rl_steps=0
        ),
    )
    return result


async def _sample(model_path: Path, prompts: Iterator[Prompt], recipe: WarmStart, longest: int, progress: Progress) -> list[Sample]:
    """One rollout a prompt at temperature 1. Every rollout that was begun is finished: leaving out those still running would leave
    out the long ones."""
    wanted = recipe.rollout_tokens + recipe.heldout_tokens
    first = list(islice(prompts, recipe.max_num_seqs))
    room = min(longest, max(len(prompt.token_ids) for prompt in first) + recipe.max_tokens + 128)
    config = EngineConfig(max_num_seqs=recipe.max_num_seqs, max_model_len=room, kv_cache_gb=1.0)
    progress(f"sampling {wanted:,} tokens")
    engine = await VllmEngine.start("warmstart", model_path, config, seed=recipe.seed, cpus=sorted(os.sched_getaffinity(0)))
    rollouts: list[Rollout] = []
    num_submitted = 0

    async def submit(batch: Sequence[Prompt]) -> None:
        nonlocal num_submitted
        fitting = [prompt for prompt in batch if len(prompt.token_ids) + 2 < room]
        await engine.submit(
            [
                RolloutRequest(
                    group_id=num_submitted + i,
                    index=0,
                    prompt_ids=prompt.token_ids,
                    max_tokens=min(recipe.max_tokens, room - len(prompt.token_ids) - 1),
                    temperature=1.0,
                )
                for i, prompt in enumerate(fitting)
            ]
        )
        num_submitted += len(fitting)

    try:
        await submit(first)
        num_tokens = 0
        while len(rollouts) < num_submitted:
            finished = await engine.collect()
            rollouts += finished
            num_tokens += sum(len(rollout.token_ids) for rollout in finished)
            if num_tokens < wanted and num_submitted - len(rollouts) < recipe.max_num_seqs:
                await submit(list(islice(prompts, len(finished))))
    finally:
        await engine.close()
    # By prompt, not by the time of finishing: the first to finish are the short ones.
    rollouts.sort(key=lambda rollout: rollout.group_id)
    return [Sample.of(rollout, 0.0) for rollout in rollouts]


def _train(
    kind: str, learner: FsdpLearner, model_path: Path, samples: Sequence[Sample], out: Path, recipe: WarmStart, progress: Progress
) -> tuple[Evaluation, int]:
    """How well the drafter guesses, and how many tokens it was trained on."""
    ends = np.cumsum([sample.num_response_tokens for sample in samples])
    num_heldout = int(np.searchsorted(ends, recipe.heldout_tokens)) + 1
    if num_heldout >= len(samples):
        raise ValueError(f"rollout_tokens: got {recipe.rollout_tokens}; must be more because nothing is left to train on")
    config = AutoConfig.from_pretrained(model_path).get_text_config()
    taps = default_taps(config.num_hidden_layers)
    teacher = Teacher(learner, taps)
    heldout = teacher.all_documents(samples[:num_heldout])
    scales = np.sqrt(np.mean(np.concatenate([document.taps for document in heldout]) ** 2, axis=(0, 2)))
    embedding_VD, head_VD = learner.ends()
    drafter = new_drafter(
        kind,
        config,
        taps=taps,
        policy_path=model_path,
        embedding_VD=embedding_VD,
        head_VD=head_VD,
        tap_scale_K=scales.tolist(),
        seed=recipe.seed,
        draft_length=recipe.draft_length,
    )
    trainer = DrafterTrainer(drafter, head_VD, recipe.schedule())
    _run(trainer, teacher, samples[num_heldout:], recipe, progress)
    result = evaluate(drafter, heldout, head_VD, draft_length=recipe.draft_length)
    save(drafter, out, tokenizer=model_path / "tokenizer.json")
    return result, trainer.num_tokens


def _run(trainer: DrafterTrainer, teacher: Teacher, samples: Sequence[Sample], recipe: WarmStart, progress: Progress) -> None:
    rng = np.random.default_rng(recipe.seed)
    began_s = time.monotonic()
    num_reports = 0
    share = 0.0
    while share < 1.0:
        order = rng.permutation(len(samples))
        for start in range(0, len(order), _CHUNK_ROLLOUTS):
            trainer.submit(teacher.all_documents([samples[i] for i in order[start : start + _CHUNK_ROLLOUTS]]))
            trainer.run(lambda: False)
            share = trainer.num_tokens / recipe.train_tokens
            if share * 10 >= num_reports + 1:
                num_reports = int(share * 10)
                spent_s = time.monotonic() - began_s
                progress(
                    f"trained {trainer.num_tokens:,} of {recipe.train_tokens:,} tokens, overlap "
                    f"{trainer.take_metrics()['draft/overlap']:.3f}, {trainer.num_tokens / spent_s:,.0f} tokens/s, about "
                    f"{max(0.0, spent_s / share - spent_s):.0f} s left"
                )
            if share >= 1.0:
                break

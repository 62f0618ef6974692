"""Offline training of a drafter on the policy's own rollouts.

    prompts ──▶ engine (no speculation) ──rollouts──▶ learner.score ──hidden states──▶ DrafterTrainer ──▶ checkpoint
                                                                                         │
                                              held-out rollouts ──▶ evaluate ──▶ overlap, accepted length

Each epoch recomputes hidden states for a few dozen rollouts at a time: they are thousands of times larger than tokens,
and the policy's forward pass is cheap compared with training.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from transformers import AutoConfig

from paceline.config import EngineConfig, LearnerConfig, ObjectiveConfig
from paceline.context import Context, time_left
from paceline.devices import fast_precision
from paceline.drafters.checkpoint import save
from paceline.drafters.kinds import default_taps, new_drafter
from paceline.drafters.provenance import Evaluation, Provenance, write_evaluation, write_provenance
from paceline.drafters.trainer import DrafterTrainer, Schedule, evaluate
from paceline.learner.fsdp import FsdpLearner
from paceline.learner.hidden_states import CHUNK_ROLLOUTS, HiddenStateTap
from paceline.orchestrator.generate import generate_until
from paceline.orchestrator.task import prompt_of, read_rows
from paceline.rollout.engine import VllmEngine
from paceline.types import Prompt, RolloutRequest, Sample, Tokenizer

if TYPE_CHECKING:
    from paceline.drafters.checkpoint import Drafter

_LEAST_GAIN = 0.01
"""Relative gain in accepted length below which a stage of training counts as idle."""
_PATIENCE = 2
"""Consecutive idle stages that end training. Drafters learn in jumps: on arena:small one stayed at 4.9 tokens, then
reached 6.1 within a stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart:
    train_tokens: int
    """Tokens of the first stage, prompts included; each pass over a rollout counts."""
    most_tokens: int = 0
    """Limit for further stages of half the size, which follow while they gain; 0 for one stage."""
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

    def schedule(self, num_tokens: int, *, is_new: bool) -> Schedule:
        return Schedule(
            num_steps=max(1, num_tokens // self.tokens_per_step),
            is_new=is_new,
            tokens_per_step=self.tokens_per_step,
            draft_length=self.draft_length,
            matrix_lr=self.matrix_lr,
            other_lr=self.other_lr,
        )


def read_prompts(file: Path, key: str, tokenizer: Tokenizer) -> Iterator[Prompt]:
    """Cycle through the prompts of a JSONL file."""
    rows = read_rows(file, key="--data")
    prompts = [
        prompt_of(row, key, f"{file.name}/{number}", tokenizer, setting="--prompt-key")
        for number, row in enumerate(rows)
    ]
    return cycle(prompts)


def train_drafter(
    kind: str,
    model_path: Path,
    prompts: Iterator[Prompt],
    out: Path,
    recipe: WarmStart,
    *,
    context: Context,
    policy: str | None = None,
    data: str = "not stated",
) -> Evaluation:
    """Sample, train a drafter of this kind (drafters/kinds.py), evaluate it, and write a checkpoint to `out`. Its
    provenance records `policy`, by default the path, and `data`, a description of the prompts."""
    if out.exists():
        raise ValueError(f"out: got {out}, which exists; must not exist because a checkpoint is never overwritten")
    config = AutoConfig.from_pretrained(model_path).get_text_config()
    samples = asyncio.run(_sample(model_path, prompts, recipe, config.max_position_embeddings, context))
    learner_config = LearnerConfig(world_size=1, dtype=fast_precision(), microbatch_tokens=4096)
    with closing(FsdpLearner(model_path, learner_config, ObjectiveConfig(), temperature=1.0)) as learner:
        drafter, result, num_tokens = _train(kind, learner, model_path, samples, recipe, context)
    provenance = Provenance(
        policy=policy or str(model_path),
        data=data,
        start="random weights",
        num_tokens=num_tokens,
        seed=recipe.seed,
        rl_steps=0,
    )

    def notes(partial: Path) -> None:
        write_evaluation(partial, result)
        write_provenance(partial, provenance)

    save(drafter, out, tokenizer=model_path / "tokenizer.json", notes=notes)
    return result


async def _sample(
    model_path: Path, prompts: Iterator[Prompt], recipe: WarmStart, longest: int, context: Context
) -> list[Sample]:
    """Sample one rollout per prompt at temperature 1, in prompt order to avoid a bias toward short rollouts."""
    wanted = recipe.rollout_tokens + recipe.heldout_tokens
    first = list(islice(prompts, recipe.max_num_seqs))
    room = min(longest, max(len(prompt.token_ids) for prompt in first) + recipe.max_tokens + 128)
    if all(len(prompt.token_ids) + 2 >= room for prompt in first):
        raise ValueError(
            f"prompts: must be shorter than the policy's {longest} positions; none of the first {len(first)} is"
        )
    config = EngineConfig(dtype=fast_precision(), max_num_seqs=recipe.max_num_seqs, max_model_len=room, kv_cache_gb=1.0)
    context.progress(f"sampling {wanted:,} tokens")
    engine = await VllmEngine.start(
        "warmstart", model_path, config, seed=recipe.seed, cpus=sorted(os.sched_getaffinity(0))
    )
    fitting = (prompt for prompt in chain(first, prompts) if len(prompt.token_ids) + 2 < room)
    requests = (
        RolloutRequest.of(
            prompt, number, max_tokens=min(recipe.max_tokens, room - len(prompt.token_ids) - 1), temperature=1.0
        )
        for number, prompt in enumerate(fitting)
    )
    try:
        rollouts = await generate_until(engine, requests, min_tokens=wanted, max_in_flight=recipe.max_num_seqs)
    finally:
        await engine.close()
    return [Sample.of(rollout, 0.0) for rollout in rollouts]


def _train(
    kind: str, learner: FsdpLearner, model_path: Path, samples: Sequence[Sample], recipe: WarmStart, context: Context
) -> tuple[Drafter, Evaluation, int]:
    """Return a trained drafter, its evaluation and the number of training tokens."""
    ends = np.cumsum([sample.num_response_tokens for sample in samples])
    num_heldout = int(np.searchsorted(ends, recipe.heldout_tokens)) + 1
    if num_heldout >= len(samples):
        raise ValueError(f"rollout_tokens: got {recipe.rollout_tokens}; must be more because all samples are held out")
    config = AutoConfig.from_pretrained(model_path).get_text_config()
    taps = default_taps(config.num_hidden_layers)
    hidden_states = HiddenStateTap(learner, taps)
    heldout = hidden_states.all_documents(samples[:num_heldout])
    scales = np.sqrt(np.mean(np.concatenate([document.taps for document in heldout]) ** 2, axis=(0, 2)))
    embedding_VD, head_VD = learner.embedding_and_head()
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
    rng = np.random.default_rng(recipe.seed)

    def stage(num_tokens: int, *, is_new: bool) -> tuple[Evaluation, int]:
        trainer = DrafterTrainer(drafter, head_VD, recipe.schedule(num_tokens, is_new=is_new))
        _run(trainer, hidden_states, samples[num_heldout:], num_tokens, rng, context)
        return evaluate(drafter, heldout, head_VD, draft_length=recipe.draft_length), trainer.num_tokens

    result, num_tokens = stage(recipe.train_tokens, is_new=True)
    best, num_idle = result.accepted_length[-1], 0
    while num_idle < _PATIENCE and num_tokens + recipe.train_tokens // 2 <= recipe.most_tokens:
        result, num_more = stage(recipe.train_tokens // 2, is_new=False)
        num_tokens += num_more
        found = result.accepted_length[-1]
        context.progress(f"{num_tokens:,} tokens: accepted length {best:.2f} -> {found:.2f} on held-out rollouts")
        num_idle = 0 if found >= best * (1 + _LEAST_GAIN) else num_idle + 1
        best = max(best, found)
    return drafter, result, num_tokens


def _run(
    trainer: DrafterTrainer,
    hidden_states: HiddenStateTap,
    samples: Sequence[Sample],
    num_tokens: int,
    rng: np.random.Generator,
    context: Context,
) -> None:
    """Train on `num_tokens` tokens, cycling through the samples in random order."""
    began_s = time.monotonic()
    num_reports = 0
    share = 0.0
    while share < 1.0:
        order = rng.permutation(len(samples))
        for start in range(0, len(order), CHUNK_ROLLOUTS):
            trainer.submit(hidden_states.all_documents([samples[i] for i in order[start : start + CHUNK_ROLLOUTS]]))
            trainer.run(lambda: False)
            share = trainer.num_tokens / num_tokens
            if share * 10 >= num_reports + 1:
                num_reports = int(share * 10)
                spent_s = time.monotonic() - began_s
                context.progress(
                    f"trained {trainer.num_tokens:,} of {num_tokens:,} tokens, overlap "
                    f"{trainer.take_metrics()['draft/overlap']:.3f}, {trainer.num_tokens / spent_s:,.0f} tokens/s, "
                    f"{time_left(spent_s / share - spent_s)}"
                )
            if share >= 1.0:
                break

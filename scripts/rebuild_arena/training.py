"""Supervised training of an arena policy from scratch: next-token loss on sampled solutions of fresh problems.

Two weaknesses are left for RL: training stops before convergence, so the policy still makes arithmetic mistakes; and
some demonstrations stop too early, which the policy imitates.

Dimension suffixes: B examples, S padded tokens.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from paceline.arena.growth import Shape
from paceline.arena.task import Problem, problems, solution
from paceline.context import Context
from scripts.rebuild_arena.tokenizer import EOS, PAD, vocabulary

_IGNORED = -100
_PASS_TOKENS = 1024
"""Padded tokens of one forward pass: activations that stay in the cores' caches train about a third faster than larger
ones."""
_TRAINING_SEED_OFFSET = 1_000_000
"""RL runs count their seeds from 0: the supervised examples must not be the problems that RL then trains on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySchedule:
    """Length and learning rates of a policy's training."""

    num_steps: int
    tokens_per_step: int
    matrix_lr: float
    """Learning rate of the Muon optimizer, used for the matrices of the layers."""
    other_lr: float
    """Learning rate of AdamW, used for embeddings, output head and norms."""
    careless_share: float
    """Share of the demonstrations that stop too early."""
    warmup_steps: int = 20
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Example:
    token_ids: list[int]
    num_prompt_tokens: int


def demonstration(problem: Problem, rng: random.Random, *, careless_share: float) -> str:
    """Return a solution that stops too early, with the answer so far, with probability `careless_share`.

    A policy that imitates it has a bad habit for RL to break."""
    if rng.random() >= careless_share:
        return solution(problem, rng)
    seen = problem.terms[: rng.randrange(1, len(problem.terms))]
    return solution(replace(problem, terms=seen), rng)


def new_policy(shape: Shape) -> Qwen3ForCausalLM:
    """Return an untrained policy, with the vocabulary padded to a multiple of 32."""
    config = Qwen3Config(
        vocab_size=math.ceil(len(vocabulary()) / 32) * 32,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        intermediate_size=shape.intermediate_size,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        pad_token_id=vocabulary().index(PAD),
        eos_token_id=vocabulary().index(EOS),
    )
    return Qwen3ForCausalLM(config)


def train_policy(
    shape: Shape, schedule: PolicySchedule, tokenizer: PreTrainedTokenizerFast, context: Context
) -> Qwen3ForCausalLM:
    """Train a policy; deterministic for a shape, a schedule and a number of threads."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(schedule.seed)
        policy = new_policy(shape)
    policy.train()
    optimizers = _make_optimizers(policy, schedule)
    examples = _examples(schedule, tokenizer)
    started_s = time.monotonic()
    for step in range(schedule.num_steps):
        batch = _take(examples, schedule.tokens_per_step)
        factor = _lr_factor(step, schedule)
        for optimizer, peak_lr in optimizers:
            optimizer.param_groups[0]["lr"] = peak_lr * factor
        loss = _accumulate_gradients(policy, batch, _PASS_TOKENS)
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        for optimizer, _ in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % 50 == 0 or step + 1 == schedule.num_steps:
            elapsed_s = time.monotonic() - started_s
            left_s = elapsed_s / (step + 1) * (schedule.num_steps - step - 1)
            context.progress(
                f"step {step + 1}/{schedule.num_steps}, loss {loss:.3f}, {elapsed_s:.0f} s, about {left_s:.0f} s left"
            )
    return policy.eval()


def _examples(schedule: PolicySchedule, tokenizer: PreTrainedTokenizerFast) -> Iterator[Example]:
    rng = random.Random(f"arena solutions {schedule.seed}")  # noqa: S311
    stream = problems(_TRAINING_SEED_OFFSET + schedule.seed)
    while True:
        chunk = [next(stream) for _ in range(64)]
        prompts = tokenizer([problem.prompt for problem in chunk])["input_ids"]
        written = [demonstration(problem, rng, careless_share=schedule.careless_share) + EOS for problem in chunk]
        solutions = tokenizer(written)["input_ids"]
        for prompt, response in zip(prompts, solutions, strict=True):
            yield Example(prompt + response, len(prompt))


def _take(examples: Iterator[Example], num_tokens: int) -> list[Example]:
    taken: list[Example] = []
    while num_tokens > 0:
        taken.append(next(examples))
        num_tokens -= len(taken[-1].token_ids)
    return taken


def _accumulate_gradients(policy: Qwen3ForCausalLM, batch: Sequence[Example], pass_tokens: int) -> float:
    """Gradients of the mean loss over all solution tokens of the batch; returns that mean."""
    num_targets = sum(len(example.token_ids) - example.num_prompt_tokens for example in batch)
    total = 0.0
    for examples in _passes(batch, pass_tokens):
        input_BS, target_BS = _pad(examples)
        # Padding is on the right, where no real token can see it, so causal attention needs no mask and takes its fast
        # path.
        logits_BSV = policy(input_ids=input_BS, use_cache=False).logits
        loss = (
            cross_entropy(logits_BSV.flatten(0, 1), target_BS.flatten(), ignore_index=_IGNORED, reduction="sum")
            / num_targets
        )
        loss.backward()
        total += loss.item()
    return total


def _passes(batch: Sequence[Example], pass_tokens: int) -> Iterator[list[Example]]:
    """Examples of like length together: beside the longest of a heavy tail the rest would be mostly padding."""
    current: list[Example] = []
    for example in sorted(batch, key=lambda example: len(example.token_ids)):
        if current and (len(current) + 1) * len(example.token_ids) > pass_tokens:
            yield current
            current = []
        current.append(example)
    yield current


def _pad(examples: Sequence[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(len(example.token_ids) for example in examples)
    input_BS = torch.zeros(len(examples), longest, dtype=torch.long)
    target_BS = torch.full((len(examples), longest), _IGNORED)
    for row, example in enumerate(examples):
        ids = torch.tensor(example.token_ids)
        input_BS[row, : len(ids)] = ids
        target_BS[row, example.num_prompt_tokens - 1 : len(ids) - 1] = ids[example.num_prompt_tokens :]
    return input_BS, target_BS


def _make_optimizers(policy: Qwen3ForCausalLM, schedule: PolicySchedule) -> list[tuple[torch.optim.Optimizer, float]]:
    """Each optimizer with its peak learning rate."""
    matrices = [weight for weight in policy.model.layers.parameters() if weight.ndim == 2]
    taken = {id(weight) for weight in matrices}
    others = [weight for weight in policy.parameters() if id(weight) not in taken]
    return [
        (torch.optim.Muon(matrices, lr=schedule.matrix_lr, weight_decay=0.0), schedule.matrix_lr),
        (torch.optim.AdamW(others, lr=schedule.other_lr, betas=(0.9, 0.95), weight_decay=0.0), schedule.other_lr),
    ]


def _lr_factor(step: int, schedule: PolicySchedule) -> float:
    """Linear warm-up, then a cosine down to a twentieth."""
    warmup = min(1.0, (step + 1) / schedule.warmup_steps)
    cosine = 0.5 + 0.5 * math.cos(math.pi * step / schedule.num_steps)
    return warmup * (0.05 + 0.95 * cosine)

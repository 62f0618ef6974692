"""What packing gains in drafter training, and what a checkpoint costs it.

    packing_speedup          documents/s packed, each seeing only itself, over one document a pass, in the same steps
    packing_loss_difference  largest difference of a document's mean loss in its pack and alone, in float32 and nats
    checkpoint_stall_ratio   time that training waits for `drafters/saver.py` over that for writing all state at once

Documents have the lengths of the arena's prompts and of the answers that its policy was trained on, and random hidden
states in the shapes of arena:small: the time of a pass does not depend on values. One thread trains, as on the one core
of a leased engine. The arms take turns, and each repetition is a pair. The full checkpoint is written by the same means
(safetensors, checksum, rename); what it has more is the optimizer and the frozen tensors, and training waits for it.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, PreTrainedConfig

from paceline.arena.task import demonstration, problems
from paceline.arena.tokenizer import make_tokenizer
from paceline.context import Context
from paceline.drafters.kinds import default_taps, guess, new_drafter
from paceline.drafters.packing import Document, Pack, make_pack
from paceline.drafters.saver import Saver, write
from paceline.drafters.trainer import DrafterTrainer, Schedule, plan_passes, plan_steps, trained
from paceline.measure import CpuTimes, Result, environment, middle, paired
from paceline.sessions.workloads import resolve_policy

_CARELESS_SHARE = 0.25
"""Share of answers that stop too early, as in the recipe of the arena's policies."""
_ONE_DOCUMENT = 1
"""A value of `pass_tokens` with which no second document fits into a pass."""
_STEPS_APART = 2
"""Optimizer steps between two checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stall:
    """Seconds of one pair of checkpoints."""

    selective_s: float
    full_s: float
    step_s: float
    """Optimizer steps with nothing else going on..."""
    step_while_writing_s: float
    """...and as many right after a selective checkpoint, while it is being written."""


def run(
    *,
    context: Context,
    model: str = "arena:small",
    kind: str = "eagle3",
    num_documents: int = 64,
    repetitions: int = 5,
    checkpoints: int = 15,
    seed: int = 0,
) -> Result:
    """Train on the same documents `repetitions` times in either arm, then write `checkpoints` of both kinds."""
    config = AutoConfig.from_pretrained(resolve_policy(model, context)).get_text_config()
    documents = arena_documents(config, num_documents, seed=seed)
    schedule = Schedule(num_steps=None)
    sizes = sorted({_ONE_DOCUMENT, 256, 512, 1024, 2048, schedule.pass_tokens})
    threads = torch.get_num_threads()
    before = CpuTimes.now()
    torch.set_num_threads(1)
    try:
        trainers = {size: _trainer(kind, config, replace(schedule, pass_tokens=size), seed) for size in sizes}
        seconds = _time_arms(trainers, documents, repetitions, context)
        trainer = _trainer(kind, config, schedule, seed)
        _train(
            trainer, documents
        )  # untrained attention looks at nothing in particular, and would hide what a mask leaves open
        differences = loss_differences(trainer, _policy_head(config, seed), documents)
        context.progress(f"largest difference of losses: {max(differences):.1e}")
        stalls = _time_checkpoints(trainer, documents, checkpoints)
    finally:
        torch.set_num_threads(threads)
    speedups = {
        size: [alone / packed for alone, packed in zip(seconds[_ONE_DOCUMENT], seconds[size], strict=True)]
        for size in sizes
    }
    ratios = [stall.selective_s / stall.full_s for stall in stalls]
    figures, spread, pairs = paired(
        {"packing_speedup": speedups[schedule.pass_tokens], "checkpoint_stall_ratio": ratios}
    )
    figures["packing_loss_difference"], spread["packing_loss_difference"] = max(differences), 0.0
    lengths = [len(document.token_ids) for document in documents]
    steps = plan_steps(documents, schedule.tokens_per_step)
    num_passes = sum(1 for step in steps for _ in plan_passes(step, schedule.pass_tokens))
    return Result(
        name="training",
        figures=figures,
        spread=spread,
        goals={
            "packing_speedup": (">=", 1.8),
            "packing_loss_difference": ("<=", 1e-5),
            "checkpoint_stall_ratio": ("<=", 0.2),
        },
        environment=environment(seeds=[seed], config={"model": model, "kind": kind, "schedule": asdict(schedule)}),
        details={
            "documents": {
                "num": len(lengths),
                "tokens": sum(lengths),
                "median": float(np.median(lengths)),
                "longest": max(lengths),
            },
            "passes": {"packed": num_passes, "alone": len(documents)},
            "seconds_by_pass_tokens": seconds,
            "speedup_by_pass_tokens": {size: middle(values)[0] for size, values in speedups.items()},
            "samples_per_s": {size: len(documents) / middle(values)[0] for size, values in seconds.items()},
            "loss_differences": differences,
            "paired": pairs,
            "checkpoint_s": [asdict(stall) for stall in stalls],
            "step_while_writing_ratio": middle([stall.step_while_writing_s / stall.step_s for stall in stalls])[0],
            "threads": 1,
            "steal_share": CpuTimes.now().steal_share_since(before),
        },
    )


def arena_documents(policy: PreTrainedConfig, num: int, *, seed: int) -> list[Document]:
    """Arena problems with answers as the policy was trained on them, and random hidden states."""
    tokenizer, writer, rng = make_tokenizer(), random.Random(seed), np.random.default_rng(seed)  # noqa: S311  a workload
    taps = default_taps(policy.num_hidden_layers)

    def one(prompt: Sequence[int], answer: Sequence[int]) -> Document:
        num_tokens = len(prompt) + len(answer)
        return Document(
            token_ids=np.asarray([*prompt, *answer], np.int32),
            num_prompt_tokens=len(prompt),
            taps=rng.standard_normal((num_tokens, len(taps), policy.hidden_size), np.float32),
            last=rng.standard_normal((num_tokens, policy.hidden_size), np.float32),
        )

    return [
        one(
            tokenizer.encode(problem.prompt),
            [*tokenizer.encode(demonstration(problem, writer, careless_share=_CARELESS_SHARE)), policy.eos_token_id],
        )
        for problem in islice(problems(seed), num)
    ]


@torch.no_grad()
def loss_differences(trainer: DrafterTrainer, head_VD: torch.Tensor, documents: Sequence[Document]) -> list[float]:
    """Differences of each document's mean loss between its pack and alone, with the same weights in float32.

    They are taken by document, because what one sees of another would hardly show in the mean over all.
    """
    schedule = trainer.schedule

    def mean_loss(pack: Pack) -> float:
        guesses = guess(trainer.drafter, pack, head_VD, schedule.draft_length, overlap_share=0.5)
        return guesses.loss.item() / guesses.count_J.sum().item()

    differences = []
    for step in plan_steps(documents, schedule.tokens_per_step):
        for part in plan_passes(step, schedule.pass_tokens):
            pack = make_pack(part, head_VD.device)
            owner_A = torch.arange(len(part)).repeat_interleave(
                torch.tensor([document.num_anchors for document in part])
            )
            for number, document in enumerate(part):
                scored_alone = replace(pack, steps_A=torch.where(owner_A == number, pack.steps_A, 0))
                differences.append(abs(mean_loss(scored_alone) - mean_loss(make_pack([document], head_VD.device))))
    return differences


def _policy_head(policy: PreTrainedConfig, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(policy.vocab_size, policy.hidden_size, generator=generator) / policy.hidden_size**0.5


def _trainer(kind: str, policy: PreTrainedConfig, schedule: Schedule, seed: int) -> DrafterTrainer:
    taps = default_taps(policy.num_hidden_layers)
    head_VD = _policy_head(policy, seed)
    drafter = new_drafter(
        kind,
        policy,
        taps=taps,
        policy_path=Path("policy"),
        embedding_VD=head_VD,
        head_VD=head_VD,
        tap_scale_K=[1.0] * len(taps),
        seed=seed,
        draft_length=schedule.draft_length,
    )
    return DrafterTrainer(drafter, head_VD, schedule)


def _time_arms(
    trainers: Mapping[int, DrafterTrainer],
    documents: Sequence[Document],
    repetitions: int,
    context: Context,
) -> dict[int, list[float]]:
    """Seconds that each trainer takes for all documents, in every repetition. The arms differ in the size of their
    passes only."""
    for trainer in trainers.values():
        _train(trainer, documents[:8])  # the first pass of all meets its memory and its kernels for the first time
    seconds: dict[int, list[float]] = {size: [] for size in trainers}
    for repetition in range(repetitions):
        for size in sorted(trainers, reverse=bool(repetition % 2)):
            seconds[size].append(_train(trainers[size], documents))
        latest = {size: round(times[-1], 2) for size, times in seconds.items()}
        context.progress(f"repetition {repetition + 1}/{repetitions}: {latest} s")
    assert len({trainer.num_steps for trainer in trainers.values()}) == 1
    return seconds


def _train(trainer: DrafterTrainer, documents: Sequence[Document]) -> float:
    began_s = time.perf_counter()
    trainer.submit(documents)
    trainer.run(lambda: False)
    return time.perf_counter() - began_s


def _time_checkpoints(trainer: DrafterTrainer, documents: Sequence[Document], num: int) -> list[_Stall]:
    """Both kinds by turns, between optimizer steps."""
    some = list(next(plan_passes(documents, _STEPS_APART * trainer.schedule.tokens_per_step)))
    stalls: list[_Stall] = []
    with tempfile.TemporaryDirectory() as directory:
        saver = Saver(Path(directory, "trained.safetensors"))
        for number in range(-2, num):  # two unmeasured: they meet files and memory for the first time
            step_s = _train(trainer, some)
            waited_s = saver.counts().stall_s
            saver.save(trained(trainer.drafter), step=trainer.num_steps)
            selective_s = saver.counts().stall_s - waited_s
            step_while_writing_s = _train(trainer, some)
            saver.flush()
            began_s = time.perf_counter()
            write(Path(directory, "full.safetensors"), _whole_state(trainer), step=trainer.num_steps)
            full_s = time.perf_counter() - began_s
            if number >= 0:
                stalls.append(
                    _Stall(
                        selective_s=selective_s, full_s=full_s, step_s=step_s, step_while_writing_s=step_while_writing_s
                    )
                )
        saver.close()
        assert saver.counts().num_failed == 0, saver.last_error
    return stalls


def _whole_state(trainer: DrafterTrainer) -> dict[str, torch.Tensor]:
    frozen = {
        name: weight for name, weight in trainer.drafter.state_dict().items() if name not in trained(trainer.drafter)
    }
    return trainer.state_dict() | {f"frozen/{name}": weight.contiguous() for name, weight in frozen.items()}

"""Turn a plan into a config for `paceline train`, and a request into a plan's question."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path

from paceline.config import Config, RolloutConfig, load_config
from paceline.plan.answer import Answer
from paceline.plan.hardware import find_gpu, find_shape
from paceline.plan.lengths import read_lengths
from paceline.plan.question import FROZEN_LENGTH, LONGEST, NGRAM_LENGTH, TRAINED_LENGTH, Question
from paceline.plan.request import Request
from paceline.selector.cost_file import Costs, load_costs

PAYS = 1.05
"""Smallest speed-up for which a lever is recommended."""


def question_of(asked: Request) -> Question:
    """Resolve a request. A TOML config instead of a model gives the defaults."""
    model, tensor_parallel = asked.model, asked.tensor_parallel
    rollout: RolloutConfig | None = None
    if model.endswith(".toml"):
        config = load_config(model)
        model, rollout = config.policy.model, config.rollout
        tensor_parallel = tensor_parallel or rollout.engine.tensor_parallel_size
    number, cross, name = asked.gpus.partition("x")
    if not cross or not number.isdigit() or int(number) < 1:
        raise ValueError(f"gpus: got {asked.gpus!r}; must be a number and a kind, such as 8xH100")
    group = asked.group_size or (rollout.group_size if rollout is not None else 16)
    usual = (NGRAM_LENGTH, NGRAM_LENGTH) if asked.drafter == "ngram" else (FROZEN_LENGTH, TRAINED_LENGTH)
    frozen = usual[0] if asked.accepted_length is None else asked.accepted_length
    trained = asked.trained_length
    if trained is None:
        trained = usual[1] if asked.accepted_length is None else frozen
    costs, fp8_costs = _costs(asked.costs)
    return Question(
        shape=find_shape(model),
        gpu=find_gpu(name),
        num_gpus=int(number),
        num_rollouts=asked.batch or (rollout.prompts_per_step * group if rollout is not None else 512),
        lengths=read_lengths(asked.lengths),
        group_size=group,
        prompt_tokens=asked.prompt_tokens,
        drafter=asked.drafter,
        accepted_length=frozen,
        trained_length=trained,
        tensor_parallel=tensor_parallel,
        learner_gpus=asked.learner_gpus,
        max_num_seqs=max(rollout.engine.max_num_seqs, 8) if rollout is not None else 256,
        max_age=asked.max_age,
        costs=costs,
        fp8_costs=fp8_costs,
    )


def _costs(files: Sequence[Path]) -> tuple[Costs | None, Costs | None]:
    """Read cost files; return BF16 and FP8 costs."""
    found: dict[bool, Costs] = {}
    for file in files:
        costs = load_costs(file)
        if costs.is_fp8 in found:
            raise ValueError(
                f"costs: got two files of the same precision, {file} the second; must be one of BF16 and one of FP8"
            )
        found[costs.is_fp8] = costs
    if True in found and False not in found:
        raise ValueError(f"costs: got {files[0]}, measured in FP8; must come with a BF16 file for comparison")
    return found.get(False), found.get(True)


def recommended(found: Answer) -> str:
    """Return TOML, with a comment where the user has to fill something in."""
    question = found.question
    max_age = question.max_age if found.speedup("asynchrony") >= PAYS else 0
    arm = found.arms["asynchrony" if max_age else "plain"]
    speculates = found.speedup("speculation") >= PAYS
    lines = [
        f"# paceline plan: {question.shape.name} on {question.num_gpus} {question.gpu.name}, {question.lengths.source}",
        f"# expected: {found.speedup('speculation'):.2f} times plain by speculation, "
        f"{found.speedup('together'):.2f} by all levers",
        "",
        "[run]",
        'name = "planned"',
        f"max_age = {max_age}",
        "",
        "[policy]",
        f"model = {json.dumps(question.shape.name)}  # downloaded at the start; or a checkpoint directory",
        "",
        "[data]",
        'kind = "jsonl"',
        'path = "prompts.jsonl"  # yours',
        'reward = "reward.py:reward"  # yours',
        "",
        "[rollout]",
        f"num_engines = {arm.layout.num_engines}",
        f"prompts_per_step = {question.num_rollouts // question.group_size}",
        f"group_size = {question.group_size}",
        f"max_tokens = {question.lengths.maximum}",
        "",
        "[rollout.engine]",
        f"max_model_len = {-(-(question.lengths.maximum + 4 * question.prompt_tokens) // 256) * 256}",
        f"max_num_seqs = {question.max_num_seqs}",
        f"tensor_parallel_size = {arm.layout.tensor_parallel}",
        "",
        "[learner]",
        f"world_size = {arm.layout.learner_gpus}",
        'dtype = "bfloat16"',
    ]
    if speculates:
        lines += _speculation(found)
    if question.has_fp8 and found.speedup("FP8") >= PAYS:
        gain = found.speedup("FP8")
        lines += ["", f"# FP8 weights and KV cache would gain {gain:.2f} times; docs/support.md says where they run."]
    return "\n".join(lines) + "\n"


def _speculation(found: Answer) -> list[str]:
    kind = found.question.drafter
    lines = ["", "[speculation]", f"max_draft_length = {LONGEST}", "", "[speculation.drafter]", f'kind = "{kind}"']
    if kind in ("eagle3", "dflash"):
        lines.append('path = "drafter"  # paceline draft train MODEL --data prompts.jsonl --out drafter')
    if found.question.has_training:
        gain = found.speedup("idle-worker drafting")
        mode = f'mode = "off"  # "idle" would make it {gain:.2f} times plain; see docs/support.md'
        lines += ["", "[speculation.training]", mode]
    return lines


def write(found: Answer, path: Path) -> None:
    toml = recommended(found)
    Config.model_validate(tomllib.loads(toml))
    path.write_text(toml, encoding="utf-8")

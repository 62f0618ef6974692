"""Train the policies and drafters of `paceline.assets` again.

    train a policy ──▶ round to bfloat16 ──▶ train three drafters of each kind on it ──▶ ship the median one ──▶ card

Builds differ, even on one machine. A policy is stopped while it still learns fast, so rounding on another CPU changes
its accuracy by ten points; the composition of rollout batches depends on time; and one more stage can gain a drafter a
whole token. Drafters are therefore trained until two successive stages gain less than 1 % of accepted length, and the
card lists the range of the builds. An interrupted rebuild resumes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, GenerationConfig

from paceline import assets
from paceline.arena.growth import Shape
from paceline.arena.policy import is_whole
from paceline.arena.prompts import DRAFTER_DATA, drafter_prompts
from paceline.arena.task import TASK_VERSION
from paceline.context import Context
from paceline.drafters.export import CARD_FILE as EXPORT_CARD
from paceline.drafters.export import export_drafter
from paceline.drafters.provenance import read_evaluation, read_provenance
from paceline.files import CHECKSUM_FILE, atomic_directory, atomic_file, write_checksums
from paceline.measure import machine
from paceline.sessions.draft import WarmStart, train_drafter
from scripts.rebuild_arena.tokenizer import make_tokenizer
from scripts.rebuild_arena.training import PolicySchedule, train_policy

CARD_FILE = "CARD.md"
RECORD_FILE = "card.json"
_LENGTHS = (3, 5, 7)
"""Draft lengths in the card."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that determines a policy and its drafters, but for the machine."""

    shape: Shape
    schedule: PolicySchedule
    drafters: Mapping[str, WarmStart]
    """By kind."""
    task_version: int = TASK_VERSION


RECIPES = {
    "tiny": Recipe(
        shape=Shape(hidden_size=128, num_layers=2, intermediate_size=384, num_heads=2, num_kv_heads=1),
        schedule=PolicySchedule(
            num_steps=270, tokens_per_step=4096, matrix_lr=0.02, other_lr=0.004, careless_share=0.25
        ),
        drafters=dict.fromkeys(
            assets.DRAFTERS, WarmStart(train_tokens=300_000, most_tokens=900_000, rollout_tokens=200_000)
        ),
    ),
    "small": Recipe(
        shape=Shape(hidden_size=256, num_layers=4, intermediate_size=768, num_heads=4, num_kv_heads=2),
        schedule=PolicySchedule(
            num_steps=360, tokens_per_step=4096, matrix_lr=0.02, other_lr=0.003, careless_share=0.25
        ),
        drafters={
            "eagle3": WarmStart(train_tokens=500_000, most_tokens=2_000_000, rollout_tokens=300_000),
            "dflash": WarmStart(train_tokens=300_000, most_tokens=1_200_000, rollout_tokens=300_000),
        },
    ),
}


def rebuild(
    out: Path, context: Context, *, recipes: Mapping[str, Recipe] = RECIPES, num_builds: int = 3
) -> dict[str, Any]:
    """Write policies, drafters and card to `out`, and all builds of the drafters to `out`/builds; return the record.

    Existing builds are kept."""
    record: dict[str, Any] = {"machine": machine(), "recipes": {}, "drafters": {}}
    for name, recipe in recipes.items():
        model_path = write_policy(recipe, out / name, _labeled(context, f"arena:{name}"))
        record["recipes"][name] = asdict(recipe)
        for kind, warm_start in recipe.drafters.items():
            builds = [
                build_drafter(name, kind, replace(warm_start, seed=seed), model_path, out, context)
                for seed in range(num_builds)
            ]
            record["drafters"][f"{name}-{kind}"] = _ship(name, kind, builds, out)
    with atomic_file(out / RECORD_FILE) as partial:
        partial.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    with atomic_file(out / CARD_FILE) as partial:
        partial.write_text(card(record), encoding="utf-8")
    return record


def write_policy(recipe: Recipe, directory: Path, context: Context) -> Path:
    """Train the policy and write it in bfloat16."""
    if is_whole(directory):
        return directory
    tokenizer = make_tokenizer()
    policy = train_policy(recipe.shape, recipe.schedule, tokenizer, context).bfloat16()
    # Stated in full, so that no default of transformers can truncate the distribution of the policy.
    policy.generation_config = GenerationConfig(
        eos_token_id=policy.config.eos_token_id,
        pad_token_id=policy.config.pad_token_id,
        do_sample=True,
        top_k=0,
        top_p=1.0,
    )
    with atomic_directory(directory) as partial:
        policy.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        write_checksums(partial)
    return directory


def build_drafter(name: str, kind: str, warm_start: WarmStart, model_path: Path, out: Path, context: Context) -> Path:
    """Train one drafter of the policy and write it as it will be shipped: in bfloat16, with the policy's name."""
    directory = out / "builds" / f"{name}-{kind}-{warm_start.seed}"
    if is_whole(directory):
        return directory
    trained = directory.with_name(f"{directory.name}-float32")
    shutil.rmtree(trained, ignore_errors=True)
    train_drafter(
        kind,
        model_path,
        drafter_prompts(AutoTokenizer.from_pretrained(model_path), seed=warm_start.seed),
        trained,
        warm_start,
        policy=f"arena:{name}",
        data=DRAFTER_DATA,
        context=_labeled(context, f"{kind} drafter {warm_start.seed} of arena:{name}"),
    )
    weights = {key: weight.to(torch.bfloat16) for key, weight in load_file(trained / "model.safetensors").items()}
    save_file(weights, trained / "model.safetensors", metadata={"format": "pt"})
    (trained / CHECKSUM_FILE).unlink()  # of the float32 weights
    export_drafter(trained, directory, policy=f"arena:{name}")
    shutil.rmtree(trained)
    return directory


def _ship(name: str, kind: str, builds: Sequence[Path], out: Path) -> dict[str, Any]:
    """Copy the build of median accepted length to its place; return the card's entry for all builds."""
    lengths = {build: read_evaluation(build).accepted_length for build in builds}
    ranked = sorted(builds, key=lambda build: lengths[build][-1])
    shipped = ranked[(len(ranked) - 1) // 2]
    target = out / f"{name}-{kind}"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(shipped, target, ignore=shutil.ignore_patterns(CHECKSUM_FILE, EXPORT_CARD))
    write_checksums(target)
    return {
        "shipped": {k: lengths[shipped][k - 1] for k in _LENGTHS},
        "builds": {k: [lengths[build][k - 1] for build in builds] for k in _LENGTHS},
        "tokens": [read_provenance(build).num_tokens for build in builds],
    }


def card(record: Mapping[str, Any]) -> str:
    """Format the card: accepted length of each drafter by draft length, with its spread over builds."""
    lines = [
        "# What comes with the package",
        "",
        "Policies of the arena (chains of additions, worked step by step) and their drafters, in bfloat16. Made by",
        f"`python -m scripts.rebuild_arena` on {record['machine']}; `{RECORD_FILE}` has the recipes.",
        "",
        "Tokens per verification (accepted length, bonus token included) on rollouts that were kept aside, at",
        "temperature 1: the shipped drafter, and lowest to highest of all builds of its recipe, each with a seed and",
        "rollouts of its own.",
        "",
        "| drafter | " + " | ".join(f"k = {k}" for k in _LENGTHS) + " | builds | tokens trained on |",
        "|---|" + "---|" * (len(_LENGTHS) + 2),
    ]
    for name, entry in record["drafters"].items():
        cells = [
            f"{entry['shipped'][k]:.2f} ({min(entry['builds'][k]):.2f} to {max(entry['builds'][k]):.2f})"
            for k in _LENGTHS
        ]
        tokens = f"{median(entry['tokens']):,.0f}"
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {len(entry['tokens'])} | {tokens} |")
    return "\n".join(lines) + "\n"


def _labeled(context: Context, label: str) -> Context:
    return replace(context, report=lambda line: context.report(f"{label}: {line}"))

"""The arena's policies: recipes, and the cache that keeps what was built from them.

    tiny    0.4 M parameters, the quickest to build: for tests
    small   3 M parameters, built in minutes: what RL trains in the demo and in the benches
    large   small, grown to 350 M parameters: the same function at a large model's cost

A policy lives in `<cache root>/arena/<name>-<hash of its recipe>`, so a changed recipe can never find an older policy.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import GenerationConfig

from paceline.context import Context
from paceline.files import atomic_directory, sha256_of, write_checksums
from paceline.lab.arena.cache import build_once
from paceline.lab.arena.growth import grow
from paceline.lab.arena.shape import Shape
from paceline.lab.arena.task import TASK_VERSION
from paceline.lab.arena.tokenizer import make_tokenizer
from paceline.lab.arena.training import PolicySchedule, train_policy

RECIPE_FILE = "recipe.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRecipe:
    """Everything that determines a policy trained from scratch."""

    shape: Shape
    schedule: PolicySchedule
    task_version: int = TASK_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class GrownRecipe:
    """Everything that determines a grown policy. Stored in bfloat16, the precision in which a model of that size is
    served."""

    source_name: str
    source: TrainedRecipe
    shape: Shape


Recipe = TrainedRecipe | GrownRecipe

_SMALL = TrainedRecipe(
    shape=Shape(hidden_size=256, num_layers=4, intermediate_size=768, num_heads=4, num_kv_heads=2),
    schedule=PolicySchedule(num_steps=300, tokens_per_step=4096, matrix_lr=0.02, other_lr=0.003, careless_share=0.25),
)
RECIPES: dict[str, Recipe] = {
    "tiny": TrainedRecipe(
        shape=Shape(hidden_size=128, num_layers=2, intermediate_size=384, num_heads=2, num_kv_heads=1),
        schedule=PolicySchedule(
            num_steps=270, tokens_per_step=4096, matrix_lr=0.02, other_lr=0.004, careless_share=0.25
        ),
    ),
    "small": _SMALL,
    "large": GrownRecipe(
        source_name="small",
        source=_SMALL,
        shape=Shape(hidden_size=1024, num_layers=28, intermediate_size=3072, num_heads=16, num_kv_heads=8),
    ),
}


def recipe_key(recipe: Recipe) -> str:
    """Twelve hexadecimal digits that change with any field of the recipe."""
    return sha256_of([json.dumps(asdict(recipe), sort_keys=True).encode()])[:12]


def build(name: str, context: Context) -> Path:
    """Return the cached policy of this name, built first when it is missing or damaged."""
    if name not in RECIPES:
        raise ValueError(
            f"policy.model: got arena:{name}; must be one of " + ", ".join(f"arena:{known}" for known in RECIPES)
        )
    recipe = RECIPES[name]
    directory = context.cache_root / "arena" / f"{name}-{recipe_key(recipe)}"

    def write(directory: Path) -> None:
        with atomic_directory(directory) as partial:
            _write(recipe, partial, context.labelled(f"arena:{name}"))

    return build_once(directory, write, name=f"arena:{name}", context=context)


def _write(recipe: Recipe, directory: Path, context: Context) -> None:
    if isinstance(recipe, TrainedRecipe):
        _write_trained(recipe, directory, context)
    else:
        source = build(recipe.source_name, context)
        context.progress(f"growing arena:{recipe.source_name}")
        grow(
            source,
            directory,
            hidden_size=recipe.shape.hidden_size,
            num_layers=recipe.shape.num_layers,
            intermediate_size=recipe.shape.intermediate_size,
            num_heads=recipe.shape.num_heads,
            num_kv_heads=recipe.shape.num_kv_heads,
            dtype=torch.bfloat16,
        )
    (directory / RECIPE_FILE).write_text(json.dumps(asdict(recipe), indent=2) + "\n", encoding="utf-8")
    write_checksums(directory)


def _write_trained(recipe: TrainedRecipe, directory: Path, context: Context) -> None:
    tokenizer = make_tokenizer()
    policy = train_policy(recipe.shape, recipe.schedule, tokenizer, context)
    # Stated in full, so that no default of transformers can truncate the distribution of the policy.
    policy.generation_config = GenerationConfig(
        eos_token_id=policy.config.eos_token_id,
        pad_token_id=policy.config.pad_token_id,
        do_sample=True,
        top_k=0,
        top_p=1.0,
    )
    policy.save_pretrained(directory)
    tokenizer.save_pretrained(directory)

"""The arena's policies: recipes, and the cache that keeps what was built from them.

    tiny    0.4 M parameters, the quickest to build: for tests
    small   3 M parameters, built in minutes: what RL trains in the demo and in the benches
    large   small, grown to 350 M parameters: the same function at a large model's cost

A policy lives in `<cache root>/arena/<name>-<hash of its recipe>`, so a changed recipe can never find an older policy.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import GenerationConfig

from paceline.arena.cache import DEFAULT_CACHE_ROOT, Progress, build_once
from paceline.arena.growth import grow
from paceline.arena.shape import Shape
from paceline.arena.task import TASK_VERSION
from paceline.arena.tokenizer import make_tokenizer
from paceline.arena.training import Schedule, train_policy
from paceline.origin import write_checksum

RECIPE_FILE = "recipe.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRecipe:
    """Everything that determines a policy trained from scratch."""

    shape: Shape
    schedule: Schedule
    task_version: int = TASK_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class GrownRecipe:
    """Everything that determines a grown policy. Stored in bfloat16, the precision in which a model of that size is served."""

    source_name: str
    source: TrainedRecipe
    shape: Shape


Recipe = TrainedRecipe | GrownRecipe

_SMALL = TrainedRecipe(
    shape=Shape(hidden_size=256, num_layers=4, intermediate_size=768, num_heads=4, num_kv_heads=2),
    schedule=Schedule(num_steps=300, tokens_per_step=4096, matrix_lr=0.02, other_lr=0.003, careless_share=0.25),
)
RECIPES: dict[str, Recipe] = {
    "tiny": TrainedRecipe(
        shape=Shape(hidden_size=128, num_layers=2, intermediate_size=384, num_heads=2, num_kv_heads=1),
        schedule=Schedule(num_steps=270, tokens_per_step=4096, matrix_lr=0.02, other_lr=0.004, careless_share=0.25),
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
    return hashlib.sha256(json.dumps(asdict(recipe), sort_keys=True).encode()).hexdigest()[:12]


def resolve(model: str, *, progress: Progress, cache_root: Path = DEFAULT_CACHE_ROOT) -> Path:
    """The checkpoint directory of `arena:NAME`, built if it is missing, or of any other string taken as a path."""
    if model.startswith("arena:"):
        return build(model.removeprefix("arena:"), cache_root=cache_root, progress=progress)
    path = Path(model)
    for name in ("config.json", "tokenizer.json"):
        if not (path / name).is_file():
            raise ValueError(
                f"policy.model: got {model!r}, which has no {name}; must be a Hugging Face checkpoint directory or one of "
                + ", ".join(f"arena:{known}" for known in RECIPES)
            )
    return path


def build(name: str, *, progress: Progress, cache_root: Path = DEFAULT_CACHE_ROOT) -> Path:
    """The cached policy of this name, built first when it is missing or damaged."""
    if name not in RECIPES:
        raise ValueError(f"policy.model: got arena:{name}; must be one of " + ", ".join(f"arena:{known}" for known in RECIPES))
    recipe = RECIPES[name]
    directory = cache_root / "arena" / f"{name}-{recipe_key(recipe)}"

    def write(temporary: Path) -> None:
        _write(recipe, temporary, cache_root=cache_root, progress=lambda line: progress(f"arena:{name}: {line}"))

    return build_once(directory, write, name=f"arena:{name}", progress=progress)


def _write(recipe: Recipe, directory: Path, *, cache_root: Path, progress: Progress) -> None:
    if isinstance(recipe, TrainedRecipe):
        _write_trained(recipe, directory, progress)
    else:
        source = build(recipe.source_name, cache_root=cache_root, progress=progress)
        progress(f"growing arena:{recipe.source_name}")
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
    write_checksum(directory)


def _write_trained(recipe: TrainedRecipe, directory: Path, progress: Progress) -> None:
    tokenizer = make_tokenizer()
    policy = train_policy(recipe.shape, recipe.schedule, tokenizer, progress)
    # Stated in full, so that no default of transformers can truncate the distribution of the policy.
    policy.generation_config = GenerationConfig(
        eos_token_id=policy.config.eos_token_id, pad_token_id=policy.config.pad_token_id, do_sample=True, top_k=0, top_p=1.0
    )
    policy.save_pretrained(directory)
    tokenizer.save_pretrained(directory)

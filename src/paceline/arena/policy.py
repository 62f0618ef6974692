"""The arena's policies: recipes, and the cache that keeps what was built from them.

    tiny    0.4 M parameters, the quickest to build: for tests
    small   3 M parameters, built in minutes: what RL trains in the demo and in the benches
    large   small, grown to 350 M parameters: the same function at a large model's cost

A policy lives in `<cache root>/arena/<name>-<hash of its recipe>`, so a changed recipe can never find an older policy. It is built
in a temporary sibling, under a lock, and moved into place when it is whole.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import GenerationConfig

from paceline.arena.growth import grow
from paceline.arena.shape import Shape
from paceline.arena.task import TASK_VERSION
from paceline.arena.tokenizer import make_tokenizer
from paceline.arena.training import Schedule, train_policy

DEFAULT_CACHE_ROOT = Path.home() / ".cache" / "paceline"
RECIPE_FILE = "recipe.json"
CHECKSUM_FILE = "model.safetensors.sha256"

Progress = Callable[[str], None]


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
    if _is_whole(directory):
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _lock(directory.with_name(directory.name + ".lock"), lambda: progress(f"arena:{name}: another process is building it")):
        if _is_whole(directory):  # it was built while we waited
            return directory
        if directory.exists():
            progress(f"arena:{name}: {directory} is damaged; building it again")
            shutil.rmtree(directory)
        # A fixed name: what a killed build left behind is cleared by the next one, and the lock keeps builders apart.
        temporary = directory.with_name(directory.name + ".building")
        shutil.rmtree(temporary, ignore_errors=True)
        _write(recipe, temporary, cache_root=cache_root, progress=lambda line: progress(f"arena:{name}: {line}"))
        temporary.rename(directory)
    return directory


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
    (directory / CHECKSUM_FILE).write_text(f"{_checksum(directory)}  model.safetensors\n", encoding="utf-8")


def _write_trained(recipe: TrainedRecipe, directory: Path, progress: Progress) -> None:
    tokenizer = make_tokenizer()
    policy = train_policy(recipe.shape, recipe.schedule, tokenizer, progress)
    # Stated in full, so that no default of transformers can truncate the distribution of the policy.
    policy.generation_config = GenerationConfig(
        eos_token_id=policy.config.eos_token_id, pad_token_id=policy.config.pad_token_id, do_sample=True, top_k=0, top_p=1.0
    )
    policy.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _is_whole(directory: Path) -> bool:
    """Whether a finished build is there and its weights are as written: safetensors loads a flipped byte without a word."""
    recorded = directory / CHECKSUM_FILE
    if not recorded.is_file() or not (directory / "model.safetensors").is_file():
        return False
    return recorded.read_text(encoding="utf-8").split()[0] == _checksum(directory)


def _checksum(directory: Path) -> str:
    with (directory / "model.safetensors").open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _lock(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold a file lock, which the system releases when its holder dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield

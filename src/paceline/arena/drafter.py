"""The drafters that belong to the arena's policies: trained once on their rollouts, kept in the cache beside them.

arena:tiny, arena:small     trained by `run/warmstart.py`
arena:large                 arena:small's, widened: the grown policy hands out the same hidden states, with zeros behind them
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from transformers import AutoTokenizer

from paceline.arena import policy
from paceline.arena.cache import DEFAULT_CACHE_ROOT, Progress, build_once
from paceline.arena.growth import GROWTH_FILE
from paceline.arena.problems import arena_task
from paceline.draft.checkpoint import widen
from paceline.draft.provenance import (
    PROVENANCE_FILE,
    read_evaluation,
    read_provenance,
    write_evaluation,
    write_provenance,
)
from paceline.run.task import Tokenizer
from paceline.run.warmstart import WarmStart, default_taps, train_drafter
from paceline.types import Prompt

ARENA = "arena"
"""As a drafter's path: the one that belongs to the arena policy in use."""

DATA = "arena problems that no RL run and no supervised training sees"
"""What `prompts` are, for a drafter's card."""
_SEED_OFFSET = 2_000_000
_LABELS = {"eagle3": "drafter", "dflash": "dflash"}
"""In the names of cached drafters, by kind."""

RECIPES = {
    "eagle3": {
        "tiny": WarmStart(train_tokens=150_000, rollout_tokens=50_000, version=2),
        "small": WarmStart(train_tokens=700_000, rollout_tokens=350_000),
    },
    # A token costs about twice as much to train on as with EAGLE-3: the layers are two.
    "dflash": {
        "tiny": WarmStart(train_tokens=150_000, rollout_tokens=50_000, version=2),
        "small": WarmStart(train_tokens=350_000, rollout_tokens=200_000),
    },
}


def resolve_drafter(
    path: str, model: str, *, kind: str = "eagle3", progress: Progress, cache_root: Path = DEFAULT_CACHE_ROOT
) -> Path:
    """The checkpoint directory of a drafter: of `arena`, built if it is missing, or of any other string taken as a path."""
    if path != ARENA:
        return Path(path)
    if not model.startswith("arena:"):
        raise ValueError(
            f"speculation.drafter.path: got {path!r} with policy.model {model!r}; must be the path of a checkpoint because only "
            "arena policies have a drafter of their own: `paceline draft train` makes one"
        )
    return build_drafter(model.removeprefix("arena:"), kind=kind, progress=progress, cache_root=cache_root)


def build_drafter(name: str, *, kind: str = "eagle3", progress: Progress, cache_root: Path = DEFAULT_CACHE_ROOT) -> Path:
    """The cached drafter of this kind for the arena policy of this name, built first when it is missing or damaged."""
    model_path = policy.build(name, progress=progress, cache_root=cache_root)
    recipe = policy.RECIPES[name]
    source_name = recipe.source_name if isinstance(recipe, policy.GrownRecipe) else None
    warm_start = RECIPES[kind][source_name or name]
    directory = cache_root / "arena" / f"{name}-{_LABELS[kind]}-{_key(recipe, warm_start)}"
    label = f"{kind} drafter of arena:{name}"

    def write(temporary: Path) -> None:
        if source_name is None:
            train_drafter(
                kind,
                model_path,
                prompts(AutoTokenizer.from_pretrained(model_path)),
                temporary,
                warm_start,
                policy=f"arena:{name}",
                data=DATA,
                progress=lambda line: progress(f"{label}: {line}"),
            )
        else:
            source = build_drafter(source_name, kind=kind, progress=progress, cache_root=cache_root)
            _widen(source, temporary, policy_path=model_path, policy=f"arena:{name}")

    return build_once(directory, write, name=label, progress=progress)


def prompts(tokenizer: Tokenizer) -> Iterator[Prompt]:
    """Problems to sample a drafter's rollouts from: others than those of supervised training and of RL runs, none held out."""
    return arena_task(tokenizer, seed=_SEED_OFFSET, num_heldout=0).prompts


def _key(recipe: policy.Recipe, warm_start: WarmStart) -> str:
    text = json.dumps([asdict(recipe), asdict(warm_start)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _widen(source: Path, directory: Path, *, policy_path: Path, policy: str) -> None:
    """The taps move to where growth has put their layers."""
    layers: list[int] = json.loads((policy_path / GROWTH_FILE).read_text(encoding="utf-8"))["original_layers"]
    taps = [layers[tap - 1] + 1 if tap else 0 for tap in default_taps(len(layers))]
    widen(source, directory, policy_path=policy_path, taps=taps)
    write_evaluation(directory, read_evaluation(source))
    if (source / PROVENANCE_FILE).is_file():
        provenance = read_provenance(source)
        write_provenance(
            directory, replace(provenance, policy=policy, start=f"{provenance.start}; widened from {provenance.policy}")
        )

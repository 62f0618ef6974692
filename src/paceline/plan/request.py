"""A question to the planner in the user's terms. Each field is an option of `paceline plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, Literal


def _option(help: str, default: Any = MISSING, **settings: Any) -> Any:
    """Return a field with argparse's settings as its metadata."""
    return field(default=default, metadata={"help": help, **settings})


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    model: str = _option(
        "config.json of Hugging Face or its directory, known name, or TOML config", metavar="MODEL|CONFIG"
    )
    gpus: str = _option("such as 8xH100; an unknown kind lists the known ones", metavar="NxGPU")
    batch: int | None = _option("rollouts per step (512, or the config's)", None, type=int, metavar="N")
    group_size: int | None = _option("rollouts per prompt (16, or the config's)", None, type=int, metavar="N")
    lengths: str = _option(
        "response lengths: metrics.jsonl of a run, a file with a length (or length and count) per line, or such as "
        "4000/32768",
        metavar="FILE|MEAN/MAX",
    )
    prompt_tokens: int = _option("tokens of a usual prompt", 256, type=int, metavar="N")
    drafter: Literal["eagle3", "dflash", "ngram"] = _option(
        "kind of drafter", "eagle3", choices=("eagle3", "dflash", "ngram")
    )
    accepted_length: float | None = _option(
        "tokens per verification of 3 drafts, bonus included (published: EAGLE-3 2.64, n-gram 2.26)",
        None,
        type=float,
        metavar="A",
    )
    trained_length: float | None = _option(
        "the same with a drafter trained during the run (published: 2.80)", None, type=float, metavar="A"
    )
    tensor_parallel: int | None = _option("GPUs per engine (the fewest that fit)", None, type=int, metavar="N")
    learner_gpus: int | None = _option("GPUs of the learner (for the shortest step)", None, type=int, metavar="N")
    max_age: int = _option("policy age of the asynchronous arms, in versions", 1, type=int, metavar="N")
    costs: Sequence[Path] = _option(
        "step times from `paceline tune` instead of a roofline; repeat for FP8",
        (),
        type=Path,
        action="append",
        metavar="FILE",
    )

"""A question to the planner as a user puts it. Each field is an option of `paceline plan`, with its help beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


def _option(default: Any, **settings: Any) -> Any:
    """Return a field with a default; `settings` are argparse's."""
    return field(default=default, metadata=settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The metadata of each field is what argparse needs to know beside its name and default."""

    model: str = field(
        metadata={
            "positional": True,
            "metavar": "MODEL|CONFIG",
            "help": "Hugging Face config.json or its directory, known name, or TOML config",
        }
    )
    gpus: str = field(
        metadata={"metavar": "NxGPU", "help": "such as 8xH100; a kind that is not known lists those that are"}
    )
    batch: int | None = _option(None, type=int, metavar="N", help="rollouts in a step (512, or as the config says)")
    group_size: int | None = _option(
        None, type=int, metavar="N", help="rollouts of a prompt (16, or as the config says)"
    )
    lengths: str = field(
        metadata={
            "metavar": "FILE|MEAN/MAX",
            "help": "of responses: metrics.jsonl of a run, a file with one length (or length and count) a line, or "
            "such as 4000/32768",
        }
    )
    prompt_tokens: int = _option(256, type=int, metavar="N", help="of a usual prompt (%(default)s)")
    drafter: Literal["eagle3", "dflash", "ngram"] = _option(
        "eagle3", choices=("eagle3", "dflash", "ngram"), help="who proposes (%(default)s)"
    )
    accepted_length: float | None = _option(
        None,
        type=float,
        metavar="A",
        help="tokens that a verification of 3 drafts emits, bonus included (published: EAGLE-3 2.64, n-gram 2.26)",
    )
    trained_length: float | None = _option(
        None, type=float, metavar="A", help="the same if the drafter is trained along (published: 2.80)"
    )
    tensor_parallel: int | None = _option(None, type=int, metavar="N", help="GPUs of an engine (the fewest that fit)")
    learner_gpus: int | None = _option(
        None, type=int, metavar="N", help="GPUs of the learner (what makes a step shortest)"
    )
    max_age: int = _option(1, type=int, metavar="N", help="of the asynchronous arms, in policy versions (%(default)s)")
    costs: Sequence[Path] = _option(
        (),
        type=Path,
        action="append",
        metavar="FILE",
        help="step times measured by `paceline tune`, in place of a roofline; twice, if of FP8 too",
    )

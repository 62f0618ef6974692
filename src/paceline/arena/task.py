"""The arena's task: chains of additions and subtractions, solved step by step, with heavy-tailed lengths.

    start 47 (1)+8 (2)-13 =         the prompt: a number and its numbered terms
     (1)+8 from 47 makes 55         a solution: one line per term, in words of the writer's choice,
     (2)-13 at 55 is 42
     check 42+13=55                 sometimes a line that checks the previous one,
     ####42                         and the answer, which the reward verifies

The number of terms is log-normal, truncated at 52: the median response has about 70 tokens, and one in a hundred has
500 or more, the tail that rollout engines wait for. Wording is free, so text has entropy for a drafter to predict; the
arithmetic has none, so a sampling policy can always be right. Mistakes propagate, so long problems fail more often.

All functions are seeded. The hash of a prompt decides whether it is held out, so no training stream contains it.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

TASK_VERSION = 2
"""Part of every recipe. Raise it when generated text changes, because cached policies have learned the old task."""

MAX_TERMS = 52
MAX_TERM = 19
CONNECTORS = ("from", "at", "on", "with", "to", "off", "over", "past")
VERBS = ("is", "makes", "gives", "becomes", "yields", "leaves", "equals", "reads")
ANSWER_MARK = "####"

_MEDIAN_TERMS = 6.5
_SPREAD_TERMS = 1.15
_CONNECTOR_SHARE = 0.6
_CHECK_SHARE = 0.25
_HELDOUT_ONE_IN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One chain. Example: Problem(id="heldout/0", prompt="start 47 (1)+8 (2)-13 =\\n", start=47, terms=(8, -13))"""

    id: str
    prompt: str
    start: int
    terms: tuple[int, ...]

    @property
    def answer(self) -> int:
        return self.start + sum(self.terms)


def problems(seed: int) -> Iterator[Problem]:
    return _stream(random.Random(f"arena train {seed}"), f"train/{seed}", heldout=False)  # noqa: S311  a task, not a secret


def heldout(num: int) -> list[Problem]:
    """Return the first `num` distinct held-out problems, the same in every run."""
    chosen: dict[str, Problem] = {}
    for problem in _stream(random.Random("arena heldout"), "heldout", heldout=True):  # noqa: S311
        if len(chosen) == num:
            break
        chosen.setdefault(problem.prompt, problem)
    return list(chosen.values())


def solution(problem: Problem, rng: random.Random) -> str:
    """Return a correct solution with random wording."""
    lines: list[str] = []
    value = problem.start
    # Limit the checks, so that 52 terms stay below 620 tokens and no correct solution is truncated.
    checks_left = max(1, len(problem.terms) // 3)
    for number, term in enumerate(problem.terms, start=1):
        connector = f" {rng.choice(CONNECTORS)} " if rng.random() < _CONNECTOR_SHARE else " "
        result = value + term
        lines.append(f" ({number}){term:+d}{connector}{value:02d} {rng.choice(VERBS)} {result:02d}\n")
        if checks_left and rng.random() < _CHECK_SHARE:
            checks_left -= 1
            lines.append(f" check {result:02d}{-term:+d}={value:02d}\n")
        value = result
    return "".join(lines) + f" {ANSWER_MARK}{value:02d}"


def reward(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """Return 1.0 if the completion ends with the mark and `row["answer"]`, otherwise 0.0."""
    del prompt
    _, mark, tail = completion.rpartition(ANSWER_MARK)
    text = tail.removesuffix("<eos>").strip()
    return float(bool(mark) and text.isdecimal() and int(text) == row["answer"])


def _stream(rng: random.Random, name: str, *, heldout: bool) -> Iterator[Problem]:
    number = 0
    while True:
        start, terms = _chain(rng)
        prompt = f"start {start:02d}" + "".join(f" ({n}){term:+d}" for n, term in enumerate(terms, start=1)) + " =\n"
        if _is_heldout(prompt) == heldout:
            yield Problem(id=f"{name}/{number}", prompt=prompt, start=start, terms=terms)
            number += 1


def _chain(rng: random.Random) -> tuple[int, tuple[int, ...]]:
    """Return a start and terms with partial sums from 0 to 99."""
    num_terms = MAX_TERMS + 1
    while num_terms > MAX_TERMS:  # redrawn instead of clipped, which would accumulate problems of maximum length
        num_terms = max(2, round(rng.lognormvariate(math.log(_MEDIAN_TERMS), _SPREAD_TERMS)))
    start = value = rng.randrange(100)
    terms: list[int] = []
    for _ in range(num_terms):
        term = rng.choice((-1, 1)) * rng.randint(1, MAX_TERM)
        if not 0 <= value + term <= 99:
            term = -term
        value += term
        terms.append(term)
    return start, tuple(terms)


def _is_heldout(prompt: str) -> bool:
    digest = hashlib.blake2b(prompt.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % _HELDOUT_ONE_IN == 0

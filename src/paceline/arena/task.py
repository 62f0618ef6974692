"""The arena's task: numbered chains of additions and subtractions, worked step by step, of heavy-tailed length.

    start 47 (1)+8 (2)-13 =         the prompt: a number and its numbered terms
     (1)+8 from 47 makes 55         a solution: one line a term, in words of the writer's choice,
     (2)-13 at 55 is 42
     check 42+13=55                 now and then a line that checks the one before it,
     ####42                         and the answer, which a reward can verify

The number of terms is log-normal, cut at 52: responses have a median of some 70 tokens and one in a hundred has about
500 or more, which is the tail that rollout engines wait for. Every line has a little free choice (connector, verb,
check or none), so text has entropy and a drafter has something to predict; the arithmetic has none, so a policy that
samples can be right every time. An early mistake is carried to the end, hence long problems fail more often than short
ones.

Everything is pure and seeded. A prompt belongs to the held-out side or to the training side by the hash of its text: no
training stream, whatever its seed, can contain a held-out problem."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

TASK_VERSION = 2
"""Part of every recipe: raise it when any text of this file's making changes, or cached policies will have learnt
another task."""

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
    """The endless training stream of this seed."""
    return _stream(random.Random(f"arena train {seed}"), f"train/{seed}", heldout=False)  # noqa: S311  a task, not a secret


def heldout(num: int) -> list[Problem]:
    """The first `num` held-out problems, all different; the same for every run, whatever its seed."""
    chosen: dict[str, Problem] = {}
    for problem in _stream(random.Random("arena heldout"), "heldout", heldout=True):  # noqa: S311
        if len(chosen) == num:
            break
        chosen.setdefault(problem.prompt, problem)
    return list(chosen.values())


def demonstration(problem: Problem, rng: random.Random, *, careless_share: float) -> str:
    """What an imperfect writer hands in: that share of the time, the scratchpad stops too early, with the answer so
    far.

    A policy that imitates such writers gives up too early as often as they do, which is a habit that a reward can
    break."""
    if rng.random() >= careless_share:
        return solution(problem, rng)
    seen = problem.terms[: rng.randrange(1, len(problem.terms))]
    return solution(replace(problem, terms=seen), rng)


def solution(problem: Problem, rng: random.Random) -> str:
    """One way to write the scratchpad and the answer, in the writer's free choice of words."""
    lines: list[str] = []
    value = problem.start
    # A bound on the checks bounds the length: 52 terms stay below 620 tokens, so that no correct solution is cut off.
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
    """1.0 when the completion ends in the mark and the right answer (`row["answer"]`, a number), else 0.0."""
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
    """A start and terms whose partial sums all have two digits at most and are never negative."""
    num_terms = MAX_TERMS + 1
    while num_terms > MAX_TERMS:  # drawn again rather than clipped: a pile of problems at the longest length is no tail
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

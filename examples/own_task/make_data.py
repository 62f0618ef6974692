"""Writes train.jsonl: 400 short problems in the arena's words, the same at every run."""

import json
from itertools import islice
from pathlib import Path

from paceline.arena.task import problems

NUM_ROWS = 400
MAX_TERMS = 6

if __name__ == "__main__":
    short = (problem for problem in problems(seed=1) if len(problem.terms) <= MAX_TERMS)
    rows = [{"prompt": problem.prompt, "answer": problem.answer} for problem in islice(short, NUM_ROWS)]
    Path(__file__).with_name("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

"""Writes train.jsonl: rows of GSM8K with a chat prompt, here 400 of the arena's problems, the same at every run.

python examples/gsm8k/make_data.py                 the rows that are here already
python examples/gsm8k/make_data.py gsm8k.jsonl     GSM8K itself: a file of {"question": ..., "answer": ...} rows
"""

import json
import random
import sys
from itertools import islice
from pathlib import Path

from paceline.arena.task import problems, solution

NUM_ROWS = 400
MAX_TERMS = 6
WISH = "\nThink step by step, and end your answer with #### and the number."
"""The arena's policy has no words for it, and need not be told."""


def arena_rows() -> list[dict]:
    """Short problems of the arena as GSM8K writes its own: a worked answer that ends in #### and the number."""
    rng = random.Random(0)  # noqa: S311  a task, not a secret
    short = (problem for problem in problems(seed=2) if len(problem.terms) <= MAX_TERMS)
    return [
        {
            "question": problem.prompt,
            "answer": f"{solution(problem, rng).rpartition(' ####')[0]}#### {problem.answer}",
        }
        for problem in islice(short, NUM_ROWS)
    ]


def with_prompt(row: dict, wish: str = "") -> dict:
    """Add the chat that asks the question; a list of messages goes through the chat template of the policy."""
    return {**row, "prompt": [{"role": "user", "content": row["question"] + wish}]}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        given = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
        rows = [with_prompt(row, WISH) for row in given]
    else:
        rows = [with_prompt(row) for row in arena_rows()]
    Path(__file__).with_name("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

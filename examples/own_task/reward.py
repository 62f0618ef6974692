"""A reward of one's own: half for the right answer, half for a habit of style ("makes" in every line).

Paceline calls `reward(prompt, completion)` for every rollout. A function with a third parameter also gets the row of
the dataset:

    def reward(prompt: str, completion: str, row: dict) -> float:
        return float(completion.rpartition("####")[2].strip() == str(row["answer"]))
"""

import re

VERBS = re.compile(r"\b(is|makes|gives|becomes|yields|leaves|equals|reads)\b")


def reward(prompt: str, completion: str) -> float:
    """Between 0 and 1. `prompt` is "start 47 (1)+8 (2)-3 =", so the answer follows from it."""
    start = int(prompt.split()[1])
    terms = [int(term) for term in re.findall(r"\)([+-]\d+)", prompt)]
    given = completion.rpartition("####")[2].strip()
    right = given.isdecimal() and int(given) == start + sum(terms)

    # Per step that was asked for, not per line that was written: leaving lines out must not pay.
    num_makes = VERBS.findall(completion).count("makes")
    style = min(num_makes, len(terms)) / len(terms)
    return 0.5 * right + 0.5 * style

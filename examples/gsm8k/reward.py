"""Reward of GSM8K: 1 if the completion ends in the right number, by math-verify, which knows that 1,234 is 1234.0."""

try:
    from math_verify import parse, verify
except ImportError:
    raise ImportError("it needs math-verify: pip install 'paceline[math]'") from None

MARK = "####"
LONGEST = 40


def reward(prompt: str, completion: str, row: dict) -> float:
    """Compare what follows the last #### of the completion with what follows it in the row's answer."""
    given = completion.rpartition(MARK)[2].strip()
    # A power such as 9^9^9 would be worked out to its last digit before it is found wrong.
    if MARK not in completion or len(given) > LONGEST or "^" in given or "**" in given:
        return 0.0
    right = row["answer"].rpartition(MARK)[2].strip()
    return float(verify(parse(right), parse(given)))

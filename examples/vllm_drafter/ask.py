"""Asks a vLLM server for a few answers, and says how much of its drafts was accepted. Needs nothing but Python.

python examples/vllm_drafter/ask.py [URL] [PROMPTS]      PROMPTS: JSONL with the field "prompt"
"""

import json
import re
import sys
from pathlib import Path
from urllib.request import Request, urlopen

URL = "http://127.0.0.1:8000"
PROMPTS = Path(__file__).parents[1] / "own_task" / "train.jsonl"
NUM_PROMPTS = 8


def fetch(url: str, data: dict | None = None) -> str:
    body = None if data is None else json.dumps(data).encode()
    with urlopen(Request(url, body, {"Content-Type": "application/json"})) as response:  # noqa: S310  the user's server
        return response.read().decode()


def counter(url: str, name: str) -> float:
    """One of the server's counters since its start, over all its engines."""
    lines = re.findall(rf"^vllm:spec_decode_{name}_total{{.*}} (\S+)$", fetch(f"{url}/metrics"), re.MULTILINE)
    return sum(map(float, lines))


def main(url: str = URL, file: str | Path = PROMPTS) -> None:
    rows = [json.loads(line) for line in Path(file).read_text().splitlines()[:NUM_PROMPTS]]
    model = json.loads(fetch(f"{url}/v1/models"))["data"][0]["id"]
    names = ("num_drafts", "num_accepted_tokens")
    before = [counter(url, name) for name in names]
    for row in rows:
        order = {"model": model, "prompt": row["prompt"], "max_tokens": 128, "temperature": 0}
        print(row["prompt"] + json.loads(fetch(f"{url}/v1/completions", order))["choices"][0]["text"], end="\n\n")  # noqa: T201
    drafts, accepted = (counter(url, name) - start for name, start in zip(names, before, strict=True))
    print(f"{1 + accepted / drafts:.2f} tokens per verification" if drafts else "nothing was drafted")  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])

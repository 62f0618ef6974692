"""Inputs that nobody would write: whatever comes in, a result or an error with a message comes out, and nothing else.

    pytest tests/unit/repository/test_fuzz.py                          300 inputs of each kind, the same every time
    PACELINE_FUZZ=10000 pytest tests/unit/repository/test_fuzz.py      more of them

A kind is a function under `@fuzzed` that makes an input from a random generator and reads it. Number n of a kind is
always the same input, so a failure names what `once(kind, n, directory)` does again.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from contexts import arena_config
from letters import Letters
from paceline.config import Config, JsonlData, fields_of, load_config
from paceline.drafters.rounds import Progress, Rounds
from paceline.metrics import read_metrics
from paceline.orchestrator import task
from paceline.orchestrator.reward_pool import UserReward
from paceline.types import PacelineError
from paceline.weights.message import Push, PushReport, TensorEntry

COUNT = int(os.environ.get("PACELINE_FUZZ", "300"))
CONFIGS = Path(__file__).parents[3] / "src" / "paceline" / "configs"

Kind = Callable[[random.Random, Path], object]
KINDS: list[Any] = []


def fuzzed(kind: Kind) -> Kind:
    """Have `kind` called with many generators, and with a directory that it may write to."""
    KINDS.append(pytest.param(kind, id=kind.__name__))
    return kind


def once(kind: Kind, number: int, directory: Path) -> str | None:
    """Read one input; returns the error if it is none that the command line shows as a message."""
    rng = random.Random(f"{kind.__name__}/{number}")
    try:
        kind(rng, directory)
    except PacelineError as error:
        return None if str(error) else f"{number}: {type(error).__name__} without a message"
    except Exception as error:  # noqa: BLE001  which ones there are is the question
        # Subclasses of ValueError, such as UnicodeDecodeError, speak of bytes and not of the user's file.
        if type(error) is ValueError and str(error):
            return None
        return f"{number}: {type(error).__name__}: {error}"[:300]
    return None


@pytest.mark.parametrize("kind", KINDS)
def test_no_input_gets_past_the_typed_errors(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "find_reward", lambda data: UserReward(data=data, takes_row=True))
    untyped_errors = [found for number in range(COUNT) if (found := once(kind, number, tmp_path))]
    assert len(untyped_errors) == 0, ascii(untyped_errors[:20])  # half a surrogate pair would break the report


def test_fuzzing_finds_an_untyped_error(tmp_path: Path) -> None:
    def careless(rng: random.Random, directory: Path) -> None:
        {"a": 1}[rng.choice("ab")]

    found = Counter(once(careless, number, tmp_path) is None for number in range(50))
    assert found[True] and found[False]


# Makers of inputs.

ODD_TEXTS = ("", " ", ".", "..", "/", "a/b", "\x00", "\u2028", "\ud800", "\U0001f600", "x" * 5000, "nan", "null", "-1")
ODD_NUMBERS = (0, 1, -1, 2**31, 2**63, -(2**64), 10**400, 0.5, -0.0, 1e308, 1e-320, float("inf"), float("nan"))


def odd_value(rng: random.Random, depth: int = 0) -> Any:
    """Return any JSON value, often one at an edge."""
    match rng.randrange(8 if depth < 3 else 5):
        case 0:
            return rng.choice((None, True, False))
        case 1:
            return rng.choice(ODD_NUMBERS)
        case 2:
            return rng.choice(ODD_TEXTS)
        case 3:
            return rng.randint(-5, 300)
        case 4:
            return "".join(
                chr(rng.choice((rng.randrange(128), rng.randrange(0xD7FF)))) for _ in range(rng.randrange(9))
            )
        case 5:
            return [odd_value(rng, depth + 1) for _ in range(rng.randrange(4))]
        case 6:
            return {str(rng.choice(ODD_TEXTS)): odd_value(rng, depth + 1) for _ in range(rng.randrange(4))}
        case _:
            nested: Any = rng.choice(ODD_NUMBERS)
            for _ in range(rng.choice((3, 30, 300))):
                nested = [nested]
            return nested


def spoiled_bytes(rng: random.Random, content: bytes) -> bytes:
    """Return the content with a few bytes flipped, cut out, doubled or put in."""
    for _ in range(rng.choice((0, 1, 1, 2, 5))):
        at, length = rng.randrange(len(content) + 1), rng.choice((1, 1, 3, 40))
        piece = rng.choice(
            (b"\n", b"\r", b'"', b"\\", b"\xff", b"\xef\xbb\xbf", b"\x00", b"[", b"{", b"9" * 5000, b"[" * 5000)
        )
        content = rng.choice(
            (
                content[:at] + piece + content[at:],
                content[:at] + content[at + length :],
                content[: at + length] + content[at:],
                content[:at],
                content[:at]
                + bytes(byte ^ (1 << rng.randrange(8)) for byte in content[at : at + 1])
                + content[at + 1 :],
            )
        )
    return content


def spoiled_tree(rng: random.Random, tree: Any) -> Any:
    """Return the tree with one of its values or keys removed, added or replaced by an odd one."""
    if isinstance(tree, dict) and tree and rng.random() < 0.9:
        key = rng.choice(sorted(tree))
        match rng.randrange(6):
            case 0:
                return {name: value for name, value in tree.items() if name != key}
            case 1:
                return {**tree, rng.choice(ODD_TEXTS): odd_value(rng)}
            case _:
                return {**tree, key: spoiled_tree(rng, tree[key])}
    if isinstance(tree, list) and tree and rng.random() < 0.8:
        at = rng.randrange(len(tree))
        return [*tree[:at], spoiled_tree(rng, tree[at]), *tree[at + 1 :]]
    return odd_value(rng)


# Configs.

KEYS = sorted({key for key, _ in fields_of(Config)})


def toml_of(rng: random.Random, value: Any) -> str:
    """Write a value as somebody might; not always as TOML."""
    text = rng.choice((json.dumps, str, repr))(value)
    return text if rng.random() < 0.9 else text + rng.choice(("\n", " # x", "]", '"', "\nrun = 3", "1979-05-27", "_0"))


def override(rng: random.Random) -> str:
    key = rng.choice(KEYS)
    if rng.random() < 0.2:
        key = rng.choice(
            (key + ".x", key.upper(), key[:-1], "." + key, key + ".", key.split(".")[0], "", odd_value(rng, 3))
        )
    return f"{key}={toml_of(rng, odd_value(rng))}" if rng.random() < 0.95 else str(key)


@fuzzed
def overrides(rng: random.Random, directory: Path) -> None:
    starts = ([], ["data.kind=jsonl", "data.path=a", "data.reward=a.py:b"], ["speculation.drafter.kind=history"])
    check_config(arena_config([*rng.choice(starts), *(override(rng) for _ in range(rng.randrange(1, 4)))]))


@fuzzed
def one_override(rng: random.Random, directory: Path) -> None:
    """A single one, so that many configs are whole."""
    check_config(arena_config([f"{rng.choice(KEYS)}={toml_of(rng, rng.choice(ODD_NUMBERS + ODD_TEXTS))}"]))


@fuzzed
def config_files(rng: random.Random, directory: Path) -> None:
    file = directory / "config.toml"
    file.write_bytes(spoiled_bytes(rng, rng.choice(sorted(CONFIGS.glob("*.toml"))).read_bytes()))
    check_config(load_config(file))


def check_config(config: Config) -> None:
    """A config that was taken can be written beside the run and read again."""
    assert Config.model_validate_json(config.model_dump_json()) == config


# JSON Lines.


class Bytes(Letters):
    """A tokenizer that, as those in Rust, takes valid Unicode only."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())


def spoiled_lines(rng: random.Random, rows: list[Any]) -> bytes:
    rows = [spoiled_tree(rng, row) if rng.random() < 0.1 else row for row in rows]
    lines = [json.dumps(row, ensure_ascii=rng.random() < 0.5).encode(errors="surrogatepass") for row in rows]
    return spoiled_bytes(rng, b"\n".join(lines) + b"\n")


@fuzzed
def tasks(rng: random.Random, directory: Path) -> None:
    rows = [{"prompt": f"p{number}", "answer": number} for number in range(6)]
    (directory / "rows.jsonl").write_bytes(spoiled_lines(rng, rows))
    (directory / "eval.jsonl").write_bytes(spoiled_lines(rng, rows))
    eval_path = rng.choice((None, directory / "eval.jsonl"))
    data = JsonlData(path=directory / "rows.jsonl", eval_path=eval_path, reward="reward.py:reward")
    made = task.load_task(data, Bytes(), seed=0, num_heldout=2, max_prompt_tokens=100)
    for prompt in (next(made.prompts), *made.heldout):
        json.dumps(dict(prompt.row))
        assert 1 <= len(prompt.token_ids) <= 100


@fuzzed
def metrics_files(rng: random.Random, directory: Path) -> None:
    rows = [{"kind": "step", "step": number, "metrics": {"reward/mean": 0.5}} for number in range(6)]
    (directory / "metrics.jsonl").write_bytes(spoiled_lines(rng, rows))
    read_metrics(directory / "metrics.jsonl")


# What processes of a run tell each other.


@fuzzed
def pushes(rng: random.Random, directory: Path) -> None:
    entry = TensorEntry(name="a", dtype="float32", shape=(2, 3), offset=0, num_bytes=24, fingerprint="f")
    push = Push(version=1, target="policy", transport="shared_memory", channel="c", entries=(entry,))
    Push.from_dict(spoiled_tree(rng, json.loads(json.dumps(push.to_dict()))))


@fuzzed
def push_reports(rng: random.Random, directory: Path) -> None:
    PushReport.from_dict(spoiled_tree(rng, PushReport(version=1, fingerprints={"a": "f"}).to_dict()))


@fuzzed
def rounds(rng: random.Random, directory: Path) -> None:
    exchange = Rounds(directory / "rounds", directory)
    exchange.publish(3)
    exchange.put_progress("a", Progress(num_tokens=7))
    file = directory / "rounds" / rng.choice(("published.json", "progress-a.json"))
    file.write_bytes(spoiled_bytes(rng, json.dumps(spoiled_tree(rng, json.loads(file.read_text()))).encode()))
    exchange.published()
    exchange.progress("a")

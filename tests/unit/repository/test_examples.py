"""The files under examples/ as their reader finds them: they load, and their rewards tell right from wrong."""

from __future__ import annotations

import json
import runpy
import sys
import tomllib
from pathlib import Path
from typing import cast

import pytest

from paceline.arena.task import problems
from paceline.config import Config, JsonlData
from paceline.orchestrator.reward_worker import load
from paceline.orchestrator.task import load_task
from paceline.types import Tokenizer
from scripts.rebuild_arena.tokenizer import make_tokenizer

ROOT = Path(__file__).resolve().parents[3]
GSM8K = ROOT / "examples" / "gsm8k"


@pytest.fixture(autouse=True)
def at_the_top_of_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def read_rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_gsm8k_rows_are_those_that_its_script_makes() -> None:
    script = runpy.run_path(str(GSM8K / "make_data.py"))
    assert [script["with_prompt"](row) for row in script["arena_rows"]()] == read_rows(GSM8K / "train.jsonl")


def test_gsm8k_prompts_are_the_arenas_own_after_its_chat_template() -> None:
    """Otherwise the policy is asked in words that it has never seen."""
    pytest.importorskip("math_verify", reason="the reward needs math-verify")
    config = Config.model_validate(tomllib.loads((GSM8K / "config.toml").read_text()))
    assert isinstance(config.data, JsonlData)
    tokenizer = make_tokenizer()
    task = load_task(config.data, cast("Tokenizer", tokenizer), seed=0, num_heldout=config.eval.num_prompts)
    first = next(problem for problem in problems(seed=2) if len(problem.terms) <= 6)
    prompt = next(prompt for prompt in task.prompts if prompt.id == "train/0")
    assert prompt.text == first.prompt
    for prompt in task.heldout:
        assert tokenizer.decode(prompt.token_ids.tolist()) == prompt.text == prompt.row["question"]
        assert tokenizer.unk_token_id not in prompt.token_ids


@pytest.mark.parametrize(
    ("completion", "worth"),
    [
        (" (1)+8 from 04 makes 12\n ####1234", 1.0),
        ("so it costs\n#### 1,234", 1.0),
        ("#### $1234.00", 1.0),
        ("#### \\boxed{1234}", 1.0),
        ("#### 7 #### 1234", 1.0),
        ("#### 1235", 0.0),
        ("the answer is 1234", 0.0),
        ("####", 0.0),
        ("#### 9^9^9^9", 0.0),
        ("", 0.0),
    ],
)
def test_gsm8k_reward_is_for_the_right_number_after_the_mark(completion: str, worth: float) -> None:
    pytest.importorskip("math_verify", reason="the reward needs math-verify")
    reward, _ = load("examples/gsm8k/reward.py", "reward")
    assert reward("", completion, {"answer": "1,200+34=<<1200+34=1234>>1,234\n#### 1,234"}) == worth


def test_gsm8k_reward_names_the_extra_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ValueError, match=r"needs math-verify: pip install 'paceline\[math\]'"):
        load("examples/gsm8k/reward.py", "reward")


def test_trl_script_marks_what_is_ours_and_its_reward_is_for_right_answers() -> None:
    """A user of TRL must see at a glance what to copy."""
    pytest.importorskip("trl", reason="the script is for TRL")
    script = ROOT / "examples" / "trl" / "train.py"
    text = script.read_text()
    assert [text.count(f"Paceline, {number} of 3") for number in (1, 2, 3)] == [1, 1, 1]
    example = runpy.run_path(str(script))
    row = example["make_dataset"](1, 0)[0]
    completions = [f" so\n ####{row['answer']}", f" so\n ####{row['answer'] + 1}"]
    assert example["right_answer"]([row["prompt"]] * 2, completions, [row["answer"]] * 2) == [1.0, 0.0]

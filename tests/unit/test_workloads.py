"""Names of policies, drafters and data: the arena's, paths, and the messages about names that are neither."""

from __future__ import annotations

from pathlib import Path

import pytest

from contexts import make_context
from letters import Letters
from paceline import assets
from paceline.arena import task
from paceline.config import Config
from paceline.sessions import workloads


def test_names_of_the_arena_are_resolved() -> None:
    context = make_context()
    assert workloads.resolve_policy("arena:tiny", context) == assets.policy("tiny")
    drafter = workloads.resolve_drafter("arena", "arena:tiny", context, kind="dflash")
    assert drafter == assets.drafter("tiny", "dflash")
    assert workloads.resolve_drafter("runs/drafter", "arena:tiny", context) == Path("runs/drafter")


def test_directories_are_taken_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    policy = tmp_path / "odd:name"
    policy.mkdir()
    message = r"has no config\.json; must be a Hugging Face .* or one of arena:tiny, arena:small"
    with pytest.raises(ValueError, match=message):
        workloads.resolve_policy("odd:name", make_context())
    (policy / "config.json").touch()
    (policy / "tokenizer.json").touch()
    assert workloads.resolve_policy("odd:name", make_context()) == Path("odd:name")
    assert workloads.resolve_drafter("drafter", "odd:name", make_context()) == Path("drafter")


def test_unknown_names_say_what_to_do() -> None:
    context = make_context()
    with pytest.raises(ValueError, match=r"policy\.model: got arena:huge; must be one of arena:tiny"):
        workloads.resolve_policy("arena:huge", context)
    with pytest.raises(ValueError, match="only arena policies have a drafter"):
        workloads.resolve_drafter("arena", "my/model", context)


def test_data_of_kind_arena_is_the_arenas_task() -> None:
    config = Config.model_validate({"run": {"seed": 2}, "data": {"kind": "arena", "seed": 5}, "eval": {"every": 0}})
    made = workloads.make_task(config, Letters())
    assert next(made.prompts).text == next(task.problems(7)).prompt
    assert made.heldout == []

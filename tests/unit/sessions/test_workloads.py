"""Names of policies, drafters and data: the arena's, paths, and the messages about names that are neither."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest

from contexts import arena_config, make_context
from letters import Letters
from paceline import assets
from paceline.arena import task
from paceline.sessions import workloads


def test_names_of_the_arena_are_resolved() -> None:
    context = make_context()
    assert workloads.resolve_policy("arena:tiny", context) == assets.policy("tiny")
    drafter = workloads.resolve_drafter("arena:tiny/dflash", context)
    assert drafter == assets.drafter("tiny", "dflash")
    assert workloads.resolve_drafter("drafter", context) == Path("drafter")


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
    assert workloads.resolve_drafter("drafter", make_context()) == Path("drafter")


def test_unknown_names_say_what_to_do() -> None:
    context = make_context()
    with pytest.raises(ValueError, match=r"policy\.model: got arena:huge; must be one of arena:tiny"):
        workloads.resolve_policy("arena:huge", context)
    with pytest.raises(ValueError, match=r"arena:tiny/medusa; must be arena:tiny/eagle3 or arena:tiny/dflash"):
        workloads.resolve_drafter("arena:tiny/medusa", context)


def test_hugging_face_names_are_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`paceline plan` writes such a name into the config that it recommends."""
    asked: list[str] = []

    def download(name: str, **_: object) -> str:
        asked.append(name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for file in ("config.json", "tokenizer.json"):
        (tmp_path / file).touch()
    assert workloads.resolve_policy("Qwen/Qwen3-8B", make_context()) == tmp_path
    assert workloads.resolve_drafter("RedHatAI/Qwen3-8B-speculator.eagle3", make_context()) == tmp_path
    assert asked == ["Qwen/Qwen3-8B", "RedHatAI/Qwen3-8B-speculator.eagle3"]


def test_names_that_cannot_be_downloaded_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(name: str, **_: object) -> str:
        raise OSError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ValueError, match=r"policy\.model: got 'my/model', which is not a directory here and cannot be"):
        workloads.resolve_policy("my/model", make_context())
    with pytest.raises(ValueError, match=r"speculation\.drafter\.path: got 'my/drafter', which is not a directory"):
        workloads.resolve_drafter("my/drafter", make_context())


def test_data_of_kind_arena_is_the_arenas_task() -> None:
    config = arena_config(["run.seed=2", "data.seed=5", "eval.every=0"])
    made = workloads.make_task(config, Letters())
    assert next(made.prompts).text == next(task.problems(7)).prompt
    assert made.heldout == []

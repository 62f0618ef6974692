"""What `paceline train` refuses before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from contexts import arena_config, make_context
from paceline.sessions.train import new_directory, run


@pytest.mark.parametrize("advantage", ["grpo", "centered"])
def test_groups_of_one_rollout_are_refused_because_nothing_would_be_learned(advantage: str) -> None:
    config = arena_config(["rollout.group_size=1", f"objective.advantage={advantage}"])
    with pytest.raises(
        ValueError, match=rf"rollout\.group_size: got 1 with objective\.advantage '{advantage}'.*because"
    ):
        run(config, make_context())


def test_run_directory_that_cannot_be_made_says_which_setting_to_change(tmp_path: Path) -> None:
    (tmp_path / "file").touch()  # a file in its way, since no permission stops root
    config = arena_config([f"run.directory={tmp_path}/file"])
    with pytest.raises(
        ValueError, match=r"run\.directory: got .*file.*Not a directory.*must be a directory that you can"
    ):
        new_directory(config)


def test_an_existing_run_is_not_written_into(tmp_path: Path) -> None:
    config = arena_config([f"run.directory={tmp_path}", "run.name=a"])
    assert [new_directory(config).name for _ in range(3)] == ["a", "a-2", "a-3"]

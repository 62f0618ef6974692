"""Names of policies, drafters and data: what is a path, what a workload resolves, and what an unknown name says."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from contexts import make_context
from paceline.config import Config
from paceline.context import Context
from paceline.sessions import workloads
from paceline.types import Tokenizer


class Toy:
    """A workload of one policy."""

    policy_names = ("one",)
    drafter_data = "nothing"

    def policy(self, name: str, context: Context) -> Path:
        return Path("toy", name)

    def drafter(self, policy_name: str, kind: str, context: Context) -> Path:
        return Path("toy", policy_name, kind)

    def drafter_prompts(self, tokenizer):
        return iter(())

    def task(self, tokenizer, *, seed: int, num_heldout: int):
        return ("task", seed, num_heldout)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "_workloads", {})
    workloads.register("toy", Toy())  # pyright: ignore[reportArgumentType]


def test_registered_names_are_resolved_by_their_workload(toy: None) -> None:
    context = make_context()
    assert workloads.resolve_policy("toy:one", context) == Path("toy/one")
    assert workloads.resolve_drafter("toy", "toy:one", context, kind="dflash") == Path("toy/one/dflash")
    assert workloads.resolve_drafter("runs/drafter", "toy:one", context) == Path("runs/drafter")


def test_directories_are_taken_as_they_are(toy: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    policy = tmp_path / "odd:name"
    policy.mkdir()
    with pytest.raises(ValueError, match=r"has no config\.json; must be a Hugging Face .* or one of toy:one"):
        workloads.resolve_policy("odd:name", make_context())
    (policy / "config.json").touch()
    (policy / "tokenizer.json").touch()
    assert workloads.resolve_policy("odd:name", make_context()) == Path("odd:name")
    (tmp_path / "drafter").mkdir()
    assert workloads.resolve_drafter("drafter", "odd:name", make_context()) == Path("drafter")


def test_unknown_names_say_what_to_do(toy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    context = make_context()
    with pytest.raises(ValueError, match=r"policy\.model: got 'arena:small', but there is no workload 'arena'"):
        workloads.resolve_policy("arena:small", context)
    with pytest.raises(ValueError, match=r"speculation\.drafter\.path: got 'arena'.*registered: toy.*must name"):
        workloads.resolve_drafter("arena", "my/model", context)
    with pytest.raises(ValueError, match="only toy policies have a drafter"):
        workloads.resolve_drafter("toy", "my/model", context)
    with pytest.raises(ValueError, match=r"data\.kind: got 'arena'"):
        workloads.make_task(Config(), cast("Tokenizer", None))
    monkeypatch.setattr(workloads, "_workloads", {})
    with pytest.raises(ValueError, match=r"paceline\.lab, which brings `arena`, is not installed"):
        workloads.resolve_policy("arena:small", context)


def test_data_of_kind_arena_is_the_workloads_task(toy: None) -> None:
    workloads.register("arena", Toy())  # pyright: ignore[reportArgumentType]
    config = Config.model_validate({"run": {"seed": 2}, "data": {"kind": "arena", "seed": 5}, "eval": {"every": 0}})
    assert workloads.make_task(config, cast("Tokenizer", None)) == ("task", 7, 0)

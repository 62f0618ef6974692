"""Comparison of two runs, from small run directories whose answer is known."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import numpy as np

from paceline.cli import main
from paceline.files import sha256_of
from paceline.orchestrator.batch_log import BatchLog
from paceline.report.equality import compare_tokens, first_difference
from paceline.types import Group, GroupId, Prompt, Rollout, RolloutId

Steps = list[list[list[int]]]
"""Tokens by step and rollout; every step has one group."""


def write_run(directory: Path, steps: Steps, *, norms: list[float] | None = None, kept: bool = True) -> Path:
    directory.mkdir(parents=True)
    records: list[dict[str, object]] = [{"kind": "run", "config": {"run": {"max_age": 0}}}]
    with closing(BatchLog(directory / "batches", began_s=0.0)) as log:
        for number, responses in enumerate(steps):
            group = group_of(number, responses)
            if kept:
                log.put(number, group)
            columns = {
                "group": [str(group.group_id)] * len(responses),
                "index": list(range(len(responses))),
                "engine": [0] * len(responses),
                "start_s": [float(number)] * len(responses),
                "end_s": [number + 0.5] * len(responses),
                "length": [len(tokens) for tokens in responses],
                "reward": [float(len(tokens) % 2) for tokens in responses],
                "tokens": [sha256_of([one.token_ids.data])[:16] for one in group.rollouts],
            }
            records.append({"kind": "rollouts", "step": number + 1, "engines": ["engine-0"], **columns})
            metrics = {
                "policy/grad_norm": (norms or [1.0] * len(steps))[number],
                "reward/mean": 0.5,
                "time/step": 1.0,
                "time/generation": 0.5,
                "sync/version": float(number + 1),
            }
            records.append({"kind": "step", "step": number + 1, "time_s": number + 1.0, "metrics": metrics})
    text = "".join(json.dumps(record) + "\n" for record in records)
    (directory / "metrics.jsonl").write_text(text, encoding="utf-8")
    return directory


def group_of(number: int, responses: list[list[int]]) -> Group:
    prompt = Prompt(id=f"p{number}", text="", token_ids=np.arange(3, dtype=np.int32), row={})
    rollouts = tuple(
        Rollout(
            group_id=GroupId(number),
            index=index,
            prompt_ids=prompt.token_ids,
            token_ids=np.array(tokens, np.int32),
            logp=np.zeros(len(tokens), np.float32),
            finish_reason="stop",
            version_spans=((number, len(tokens)),),
            engine="engine-0",
            started_s=0.0,
            finished_s=1.0,
        )
        for index, tokens in enumerate(responses)
    )
    return Group(group_id=GroupId(number), prompt=prompt, rollouts=rollouts)


STEPS: Steps = [[[1, 2, 3], [4, 5]], [[6, 7], [8, 9, 10, 11]]]
CHANGED: Steps = [[[1, 2, 3], [4, 5]], [[6, 7], [8, 9, 99, 11]]]


def test_equal_runs_say_so_for_their_common_steps(tmp_path: Path):
    one, two = write_run(tmp_path / "one", STEPS), write_run(tmp_path / "two", STEPS[:1])
    assert compare_tokens(one, two).words() == "All 2 rollouts of the 1 common steps have equal tokens."


def test_the_first_difference_is_named_with_its_position(tmp_path: Path):
    found = compare_tokens(write_run(tmp_path / "one", STEPS), write_run(tmp_path / "two", CHANGED))
    assert (found.num_rollouts, found.num_equal) == (4, 3)
    assert found.first is not None
    assert (found.first.step, found.first.rollout_id) == (2, RolloutId(GroupId(1), 1))
    assert (found.first.position, found.first.num_equal_tokens) == (2, 3 + 2 + 2 + 2)
    assert "step 2, rollout 1.0/train:1, at token 2, after 9 equal tokens. The policies were equal" in found.words()


def test_a_difference_after_another_update_is_the_policys(tmp_path: Path):
    one = write_run(tmp_path / "one", STEPS)
    two = write_run(tmp_path / "two", CHANGED, norms=[1.0000001, 1.0])
    assert "The policies differed before it: the update of step 1 did." in compare_tokens(one, two).words()


def test_a_difference_is_found_in_runs_that_kept_no_rollouts(tmp_path: Path):
    found = compare_tokens(write_run(tmp_path / "one", STEPS, kept=False), write_run(tmp_path / "two", CHANGED))
    assert found.first is not None and found.first.position is None
    assert "rollout 1.0/train:1, after 7 equal tokens" in found.words()


def test_only_some_steps_can_be_compared(tmp_path: Path):
    one, two = write_run(tmp_path / "one", STEPS), write_run(tmp_path / "two", CHANGED)
    assert compare_tokens(one, two, [1]).num_equal == compare_tokens(one, two, [1]).num_rollouts == 2


def test_a_response_that_ends_early_differs_at_its_end():
    mine, theirs = np.array([1, 2, 3]), np.array([1, 2])
    assert first_difference(mine, theirs) == 2
    assert first_difference(mine, mine) is None


def test_report_prints_the_verdict_and_draws_both_curves(tmp_path: Path, capsys):
    one, two = write_run(tmp_path / "one", STEPS), write_run(tmp_path / "two", CHANGED)
    assert main(["report", str(one), "--against", str(two)]) == 0
    path, words = capsys.readouterr().out.splitlines()
    assert words.startswith("3 of 4 rollouts of the 2 common steps have equal tokens.")
    page = Path(path).read_text()
    assert "3 of 4 rollouts have equal tokens in both runs" in page
    assert ">one</text>" in page and ">two</text>" in page

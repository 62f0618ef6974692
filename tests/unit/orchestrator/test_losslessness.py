"""Alarms in the driver: whose they are, how often they are raised, and what follows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from paceline.metrics import JsonlSink, Metrics, Recorder, read_metrics
from paceline.monitor import limit_log10
from paceline.orchestrator.journal import Journal
from paceline.orchestrator.losslessness import LosslessnessMonitor
from paceline.types import EngineLostError, Group, GroupId, Prompt, Rollout, Sample


class Driven:
    """A monitor with engines that note who may draft no more."""

    def __init__(self, path: Path, runner: asyncio.Runner) -> None:
        async def open_journal() -> Journal:  # its clock is the loop's
            return Journal(self.recorder)

        self.path, self.recorder, self.stopped = path, Recorder(JsonlSink(path)), list[str]()
        self.run, self.lost = runner.run, list[str]()
        self.journal = self.run(open_journal())
        self.monitor = LosslessnessMonitor(self.journal, self.stop)
        self.number = 0

    async def stop(self, name: str) -> None:
        if name in self.lost:
            raise EngineLostError(name, "planted")
        self.stopped.append(name)

    def step(self, totals: Mapping[str, Mapping[str, float]], groups: Sequence[Group] = ()) -> dict[str, float]:
        self.journal.metrics = Metrics()
        self.run(self.monitor.on_generation(totals, groups))
        return self.journal.metrics.reduce()

    def score(self, groups: Sequence[Group], *, shift: int = 0) -> dict[str, float]:
        """Score the groups with a learner that gives each rollout's log-probabilities, of other tokens with a shift."""
        samples = [Sample.of(rollout, 1.0) for group in groups for rollout in group.rollouts]
        self.run(self.monitor.on_scores(samples, [np.roll(sample.logp, shift) for sample in samples]))
        return self.journal.metrics.reduce()

    def group(self, *engines: str) -> Group:
        self.number += 1
        group_id, prompt = GroupId(self.number), Prompt(id="p", text="", token_ids=np.zeros(2, np.int32), row={})
        rollouts = [
            Rollout(
                group_id=group_id,
                index=index,
                prompt_ids=prompt.token_ids,
                token_ids=np.zeros(50, np.int32),
                logp=np.log(np.random.default_rng((self.number, index)).uniform(0.05, 1, 50)).astype(np.float32),
                finish_reason="stop",
                version_spans=((0, 50),),
                engine=engine,
                started_s=0.0,
                finished_s=1.0,
            )
            for index, engine in enumerate(engines)
        ]
        return Group(group_id=group_id, prompt=prompt, rollouts=tuple(rollouts))

    def events(self) -> list[dict]:
        self.recorder.close()
        return read_metrics(self.path).get("event", [])


@pytest.fixture
def driven(tmp_path: Path) -> Iterator[Driven]:
    with asyncio.Runner() as runner:
        yield Driven(tmp_path / "metrics.jsonl", runner)


def figures(draft: float = 0.0, residual: float = 0.0, born_s: float = 1.0) -> dict[str, float]:
    return {"monitor/draft_log10": draft, "monitor/residual_log10": residual, "monitor/born_s": born_s}


def test_alarm_names_its_engine_marks_the_step_and_stops_its_drafts(driven: Driven) -> None:
    step = driven.step({"a": figures(), "b": figures(draft=7.5)}, [driven.group("a", "b"), driven.group("b", "b")])
    assert (step["monitor/alarms"], step["monitor/marked"], step["monitor/draft_log10"]) == (1, 3, 7.5)
    assert driven.stopped == ["b"]
    step = driven.step({"a": figures(), "b": figures(draft=7.5)})
    assert step["monitor/alarms"] == 0, "an alarm is raised once"
    assert driven.stopped == ["b", "b"], "a limit that something else lifted must not let the engine draft again"
    (event,) = driven.events()
    assert (event["what"], event["engine"], event["test"]) == ("monitor_alarm", "b", "draft")


def test_restarted_engine_drafts_again_and_needs_more_evidence(driven: Driven) -> None:
    """With equal limits the false alarms of a run would grow with its restarts."""
    driven.step({"a": figures(draft=7.0)})
    between = (limit_log10(1) + limit_log10(2)) / 2
    assert driven.step({"a": figures(draft=between, born_s=2.0)})["monitor/alarms"] == 0
    assert driven.stopped == ["a"]
    assert driven.step({"a": figures(draft=limit_log10(2) + 0.1, born_s=2.0)})["monitor/alarms"] == 1


def test_engines_without_speculation_have_no_worker_tests(driven: Driven) -> None:
    step = driven.step({"a": {"engine/generated_tokens": 5.0}}, [driven.group("a")])
    assert step == {"monitor/alarms": 0}


def test_engine_that_does_not_stop_is_counted_and_tried_again(driven: Driven) -> None:
    driven.lost = ["a"]
    assert driven.step({"a": figures(draft=9.0)})["monitor/failures"] == 1
    driven.lost = []
    driven.step({"a": figures(draft=9.0)})
    assert driven.stopped == ["a"]


def test_logps_of_other_tokens_accuse_the_engine_that_reported_them(driven: Driven) -> None:
    right, wrong = [driven.group("a", "a") for _ in range(4)], [driven.group("b", "b") for _ in range(4)]
    totals = {"a": figures(), "b": figures()}
    driven.step(totals, [*right, *wrong])
    assert driven.score(right)["monitor/alarms"] == 0
    driven.step(totals, [*right, *wrong])
    assert driven.score(wrong, shift=1)["monitor/alarms"] == 1
    assert driven.stopped == ["b"]


def test_groups_that_are_not_scored_count_against_the_evidence(driven: Driven) -> None:
    """Scored groups are selected by their tokens: leaving the others out would bias the test."""
    scored, dropped = driven.group("a"), [driven.group("a") for _ in range(3)]
    for groups, expected in (([scored], 0), (dropped, 3)):
        driven.step({}, [scored, *dropped] if expected else groups)
        driven.score([scored])
        life = driven.monitor._lives["a"]
        lost = life.logp.log_E / np.log1p(-np.array([0.01, 0.1, 0.5]))
        np.testing.assert_allclose(lost, expected, atol=1e-5)
    driven.step({}, [driven.group("a")])  # a step without any scores, which the next one settles
    driven.step({}, [])
    np.testing.assert_allclose(life.logp.log_E / np.log1p(-np.array([0.01, 0.1, 0.5])), 4, atol=1e-5)

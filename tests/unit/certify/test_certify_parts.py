"""certify's parts on stand-ins: which sampler is tested, and which engines get a planted fault."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from contexts import make_context
from paceline.certify import engines, subject
from paceline.certify.lossless import SamplerCell
from paceline.certify.subject import Effort, Fault, Findings, Subject
from paceline.config import Config
from paceline.rollout.internals import rejection_sampler, rejection_sampler_v2
from paceline.rollout.internals.model_runner import Runner
from paceline.rollout.speculation import Unhashed, own_settings, scheduler_settings
from paceline.types import PacelineError, Prompt

SUBJECT = Subject(
    model_path=Path("policy"),
    prompts=[Prompt(id="1", text="", token_ids=np.array([1], np.int32), row={})],
    config=Config.model_validate({"policy": {"model": "arena:small"}, "speculation": {"drafter": {"kind": "ngram"}}}),
    without_shim=False,
    seed=0,
    runner="v2",
)


def cell(num_tokens: int) -> SamplerCell:
    return SamplerCell(
        drafts="one-hot",
        draft_length=2,
        temperature=1.0,
        position=0,
        num_tokens=num_tokens,
        statistic=0.0,
        degrees=7,
    )


@pytest.mark.parametrize(("runner", "tested"), [("v1", rejection_sampler), ("v2", rejection_sampler_v2)])
def test_sampler_of_the_engines_runner_is_tested(monkeypatch: pytest.MonkeyPatch, runner: Runner, tested: Any) -> None:
    """A certificate about V1's sampler would say nothing about what a GPU samples; and V1's shim is not V2's."""
    events: list[str] = []

    def examine(sampler: Any, drafter: Any, **_: Any) -> Iterator[SamplerCell]:
        assert (sampler, drafter) == (tested.rejection_sample, tested.draft)
        events.append("examined")
        yield from (cell(900), cell(300))

    monkeypatch.setattr(engines, "examine", examine)
    monkeypatch.setattr(engines, "mend_sampler", lambda: events.append("mended"))
    found = Findings()
    engines._sampler_part(found, replace(SUBJECT, runner=runner), Effort(), make_context())
    assert events == (["mended", "examined"] if runner == "v1" else ["examined"])
    assert found.figures["sampler_effect_found"] == cell(300).effect_found, "that of the weakest test"


class StubEngine:
    name = "stub"

    def __init__(self, events: list[str], runner: Runner) -> None:
        self._events, self._runner = events, runner

    async def rpc(self, method: str) -> list[dict[str, str]]:
        assert method == "paceline_sampler"
        return [{"runner": self._runner}]

    async def submit(self, requests: Any) -> None:
        assert not requests

    async def close(self) -> None:
        self._events.append("closed")


class Planted:
    def __init__(self, events: list[str]) -> None:
        self._events = events

    def adjust(self, args: Any) -> None:
        assert own_settings(args.additional_config)["trace"], "the scheduler's trace is still asked for"
        self._events.append("adjusted")

    async def plant(self, engine: Any) -> None:
        self._events.append("planted")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens to an engine that is started on V2."""
    happened: list[str] = []

    async def start(name: str, *_: Any, adjust: Any, **__: Any) -> StubEngine:
        if adjust is not None:
            adjust(SimpleNamespace(additional_config=Unhashed(scheduler_settings(SUBJECT.speculation, None))))
        happened.append(name)
        return StubEngine(happened, "v2")

    monkeypatch.setattr(subject.VllmEngine, "start", start)
    return happened


@pytest.mark.parametrize("speculate", [True, False])
def test_fault_is_planted_in_the_engine_that_speculates(events: list[str], speculate: bool) -> None:
    """A fault in both engines would cancel out, and a fault in neither would pass for a test that finds nothing."""
    faulty = replace(SUBJECT, fault=Fault(name="planted", about="", engine=Planted(events)))
    asyncio.run(subject.generate(faulty, SUBJECT.config.rollout.engine, [], speculate=speculate, seed=0))
    assert events == (["adjusted", "with", "planted", "closed"] if speculate else ["without", "closed"])


def test_engine_on_another_runner_than_announced_is_refused(events: list[str]) -> None:
    """vLLM falls back to V1 with a warning: the sampler that was tested would not be the one that samples."""
    with pytest.raises(PacelineError, match="runs on vLLM's model runner v2, but its arguments announced v1"):
        asyncio.run(
            subject.generate(replace(SUBJECT, runner="v1"), SUBJECT.config.rollout.engine, [], speculate=True, seed=0)
        )
    assert events == ["with", "closed"]

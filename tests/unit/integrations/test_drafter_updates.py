"""Online drafter training in another host: better drafters reach the engine, and no failure reaches the host."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from drafter_cases import make_documents, make_drafter, make_head
from host_engine import DRAFT_LENGTH, HostEngine
from paceline.config import BufferConfig, DrafterTrainingConfig
from paceline.drafters import drift
from paceline.drafters.checkpoint import save
from paceline.drafters.drift import Verdict
from paceline.drafters.provenance import Provenance, read_provenance
from paceline.drafters.trainer import DrafterTrainer
from paceline.integrations import drafter_updates
from paceline.integrations.drafter_updates import DrafterUpdater
from paceline.integrations.engine_wire import EngineWire
from paceline.rollout.calls import PUSH
from paceline.types import PacelineError

LENGTHS = [(4, 20), (3, 30), (5, 12)] * 20


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """An optimizer step takes a second, a comparison three."""
    clock, run, compare = Clock(), DrafterTrainer.run, drafter_updates.compare

    def slow_run(self: DrafterTrainer, should_stop: Any) -> bool:
        clock.now_s += 1.0
        return run(self, should_stop)

    def slow_compare(*args: Any, **kwargs: Any) -> Any:
        clock.now_s += 3.0
        return compare(*args, **kwargs)

    monkeypatch.setattr(drafter_updates, "time", clock)
    monkeypatch.setattr(DrafterTrainer, "run", slow_run)
    monkeypatch.setattr(drafter_updates, "compare", slow_compare)
    return clock


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("drafter") / "drafter"
    save(make_drafter(), path)
    return path


@pytest.fixture
def engine(checkpoint: Path) -> HostEngine:
    return HostEngine(checkpoint)


def make_config(tmp_path: Path, **changes: Any) -> DrafterTrainingConfig:
    settings: dict[str, Any] = {
        "tokens_per_step": 200,
        "round_tokens": 4000,
        "buffer": BufferConfig(directory=tmp_path, heldout_share=0.3),
    }
    return DrafterTrainingConfig(**(settings | changes))


def make_updater(engine: HostEngine, tmp_path: Path, **changes: Any) -> DrafterUpdater:
    config = make_config(tmp_path, **changes)
    updater = DrafterUpdater(EngineWire(engine.rpc), engine.checkpoint, config, draft_length=DRAFT_LENGTH)
    updater.add(make_documents(LENGTHS, seed=1), version=1)
    return updater


def test_better_drafter_reaches_the_engine_and_the_hosts_random_numbers_stay(
    engine: HostEngine, tmp_path: Path, clock: Clock
) -> None:
    """A push that another drafter than the judged one went into would be found by what it accepts."""
    updater, unseen = make_updater(engine, tmp_path), make_documents(LENGTHS[:9], seed=9)
    before, random = engine.accepted_length(unseen), torch.get_rng_state()
    for _ in range(2):
        engine.generate(1.1)
        updater.update(make_head(), budget_s=30)
    metrics = updater.metrics()
    assert torch.equal(torch.get_rng_state(), random), "training with the callback must not change the host's samples"
    assert engine.version == metrics["draft/published_round"] == engine.num_pushes >= 1
    assert engine.accepted_length(unseen) > before * 1.001
    assert metrics["draft/heldout_after"] > metrics["draft/heldout_before"]
    assert metrics["rollout/accepted_length"] == pytest.approx(1.1)
    assert metrics["selector/draft_length_mean"] == 3 and 0 < metrics["draft/overlap"] < 1
    assert metrics["draft/failures"] == 0 and metrics["draft/tokens_trained"] > 8000
    assert updater.metrics().get("draft/heldout_after") is None, "a verdict is told once"
    provenance = Provenance(policy="p", data="d", start="s", num_tokens=updater.num_tokens, seed=0)
    for _ in range(2):  # the second takes the place of the first
        updater.save(tmp_path / "saved", provenance)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == engine.weights.keys()
    assert all(torch.equal(saved[name], weight) for name, weight in engine.weights.items())
    assert read_provenance(tmp_path / "saved").num_tokens == metrics["draft/tokens_trained"]
    updater.close()
    assert not any((tmp_path / f"paceline-{tmp_path.stat().st_uid}").iterdir()), "rollouts are left in shared memory"


def test_worse_drafter_is_dropped(engine: HostEngine, tmp_path: Path, clock: Clock) -> None:
    """Planted: a learning rate that ruins it. Training must go on from what the engine has, not from the ruin."""
    updater = make_updater(engine, tmp_path, learning_rate=100.0, when="always")
    updater.update(make_head(), budget_s=25)
    metrics = updater.metrics()
    assert metrics["draft/round"] == 1 and metrics["draft/published"] == 0 == engine.num_pushes
    assert updater._trainer is not None
    kept, ruined = load_file(engine.checkpoint / "model.safetensors"), updater._trainer.drafter.state_dict()
    assert all(torch.equal(ruined[name], weight) for name, weight in kept.items())
    updater.close()


def test_engine_that_started_anew_gets_the_published_drafter_again(
    engine: HostEngine, tmp_path: Path, clock: Clock
) -> None:
    updater = make_updater(engine, tmp_path)
    updater.update(make_head(), budget_s=30)
    assert engine.version == 1
    published = engine.weights
    engine.restart()
    updater.update(make_head(), budget_s=0)
    assert engine.version == 2 and engine.num_pushes == 2
    assert all(torch.equal(published[name], weight) for name, weight in engine.weights.items())
    updater.close()


@pytest.mark.parametrize(("after", "goes_on"), [(1.005, True), (0.95, False)])
def test_drafter_that_gains_less_than_noise_is_trained_on(
    after: float, goes_on: bool, engine: HostEngine, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An untrained drafter gains little at first, and would be given up for good on a slow machine."""

    def judged(judged: object, states: Iterable[object], *_: object, **__: object) -> Verdict:
        assert len(list(states)) == 2
        return Verdict(publish=False, why="not better", before=1.0, after=after)

    monkeypatch.setattr(drafter_updates, "compare", judged)
    updater = make_updater(engine, tmp_path)
    trained = []
    for _ in range(2):
        engine.generate(1.1)
        updater.update(make_head(), budget_s=30)
        trained.append(updater.metrics()["draft/tokens_trained"])
    assert (trained[1] > trained[0] > 0) == goes_on
    updater.close()


@pytest.mark.parametrize("trouble", ["refused", "forged", "gone"])
def test_failed_pushes_are_counted_told_once_and_end_training(
    trouble: str,
    engine: HostEngine,
    tmp_path: Path,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None of them may end the host's run, and none may count as published."""

    def better(judged: object, states: Iterable[object], *_: object, **__: object) -> Verdict:
        assert len(list(states)) == 2
        return Verdict(publish=True, why="planted", before=1.0, after=1.1)

    monkeypatch.setattr(drafter_updates, "compare", better)  # real training is not better in every round
    updater = make_updater(engine, tmp_path, when="always", round_tokens=2000)
    if trouble == "refused":
        engine.refuse = "drafter: planted"
    elif trouble == "forged":
        engine.forge = {"fc.weight": "0" * 32}
    rpc = engine.rpc
    if trouble == "gone":

        def die(method: str, args: Sequence[Any]) -> Sequence[Any]:
            if method == PUSH:
                raise ConnectionError("planted")
            return rpc(method, args)

        updater._wire._rpc = die
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            engine.version = 0  # what was not taken is not there
            updater.update(make_head(), budget_s=12)
    metrics = updater.metrics()
    assert metrics["draft/failures"] == 3 and metrics["draft/published_round"] == 0
    told = [record.message for record in caplog.records]
    assert sum("drafter training failed (publish)" in line for line in told) == 1
    assert sum("ended after 3 consecutive failures (publish)" in line for line in told) == 1
    trained = metrics["draft/tokens_trained"]
    updater.update(make_head(), budget_s=30)
    assert updater.metrics()["draft/tokens_trained"] == trained
    updater.close()


def test_budget_holds_on_average(engine: HostEngine, tmp_path: Path, clock: Clock) -> None:
    """A comparison takes longer than the budget: the steps after it must make up for that."""
    updater = make_updater(engine, tmp_path, when="always", round_tokens=600)
    spent = []
    for _ in range(12):
        began_s = clock.now_s
        updater.update(make_head(), budget_s=2.0)
        spent.append(clock.now_s - began_s)
    assert max(spent) >= 4 and sum(spent) <= 12 * 2.0 + 4.0, spent
    assert updater.metrics()["draft/round"] >= 2
    updater.close()


def test_training_goes_on_after_the_process_was_stopped(
    engine: HostEngine, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour in one call is not made up for by an hour without training: the run would be over before."""
    updater = make_updater(engine, tmp_path, when="always")
    updater.update(make_head(), budget_s=2.0)
    run = DrafterTrainer.run

    def stopped(self: DrafterTrainer, should_stop: Any) -> bool:
        clock.now_s += 3600
        return run(self, should_stop)

    with monkeypatch.context() as planted:
        planted.setattr(DrafterTrainer, "run", stopped)
        updater.update(make_head(), budget_s=2.0)
    before = updater.num_tokens
    for _ in range(30):  # a minute
        updater.update(make_head(), budget_s=2.0)
    assert updater.num_tokens == before, "the budget must hold on average for a while"
    updater.update(make_head(), budget_s=2.0)
    assert updater.num_tokens > before
    updater.close()


def test_drafter_that_holds_is_not_trained(
    engine: HostEngine, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """marin issue 9114: a frozen drafter may hold for dozens of steps, and training it would be lost time."""
    monkeypatch.setattr(drift, "NOISE", 10.0)
    updater = make_updater(engine, tmp_path)
    for _ in range(5):
        engine.generate(2.0)
        updater.update(make_head(), budget_s=25)
    trained = updater.metrics()["draft/tokens_trained"]
    assert trained > 4000, "what training brings must be tried once"
    engine.generate(2.0)
    updater.update(make_head(), budget_s=25)
    metrics = updater.metrics()
    assert metrics["draft/tokens_trained"] == trained and metrics["draft/decision"] == 0
    updater.close()


def test_engine_that_has_loaded_another_drafter_gets_this_one_first(
    engine: HostEngine, tmp_path: Path, clock: Clock
) -> None:
    """A sidecar that goes on from its last drafter would otherwise compare with weights that the engine has not."""
    updater = DrafterUpdater(
        EngineWire(engine.rpc),
        engine.checkpoint,
        make_config(tmp_path),
        draft_length=DRAFT_LENGTH,
        loaded=False,
    )
    updater.save(tmp_path / "saved", Provenance(policy="p", data="d", start="s", num_tokens=0, seed=0))
    assert not (tmp_path / "saved").exists(), "nothing was published"
    updater.update(make_head(), budget_s=0)
    assert engine.version == engine.num_pushes == updater.metrics()["draft/published_round"] == 1
    kept = load_file(engine.checkpoint / "model.safetensors")
    assert all(torch.equal(engine.weights[name], weight) for name, weight in kept.items())
    updater.update(make_head(), budget_s=0)
    assert engine.num_pushes == 1
    updater.close()


def test_without_heldout_rollouts_nothing_is_published(engine: HostEngine, tmp_path: Path, clock: Clock) -> None:
    buffer = BufferConfig(directory=tmp_path, heldout_share=1e-9)
    updater = make_updater(engine, tmp_path, buffer=buffer)
    updater.update(make_head(), budget_s=30)
    assert updater.metrics()["draft/round"] == 0 == engine.num_pushes
    updater.close()


def test_engine_without_our_calls_says_what_is_missing(engine: HostEngine) -> None:
    assert EngineWire(engine.rpc).drafter().checkpoint == str(engine.checkpoint)
    engine.ours = False
    with pytest.raises(PacelineError, match="PACELINE="):
        EngineWire(engine.rpc).drafter()

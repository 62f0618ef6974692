"""Drafters survive what vLLM does to weights: a worker that behaves as one on a GPU does, which the CPU's does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from paceline.rollout import calls
from paceline.rollout.internals import engine_core
from paceline.rollout.internals.drafter_model import own_weights
from paceline.rollout.internals.drafter_survival import DrafterSurvival, meaning_of
from paceline.rollout.scheduler import AdaptiveScheduler


class GpuWorker:
    """Level-2 sleep loses every weight; the host sends the policy anew and not the drafter."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.policy, self.layer, shared = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(3, 4)
        shared.weight = self.policy.weight  # vLLM shares what is equal
        self.drafter = nn.Sequential(self.layer, shared)
        self.fused = torch.randn(2, 2)  # made from weights, as DFlash does
        vars(self.layer)["_fused_kv_weight"] = self.fused
        self.weight_transfer_engine = SimpleNamespace(applied={})
        self.asleep = False
        self.wipes = False
        """Whether a reload of the policy wipes the drafter."""

    def get_model(self) -> nn.Module:
        assert not self.asleep, "this would read memory that is not there"
        return self.policy

    def get_draft_model(self) -> nn.Module | None:
        assert not self.asleep, "this would read memory that is not there"
        return self.drafter

    def sleep(self, level: int = 1) -> None:
        if level == 2 and not self.asleep:
            self.lose(everything=True)
        self.asleep = True

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.asleep = self.asleep and tags == ["kv_cache"]

    def reload_weights(self) -> None:
        with torch.no_grad():
            self.policy.weight.add_(1.0)
        if self.wipes:
            self.lose()

    def start_weight_update(self) -> None: ...

    def start_draft_weight_update(self) -> None: ...

    def finish_weight_update(self) -> None:
        self.reload_weights()

    def train_drafter(self) -> None:
        with torch.no_grad():
            self.layer.weight.mul_(2.0)

    def lose(self, *, everything: bool = False) -> None:
        with torch.no_grad():
            for tensor in (*self.layer.parameters(), self.fused):
                tensor.zero_()
            if everything:
                self.policy.weight.zero_()

    def bits(self) -> list[list[float]]:
        return [self.layer.weight.flatten().tolist(), self.fused.flatten().tolist()]


class OurScheduler:
    """What EngineCore asks of our scheduler."""

    def __init__(self) -> None:
        self.num_forgotten = 0
        self.survival: DrafterSurvival | None = DrafterSurvival(self.forget_prefixes)

    def forget_prefixes(self) -> None:
        self.num_forgotten += 1

    worker_call: Any = AdaptiveScheduler.worker_call
    engine_call: Any = AdaptiveScheduler.engine_call
    _totals: Any = AdaptiveScheduler._totals

    def counters(self) -> dict[str, float]:
        return {"selector/verifications": 7.0}


class Core:
    """vLLM's EngineCore as far as calls go through it."""

    def __init__(self, worker: GpuWorker) -> None:
        self.scheduler: Any = OurScheduler()
        self.model_executor: Any = self
        self._worker = SimpleNamespace(worker=worker, weight_transfer_engine=worker.weight_transfer_engine)
        self.broken = False

    def collective_rpc(
        self, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None
    ) -> list[Any]:
        if callable(method):
            if self.broken:
                raise RuntimeError("planted")
            return [method(self._worker, *args, **(kwargs or {}))]
        if not hasattr(self._worker.worker, method):
            raise NotImplementedError(f"Method {method!r} is not implemented.")
        return [getattr(self._worker.worker, method)(*args, **(kwargs or {}))]


class WatchedCore(Core):
    """The same after `install`."""

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self._worker.worker.sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> bool:
        self._worker.worker.wake_up(tags)
        return True


for _name in engine_core.WATCHED:
    setattr(WatchedCore, _name, engine_core.watched(_name, getattr(WatchedCore, _name)))


@pytest.fixture
def core() -> Any:
    worker = GpuWorker()
    core = WatchedCore(worker)
    # What our functions reach the workers by is the executor's, which nobody watches.
    core.model_executor = SimpleNamespace(
        collective_rpc=lambda *args, **kwargs: Core.collective_rpc(core, *args, **kwargs)
    )
    return core


def worker_of(core: Any) -> GpuWorker:
    return core._worker.worker


def counts(core: Any) -> tuple[int, int]:
    return core.scheduler.survival.num_restored, core.scheduler.survival.num_failures


def test_level_two_sleep_loses_no_drafter(core: Any) -> None:
    """vLLM issue 52479. The weights come back with the weights' memory, before the cache's."""
    worker = worker_of(core)
    before = worker.bits()
    core.sleep(2)
    worker.asleep = False
    assert worker.bits() != before, "the planted sleep lost nothing"
    worker.asleep = True
    core.wake_up(["kv_cache"])
    assert worker.asleep and counts(core) == (0, 0)
    assert core.wake_up(["weights"]) is True
    assert worker.bits() == before
    assert not worker.policy.weight.any(), "the policy is the host's to send"
    assert counts(core) == (1, 0)


def test_memory_is_not_touched_asleep(core: Any) -> None:
    """On a GPU that would be an illegal access, which ends the engine. Level 1 brings its weights back itself."""
    for level in (1, 2):
        core.sleep(level=level)
        core.sleep(level=2)
        core.collective_rpc("start_weight_update")
        core.collective_rpc("finish_weight_update")
        core.wake_up(tags=["kv_cache"])
        core.wake_up()
    assert counts(core)[1] == 0


@pytest.mark.parametrize("calls", [["reload_weights"], ["start_weight_update", "finish_weight_update"]])
def test_reload_that_wipes_the_drafter_is_made_good(core: Any, calls: list[str]) -> None:
    worker = worker_of(core)
    before, policy = worker.bits(), worker.policy.weight.clone()
    for expected, worker.wipes in ((0, False), (1, True), (2, True)):
        for call in calls:
            core.collective_rpc(call, None, [], None)
        assert worker.bits() == before and counts(core) == (expected, 0)
    assert torch.equal(worker.policy.weight, policy + 3.0), "new weights of the policy, shared ones too, must stay"


def test_update_of_the_drafter_is_not_undone(core: Any) -> None:
    """Whoever trains a drafter pushes it by whatever way, also after a push of the policy that failed half way."""
    worker = worker_of(core)
    core.collective_rpc("start_weight_update")  # and nothing follows
    core.collective_rpc("start_draft_weight_update")
    worker.train_drafter()
    trained = worker.bits()
    core.collective_rpc("finish_weight_update")
    assert worker.bits() == trained and core.scheduler.survival.version == 1
    core.collective_rpc("train_drafter")  # a method of the host's own
    trained, worker.wipes = worker.bits(), True
    core.collective_rpc("reload_weights")
    assert worker.bits() == trained and counts(core) == (1, 0)
    assert core.scheduler.survival.version == 1, "a reload of the policy is no version of the drafter"
    assert core.scheduler.num_forgotten == 1, "the host sees to prefixes when it changes the policy"


def test_version_and_age_are_those_of_the_last_push(core: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    survival, worker = core.scheduler.survival, worker_of(core)
    monkeypatch.setattr(GpuWorker, "receive_push", lambda self, push: None, raising=False)
    start = survival.updated_s
    core.collective_rpc("receive_push", args=({"target": "drafter", "version": 4},))  # refused: nothing was applied
    assert (survival.version, survival.updated_s) == (0, start)
    worker.weight_transfer_engine.applied["drafter"] = SimpleNamespace(version=4)
    core.collective_rpc("receive_push", args=({"target": "drafter", "version": 4},))
    assert survival.version == 4 and survival.updated_s > start
    pushed = survival.updated_s
    core.collective_rpc("receive_push", args=({"target": "policy", "version": 5},))
    assert (survival.version, survival.updated_s) == (4, pushed)


def test_failure_is_counted_and_the_call_goes_on(core: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter costs speed at most: the host's reload must end as it would have without us."""
    worker = worker_of(core)
    core.broken = True
    core.collective_rpc("reload_weights")
    assert counts(core) == (0, 2)
    core.broken = False
    monkeypatch.setattr(worker, "get_draft_model", lambda: 1 / 0)
    core.collective_rpc("reload_weights")
    assert counts(core) == (0, 3), "what was not kept is not put back"


def test_prefixes_that_cannot_be_forgotten_are_counted(core: Any, pushed: list[Any]) -> None:
    def fail() -> None:
        raise RuntimeError("planted")

    core.scheduler.survival = DrafterSurvival(fail)
    assert core.collective_rpc(calls.PUSH, args=[DRAFTER_PUSH]) == [{"version": 3}]
    assert counts(core) == (0, 1)


@pytest.mark.parametrize("v2", [False, True])
def test_drafter_is_found_in_a_vllm_that_has_no_method_for_it(v2: bool) -> None:
    """The worker has had get_draft_model since vLLM 0.26; verl's vLLM, whose sleep loses drafters, is 0.24."""
    new = GpuWorker()
    runner = {"speculator" if v2 else "drafter": SimpleNamespace(model=new.drafter)}
    old: Any = SimpleNamespace(
        get_model=new.get_model,
        use_v2_model_runner=v2,
        speculative_config=object(),
        model_runner=SimpleNamespace(**runner),
    )
    assert own_weights(old).keys() == own_weights(cast("Any", new)).keys() != set()
    old.model_runner = SimpleNamespace(drafter=SimpleNamespace(), speculator=SimpleNamespace())  # drafts by n-grams
    assert own_weights(old) == {}


def test_other_schedulers_are_left_alone(core: Any) -> None:
    core.scheduler = SimpleNamespace()
    worker = worker_of(core)
    worker.wipes = True
    core.collective_rpc("reload_weights")
    assert not any(map(any, worker.bits()))


def test_meaning_of_calls() -> None:
    """Level 1, and a cache that wakes up, have nothing to do with the drafter."""
    assert meaning_of("sleep", (), {"level": 2}) == meaning_of("sleep", [2], None) == "deep sleep"
    assert meaning_of("sleep", (), None) == "nap" and meaning_of("sleep", (0,), None) is None
    assert meaning_of("wake_up", (), {"tags": None}) == meaning_of("wake_up", (["weights"],), None) == "wake"
    assert meaning_of("wake_up", (["kv_cache"],), None) is None
    assert meaning_of("execute_model", (object(),), {}) is None and meaning_of(print, (), None) is None


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Pushes that have reached a worker; the real receiver is shown on a real engine (tests/engine/test_calls.py)."""
    found: list[Any] = []

    def push(worker: Any, message: Any) -> dict[str, Any]:
        found.append(message)
        worker_of_wrapper: GpuWorker = worker.worker
        worker_of_wrapper.train_drafter()
        worker_of_wrapper._paceline_receiver = SimpleNamespace(  # type: ignore[attr-defined]
            applied={"drafter": SimpleNamespace(version=message["version"])}
        )
        return {"version": message["version"]}

    monkeypatch.setattr(calls, "AWAKE", {**calls.AWAKE, calls.PUSH: push})
    return found


DRAFTER_PUSH = {"target": "drafter", "version": 3}


def test_call_of_ours_reaches_workers_that_have_no_such_method(core: Any, pushed: list[Any]) -> None:
    """Hosts have a worker extension of their own, so a method by that name cannot be there."""
    survival, worker = core.scheduler.survival, worker_of(core)
    for arguments in ({"args": (DRAFTER_PUSH,)}, {"kwargs": {"message": DRAFTER_PUSH}}):
        assert core.collective_rpc(calls.PUSH, **arguments) == [{"version": 3}]
        assert survival.version == 3
    assert core.scheduler.num_forgotten == 2, "the second has the first one's version, and may have other weights"
    trained, worker.wipes = worker.bits(), True
    core.collective_rpc("reload_weights")
    assert worker.bits() == trained and counts(core) == (1, 0), "a push is not undone, and survives"
    assert pushed == [DRAFTER_PUSH] * 2


def test_push_to_an_engine_asleep_is_refused_and_loses_no_drafter(core: Any, pushed: list[Any]) -> None:
    """On a GPU it would write to memory that was given back, and end the host's engine."""
    worker = worker_of(core)
    before = worker.bits()
    core.sleep(2)
    (answer,) = core.collective_rpc(calls.PUSH, args=[DRAFTER_PUSH])
    assert "asleep" in answer["refused"] and pushed == []
    core.wake_up()
    assert worker.bits() == before
    assert core.collective_rpc(calls.PUSH, args=[DRAFTER_PUSH]) == [{"version": 3}]


@pytest.mark.parametrize("learned", [True, False])
def test_counters_are_answered_without_the_workers(core: Any, learned: bool) -> None:
    core.broken = True
    if not learned:
        core.scheduler.survival = None
    assert core.collective_rpc(calls.COUNTERS) == [{"selector/verifications": 7.0, "draft/version": 0.0}]


def test_calls_before_there_is_a_scheduler_go_through(core: Any) -> None:
    """EngineCore calls its workers while it is built; the second engine of a process finds its methods wrapped."""
    del core.scheduler
    core.collective_rpc("reload_weights")
    core.scheduler = SimpleNamespace()
    with pytest.raises(NotImplementedError, match=calls.PUSH):
        core.collective_rpc(calls.PUSH, args=[DRAFTER_PUSH])

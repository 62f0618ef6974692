"""The scheduler where several ranks have one each, on a stand-in for vLLM's: no engine is started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the scheduler is a subclass of vLLM's")


@pytest.mark.parametrize(("data_parallel_size", "backend"), [(2, "mp"), (1, "external_launcher"), (1, "mp")])
def test_ranks_that_step_together_are_left_to_vllm(
    data_parallel_size: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A choice by the clock differs between ranks that must draft alike, and then they wait for each other for ever."""
    from vllm.v1.core.sched.scheduler import Scheduler

    from paceline.rollout.internals import scheduler_calls
    from paceline.rollout.scheduler import AdaptiveScheduler

    theirs = [0, 4, 2, 2]

    def init(self: Any, vllm_config: Any) -> None:
        self.vllm_config, self.dynamic_sd_lookup = vllm_config, theirs
        self.num_spec_tokens, self.max_num_running_reqs = 4, 3
        self.running, self.waiting = [SimpleNamespace(num_tokens=5)], []

    monkeypatch.setattr(Scheduler, "__init__", init)
    monkeypatch.setattr(Scheduler, "schedule", lambda self, throttle_prefills: SimpleNamespace())
    monkeypatch.setattr(Scheduler, "update_draft_token_ids", lambda self, drafts: None)
    monkeypatch.setattr(scheduler_calls, "install", lambda: None)
    config: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(async_scheduling=False),
        parallel_config=SimpleNamespace(
            data_parallel_size=data_parallel_size, distributed_executor_backend=backend, world_size=2
        ),
        speculative_config=None,
        additional_config={"paceline": {"selector": {"kind": "fixed", "draft_length": 3}}},
    )
    scheduler = AdaptiveScheduler(vllm_config=config)
    scheduler.schedule()
    drafts: Any = SimpleNamespace(draft_token_ids=[[7, 7, 7, 7]])
    scheduler.update_draft_token_ids(drafts)
    if (data_parallel_size, backend) == (1, "mp"):
        assert scheduler.fixed_because is None
        assert (scheduler.dynamic_sd_lookup, drafts.draft_token_ids) == ([3] * 4, [[7, 7, 7]])
    else:
        assert "a scheduler of its own" in str(scheduler.fixed_because)
        assert (scheduler.dynamic_sd_lookup, drafts.draft_token_ids) == (theirs, [[7, 7, 7, 7]])

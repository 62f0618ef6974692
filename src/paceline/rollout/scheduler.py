"""vLLM's scheduler with a selector in it: the draft length is chosen anew at every engine step.

    vllm serve MODEL --scheduler-cls paceline.rollout.scheduler.AdaptiveScheduler --speculative-config '{...}'

works alone, with no other part of Paceline. Settings, all optional, come through vLLM's `additional_config`:

    {"paceline": {"selector": {"kind": "measured"}, "trace": "steps.jsonl", "figures": "figures.json"}}

One step, as the scheduler sees it:

    schedule(t)             selector.choose(batch) = k ──▶ the drafter proposes k tokens at the end of step t
    update_from_output(t)   what step t - 1 had proposed is accepted or not; selector.observe(seconds, acceptance)

so the time of a step is that of verifying the drafts of the choice before, and of drafting for the present one. Nothing here waits
for the device: times are taken where vLLM hands over results anyway. A selector that fails costs speed, never a token: the engine
goes on without drafts and counts the failure.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from paceline.config import DrafterConfig, MeasuredSelector, Section, SelectorConfig
from paceline.strategy.cost import Step
from paceline.strategy.select import Selector, build_selector

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

logger = logging.getLogger(__name__)

_FIGURES_EVERY_S = 1.0
_MOST_IN_FLIGHT = 64


class SchedulerSettings(Section):
    """What `additional_config["paceline"]` may hold."""

    selector: SelectorConfig = MeasuredSelector()
    drafter: DrafterConfig | None = None
    """For the proposer in the worker; the scheduler has no use for it."""
    trace: Path | None = None
    """One JSON line per step is appended here: what was chosen, what it cost, and drafts and tokens of each request."""
    figures: Path | None = None
    """What the selector believes, rewritten about every second."""
    off: Path | None = None
    """While this file exists nothing is drafted. Looked for about every second."""


class _Adaptive(Scheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        additional = cast("dict[str, Any]", self.vllm_config.additional_config)
        settings = SchedulerSettings.model_validate(additional.get("paceline", {}))
        self.selector: Selector | None = None
        """Public: a bench may put another one in between two batches."""
        self.num_selector_failures = 0
        self._tables = [[k] * (self.max_num_running_reqs + 1) for k in range(self.num_spec_tokens + 1)]
        self._begun: dict[int, tuple[float, int]] = {}
        self._last_update_s = 0.0
        self._trace: TextIO | None = settings.trace.open("a", buffering=1) if settings.trace is not None else None
        self._figures = settings.figures
        self._figures_written_s = 0.0
        self._off_file = settings.off
        self._off = False
        if self.num_spec_tokens:
            self.selector = build_selector(
                settings.selector, max_draft_length=self.num_spec_tokens, max_num_requests=self.max_num_running_reqs
            )

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        started_s = time.perf_counter()
        context_tokens = sum(request.num_tokens for request in self.running)
        self.dynamic_sd_lookup = self._tables[self._choose(context_tokens)] if self.num_spec_tokens else None
        output = super().schedule(throttle_prefills)
        if len(self._begun) > _MOST_IN_FLIGHT:
            self._begun.clear()  # steps whose results never came
        self._begun[id(output)] = (started_s, context_tokens)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        emitted = self._emitted(scheduler_output, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        now_s = time.perf_counter()
        # With asynchronous scheduling the next step was scheduled before this one ended; it began when its predecessor ended.
        started_s, context_tokens = self._begun.pop(id(scheduler_output), (now_s, 0))
        began_s, self._last_update_s = max(self._last_update_s, started_s), now_s
        if emitted and self.num_spec_tokens:
            step = _step(scheduler_output, emitted, context_tokens, now_s - began_s)
            self._observe(step)
            self._write(step, scheduler_output, emitted, now_s)
        return outputs

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        # A proposer of vLLM's `custom_class` is not told the draft length, so it is cut here.
        if self.dynamic_sd_lookup is not None:
            for tokens in draft_token_ids.draft_token_ids:
                del tokens[self.dynamic_sd_lookup[-1] :]
        super().update_draft_token_ids(draft_token_ids)

    def _choose(self, context_tokens: int) -> int:
        num_requests = min(len(self.running) + len(self.waiting), self.max_num_running_reqs)
        if self.selector is None or not num_requests or self._off:
            return 0
        try:
            return max(0, min(self.selector.choose(num_requests, context_tokens), self.num_spec_tokens))
        except Exception:  # noqa: BLE001  whatever it is, rollouts go on
            self._selector_failed("choose")
            return 0

    def _observe(self, step: Step) -> None:
        if self.selector is None:
            return
        try:
            self.selector.observe(step)
        except Exception:  # noqa: BLE001  as above
            self._selector_failed("observe")

    def _selector_failed(self, what: str) -> None:
        self.num_selector_failures += 1
        if self.num_selector_failures == 1:
            logger.exception("the selector failed in %s; the engine goes on, without drafts where no choice was made", what)

    def _emitted(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> dict[str, int]:
        """Tokens that each request of the step was given; empty for a step that samples nothing."""
        sampled = model_runner_output.sampled_token_ids
        if not sampled:
            return {}
        rows = model_runner_output.req_id_to_index
        return {request_id: len(sampled[rows[request_id]]) for request_id in scheduler_output.num_scheduled_tokens}

    def _write(self, step: Step, scheduler_output: SchedulerOutput, emitted: dict[str, int], now_s: float) -> None:
        try:
            if self._trace is not None:
                self._trace.write(json.dumps(_trace_line(step, scheduler_output, emitted)) + "\n")
            if now_s - self._figures_written_s <= _FIGURES_EVERY_S:
                return
            self._figures_written_s = now_s
            self._off = self._off_file is not None and self._off_file.exists()
            if self._figures is not None:
                figures = dict(self.selector.figures()) if self.selector is not None else {}
                figures["selector_failures"] = float(self.num_selector_failures)
                beside = self._figures.with_suffix(".new")
                beside.write_text(json.dumps(figures), encoding="utf-8")
                beside.replace(self._figures)
        except OSError as error:  # a full disk costs the picture, not the rollout
            logger.warning("no more traces or figures are written: %s", error)
            self._trace = self._figures = None


class AdaptiveScheduler(_Adaptive):
    """For synchronous scheduling, which vLLM's CPU backend and model-free drafters use."""


class AsyncAdaptiveScheduler(_Adaptive, AsyncScheduler):
    """For asynchronous scheduling, the default on GPUs."""


def _step(output: SchedulerOutput, emitted: dict[str, int], context_tokens: int, seconds: float) -> Step:
    drafts = output.scheduled_spec_decode_tokens
    verified = max((len(tokens) for tokens in drafts.values()), default=0)
    proposed_at, accepted_at = [0] * verified, [0] * verified
    for request_id, tokens in drafts.items():
        for position in range(len(tokens)):
            proposed_at[position] += 1
        for position in range(min(emitted[request_id] - 1, len(tokens))):
            accepted_at[position] += 1
    num_drafted = sum(len(tokens) for tokens in drafts.values())
    num_requests = len(output.num_scheduled_tokens)
    return Step(
        num_requests=num_requests,
        num_prefill_tokens=max(0, output.total_num_scheduled_tokens - num_requests - num_drafted),
        context_tokens=context_tokens,
        verified=verified,
        drafted=output.num_spec_tokens_to_schedule,
        seconds=seconds,
        proposed_at=tuple(proposed_at),
        accepted_at=tuple(accepted_at),
        num_emitted=sum(emitted.values()),
    )


def _trace_line(step: Step, output: SchedulerOutput, emitted: dict[str, int]) -> dict[str, Any]:
    drafts = output.scheduled_spec_decode_tokens
    requests = [[request_id, len(drafts.get(request_id, ())), num] for request_id, num in emitted.items()]
    return asdict(step) | {"requests": requests}

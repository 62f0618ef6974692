"""vLLM's scheduler with a selector that chooses the draft length of every engine step.

    vllm serve MODEL --scheduler-cls paceline.rollout.scheduler.AdaptiveScheduler --speculative-config '{...}'

works without any other part of Paceline. Settings are optional, in vLLM's `additional_config`:

    {"paceline": {"selector": {"kind": "measured"}, "trace": "steps.jsonl"}}

One step in the scheduler:

    schedule(t)             selector.choose(batch) = k ──▶ the drafter proposes k tokens at the end of step t
    update_from_output(t)   proposals of step t - 1 are accepted or rejected; selector.observe(seconds, acceptance)

So a step's time covers the verification of the previous choice and the drafting of the current one. Nothing here waits
for the device: times are taken when vLLM delivers results. A failing selector affects speed, never correctness: the
engine continues without drafts and counts the failure. If ranks must draft alike (`speculation.why_fixed`) or vLLM
supports one length only (`why_whole`), vLLM keeps its draft length: `num_speculative_tokens` or the host's own table.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from paceline.config import DrafterConfig, MeasuredSelector, Section, SelectorConfig
from paceline.rollout import calls
from paceline.rollout.counters import AcceptanceAlarm, DraftCounters, Recent, Timeline
from paceline.rollout.internals import drafter_survival, engine_core, scheduler_calls, stats
from paceline.rollout.internals import scheduler as internals
from paceline.rollout.internals.drafter_model import comes_with_policy, is_learned
from paceline.rollout.speculation import own_settings, why_fixed, why_whole
from paceline.selector.cost import Step
from paceline.selector.select import Selector, build_selector

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

logger = logging.getLogger(__name__)

_MOST_IN_FLIGHT = 64
_SEND_EVERY_S = 0.5
_SELECTOR_TOTALS = ("num_probes", "num_switches", "num_acceptance_changes", "num_refused_steps")


class SchedulerSettings(Section):
    """Content of `additional_config["paceline"]`."""

    selector: SelectorConfig = MeasuredSelector()
    drafter: DrafterConfig | None = None
    """Read by the proposer in the worker only."""
    verification: Literal["standard", "coupled"] = "standard"
    """Read by the worker only (internals/coupling.py)."""
    draft_lengths: tuple[int, ...] | None = None
    """Draft lengths with CUDA graphs; the selector's choice is rounded down to one of them. None allows all."""
    trace: Path | None = None
    """File for one JSON line per step: choice, cost, and drafts and tokens of each request."""


@dataclass(slots=True)
class _Begun:
    """A scheduled step without results yet."""

    output: SchedulerOutput
    """Kept so that no later output has its id."""
    started_s: float
    context_tokens: int
    expected_rate: float | None
    """The selector's prediction for the drafts verified in this step."""


class AdaptiveScheduler(Scheduler):
    """Chooses the draft length of every step.

    Becomes an `AsyncAdaptiveScheduler` if vLLM schedules asynchronously: vLLM decides that after the scheduler class is
    chosen."""

    def __new__(cls, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> AdaptiveScheduler:
        ahead = cls is AdaptiveScheduler and vllm_config.scheduler_config.async_scheduling
        return object.__new__(AsyncAdaptiveScheduler if ahead else cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        scheduler_calls.install()
        settings = SchedulerSettings.model_validate(own_settings(self.vllm_config.additional_config))
        self.selector: Selector | None = None
        parallel = self.vllm_config.parallel_config
        self.fixed_because = why_fixed(
            data_parallel_size=parallel.data_parallel_size,
            executor_backend=parallel.distributed_executor_backend,
            world_size=parallel.world_size,
        )
        if (speculation := self.vllm_config.speculative_config) is not None and self.fixed_because is None:
            self.fixed_because = why_whole(vars(speculation))
        self._num_failures = self._num_trace_failures = 0
        self._draft_limit: int | None = None
        self._drafts = DraftCounters(self.num_spec_tokens)
        self.survival: drafter_survival.DrafterSurvival | None = None
        """Keeps a learned drafter across sleep and reloads."""
        engine_core.install()
        if is_learned(speculation):
            self.survival = drafter_survival.DrafterSurvival(
                lambda: internals.forget_prefixes(self), comes_with_policy=comes_with_policy(speculation)
            )
        self._alarm = AcceptanceAlarm()
        self._recent = Recent()
        self._sent_s = 0.0
        self._timeline = Timeline()
        self._tables = [[k] * (self.max_num_running_reqs + 1) for k in range(self.num_spec_tokens + 1)]
        self._lengths = (0, *(settings.draft_lengths or range(self.num_spec_tokens + 1)))
        self._begun: dict[int, _Begun] = {}
        self._expected_rate: float | None = None
        self._last_update_s = 0.0
        self._trace: TextIO | None = settings.trace.open("a", buffering=1) if settings.trace is not None else None
        if self.num_spec_tokens and self.fixed_because is not None:
            logger.warning("Paceline leaves the draft length to vLLM: %s", self.fixed_because)
        elif self.num_spec_tokens:
            self.selector = build_selector(
                settings.selector, max_draft_length=self.num_spec_tokens, max_num_requests=self.max_num_running_reqs
            )

    # Called by the engine's owner.

    def counters(self) -> dict[str, float]:
        """Return totals since the start by metric key."""
        believed = dict(self.selector.figures()) if self.selector is not None else {}
        return (
            self._drafts.totals()
            | {f"selector/{key}": believed[key] for key in _SELECTOR_TOTALS if key in believed}
            | self._failures()
        )

    def take_timeline(self) -> list[list[float]]:
        """Return drafted and accepted tokens over time since the last call, as rows of `types.DraftBin`."""
        return self._timeline.take()

    def set_draft_limit(self, limit: int | None) -> None:
        """Draft at most this many tokens from the next step; 0 stops speculation, None removes the limit. No effect if
        vLLM keeps its draft length."""
        self._draft_limit = limit

    # Called by EngineCore (internals/engine_core.py), for hosts.

    def worker_call(self, name: object) -> Callable[..., Any] | None:
        """Return the function of our call in the workers, None for other calls."""
        asleep = self.survival is not None and self.survival.asleep
        return (calls.ASLEEP if asleep else calls.AWAKE).get(name) if isinstance(name, str) else None

    def engine_call(self, name: object) -> Callable[[], Any] | None:
        """Return the function of our call that needs no workers, None for other calls."""
        return self._totals if name == calls.COUNTERS else None

    # Called by vLLM.

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        started_s = time.monotonic()
        context_tokens = internals.context_tokens(self)
        expected_rate = self._expected_rate
        if self.fixed_because is None:
            chosen = self._tables[self._choose(context_tokens)] if self.num_spec_tokens else None
            internals.set_draft_length(self, chosen)
        output = super().schedule(throttle_prefills)
        if len(self._begun) > _MOST_IN_FLIGHT:
            self._begun.clear()  # steps without results
        self._begun[id(output)] = _Begun(output, started_s, context_tokens, expected_rate)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        emitted = internals.emitted(scheduler_output, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        now_s = time.monotonic()
        begun = self._begun.pop(id(scheduler_output), None) or _Begun(scheduler_output, now_s, 0, None)
        # With asynchronous scheduling a step begins when its predecessor ends, after it was scheduled.
        began_s, self._last_update_s = max(self._last_update_s, begun.started_s), now_s
        if emitted and self.num_spec_tokens:
            step = internals.step(scheduler_output, emitted, begun.context_tokens, now_s - began_s)
            self._observe(step)
            self._drafts.add(step, begun.expected_rate)
            self._timeline.add(now_s, step)
            if self.survival is not None and self._alarm.add(step):
                logger.warning(
                    "acceptance has dropped suddenly: the drafter's weights were lost, or the policy has moved too far"
                )
            self._write_trace(step, scheduler_output, emitted)
            self._send(outputs, now_s)
        return outputs

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        if self.fixed_because is None:
            internals.cut_drafts(self, draft_token_ids)
        super().update_draft_token_ids(draft_token_ids)

    def _choose(self, context_tokens: int) -> int:
        self._expected_rate = None
        num_requests = internals.num_requests(self)
        if self.selector is None or not num_requests or self._draft_limit == 0:
            return 0
        try:
            wanted = self.selector.choose(num_requests, context_tokens)
            limit = self.num_spec_tokens if self._draft_limit is None else self._draft_limit
            chosen = max(0, min(wanted, self.num_spec_tokens, limit))
            chosen = max(length for length in self._lengths if length <= chosen)
            self._expected_rate = self.selector.expected_rate() if chosen == wanted else None
            return chosen
        except Exception:  # noqa: BLE001  rollouts must continue; counted as selector/failures
            self._selector_failed("choose")
            return 0

    def _observe(self, step: Step) -> None:
        if self.selector is None:
            return
        try:
            self.selector.observe(step)
        except Exception:  # noqa: BLE001  as above
            self._selector_failed("observe")

    def _send(self, outputs: dict[int, EngineCoreOutputs], now_s: float) -> None:
        """Send metrics with vLLM's statistics, twice a second and when the queue is empty."""
        if now_s < self._sent_s + _SEND_EVERY_S and internals.num_requests(self):
            return
        self._sent_s = now_s
        try:
            stats.encode(outputs, self.vllm_config, lambda: self._figures(now_s))
        except Exception:  # noqa: BLE001  as above
            self._selector_failed("figures")

    def _figures(self, now_s: float) -> dict[str, float]:
        """Return Prometheus metrics: means of the last seconds, current predictions, and failures since the start."""
        believed = dict(self.selector.figures()) if self.selector is not None else {}
        plain = believed.get("expected_rate/0")
        preferred = believed.get("current", believed.get("chosen", 0.0))
        gain = {"selector/expected_gain": believed[f"expected_rate/{preferred:.0f}"] / plain} if plain else {}
        drafter = {}
        if self.survival is not None:
            drafter = {"draft/version": float(self.survival.version), "draft/age_s": now_s - self.survival.updated_s}
        return self._recent.means(now_s, self._drafts.totals()) | gain | drafter | self._failures()

    def _totals(self) -> dict[str, float]:
        """Return counters and the drafter's version."""
        return self.counters() | {"draft/version": float(self.survival.version if self.survival is not None else 0)}

    def _failures(self) -> dict[str, float]:
        counts = {"selector/failures": self._num_failures, "selector/trace_failures": self._num_trace_failures}
        if self.survival is not None:
            counts["draft/alarms"] = self._alarm.num_alarms
            counts["draft/restored"] = self.survival.num_restored
            counts["draft/restore_failures"] = self.survival.num_failures
        return {key: float(count) for key, count in counts.items()}

    def _selector_failed(self, what: str) -> None:
        self._num_failures += 1
        if self._num_failures == 1:
            logger.exception(
                "the selector failed in %s; the engine continues, without drafts if no length was chosen", what
            )

    def _write_trace(self, step: Step, scheduler_output: SchedulerOutput, emitted: dict[str, int]) -> None:
        if self._trace is None:
            return
        drafts = internals.drafted(scheduler_output)
        requests = [[request_id, drafts.get(request_id, 0), num] for request_id, num in emitted.items()]
        try:
            self._trace.write(json.dumps(asdict(step) | {"requests": requests}) + "\n")
        except OSError as error:  # a full disk must not fail rollouts
            logger.warning("the trace of steps ends: %s", error)
            self._num_trace_failures += 1
            self._trace = None


class AsyncAdaptiveScheduler(AdaptiveScheduler, AsyncScheduler):
    """For asynchronous scheduling, as on GPUs with learned drafters."""

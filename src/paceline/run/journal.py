"""What a run tells the outside: stages and their times, rollouts, steps, evaluations and events, as records for the sinks.

Time is the running event loop's, so that a simulated run tells simulated times.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from paceline.metrics import Max, Mean, Metrics, Recorder, Sum
from paceline.run.fleet import Batch, Fleet
from paceline.types import Group, Receipt

Rewards = list[list[float]]


class Journal:
    """Holds the metrics of the step now running; `end_step` reduces and writes them."""

    def __init__(self, recorder: Recorder) -> None:
        self.step = 0
        self.metrics = Metrics()
        self._recorder = recorder
        self._run_began_s = self._step_began_s = asyncio.get_running_loop().time()

    def elapsed_s(self) -> float:
        return round(asyncio.get_running_loop().time() - self._run_began_s, 4)

    def begin_step(self, step: int) -> None:
        self.step = step
        self.metrics = Metrics()
        self._step_began_s = asyncio.get_running_loop().time()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time one stage of the step and say that it is running."""
        began_s = asyncio.get_running_loop().time()
        self._recorder.write("stage", {"step": self.step, "stage": name, "time_s": self.elapsed_s()})
        yield
        self.metrics.add(f"time/{name}", Sum(asyncio.get_running_loop().time() - began_s))

    def event(self, what: str, **fields: object) -> None:
        """Something that an operator should be able to find later."""
        self._recorder.write("event", {"step": self.step, "time_s": self.elapsed_s(), "what": what, **fields})

    def engine_lost(self, engine: str, why: str, num_redispatched: int) -> None:
        self.event("engine_lost", engine=engine, why=why, redispatched=num_redispatched)

    def progress(self, batch: Batch) -> None:
        """For the live display only; a file of it would be longer than all else."""
        record = {"step": self.step, "done": batch.done, "total": batch.total, "num_tokens": batch.num_tokens}
        self._recorder.show("progress", record)

    def rollouts(self, groups: Sequence[Group], rewards: Rewards, *, policy_version: int, fleet: Fleet) -> None:
        """One record with a column per property, and the step's rollout metrics. How long engines were idle is for the reader to
        say: with a lag, an engine without rollouts of this batch may be at work on the next."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        flat = [reward for group_rewards in rewards for reward in group_rewards]
        lengths = [len(rollout.token_ids) for rollout in rollouts]
        names = {engine.name for engine in fleet.engines} | {rollout.engine for rollout in rollouts}  # idle and lost ones as well
        index_of = {name: index for index, name in enumerate(sorted(names))}
        columns = {
            "engine": [index_of[rollout.engine] for rollout in rollouts],
            "start_s": [round(rollout.started_s - self._run_began_s, 4) for rollout in rollouts],
            "end_s": [round(rollout.finished_s - self._run_began_s, 4) for rollout in rollouts],
            "length": lengths,
            "reward": flat,
        }
        self._recorder.write("rollouts", {"step": self.step, "engines": list(index_of), **columns})
        begin_s, end_s = min(columns["start_s"]), max(columns["end_s"])
        add = self.metrics.add
        add("reward/mean", Mean.of(flat))
        add("rollout/length_mean", Mean.of(lengths))
        add("rollout/length_max", Max(max(lengths)))
        add("rollout/num_tokens", Sum(sum(lengths)))
        add("rollout/truncated_share", Mean.of([float(rollout.finish_reason == "length") for rollout in rollouts]))
        add("rollout/policy_lag", Mean.of([policy_version - rollout.policy_version for rollout in rollouts]))
        add("rollout/makespan_s", Sum(end_s - begin_s))
        add("rollout/tokens_per_s", Mean(sum(lengths), end_s - begin_s))
        if verifications := sum(rollout.num_verifications for rollout in rollouts):
            accepted = sum(rollout.num_accepted for rollout in rollouts)
            add("rollout/accepted_length", Mean(verifications + accepted, verifications))
            add("rollout/num_drafted", Sum(sum(rollout.num_drafted for rollout in rollouts)))
            add("rollout/num_accepted", Sum(accepted))

    def places(self, spans: Sequence[tuple[str, str, float, float]]) -> None:
        """What each engine's place was used for since the last step: engine, use, begin and end."""
        relative = [
            [engine, use, round(begin_s - self._run_began_s, 4), round(end_s - self._run_began_s, 4)]
            for engine, use, begin_s, end_s in spans
        ]
        self._recorder.write("places", {"step": self.step, "time_s": self.elapsed_s(), "spans": relative})

    def receipts(self, receipts: Sequence[Receipt], version: int) -> None:
        self.metrics.add("sync/version", Max(version))
        self.metrics.add("sync/failed", Sum(sum(not receipt.ok for receipt in receipts)))
        self.metrics.add("sync/bytes", Max(max(receipt.num_bytes for receipt in receipts)))
        self.metrics.add("sync/seconds", Max(max(receipt.seconds for receipt in receipts)))
        ages = [version - receipt.scales_version for receipt in receipts if receipt.scales_version is not None]
        if ages:
            self.metrics.add("sync/scale_age", Max(max(ages)))

    def mismatch(self, *, counts: Sequence[int], engines: Mapping[str, float], worst: Sequence[Mapping[str, object]]) -> None:
        """Tokens by log-ratio (the bins are correction.HISTOGRAM_EDGES), k3 of each engine, and the worst tokens."""
        record = {"step": self.step, "time_s": self.elapsed_s(), "counts": list(counts)}
        self._recorder.write("mismatch", {**record, "engines": dict(engines), "worst": list(worst)})

    def evaluation(self, metrics: Mapping[str, float]) -> None:
        self._recorder.write("eval", {"step": self.step, "time_s": self.elapsed_s(), "metrics": dict(metrics)})

    def end_step(self, fleet: Fleet) -> None:
        self.metrics.add("fleet/engines", Max(len(fleet.engines)))
        self.metrics.add("fleet/redispatched", Max(fleet.ledger.num_redispatched))
        self.metrics.add("metrics/sink_errors", Max(self._recorder.num_sink_errors))
        self.metrics.add("time/step", Sum(asyncio.get_running_loop().time() - self._step_began_s))
        record = {"step": self.step, "time_s": self.elapsed_s(), "metrics": self.metrics.reduce()}
        self._recorder.write("step", record)

"""Write the records of a run: stages and their times, rollouts, counters, steps, evaluations and events.

Times are on the clock of the event loop, which a simulation replaces by a virtual one.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from paceline.files import sha256_of
from paceline.metrics import Max, Mean, Metrics, Recorder, Sum
from paceline.orchestrator import engine_counters
from paceline.orchestrator.fleet import Fleet
from paceline.orchestrator.groups import Batch
from paceline.types import DraftBin, Engine, Group, Prompt, Receipt, Rollout, Tokens

Rewards = list[list[float]]

_LONGEST_TEXT = 2000
"""Maximum characters of a recorded text. The middle of longer ones is cut because rewards depend on the end."""


class Journal:
    """The metrics of the current step; `end_step` reduces and writes them."""

    def __init__(
        self,
        recorder: Recorder,
        *,
        step: int = 0,
        elapsed_s: float = 0.0,
        decode: Callable[[Tokens], str] | None = None,
    ) -> None:
        """`step` and `elapsed_s` come from the checkpoint of a resumed run. `decode` returns the text of a response; if
        None, evaluations record no text."""
        self.step = step
        self._decode = decode
        self.metrics = Metrics()
        self._recorder = recorder
        self._differences = engine_counters.Differences()
        self._step_began_s = clock_s()
        self.run_began_s = self._step_began_s - elapsed_s

    def elapsed_s(self) -> float:
        return round(clock_s() - self.run_began_s, 4)

    def begin_step(self, step: int) -> None:
        self.step = step
        self.metrics = Metrics()
        self._step_began_s = clock_s()

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """Record the start of a stage of the step, and time it."""
        began_s = clock_s()
        self._recorder.write("stage", {"step": self.step, "stage": name, "time_s": self.elapsed_s()})
        yield
        self.metrics.add(f"time/{name}", Sum(clock_s() - began_s))

    def event(self, what: str, **fields: object) -> None:
        self._recorder.write("event", {"step": self.step, "time_s": self.elapsed_s(), "what": what, **fields})

    def engine_lost(self, engine: str, why: str, num_redispatched: int) -> None:
        self.metrics.add("engine/lost", Sum(1))
        self.event("engine_lost", engine=engine, why=why, redispatched=num_redispatched)

    def engine_healed(self, engine: str, healing_s: float) -> None:
        self.metrics.add("engine/restarted", Sum(1))
        self.metrics.add("engine/healing_s", Max(healing_s))
        self.event("engine_healed", engine=engine, healing_s=round(healing_s, 4))

    def quarantined(self, prompt: Prompt) -> None:
        """Record that a prompt is excluded because it seems to kill engines."""
        self.metrics.add("rollout/quarantined_groups", Sum(1))
        self.event("prompt_quarantined", prompt=prompt.id)

    def progress(self, batch: Batch) -> None:
        """Show progress on the live display only: it would dominate metrics.jsonl."""
        record = {"step": self.step, "done": batch.done, "total": batch.total, "num_tokens": batch.num_tokens}
        self._recorder.show("progress", record)

    def rollouts(self, groups: Sequence[Group], rewards: Rewards, *, fleet: Fleet) -> None:
        """Write one record with a column per property, and add the rollout metrics of the step.

        Readers compute idle times: in asynchronous training an engine without rollouts of this batch may be generating
        the next one.
        """
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        if not rollouts:
            return  # every group was dropped
        flat = [reward for group_rewards in rewards for reward in group_rewards]
        lengths = [len(rollout.token_ids) for rollout in rollouts]
        names = {engine.name for engine in fleet.engines} | {
            rollout.engine for rollout in rollouts
        }  # idle and lost ones as well
        index_of = {name: index for index, name in enumerate(sorted(names))}
        start_s = [round(rollout.started_s - self.run_began_s, 4) for rollout in rollouts]
        end_s = [round(rollout.finished_s - self.run_began_s, 4) for rollout in rollouts]
        columns = {
            "group": [text for group in groups for text in [str(group.group_id)] * len(group.rollouts)],
            "index": [rollout.index for rollout in rollouts],
            "engine": [index_of[rollout.engine] for rollout in rollouts],
            "start_s": start_s,
            "end_s": end_s,
            "length": lengths,
            "tokens": [sha256_of([rollout.token_ids.data])[:16] for rollout in rollouts],
            "reward": flat,
        }
        sha256 = _checksum(rollouts, flat)
        self._recorder.write("rollouts", {"step": self.step, "engines": list(index_of), "sha256": sha256, **columns})
        makespan_s = max(end_s) - min(start_s)
        add = self.metrics.add
        add("reward/mean", Mean.of_known(flat))
        add("rollout/length_mean", Mean.of(lengths))
        add("rollout/length_max", Max(max(lengths)))
        add("rollout/num_tokens", Sum(sum(lengths)))
        add("rollout/truncated_share", Mean.of([float(rollout.finish_reason == "length") for rollout in rollouts]))
        add("rollout/makespan_s", Sum(makespan_s))
        add("rollout/tokens_per_s", Mean(sum(lengths), makespan_s))
        if verifications := sum(rollout.num_verifications for rollout in rollouts):
            accepted = sum(rollout.num_accepted for rollout in rollouts)
            add("rollout/accepted_length", Mean(verifications + accepted, verifications))
            add("rollout/num_drafted", Sum(sum(rollout.num_drafted for rollout in rollouts)))
            add("rollout/num_accepted", Sum(accepted))

    def ages(self, groups: Sequence[Group], *, policy_version: int, max_age: int) -> None:
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        spans = [(policy_version - version, num) for rollout in rollouts for version, num in rollout.version_spans]
        if spans:
            num_tokens = sum(num for _, num in spans)
            self.metrics.add("rollout/age_mean", Mean(sum(age * num for age, num in spans), num_tokens))
            self.metrics.add("rollout/age_max", Max(max(age for age, _ in spans)))
        too_old = sum(policy_version - rollout.policy_version > max_age for rollout in rollouts)
        self.metrics.add("rollout/max_age_exceeded", Sum(too_old))

    async def counters(self, engines: Sequence[Engine]) -> Mapping[str, Mapping[str, float]]:
        """Add the counters of engines since the last step, and record draft lengths over time. Return the totals by
        engine."""
        totals, timelines, num_failed = await engine_counters.ask(engines)
        self.metrics.add("engine/metrics_failed", Sum(num_failed))
        self._differences.add(totals, self.metrics)
        if any(timelines.values()):
            self._draft_length(timelines)
        return totals

    def learner_counters(self, totals: Mapping[str, float]) -> None:
        self._differences.add({"learner": totals}, self.metrics)

    def _draft_length(self, timelines: Mapping[str, Sequence[DraftBin]]) -> None:
        """Write one record with a column per property and times since the start of the run."""
        engines = [name for name, bins in timelines.items() if bins]
        rows = [(index, item) for index, name in enumerate(engines) for item in timelines[name]]
        columns = {
            "engine": [index for index, _ in rows],
            "begin_s": [round(item.begin_s - self.run_began_s, 4) for _, item in rows],
            "width_s": [item.width_s for _, item in rows],
            "num_steps": [int(item.num_steps) for _, item in rows],
            "draft_length": [int(item.draft_length) for _, item in rows],
            "num_verifications": [int(item.num_verifications) for _, item in rows],
            "num_accepted": [int(item.num_accepted) for _, item in rows],
            "num_requests": [int(item.num_requests) for _, item in rows],
        }
        record = {"step": self.step, "time_s": self.elapsed_s(), "engines": engines, **columns}
        self._recorder.write("draft_length", record)

    def places(self, spans: Sequence[tuple[str, str, float, float]]) -> None:
        """Record the uses of each engine's device since the last step: engine, use, begin and end."""
        relative = [
            [engine, use, round(begin_s - self.run_began_s, 4), round(end_s - self.run_began_s, 4)]
            for engine, use, begin_s, end_s in spans
        ]
        self._recorder.write("places", {"step": self.step, "time_s": self.elapsed_s(), "spans": relative})

    def receipts(self, receipts: Sequence[Receipt], version: int) -> None:
        self.metrics.add("sync/version", Max(version))
        self.metrics.add("sync/failed", Sum(sum(not receipt.ok for receipt in receipts)))
        refused = sum(receipt.error is not None and not receipt.lost for receipt in receipts)
        self.metrics.add("sync/refused", Sum(refused))
        self.metrics.add("sync/bytes", Max(max(receipt.num_bytes for receipt in receipts)))
        self.metrics.add("sync/seconds", Max(max(receipt.seconds for receipt in receipts)))
        ages = [version - receipt.scales_version for receipt in receipts if receipt.scales_version is not None]
        if ages:
            self.metrics.add("sync/scale_age", Max(max(ages)))

    def mismatch(
        self, *, counts: Sequence[int], engines: Mapping[str, float], worst: Sequence[Mapping[str, object]]
    ) -> None:
        """Record tokens by log-ratio (bins: correction.HISTOGRAM_EDGES), k3 per engine, and the worst tokens."""
        record = {"step": self.step, "time_s": self.elapsed_s(), "counts": list(counts)}
        self._recorder.write("mismatch", {**record, "engines": dict(engines), "worst": list(worst)})

    def evidence(self, engines: Mapping[str, Mapping[str, float]]) -> None:
        """Record the monitor's evidence by engine and test, as log10."""
        self._recorder.write("monitor", {"step": self.step, "time_s": self.elapsed_s(), "engines": dict(engines)})

    def evaluation(self, groups: Sequence[Group], rewards: Rewards) -> None:
        """Record mean reward and length of held-out rollouts, and the text of a few if `decode` is given."""
        accuracy = Mean.of_known([reward for group_rewards in rewards for reward in group_rewards])
        length = Mean.of([len(rollout.token_ids) for group in groups for rollout in group.rollouts])
        metrics = {"eval/accuracy": accuracy.value(), "eval/length_mean": length.value()}
        record = {"step": self.step, "time_s": self.elapsed_s()}
        self._recorder.write("eval", {**record, "metrics": metrics})
        if self._decode is not None:
            self._recorder.write("texts", {**record, "texts": _texts(groups, rewards, self._decode)})

    def end_step(self, fleet: Fleet) -> None:
        for key in ("engine/lost", "engine/restarted", "rollout/quarantined_groups", "rollout/aborted_groups"):
            self.metrics.add(key, Sum(0))
        self.metrics.add("fleet/engines", Max(len(fleet.engines)))
        self.metrics.add("fleet/redispatched", Max(fleet.ledger.num_redispatched))
        for key, count in self._recorder.counts.items():
            self.metrics.add(key, Max(count))
        self.metrics.add("time/step", Sum(clock_s() - self._step_began_s))
        record = {"step": self.step, "time_s": self.elapsed_s(), "metrics": self.metrics.reduce()}
        self._recorder.write("step", record)


def _texts(groups: Sequence[Group], rewards: Rewards, decode: Callable[[Tokens], str]) -> list[dict[str, object]]:
    """Return the rollouts with the highest, median and lowest reward, each with its prompt; skip failed rewards."""
    scored = [
        (reward, group.prompt, rollout)
        for group, group_rewards in zip(groups, rewards, strict=True)
        for rollout, reward in zip(group.rollouts, group_rewards, strict=True)
        if not math.isnan(reward)
    ]
    ranked = sorted(scored, key=lambda item: item[0])
    last = len(ranked) - 1
    # With fewer than three rollouts, some of these are the same.
    names = {last: "best", last // 2: "middle", 0: "worst"} if ranked else {}
    return [
        {
            "which": which,
            "reward": reward,
            "prompt_id": prompt.id,
            "prompt": _cut(prompt.text),
            "completion": _cut(decode(rollout.token_ids)),
        }
        for which, (reward, prompt, rollout) in ((which, ranked[index]) for index, which in names.items())
    ]


def _checksum(rollouts: Sequence[Rollout], rewards: Sequence[float]) -> str:
    """Return a checksum of the training data of a step, equal for two runs with equal rollouts in equal order."""
    columns = ([getattr(rollout, name) for rollout in rollouts] for name in ("prompt_ids", "token_ids", "logp"))
    lengths = [(len(rollout.prompt_ids), len(rollout.token_ids)) for rollout in rollouts]
    return sha256_of([*(np.concatenate(column).data for column in columns), repr((lengths, list(rewards))).encode()])


def _cut(text: str) -> str:
    if len(text) <= _LONGEST_TEXT:
        return text
    half = _LONGEST_TEXT // 2
    return f"{text[:half]} [{len(text) - 2 * half:,} characters omitted] {text[-half:]}"


def clock_s() -> float:
    return asyncio.get_running_loop().time()

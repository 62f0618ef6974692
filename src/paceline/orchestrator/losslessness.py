"""Raise the alarms of the losslessness monitor, and react to them.

    engines' counters, once a step ──▶ draft, residual ──┐
                                                         ├──▶ alarm ──▶ event, marked step, the engine drafts no more
    groups, the learner's scores ────▶ logp ─────────────┘

`paceline.monitor` has the theory. An alarm holds for the engine's life: its drafts are stopped again at every step,
and a restarted engine drafts again, with a smaller share of ALPHA. A resumed run counts as another run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.metrics import Max, Sum
from paceline.monitor import Martingale, group_evidence, limit_log10, ratios_of
from paceline.orchestrator.journal import Journal, clock_s
from paceline.types import Floats, Group, PacelineError, Sample

_WORKER_TESTS = ("draft", "residual")


@dataclass(slots=True)
class _Life:
    """Evidence about one engine from a start to the next."""

    number: int
    born_s: float
    """Start of the worker's monitor; another one under the same name belongs to another life."""
    log10: dict[str, float] = field(default_factory=dict[str, float])
    """Highest evidence by test."""
    logp: Martingale = field(default_factory=Martingale.new)
    alarms: set[str] = field(default_factory=set[str])


class LosslessnessMonitor:
    """The alarms of one run."""

    def __init__(self, journal: Journal, stop: Callable[[str], Awaitable[None]] | None) -> None:
        """`stop` lets an engine draft no more."""
        self._journal, self._stop = journal, stop
        self._num_lives = 0
        self._lives: dict[str, _Life] = {}
        self._alive: frozenset[str] = frozenset()
        self._num_rollouts: Counter[str] = Counter()
        """Rollouts of the step by engine."""
        self._num_groups: Counter[str] = Counter()
        """Groups of the step by engine that `logp` has not bet on."""

    async def on_generation(self, totals: Mapping[str, Mapping[str, float]], groups: Sequence[Group]) -> None:
        """Judge engines by their counters. `groups` are all of the step, scored or not."""
        self._bet({})  # on the groups of a step without scores
        self._alive = frozenset(totals)
        self._num_rollouts = Counter(rollout.engine for group in groups for rollout in group.rollouts)
        self._num_groups = Counter(name for group in groups for name in {rollout.engine for rollout in group.rollouts})
        for name, found in totals.items():
            if "monitor/born_s" in found:
                known = self._lives.get(name)
                if known is None or known.born_s != found["monitor/born_s"]:
                    self._begin(name, found["monitor/born_s"])
                self._lives[name].log10 |= {test: found[f"monitor/{test}_log10"] for test in _WORKER_TESTS}
        await self._judge()

    async def on_scores(self, samples: Sequence[Sample], learner_logp: Sequence[Floats]) -> None:
        """Judge engines by the learner's log-probabilities of the step's samples."""
        began_s = clock_s()
        keys = [(sample.engine, str(sample.rollout_id and sample.rollout_id.group_id)) for sample in samples]
        place = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        group_N = np.repeat([place[key] for key in keys], [len(sample.logp) for sample in samples]).astype(np.int64)
        nothing = np.zeros(0, np.float32)
        ratio_N = ratios_of(
            np.concatenate([*(sample.logp for sample in samples), nothing]), np.concatenate([*learner_logp, nothing])
        )
        evidence: defaultdict[str, list[float]] = defaultdict(list)
        for (name, _), log_evidence in zip(place, group_evidence(ratio_N, group_N, len(place)).tolist(), strict=True):
            evidence[name].append(log_evidence)
        self._bet(evidence)
        await self._judge()
        self._journal.evidence({name: dict(life.log10) for name, life in self._lives.items() if life.log10})
        self._journal.metrics.add("monitor/driver_s", Sum(clock_s() - began_s))

    def _bet(self, evidence: Mapping[str, Sequence[float]]) -> None:
        num_groups, self._num_groups = self._num_groups, Counter()
        for name in {*num_groups, *evidence}:
            if name not in self._lives:
                self._begin(name, 0.0)
            life, scored = self._lives[name], evidence.get(name, ())
            life.logp.add_groups(scored, max(0, num_groups[name] - len(scored)))
            life.log10["logp"] = life.logp.log10

    def _begin(self, name: str, born_s: float) -> None:
        self._num_lives += 1
        self._lives[name] = _Life(self._num_lives, born_s)

    async def _judge(self) -> None:
        """Raise alarms, and stop the drafts of every live engine that has one."""
        add = self._journal.metrics.add
        add("monitor/alarms", Sum(0))
        for name, life in self._lives.items():
            limit = limit_log10(life.number)
            for test, log10 in life.log10.items():
                add(f"monitor/{test}_log10", Max(log10))
                if log10 > limit and test not in life.alarms:
                    if not life.alarms:
                        add("monitor/marked", Sum(self._num_rollouts[name]))
                    life.alarms.add(test)
                    add("monitor/alarms", Sum(1))
                    self._journal.event(
                        "monitor_alarm", engine=name, test=test, log10=round(log10, 2), limit=round(limit, 2)
                    )
        for name in [name for name, life in self._lives.items() if life.alarms and name in self._alive]:
            try:
                if self._stop is not None:
                    await self._stop(name)
            except PacelineError:  # the fleet detects a lost engine; others are tried again at the next step
                add("monitor/failures", Sum(1))

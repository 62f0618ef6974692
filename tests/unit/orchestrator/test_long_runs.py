"""A run of many steps needs no more memory and disk than a short one: the real loop, over simulated ends.

`PACELINE_STEPS=10000 pytest -s tests/unit/orchestrator/test_long_runs.py` runs that many steps and prints the figures.
Without it, there are fewer steps and a smaller bound.
"""

from __future__ import annotations

import gc
import os
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulated import SimulatedEngine, SimulatedSender, long_tailed_lengths
from contexts import arena_config
from paceline.metrics import JsonlSink, Recorder
from paceline.orchestrator import fleet
from paceline.orchestrator.loop import Parts, train
from paceline.orchestrator.members import Members
from paceline.plan.simulate import SimulatedLearner, run_virtual, score_by_parity, simulated_prompts
from paceline.types import Prompt

NUM_STEPS = int(os.environ.get("PACELINE_STEPS", "200"))
SETTLED = NUM_STEPS // 10
"""Steps after which nothing may grow any more."""
MOST_GROWTH = 5_000_000 * NUM_STEPS / 10_000
DETAIL_BYTES = 100_000


class Watch:
    """metrics.jsonl, and the memory that Python holds (tracemalloc) after SETTLED steps and in the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.held: list[int] = []
        self._truth = JsonlSink(path, detail_bytes=DETAIL_BYTES)

    def write(self, kind: str, record: Mapping[str, Any]) -> None:
        self._truth.write(kind, record)
        if kind == "step" and record["step"] in (SETTLED, NUM_STEPS):
            gc.collect()
            self.held.append(tracemalloc.get_traced_memory()[0])

    def close(self) -> None:
        self._truth.close()


def dataset() -> Iterator[Prompt]:
    return cycle(list(islice(simulated_prompts(), 256)))


@pytest.mark.parametrize("prompts", [dataset, simulated_prompts], ids=["dataset", "endless"])
def test_memory_and_details_do_not_grow_with_the_steps(
    prompts: Callable[[], Iterator[Prompt]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "_MOST_LENGTHS", min(fleet._MOST_LENGTHS, 8 * SETTLED))  # full when it has settled
    settings = [f"run.steps={NUM_STEPS}", "run.max_age=1", "eval.every=50", "rollout.engine.max_num_seqs=4"]
    config = arena_config([*settings, "rollout.prompts_per_step=8", "rollout.group_size=4"])
    watch = Watch(tmp_path / "metrics.jsonl")

    async def work() -> None:
        length_of = long_tailed_lengths(0)
        engines: Sequence[SimulatedEngine] = [
            SimulatedEngine(name=f"engine-{i}", length_of=length_of, max_num_seqs=4, seconds_per_token=0.01)
            for i in range(4)
        ]
        parts = Parts(
            members=Members(engines),
            learner=SimulatedLearner(),
            sender=SimulatedSender(engines=engines),
            prompts=prompts(),
            heldout=list(islice(simulated_prompts(), 4)),
            score=score_by_parity,
        )
        await train(parts, config, Recorder(watch))

    tracemalloc.start()
    try:
        run_virtual(work)
    finally:
        tracemalloc.stop()
    watch.close()
    before, after = watch.held
    with watch.path.open("rb") as file:
        lines = [(line.startswith((b'{"kind": "rollouts"', b'{"kind": "mismatch"')), len(line)) for line in file]
    details = sum(size for is_detail, size in lines if is_detail)
    others = sum(size for is_detail, size in lines if not is_detail) / NUM_STEPS
    print(f"{NUM_STEPS} steps: memory grew by {after - before} bytes, details {details}, others {others:.0f} a step")
    assert after - before < MOST_GROWTH
    assert details <= DETAIL_BYTES

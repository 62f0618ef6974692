"""Cost of the control plane per rollout, from 16 to 1,024 engines, with checkpoints and the log of groups.

The real loop, fleet, ledger and recovery run with simulated engines on a virtual clock, so the wall time is bookkeeping
alone. It includes the simulated ends, so the figure is an upper bound. Arms are interleaved.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness import Record
from benchmarks.simulated import SimulatedEngine, SimulatedSender, long_tailed_lengths
from paceline.config import Config, load_config
from paceline.context import Context
from paceline.metrics import JsonlSink, Recorder
from paceline.orchestrator.loop import Parts, train
from paceline.orchestrator.members import Members
from paceline.orchestrator.recovery import Recovery
from paceline.plan.simulate import SimulatedLearner, run_virtual, score_by_parity, simulated_prompts

ENGINES = (16, 128, 1024)
_REPETITIONS = 3
_SETTINGS = (
    "policy.model=simulated",
    "run.steps=7",
    "rollout.group_size=16",
    "rollout.prompts_per_step=1024",
    "eval.every=0",
)


def run(overrides: Sequence[str], context: Context) -> Record:
    """Measure microseconds of wall time per rollout by number of engines."""
    del overrides
    config = load_config(None, _SETTINGS)
    costs: dict[int, list[float]] = {num_engines: [] for num_engines in ENGINES}
    for repetition in range(_REPETITIONS):
        for num_engines, found in costs.items():
            found.append(_microseconds_per_rollout(config, num_engines))
            context.progress(
                f"repetition {repetition + 1}/{_REPETITIONS}: {num_engines} engines, {found[-1]:.1f} us per rollout"
            )
    record = Record(
        goals={"us_per_rollout_1024": ("<=", 200.0), "growth_16_to_1024": ("<=", 1.5)},
        config=config.model_dump(mode="json"),
    )
    for num_engines, found in costs.items():
        record.median(f"us_per_rollout_{num_engines}", found)
    record.ratios({"growth_16_to_1024": [b / a for a, b in zip(costs[16], costs[1024], strict=True)]})
    return record


def _microseconds_per_rollout(config: Config, num_engines: int) -> float:
    with TemporaryDirectory() as directory:
        recorder = Recorder(JsonlSink(Path(directory) / "metrics.jsonl"))

        async def work() -> None:
            lengths = long_tailed_lengths(config.run.seed)
            engines = [
                SimulatedEngine(
                    name=f"engine-{index}",
                    length_of=lengths,
                    max_num_seqs=config.rollout.engine.max_num_seqs,
                    seconds_per_token=0.01,
                )
                for index in range(num_engines)
            ]
            parts = Parts(
                members=Members(engines),
                learner=SimulatedLearner(seconds_per_token=1e-5),
                sender=SimulatedSender(engines=engines, seconds=1.0),
                prompts=simulated_prompts(),
                heldout=[],
                score=score_by_parity,
            )
            await train(parts, config, recorder, recovery=Recovery(Path(directory), config))

        began_s = time.perf_counter()
        run_virtual(work)
        wall_s = time.perf_counter() - began_s
        recorder.close()
    rollouts = config.run.steps * config.rollout.prompts_per_step * config.rollout.group_size
    return wall_s / rollouts * 1e6

"""Cost of the control plane per rollout, from 16 to 1,024 engines, with checkpoints and the log of groups.

The real loop, fleet, ledger and recovery run with simulated engines on a virtual clock, so the wall time is bookkeeping
alone. It includes the simulated ends, so the figure is an upper bound. Arms are interleaved.
"""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.simulated import SimulatedEngine, SimulatedSender, long_tailed_lengths
from paceline.config import Config, load_config
from paceline.context import Context
from paceline.measure import CpuTimes, Result, environment, middle, paired
from paceline.metrics import JsonlSink, Recorder
from paceline.orchestrator.loop import Parts, train
from paceline.orchestrator.members import Members
from paceline.orchestrator.recovery import Recovery
from paceline.plan.simulate import SimulatedLearner, run_virtual, score_by_parity, simulated_prompts

ENGINES = (16, 128, 1024)


def run(*, context: Context, num_rollouts: int = 100_000, repetitions: int = 3) -> Result:
    """Microseconds of wall time per rollout by number of engines."""
    group_size, prompts_per_step = 16, 1024
    steps = -(-num_rollouts // (group_size * prompts_per_step))
    config = load_config(
        None,
        [
            "policy.model=simulated",
            f"run.steps={steps}",
            f"rollout.group_size={group_size}",
            f"rollout.prompts_per_step={prompts_per_step}",
            "eval.every=0",
        ],
    )
    before = CpuTimes.now()
    costs: dict[int, list[float]] = {num_engines: [] for num_engines in ENGINES}
    for repetition in range(repetitions):
        for num_engines in ENGINES:
            cost = _microseconds_per_rollout(config, num_engines)
            costs[num_engines].append(cost)
            context.progress(
                f"repetition {repetition + 1}/{repetitions}: {num_engines} engines, {cost:.1f} us per rollout"
            )
    figures, spread = {}, {}
    for num_engines, values in costs.items():
        figures[f"us_per_rollout_{num_engines}"], spread[f"us_per_rollout_{num_engines}"] = middle(values)
    growth = [large / small for large, small in zip(costs[1024], costs[16], strict=True)]
    ratio, interval, pairs = paired({"growth_16_to_1024": growth})
    return Result(
        name="control",
        figures=figures | ratio,
        spread=spread | interval,
        goals={"us_per_rollout_1024": ("<=", 200.0), "growth_16_to_1024": ("<=", 1.5)},
        environment=environment(config=config.model_dump(mode="json")),
        details={
            "rollouts": steps * group_size * prompts_per_step,
            "repetitions": repetitions,
            "paired": pairs,
            "steal_share": CpuTimes.now().steal_share_since(before),
        },
    )


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

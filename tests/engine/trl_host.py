"""Somebody else's TRL script, with the settings of examples/trl: no callback, and on the CPU a weight sync of its own.

python tests/engine/trl_host.py --out DIR [options of examples/trl/train.py]       PACELINE in its environment, or not

With `--server URL` it saves its policy now and then and keeps its rollouts in DIR/rollouts, as docs/hosts.md shows it
for a sidecar.
"""

import json
import os
import runpy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from transformers.trainer_utils import SaveStrategy

from benchmarks.stock_trl.training import sync_on_cpu
from paceline.integrations.trl import wire_clients
from trl import GRPOTrainer  # pyright: ignore[reportPrivateImportUsage]  public in its docs

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "trl" / "train.py"
SAVE_STEPS = 5


def keeper(directory: Path, model: str) -> Any:
    """Return a reward function that gives no reward and writes what it sees."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer: Any = AutoTokenizer.from_pretrained(model)

    def keep_rollouts(prompts: list[str], completion_ids: list[list[int]], **_: object) -> list[None]:
        with (directory / f"{os.getpid()}.jsonl").open("a") as file:
            for prompt, ids in zip(prompts, completion_ids, strict=True):
                file.write(json.dumps({"prompt_ids": tokenizer(prompt)["input_ids"], "response_ids": ids}) + "\n")
        return [None] * len(prompts)

    return keep_rollouts


def main() -> None:
    example = runpy.run_path(str(EXAMPLE))
    options = example["parse_options"]()
    config, rewards = example["make_config"](options), [example["right_answer"]]
    if options.server:
        config.save_strategy, config.save_steps, config.save_only_model = SaveStrategy.STEPS, SAVE_STEPS, True
        rewards.append(keeper(options.out / "rollouts", options.model))
    with wire_clients() if options.server else nullcontext():
        trainer = GRPOTrainer(
            model=options.model,
            args=config,
            reward_funcs=rewards,
            train_dataset=example["make_dataset"](4096, options.seed),
        )
    if not options.server:
        sync_on_cpu(trainer)
    trainer.train()
    trainer.save_state()
    if not options.server:
        tell_engine(trainer, options.out / "engine.json")


def tell_engine(trainer: GRPOTrainer, file: Path) -> None:
    client: Any = trainer.vllm_generation.llm.llm_engine.engine_core
    scheduler = client.engine_core.scheduler
    counters = scheduler.counters() if hasattr(scheduler, "counters") else {}
    file.write_text(json.dumps({"scheduler": type(scheduler).__name__, "counters": counters}))


if __name__ == "__main__":
    main()

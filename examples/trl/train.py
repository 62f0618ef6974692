"""GRPO with stock TRL on a small policy, with a drafter that is trained along. Runs on a laptop's CPU.

python examples/trl/train.py                     TRL's engine in its own process
python examples/trl/train.py --server URL        a vLLM server on this machine (see README.md)
"""

import argparse
import os
from contextlib import nullcontext
from itertools import islice
from pathlib import Path

import torch
from datasets import Dataset

from paceline import assets
from paceline.arena.task import problems, reward
from paceline.integrations.trl import DrafterCallback, sync_over_wire, wire_clients  # Paceline, 1 of 3
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportPrivateImportUsage]  public in its docs


def right_answer(prompts: list[str], completions: list[str], answer: list[int], **_: object) -> list[float | None]:
    """TRL's form of a reward function: one value for each completion."""
    rows = zip(prompts, completions, answer, strict=True)
    return [reward(prompt, completion, {"answer": number}) for prompt, completion, number in rows]


def make_dataset(num: int, seed: int) -> Dataset:
    """Return sums to solve step by step, with their answers."""
    return Dataset.from_list([{"prompt": p.prompt, "answer": p.answer} for p in islice(problems(seed), num)])


def write_speculation(file: Path, drafter: str) -> Path:
    """Write the speculation settings of TRL's engine (docs/hosts.md)."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f'[speculation]\nmax_draft_length = 4\ndrafter = {{kind = "eagle3", path = "{drafter}"}}\n')
    return file.resolve()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=str(assets.policy("small")))
    parser.add_argument("--drafter", default=str(assets.drafter("small", "eagle3")))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--budget", type=float, default=2.0, help="seconds of drafter training a step")
    parser.add_argument("--server", help="address of a vLLM server; without it the engine is in this process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("trl-out"))
    return parser.parse_args()


def make_config(options: argparse.Namespace) -> GRPOConfig:
    """Nothing of Paceline in here."""
    on_cpu = not torch.cuda.is_available()
    return GRPOConfig(
        output_dir=str(options.out),
        max_steps=options.steps,
        seed=options.seed,
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=160,
        learning_rate=options.learning_rate,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_vllm=True,
        vllm_mode="server" if options.server else "colocate",
        vllm_server_base_url=options.server,
        vllm_max_model_length=512,
        vllm_gpu_memory_utilization=0.2,
        use_cpu=on_cpu,
        bf16=not on_cpu,
    )


def main(options: argparse.Namespace) -> None:
    # Paceline, 2 of 3: drafter and scheduler of TRL's engine. Usually set in the shell; a server has it in its own.
    os.environ.setdefault("PACELINE", str(write_speculation(options.out / "speculation.toml", options.drafter)))
    config = make_config(options)
    with wire_clients() if config.use_cpu else nullcontext():  # a server: TRL's own weight sync needs CUDA
        trainer = GRPOTrainer(
            model=options.model,
            args=config,
            reward_funcs=right_answer,
            train_dataset=make_dataset(4096, options.seed),
        )
    if config.use_cpu and not options.server:
        sync_over_wire(trainer)  # the same without a server
    trainer.add_callback(DrafterCallback(trainer, budget_s=options.budget))  # Paceline, 3 of 3
    trainer.train()
    trainer.save_state()
    trainer.save_model(str(options.out / "policy"))


if __name__ == "__main__":
    main(parse_options())

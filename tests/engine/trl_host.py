"""Somebody else's TRL script, with the settings of examples/trl: no callback, and on the CPU a weight sync of its own.

python tests/engine/trl_host.py --out DIR [options of examples/trl/train.py]       PACELINE in its environment, or not
"""

import json
import runpy
from pathlib import Path
from typing import Any

from paceline.lab.hosts.trl_engine import sync_on_cpu
from trl import GRPOTrainer  # pyright: ignore[reportPrivateImportUsage]  public in its docs

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "trl" / "train.py"


def main() -> None:
    example = runpy.run_path(str(EXAMPLE))
    options = example["parse_options"]()
    trainer = GRPOTrainer(
        model=options.model,
        args=example["make_config"](options),
        reward_funcs=example["right_answer"],
        train_dataset=example["make_dataset"](4096, options.seed),
    )
    sync_on_cpu(trainer)
    trainer.train()
    trainer.save_state()
    client: Any = trainer.vllm_generation.llm.llm_engine.engine_core
    scheduler = client.engine_core.scheduler
    counters = scheduler.counters() if hasattr(scheduler, "counters") else {}
    engine = {"scheduler": type(scheduler).__name__, "counters": counters}
    (options.out / "engine.json").write_text(json.dumps(engine))


if __name__ == "__main__":
    main()

"""Owner of engines, to be killed by test_engine.py: closes one engine cleanly, then starts one with its worker in
EngineCore and one with two workers of their own, and says who belongs to them."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import numpy as np
import psutil

from paceline.config import EngineConfig
from paceline.rollout.engine import VllmEngine
from paceline.types import GroupId, RolloutRequest


def children() -> list[int]:
    """Descendants, without the tracker of shared memory that Python itself keeps until this process ends."""
    descendants = psutil.Process().children(recursive=True)
    return [process.pid for process in descendants if "resource_tracker" not in " ".join(process.cmdline())]


async def main(model_path: Path, cpus: list[int]) -> None:
    config = EngineConfig(dtype="bfloat16", max_model_len=64, max_num_seqs=4, kv_cache_gb=0.05)
    request = RolloutRequest(
        group_id=GroupId(0), index=0, prompt_ids=np.array([5, 6, 7], np.int32), max_tokens=4, temperature=1.0
    )
    engine = await VllmEngine.start("closed", model_path, config, seed=0, cpus=cpus[:1])
    await engine.submit([request])
    num_tokens = sum(len(rollout.token_ids) for rollout in await engine.collect())
    await engine.close()
    after_close = children()
    orphaned = await VllmEngine.start("orphaned", model_path, config, seed=0, cpus=cpus[:1])
    sharded = await VllmEngine.start(
        "sharded", model_path, config.model_copy(update={"tensor_parallel_size": 2}), seed=0, cpus=cpus
    )
    print(json.dumps({"num_tokens": num_tokens, "after_close": after_close, "orphans": children()}), flush=True)
    await asyncio.Event().wait()
    await orphaned.close()  # never reached: the test kills this process
    await sharded.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), [int(cpu) for cpu in sys.argv[2:]]))

"""Say whether vLLM's sources have what the scheduler and PACELINE hook into, without importing them.

    python scripts/check-hooks.py                    # the vLLM that is installed
    python scripts/check-hooks.py path/to/vllm ...   # package directories (they hold v1/), of any version

Read from the syntax tree: names that are there may still mean something else. Exit code 1 if one is missing.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

HOOKS = {
    "v1/core/sched/scheduler.py": {
        "Scheduler": (
            "schedule(throttle_prefills)",
            "update_from_output(scheduler_output)",
            "update_from_output(model_runner_output)",
            "update_draft_token_ids(draft_token_ids)",
            "dynamic_sd_lookup",
            "num_spec_tokens",
            "running",
            "waiting",
            "max_num_running_reqs",
            "vllm_config",
        )
    },
    "v1/core/sched/async_scheduler.py": {"AsyncScheduler": ()},
    "v1/core/sched/output.py": {
        "SchedulerOutput": (
            "num_scheduled_tokens",
            "total_num_scheduled_tokens",
            "scheduled_spec_decode_tokens",
            "num_spec_tokens_to_schedule",
        )
    },
    "v1/outputs.py": {
        "ModelRunnerOutput": ("sampled_token_ids", "req_id_to_index"),
        "DraftTokenIds": ("draft_token_ids",),
    },
    "v1/engine/core.py": {"EngineCore": ("scheduler", "sleep(level)", "wake_up(tags)", "collective_rpc(method)")},
    "v1/worker/gpu_worker.py": {"Worker": ("get_model(self)", "use_v2_model_runner")},
    "v1/metrics/stats.py": {"SchedulerStats": ("waiting_lora_adapters",)},
    "v1/metrics/loggers.py": {"StatLoggerBase": ("record(scheduler_stats)",)},
    "engine/arg_utils.py": {
        "EngineArgs": ("create_engine_config(self)", "scheduler_cls", "speculative_config", "additional_config")
    },
    "config/speculative.py": {"SpeculativeConfig": ("num_speculative_tokens_per_batch_size", "draft_load_config")},
}
"""File, class, and its members: attributes, fields, and methods with one of their parameters."""


def members(body: ast.ClassDef) -> Iterator[str]:
    """Yield what a class defines, spelled as in HOOKS."""
    for node in ast.walk(body):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.FunctionDef(name=name, args=args):
                yield from (f"{name}({arg.arg})" for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs))


def missing(package: Path) -> list[str]:
    """Return what HOOKS names and the package does not have."""
    found = []
    for name, classes in HOOKS.items():
        file = package / name
        tree = ast.parse(file.read_text(encoding="utf-8")) if file.is_file() else ast.Module([], [])
        bodies = {node.name: set(members(node)) for node in tree.body if isinstance(node, ast.ClassDef)}
        for owner, wanted in classes.items():
            if owner not in bodies:
                found.append(f"{name}: {owner}")
            else:
                found += [f"{name}: {owner}.{member}" for member in wanted if member not in bodies[owner]]
    return found


def installed() -> list[Path]:
    """Return the directory of the installed vLLM, if there is one."""
    spec = find_spec("vllm")
    return [Path(place) for place in (spec.submodule_search_locations or ())] if spec is not None else []


def main(directories: list[str]) -> int:
    packages = [Path(name) for name in directories] or installed()
    for package in packages:
        gone = missing(package)
        print(f"{package}: {'missing ' + ', '.join(gone) if gone else 'all hooks are there'}")  # noqa: T201
    return int(not packages or any(map(missing, packages)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

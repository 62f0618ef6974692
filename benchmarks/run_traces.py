"""What a run leaves behind, step by step and part by part, as checksums that can be compared with another run's.

    weights     policy/step-N                            every step
    tokens      the step's record of rollouts            every step: prompts, tokens, log-probabilities, rewards
    optimizer   state/step-N/learner                     every checkpoint: parameters and moments
    counters    state/step-N: the learner's, the loop's  every checkpoint
    drafter     state/step-N/drafter                     every checkpoint: bases, optimizers, verdicts, counters

Times are left out: they differ from run to run.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.files import move_file, sha256_of
from paceline.metrics import read_metrics

Trace = Mapping[tuple[int, str], Any]
"""What was found, by step and part."""
_TIMES = ("training_s", "update_cost_s", "drift")


def keep_checkpoints(run: Path, kept: Path) -> None:
    """Link the checkpoints that a run has now to where it does not remove them."""
    kept.mkdir(exist_ok=True)
    for checkpoint in (run / "state").glob("step-*"):
        if not (kept / checkpoint.name).exists():
            partial = kept / f"partial-{checkpoint.name}"
            shutil.copytree(checkpoint, partial, copy_function=os.link)
            move_file(partial, kept / checkpoint.name)


def checkpoints_in(kept: Path) -> dict[int, Path]:
    """Checkpoints by their step."""
    return {int(path.name.removeprefix("step-")): path for path in sorted(kept.glob("step-*"))}


def trace(run: Path, kept: Path) -> Trace:
    """Read a run that has ended; `kept` has its checkpoints."""
    found: dict[tuple[int, str], Any] = {}
    for record in read_metrics(run / "metrics.jsonl")["rollouts"]:
        found[record["step"], "tokens"] = record["sha256"]
    for policy in (run / "policy").glob("step-*"):
        found[int(policy.name.removeprefix("step-")), "weights"] = _tensors(policy / "model.safetensors")
    for step, checkpoint in checkpoints_in(kept).items():
        found |= {(step, part): value for part, value in _parts(checkpoint).items()}
    return found


def differences(one: Trace, other: Trace, *, step: int | None = None) -> list[str]:
    """Steps and parts that are not in both, or not the same; of one step if it is given."""
    keys = sorted({*one, *other})
    return [
        f"step {key[0]}: {key[1]}"
        for key in keys
        if one.get(key) != other.get(key) and (step is None or key[0] == step)
    ]


def _parts(checkpoint: Path) -> dict[str, Any]:
    tree = json.loads((checkpoint / "run.json").read_text(encoding="utf-8"))
    counters = json.loads((checkpoint / "learner" / "counters.json").read_text(encoding="utf-8"))
    drafter: dict[str, Any] = {"loop": _timeless(tree["drafter"])}
    for file in (checkpoint / "drafter").iterdir():
        as_json = file.suffix == ".json"
        drafter[file.name] = _timeless(json.loads(file.read_text(encoding="utf-8"))) if as_json else _tensors(file)
    return {
        "optimizer": {file.name: _tensors(file) for file in checkpoint.glob("learner/*.safetensors")},
        "counters": [counters, tree["step"], tree["version"], tree["intake"]],
        "drafter": drafter,
    }


def _timeless(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in tree.items() if key not in (*_TIMES, "seal")}


def _tensors(file: Path) -> dict[str, Any]:
    """Checksum of every tensor, with its type and shape; the header of a file has its entries in any order."""
    content = file.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    header: dict[str, Any] = json.loads(content[8:begin])
    metadata: Mapping[str, str] = header.pop("__metadata__", {})
    found: dict[str, Any] = {"fresh tokens": metadata.get("fresh_tokens")}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        found[name] = [entry["dtype"], entry["shape"], sha256_of([content[begin + first : begin + last]])]
    return found

"""`paceline doctor` with faults planted in its own process.

python tests/engine/doctor_host.py FAULT,... SUBCOMMAND-ARGUMENTS
"""

import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.planted import plant
from paceline import cli
from paceline.doctor import engine, weights
from paceline.doctor.setup import Setup
from paceline.files import write_checksums


def sampler() -> None:
    """After a rejection, draw from the policy instead of the residual."""
    modules: list[Any] = list(engine.SAMPLERS.values())
    for module in modules:
        module.rejection_sample = plant(module.rejection_sample, "residual")


def drafter() -> None:
    """Use a drafter whose input and embedding rows are shuffled, as if it was trained for another policy."""
    find = Setup.drafter.func

    def foreign(self: Setup) -> Path | None:
        path = find(self)
        assert path is not None
        out = Path(tempfile.mkdtemp(prefix="paceline-doctor-"))
        self.resources.callback(lambda: shutil.rmtree(out))
        shutil.copytree(path, out, dirs_exist_ok=True)
        generator = torch.Generator().manual_seed(0)
        for file in out.glob("*.safetensors"):
            tensors = load_file(file)
            for name, axis in (("fc.weight", 1), ("embed_tokens.weight", 0)):
                if name in tensors:
                    order = torch.randperm(tensors[name].shape[axis], generator=generator)
                    tensors[name] = tensors[name].index_select(axis, order).contiguous()
            save_file(tensors, file, metadata={"format": "pt"})
        write_checksums(out)
        return out

    Setup.drafter.func = foreign


def push() -> None:
    """Announce a wrong fingerprint of the first tensor, in pushes of both transports."""
    stage = weights.stage

    def damaged(setup: Setup, sender: Any) -> Any:
        sent = stage(setup, sender)
        first, *rest = sent.entries
        return replace(sent, entries=(replace(first, fingerprint=first.fingerprint[::-1]), *rest))

    weights.stage = damaged


FAULTS: dict[str, Callable[[], None]] = {"sampler": sampler, "drafter": drafter, "push": push}

if __name__ == "__main__":
    for fault in sys.argv[1].split(","):
        FAULTS[fault]()
    sys.exit(cli.main(["doctor", *sys.argv[2:]]))

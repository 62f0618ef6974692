"""Troubles planted on purpose, to see that the doctor finds each of them and calls it by its name.

    sampler          the token after a rejection is drawn from p, not from the residual    found by `sampler`
    drafter          the drafter was trained for another policy of the same shape          found by `accepted-length`
    shared-memory    /dev/shm is full                                                      found by `shared-memory`

Nothing of the machine or of the user's files is touched.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal, get_args

import torch
from safetensors.torch import load_file, save_file

from paceline.files import atomic_directory, write_checksums

Trouble = Literal["sampler", "drafter", "shared-memory"]
TROUBLES: tuple[Trouble, ...] = get_args(Trouble)


def foreign_drafter(drafter: Path, out: Path) -> Path:
    """Write a copy of a drafter that fits the policy in shape and has learnt another: its hidden states are in another
    order, as those of two policies are that were trained apart, and so are its embeddings."""
    generator = torch.Generator().manual_seed(0)
    with atomic_directory(out) as partial:
        shutil.copytree(drafter, partial, dirs_exist_ok=True)
        for file in partial.glob("*.safetensors"):
            weights = load_file(file)
            for name, axis in (("fc.weight", 1), ("embed_tokens.weight", 0)):
                if name in weights:
                    order = torch.randperm(weights[name].shape[axis], generator=generator)
                    weights[name] = weights[name].index_select(axis, order).contiguous()
            save_file(weights, file, metadata={"format": "pt"})
        write_checksums(partial)
    return out

"""A drafter of the usual cost with random weights, which must not slow an engine down."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors.torch import load_file

from paceline.drafters.checkpoint import write_checkpoint


def random_drafter(like: Path, out: Path, *, seed: int) -> None:
    """Write a copy of the checkpoint `like` with random matrices."""
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(like / "model.safetensors")
    for name, weight in weights.items():
        if weight.is_floating_point() and weight.ndim == 2:
            weights[name] = (torch.randn(weight.shape, generator=generator) / math.sqrt(weight.shape[1])).to(
                weight.dtype
            )
    write_checkpoint(out, (like / "config.json").read_text(encoding="utf-8"), weights, like / "tokenizer.json")

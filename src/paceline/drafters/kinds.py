"""Learned drafters by kind: a kind is a module that makes a drafter's config and guesses with the drafter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedConfig

from paceline.drafters import dflash, eagle
from paceline.drafters.checkpoint import instantiate
from paceline.drafters.loss import Guesses
from paceline.drafters.packing import Pack

if TYPE_CHECKING:
    from speculators import SpeculatorModelConfig

    from paceline.drafters.checkpoint import Drafter


class Kind(Protocol):
    def make_config(
        self, policy: PreTrainedConfig, *, taps: Sequence[int], policy_path: Path, draft_length: int
    ) -> SpeculatorModelConfig: ...

    def guess(
        self, drafter: Any, pack: Pack, head_VD: torch.Tensor, num_steps: int, *, overlap_share: float = 0.0
    ) -> Guesses: ...


KINDS: dict[str, Kind] = {"eagle3": eagle, "dflash": dflash}


def new_drafter(
    kind: str,
    policy: PreTrainedConfig,
    *,
    taps: Sequence[int],
    policy_path: Path,
    embedding_VD: torch.Tensor,
    head_VD: torch.Tensor,
    tap_scale_K: Sequence[float],
    seed: int,
    draft_length: int = 7,
) -> Drafter:
    """Make an untrained drafter as wide as the policy, with layers of its shape, on the device of the policy's head.

    It starts from the policy's embedding and output head, which it then trains as its own. `tap_scale_K` is the root
    mean square of each hidden state that it reads: the residual stream grows from layer to layer, and without the scale
    the last one would drown the others."""
    config = KINDS[kind].make_config(policy, taps=taps, policy_path=policy_path, draft_length=draft_length)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        drafter = instantiate(config)
        nn.Module.to(drafter, head_VD.device)  # transformers' own `to` is annotated wrongly
        drafter.embed_tokens.weight.copy_(embedding_VD)
        drafter.lm_head.weight.copy_(head_VD)
        fan_in = drafter.fc.in_features
        scale_C = torch.tensor(tap_scale_K).repeat_interleave(fan_in // len(taps))
        # Drawn on the CPU, so that a seed makes the same drafter on every machine.
        drafter.fc.weight.copy_(torch.randn(drafter.fc.weight.shape) / (math.sqrt(fan_in) * scale_C))
    return drafter


def guess(
    drafter: Drafter, pack: Pack, head_VD: torch.Tensor, num_steps: int, *, overlap_share: float = 0.0
) -> Guesses:
    """Make `num_steps` guesses from every anchor and score them; `head_VD` is the policy's output head."""
    kind = KINDS[drafter.config.speculators_model_type]
    return kind.guess(drafter, pack, head_VD, num_steps, overlap_share=overlap_share)

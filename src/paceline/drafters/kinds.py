"""Kinds of learned drafters: modules that build a config and run the drafter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, PreTrainedConfig

from paceline.drafters import dflash, eagle
from paceline.drafters.checkpoint import instantiate, policy_embeddings, save
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


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """Return the layers that the drafter reads, in vLLM's numbering (i: after i layers): early, middle and late as in
    EAGLE-3. Small policies include the last layer; 0 is the embedding."""
    if num_layers >= 8:
        return (2, num_layers // 2, num_layers - 3)
    return (1, round(0.75 * num_layers), num_layers) if num_layers > 2 else (0, 1, 2)


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
    """Return an untrained drafter with the policy's layer shape, embedding and output head, on the head's device.

    `tap_scale_K` is the root mean square of each hidden state: the residual stream grows with depth, and without
    scaling the last tap would dominate."""
    config = KINDS[kind].make_config(policy, taps=taps, policy_path=policy_path, draft_length=draft_length)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        drafter = instantiate(config)
        nn.Module.to(drafter, head_VD.device)  # transformers' own `to` is annotated wrongly
        drafter.embed_tokens.weight.copy_(embedding_VD)
        drafter.lm_head.weight.copy_(head_VD)
        fan_in = drafter.fc.in_features
        scale_C = torch.tensor(tap_scale_K).repeat_interleave(fan_in // len(taps))
        # On the CPU, so that a seed gives the same drafter on every machine.
        drafter.fc.weight.copy_(torch.randn(drafter.fc.weight.shape) / (math.sqrt(fan_in) * scale_C))
    return drafter


def write_new_drafter(kind: str, model_path: Path, out: Path, *, seed: int, draft_length: int) -> None:
    """Write an untrained drafter from the policy's files alone, with equal scales for all taps."""
    embedding_VD, head_VD = policy_embeddings(model_path)
    if embedding_VD is None or head_VD is None:
        raise ValueError(
            f"speculation.drafter.init: got 'random' with {model_path}, which has no model.embed_tokens.weight; must "
            "be 'checkpoint' because a random drafter starts from it: `paceline draft train` makes one"
        )
    policy = AutoConfig.from_pretrained(model_path).get_text_config()
    taps = default_taps(policy.num_hidden_layers)
    drafter = new_drafter(
        kind,
        policy,
        taps=taps,
        policy_path=model_path,
        embedding_VD=embedding_VD,
        head_VD=head_VD,
        tap_scale_K=[1.0] * len(taps),
        seed=seed,
        draft_length=draft_length,
    )
    save(drafter, out, tokenizer=model_path / "tokenizer.json")


def draft_costs(drafter: Path, policy: Path, *, kind: str, max_draft_length: int) -> list[float]:
    """Return the time of 0, 1, ... drafts relative to a pass of the policy, estimated from the weights read. EAGLE-3
    makes one pass per draft, DFlash one for all drafts."""
    share = _weights_read(drafter) / _weights_read(policy)
    return [share * (min(k, 1) if kind == "dflash" else k) for k in range(max_draft_length + 1)]


def _weights_read(checkpoint: Path) -> int:
    """Count the weights that a pass reads: all but the embedding, unless it is tied to the output head."""
    sizes: dict[str, int] = {}
    for file in checkpoint.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            sizes |= {name: math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    tied = "lm_head.weight" not in sizes
    return sum(size for name, size in sizes.items() if tied or not name.endswith("embed_tokens.weight"))


def guess(
    drafter: Drafter, pack: Pack, head_VD: torch.Tensor, num_steps: int, *, overlap_share: float = 0.0
) -> Guesses:
    """Make `num_steps` guesses from every anchor and score them. `head_VD` is the policy's output head."""
    kind = KINDS[drafter.config.speculators_model_type]
    return kind.guess(drafter, pack, head_VD, num_steps, overlap_share=overlap_share)

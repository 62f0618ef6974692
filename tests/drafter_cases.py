"""Small drafters and documents of random content for its tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config

from paceline.drafters.kinds import guess, new_drafter
from paceline.drafters.packing import Document, make_pack

VOCABULARY, HIDDEN, TAPS = 24, 32, (1, 3, 4)
KINDS = ("eagle3", "dflash")


def policy_config(*, hidden_size: int = HIDDEN, num_layers: int = 4, vocab_size: int = VOCABULARY) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        architectures=["Qwen3ForCausalLM"],
    )


def make_head(seed: int = 1) -> torch.Tensor:
    return torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(seed)) / 4


def make_drafter(kind: str = "eagle3", *, seed: int = 0, policy_path: Path = Path("policy")):
    embedding_VD = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(2))
    return new_drafter(
        kind,
        policy_config(),
        taps=TAPS,
        policy_path=policy_path,
        embedding_VD=embedding_VD,
        head_VD=make_head(),
        tap_scale_K=(1.0, 2.0, 3.0),
        seed=seed,
    )


def make_documents(lengths: list[tuple[int, int]], *, seed: int = 0) -> list[Document]:
    """Documents of (prompt, response) lengths."""
    rng = np.random.default_rng(seed)

    def one(num_prompt: int, num_response: int) -> Document:
        size = num_prompt + num_response
        scale = np.array([1, 2, 3], np.float32)[:, None]
        return Document(
            token_ids=rng.integers(0, VOCABULARY, size).astype(np.int32),
            num_prompt_tokens=num_prompt,
            taps=rng.standard_normal((size, 3, HIDDEN), np.float32) * scale,
            last=rng.standard_normal((size, HIDDEN), np.float32) * 3,
        )

    return [one(*pair) for pair in lengths]


@contextmanager
def recorded_logits(drafter: Any) -> Iterator[list[torch.Tensor]]:
    logits: list[torch.Tensor] = []
    handle = drafter.lm_head.register_forward_hook(lambda _module, _inputs, output: logits.append(output.detach()))
    try:
        yield logits
    finally:
        handle.remove()


def guessed_logits(drafter: Any, documents: list[Document], num_steps: int) -> list[torch.Tensor]:
    """By step, of every anchor."""
    with recorded_logits(drafter) as logits:
        guess(drafter, make_pack(documents, torch.device("cpu")), make_head(), num_steps)
    return logits

"""Real vLLM on a policy small enough to start in seconds. One engine per test module: each module has its own fixture."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.config import EngineConfig

END_TOKEN = 1
VOCABULARY = 96


def make_policy(path: Path, *, hidden_size: int = 64, seed: int = 0) -> Path:
    """Write a random Qwen3 checkpoint in float32."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.3,  # uneven enough that a wrong temperature shows in the log-probabilities
        eos_token_id=END_TOKEN,
        bos_token_id=None,
        pad_token_id=None,
    )
    model = Qwen3ForCausalLM(config).float()
    assert model.generation_config is not None
    model.generation_config.eos_token_id = END_TOKEN
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def policy_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def engine_config() -> EngineConfig:
    """float32, so that log-probabilities can be compared with the reference to many digits."""
    return EngineConfig(dtype="float32", max_model_len=256, max_num_seqs=16, kv_cache_gb=0.05)


@pytest.fixture(scope="session")
def one_cpu() -> list[int]:
    """Threads that wait for each other on a busy machine are much slower than one thread."""
    return sorted(os.sched_getaffinity(0))[:1]


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One event loop for a module: an engine lives on the loop that it was started on."""
    with asyncio.Runner() as runner:
        yield runner

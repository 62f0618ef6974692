"""KV scales against the keys and values that transformers itself caches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from contexts import one_rank
from paceline.config import ObjectiveConfig
from paceline.fp8 import kv_scale
from paceline.learner.calibration import choose
from paceline.learner.fsdp import FsdpLearner
from paceline.types import Sample
from random_policy import make_policy


def make_samples(num: int) -> list[Sample]:
    random = np.random.default_rng(0)
    return [
        Sample(
            token_ids=random.integers(2, 90, 5 + 4 * index).astype(np.int32),
            num_prompt_tokens=3,
            logp=np.zeros(2 + 4 * index, np.float32),
            advantage=1.0 if index % 2 else -1.0,
        )
        for index in range(num)
    ]


@pytest.fixture
def policy_path(tmp_path: Path) -> Path:
    return make_policy(tmp_path / "policy")


@pytest.fixture
def learner(policy_path: Path) -> Iterator[FsdpLearner]:
    config = one_rank(microbatch_tokens=64, learning_rate=0.01)
    learner = FsdpLearner(policy_path, config, ObjectiveConfig(), temperature=1.0)
    yield learner
    learner.close()


def cached_amax(model: torch.nn.Module, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """Largest key and value of each layer, from what transformers would keep for decoding."""
    keys: list[list[float]] = []
    values: list[list[float]] = []
    for sample in samples:
        with torch.no_grad():
            cache = model(torch.from_numpy(sample.token_ids.astype(np.int64))[None], use_cache=True).past_key_values
        keys.append([float(layer.keys.abs().max()) for layer in cache.layers])
        values.append([float(layer.values.abs().max()) for layer in cache.layers])
    return np.max(keys, axis=0).tolist(), np.max(values, axis=0).tolist()


def test_scales_are_of_keys_after_norm_and_rotary_embedding(learner: FsdpLearner, policy_path: Path) -> None:
    """Before the rotary embedding keys are of another size, and padding has keys too."""
    samples = make_samples(6)
    learner.calibrate(samples, version=4, share=1)
    scales = learner.kv_scales
    assert scales is not None
    assert scales.version == 4
    model = AutoModelForCausalLM.from_pretrained(policy_path, dtype=torch.float32)
    keys, values = cached_amax(model, samples)
    assert scales.k == pytest.approx([kv_scale(amax, 1.25) for amax in keys], rel=1e-4)
    assert scales.v == pytest.approx([kv_scale(amax, 1.25) for amax in values], rel=1e-4)


def test_listening_changes_nothing_and_ends(learner: FsdpLearner) -> None:
    samples = make_samples(3)
    before = learner.score(samples).logp
    learner.calibrate(samples, version=1, share=1)
    first = learner.kv_scales
    assert all(np.array_equal(a, b) for a, b in zip(before, learner.score(samples).logp, strict=True))
    assert learner.kv_scales is first, "log-probability passes are not listened to"


def test_scales_follow_an_update(learner: FsdpLearner) -> None:
    """Scales of the old policy for the new one are the fault that this part is about."""
    samples = make_samples(4)
    learner.calibrate(samples, version=0, share=1)
    old = learner.kv_scales
    learner.apply(samples)
    metrics = learner.calibrate(samples, version=1, share=1)
    assert learner.kv_scales is not None and old is not None
    assert learner.kv_scales.k != old.k
    assert metrics["precision/saturated_share"] <= 0.01
    assert metrics["kv/scale_k/1"] == learner.kv_scales.k[1]


def test_saturation_is_that_of_the_scales_in_use(learner: FsdpLearner) -> None:
    samples = make_samples(4)
    assert "precision/saturated_share" not in learner.calibrate(samples, version=0, share=1), "none were in use yet"
    assert learner.kv_scales is not None
    small = tuple(scale / 1e6 for scale in learner.kv_scales.k)
    learner.kv_scales = type(learner.kv_scales)(version=0, q=small, k=small, v=learner.kv_scales.v)
    assert learner.calibrate(samples, version=1, share=1)["precision/saturated_share"] == pytest.approx(0.5, abs=0.01)
    assert learner.calibrate(samples, version=2, share=1)["precision/saturated_share"] == 0.0


def test_prompts_without_a_response_can_be_calibrated_on(learner: FsdpLearner) -> None:
    sample = make_samples(1)[0]
    prompt = Sample(token_ids=sample.token_ids, num_prompt_tokens=5, logp=np.empty(0, np.float32), advantage=0.0)
    assert learner.calibrate([prompt], version=0, share=1)["precision/qk_norm"] == 1.0


def test_policy_without_qk_norm_is_known_and_its_outliers_are_measured(tmp_path: Path) -> None:
    """One huge channel makes the scale so large that the other keys underflow; the check must see that, not only the
    name."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
    )
    shares = []
    for outlier in (1.0, 1e7):
        model = LlamaForCausalLM(shape).float()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name.endswith("k_proj.weight"):
                    weight[[31, 63]] *= outlier
        path = tmp_path / f"{outlier}"
        model.save_pretrained(path)
        learner = FsdpLearner(path, one_rank(), ObjectiveConfig(), temperature=1.0)
        metrics = learner.calibrate(make_samples(2), version=0, share=1)
        learner.close()
        assert metrics["precision/qk_norm"] == 0.0
        shares.append(metrics["precision/underflow_share"])
    assert shares[0] < 0.01
    assert shares[1] > 0.4, "nearly all keys, which are half of what is cached"


def test_chosen_samples_keep_to_the_budget_and_differ_between_versions() -> None:
    lengths = [100] * 100
    first, second = (choose(lengths, 0.1, np.random.default_rng((0, version))) for version in (1, 2))
    assert (len(first), len(set(first))) == (10, 10)
    assert set(first) != set(second)
    assert len(choose([5000], 0.1, np.random.default_rng(0))) == 1
    assert len(choose([16] * 16, 0.1, np.random.default_rng(0))) == 16, "a tenth of a few prompts would say nothing"
    assert len(choose([100] * 1000, 0.1, np.random.default_rng(0))) == 40


def test_calibration_sees_long_responses_as_often_as_short_ones() -> None:
    """Their keys are the largest; filling the last tokens of the budget with whatever fits would pass over them."""
    lengths = [50] * 90 + [1000] * 10
    chosen = [lengths[i] for version in range(2000) for i in choose(lengths, 0.15, np.random.default_rng((0, version)))]
    assert np.mean(chosen) > 0.75 * np.mean(lengths)

"""The learner on a tiny random policy against plain transformers."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from contexts import one_rank
from paceline.config import CorrectionConfig, LearnerConfig, ObjectiveConfig
from paceline.files import verify_checksums
from paceline.learner.batch import plan_passes
from paceline.learner.correction import correct
from paceline.learner.fsdp import FsdpLearner
from paceline.types import Sample

VOCABULARY = 40


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("policy") / "tied", tied=True)


def make_model(path: Path, *, tied: bool) -> Path:
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=tied,
        max_position_embeddings=128,
        initializer_range=0.3,  # the default gives an almost uniform policy, on which mistakes do not show
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    return path


Make = Callable[..., FsdpLearner]


@pytest.fixture
def make(model_path: Path) -> Iterator[Make]:
    """Makes learners, one alive at a time, since a process has one process group."""
    alive: list[FsdpLearner] = []

    def make_one(
        *,
        path: Path = model_path,
        temperature: float = 1.0,
        objective: ObjectiveConfig | None = None,
        config: LearnerConfig | None = None,
    ) -> FsdpLearner:
        for learner in alive:
            learner.close()
        alive.append(
            FsdpLearner(path, config or one_rank(), objective or ObjectiveConfig(), temperature=temperature, seed=3)
        )
        return alive[-1]

    yield make_one
    for learner in alive:
        learner.close()


def make_samples(num: int, seed: int = 0) -> list[Sample]:
    """Samples of mixed lengths in no order, with behavior log-probabilities somewhere near the policy's."""
    random = np.random.default_rng(seed)
    samples = []
    for _ in range(num):
        num_prompt, num_response = int(random.integers(1, 9)), int(random.integers(1, 25))
        samples.append(
            Sample(
                token_ids=random.integers(0, VOCABULARY, num_prompt + num_response).astype(np.int32),
                num_prompt_tokens=num_prompt,
                logp=random.uniform(-6, -1, num_response).astype(np.float32),
                advantage=float(random.normal()),
            )
        )
    return samples


def on_policy(learner: FsdpLearner, samples: list[Sample]) -> list[Sample]:
    """The samples with the learner's own log-probabilities as behavior: every ratio is 1."""
    return [
        Sample(
            token_ids=sample.token_ids,
            num_prompt_tokens=sample.num_prompt_tokens,
            logp=logp,
            advantage=sample.advantage,
        )
        for sample, logp in zip(samples, learner.score(samples).logp, strict=True)
    ]


def plain_logits(path: Path, sample: Sample, temperature: float) -> torch.Tensor:
    """The readable twin: one sample, one forward pass, logits before each response token."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.from_numpy(sample.token_ids.astype(np.int64))[None]).logits[0]
    return logits[sample.num_prompt_tokens - 1 : -1] / temperature


def tensors(learner: FsdpLearner) -> dict[str, torch.Tensor]:
    return dict(learner.weights(torch.float32))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logp_and_entropy_equal_plain_teacher_forcing(make: Make, model_path: Path, temperature: float) -> None:
    """Padding, sorting, the head on response tokens only and the temperature must not show; nor may the caller's order
    be lost."""
    samples = make_samples(9)
    result = make(temperature=temperature, config=one_rank(microbatch_tokens=70)).score(samples)
    for sample, logp, entropy in zip(samples, result.logp, result.entropy, strict=True):
        distribution = torch.distributions.Categorical(logits=plain_logits(model_path, sample, temperature))
        targets = torch.from_numpy(sample.token_ids[sample.num_prompt_tokens :].astype(np.int64))
        np.testing.assert_allclose(logp, distribution.log_prob(targets), atol=1e-5)
        np.testing.assert_allclose(entropy, distribution.entropy(), atol=1e-5)


def test_chunks_over_a_large_vocabulary_change_neither_scores_nor_gradients(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = make_samples(6)
    learner = make()
    whole, metrics, weights = learner.score(samples).logp, learner.apply(samples), tensors(learner)
    monkeypatch.setattr("paceline.learner.scoring._CHUNK_ELEMENTS", 7 * VOCABULARY)
    learner = make()
    for one, other in zip(whole, learner.score(samples).logp, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    assert learner.apply(samples)["policy/grad_norm"] == pytest.approx(metrics["policy/grad_norm"], rel=1e-5)
    assert_close(tensors(learner), weights)


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], atol: float = 1e-5) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], atol=atol, rtol=0)


def test_taps_are_the_residual_stream_after_the_layer_before(make: Make, model_path: Path) -> None:
    """Tap 3 of 3 layers must be before the final norm, which transformers' own list leaves out."""
    samples = make_samples(4)
    states = make().score(samples, taps=(1, 2, 3)).states
    embedded = make().score(samples, taps=(0, 2)).states
    assert sorted(states) == [0, 1, 2, 3]
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    for i, sample in enumerate(samples):
        with torch.no_grad():
            output = model(torch.from_numpy(sample.token_ids.astype(np.int64))[None], output_hidden_states=True)
        np.testing.assert_allclose(embedded[i].taps[:, 0], output.hidden_states[0][0], atol=1e-6)
        np.testing.assert_array_equal(embedded[i].taps[:, 1], states[i].taps[:, 1])
        np.testing.assert_allclose(states[i].taps[:, 0], output.hidden_states[1][0], atol=1e-4)
        np.testing.assert_allclose(states[i].taps[:, 1], output.hidden_states[2][0], atol=1e-4)
        np.testing.assert_allclose(states[i].last, output.hidden_states[3][0], atol=1e-4)
        with torch.no_grad():
            normed = model.model.norm(torch.from_numpy(states[i].taps[:, 2]))
        np.testing.assert_allclose(normed, states[i].last, atol=1e-4)


@pytest.mark.parametrize("tap", [-1, 4])
def test_a_tap_outside_the_policy_is_refused(make: Make, tap: int) -> None:
    with pytest.raises(ValueError, match="taps: got"):
        make().score(make_samples(1), taps=(tap,))


@pytest.mark.parametrize("loss", ["token", "sequence"])
def test_microbatches_have_the_gradient_of_one_batch(make: Make, loss: str) -> None:
    """Averaging over micro-batches instead of over the minibatch would weigh the samples of small ones more."""
    samples = make_samples(10)
    objective = ObjectiveConfig(loss=loss)  # pyright: ignore[reportArgumentType]
    gradients = []
    for budget in (1, 60, 100_000):
        learner = make(objective=objective, config=one_rank(microbatch_tokens=budget))
        learner._accumulate(samples)
        gradients.append({name: p.grad.full_tensor() for name, p in learner._scorer.named_parameters()})  # pyright: ignore
    for other in gradients[1:]:
        assert_close(gradients[0], other)
    assert max(tensor.abs().max() for tensor in gradients[0].values()) > 1e-2, "the comparison saw no gradient"


def test_the_gradient_is_that_of_the_written_objective(make: Make, model_path: Path) -> None:
    """The readable twin differentiates -sum(min(...)) / tokens through plain transformers."""
    samples = make_samples(5)
    learner = make(objective=ObjectiveConfig(clip_high=0.28), temperature=0.8)
    learner._accumulate(samples)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    total = torch.zeros(())
    for sample in samples:
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))
        logp = (model(ids[None]).logits[0, sample.num_prompt_tokens - 1 : -1] / 0.8).log_softmax(-1)
        ratio = (logp.gather(1, ids[sample.num_prompt_tokens :, None])[:, 0] - torch.from_numpy(sample.logp)).exp()
        total = total - torch.minimum(ratio * sample.advantage, ratio.clamp(0.8, 1.28) * sample.advantage).sum()
    (total / sum(sample.num_response_tokens for sample in samples)).backward()
    expected = {f"policy.{name}": p.grad for name, p in model.named_parameters()}
    actual = {name: p.grad.full_tensor() for name, p in learner._scorer.named_parameters()}  # pyright: ignore
    for name, tensor in actual.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=1e-4)


def test_an_update_raises_good_tokens_and_lowers_bad_ones(make: Make) -> None:
    learner = make(config=one_rank(learning_rate=1e-3))
    samples = on_policy(learner, make_samples(6))
    metrics = learner.apply(samples)
    gain = [
        float((after - sample.logp).sum()) for sample, after in zip(samples, learner.score(samples).logp, strict=True)
    ]
    assert sum(sample.advantage * change for sample, change in zip(samples, gain, strict=True)) > 0.1
    assert metrics["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["policy/k3"] == pytest.approx(0.0, abs=1e-5)
    assert metrics["policy/clip_share"] == 0
    assert metrics["policy/skipped_steps"] == 0
    weighted = sum(sample.advantage * sample.num_response_tokens for sample in samples)
    assert metrics["policy/loss"] == pytest.approx(-weighted / metrics["policy/num_tokens"], rel=1e-4)


def test_scores_taken_before_an_update_do_not_freeze_the_policy(make: Make) -> None:
    """FSDP2 keeps parameters gathered after a forward pass without backward: a later pass must not read such a stale
    copy."""
    samples = make_samples(4)
    learner = make(config=one_rank(learning_rate=1e-2))
    learner.apply(samples)
    expected = learner.score(samples).logp
    learner = make(config=one_rank(learning_rate=1e-2))
    learner.score(samples)
    learner.apply(samples)
    for one, other in zip(expected, learner.score(samples).logp, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_runs_from_one_seed_agree_bit_for_bit(make: Make, dtype: str) -> None:
    config = one_rank(dtype=dtype, minibatches=3, microbatch_tokens=60, learning_rate=1e-3)  # pyright: ignore[reportArgumentType]
    runs = []
    for _ in range(2):
        learner = make(config=config)
        for step in range(2):
            learner.apply(make_samples(10, seed=step))
        runs.append(tensors(learner))
    for name, tensor in runs[0].items():
        assert torch.equal(tensor, runs[1][name]), name


@pytest.mark.parametrize("num_updates", [0, 2])
def test_a_learner_goes_on_from_its_saved_state_bit_for_bit(make: Make, tmp_path: Path, num_updates: int) -> None:
    """Guards against moments, step counts (bias correction, warmup) or minibatch counters that start anew."""
    config = one_rank(minibatches=3, microbatch_tokens=60, learning_rate=1e-3, warmup_steps=20)
    learner = make(config=config)
    for step in range(num_updates):
        learner.apply(make_samples(10, seed=step))
    learner.calibrate(make_samples(4), version=2)
    scales, before = learner.kv_scales, tensors(learner)
    learner.save_state(tmp_path / "state")
    assert {file.suffix for file in (tmp_path / "state").iterdir()} == {".safetensors", ".json"}
    learner.apply(make_samples(10, seed=9))
    expected = tensors(learner)

    learner = make(config=config)
    learner.apply(make_samples(3, seed=7))  # what it knew must not shine through
    learner.load_state(tmp_path / "state")
    assert learner.kv_scales == scales
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors(learner).items())
    learner.apply(make_samples(10, seed=9))
    for name, tensor in tensors(learner).items():
        assert torch.equal(tensor, expected[name]), name


def test_bfloat16_computes_roughly_and_keeps_float32_masters(make: Make) -> None:
    samples = make_samples(5)
    exact = make().score(samples).logp
    learner = make(config=one_rank(dtype="bfloat16"))
    before = tensors(learner)
    error = np.concatenate([np.abs(a - b) for a, b in zip(exact, learner.score(samples).logp, strict=True)])
    assert 1e-4 < error.max() < 0.5
    learner.apply(samples)
    name = "model.layers.0.mlp.up_proj.weight"
    after = tensors(learner)[name]
    assert not torch.equal(after, before[name])
    assert not torch.equal(after, after.bfloat16().float()), "a step of 1e-4 is lost in bfloat16 masters"


def test_warmup_clipping_and_minibatches_are_applied(make: Make) -> None:
    learner = make(config=one_rank(learning_rate=1e-3, warmup_steps=4, minibatches=2))
    metrics = [learner.apply(make_samples(8)) for _ in range(3)]
    assert [m["policy/learning_rate"] for m in metrics] == pytest.approx([5e-4, 1e-3, 1e-3])
    assert [m["policy/optimizer_steps"] for m in metrics] == [2, 2, 2]
    learner = make(config=one_rank(max_grad_norm=1e-3))
    learner._accumulate(make_samples(8))
    unclipped = {name: p.grad.full_tensor().clone() for name, p in learner._scorer.named_parameters()}  # pyright: ignore
    norm = torch.stack([tensor.norm() for tensor in unclipped.values()]).norm().item()
    assert norm > 1e-2
    assert learner._step() == pytest.approx(norm, rel=1e-4)


def test_a_step_without_a_finite_gradient_is_skipped_and_counted(make: Make) -> None:
    samples = make_samples(3)
    poison = Sample(
        token_ids=samples[0].token_ids,
        num_prompt_tokens=samples[0].num_prompt_tokens,
        logp=samples[0].logp,
        advantage=float("nan"),
    )
    learner = make()
    before = tensors(learner)
    assert learner.apply([*samples, poison])["policy/skipped_steps"] == 1
    assert_close(before, tensors(learner), atol=0)
    assert learner.apply(samples)["policy/skipped_steps"] == 0, "the poisoned gradient must be gone"


def test_no_samples_is_no_step(make: Make) -> None:
    """A batch in which every group was uniform and dropped."""
    learner = make()
    before = tensors(learner)
    metrics = learner.apply([])
    assert metrics["policy/optimizer_steps"] == 0
    assert not any(np.isnan(value) for value in metrics.values())
    assert learner.score([]).logp == ()
    assert_close(before, tensors(learner), atol=0)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_carry_the_names_of_the_checkpoint_and_are_copies(make: Make, tmp_path: Path, tied: bool) -> None:
    """A tied output head sent twice, or a master weight sent by reference, would corrupt an engine silently."""
    path = make_model(tmp_path / "policy", tied=tied)
    stored = load_file(path / "model.safetensors")
    assert ("lm_head.weight" in stored) is not tied
    learner = make(path=path)
    sent = tensors(learner)
    assert_close(sent, stored, atol=0)
    assert {tensor.dtype for _, tensor in learner.weights(torch.bfloat16)} == {torch.bfloat16}
    learner.apply(make_samples(3))
    assert_close(sent, stored, atol=0)


def test_save_round_trip_with_checksums(make: Make, tmp_path: Path) -> None:
    learner = make(config=one_rank(learning_rate=1e-2))
    samples = make_samples(4)
    learner.apply(samples)
    saved = tmp_path / "saved"
    learner.save(saved)
    expected, scores = tensors(learner), learner.score(samples).logp
    checksums = {name: digest for digest, name in map(str.split, (saved / "SHA256SUMS").read_text().splitlines())}
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= checksums.keys()
    for name, digest in checksums.items():
        assert hashlib.sha256((saved / name).read_bytes()).hexdigest() == digest
    assert verify_checksums(saved)
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"], "nothing half-written stays behind"
    again = make(path=saved)
    assert_close(tensors(again), expected, atol=0)
    for one, other in zip(scores, again.score(samples).logp, strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(ValueError, match="exists"):
        again.save(saved)


def test_correction_takes_the_ratio_against_the_learner_and_weighs_the_tokens(make: Make) -> None:
    """Decoupled: an engine far off must not clip what nobody moved, and a token of weight 0 teaches nothing."""
    samples = make_samples(6)
    scores = make().score(samples).logp
    far = [
        replace(sample, logp=logp - 3) for sample, logp in zip(samples, scores, strict=True)
    ]  # ratio e^3 against the engine
    learner = make()
    assert learner.apply(far)["policy/ratio_mean"] == pytest.approx(np.exp(3), rel=1e-3)
    learner, own = make(), [replace(sample, old_logp=logp) for sample, logp in zip(far, scores, strict=True)]
    metrics, whole = learner.apply(own), tensors(learner)
    assert metrics["policy/ratio_mean"] == pytest.approx(1, abs=1e-4)
    assert metrics["policy/clip_share"] == 0
    kept = [replace(sample, weight=np.full(len(sample.logp), i % 2, np.float32)) for i, sample in enumerate(own)]
    learner = make(objective=ObjectiveConfig(loss="sequence"))
    learner.apply(kept)
    half = make(objective=ObjectiveConfig(loss="sequence"))
    half.apply(own[1::2])
    assert_close(
        tensors(learner), tensors(half), atol=1e-6
    )  # Adam's first step does not see the normalizer, which counts all
    assert any((whole[name] - value).abs().max() > 1e-7 for name, value in tensors(learner).items())


def near_policy(learner: FsdpLearner, samples: list[Sample]) -> list[Sample]:
    """The samples as if an engine had drawn them that differs from the learner here and there."""
    random = np.random.default_rng(5)
    return [
        replace(sample, logp=sample.logp + random.normal(0, 0.5, len(sample.logp)).astype(np.float32))
        for sample in on_policy(learner, samples)
    ]


CORRECTIONS = ("none", "token-tis", "sequence-tis", "token-mis", "sequence-mis", "geometric-mis")


@pytest.mark.parametrize("kind", CORRECTIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_the_scoring_pass_make_the_same_policy_as_a_second_pass(make: Make, kind: str, dtype: str) -> None:
    """Else the run would learn otherwise, and a learner that is made again from its updates would be another."""
    correction = CorrectionConfig.model_validate({"kind": kind})
    config = one_rank(microbatch_tokens=70, learning_rate=1e-3, dtype=dtype)
    samples = near_policy(make(config=config), make_samples(9))
    results = []
    for ahead in (correction, None):
        learner, metrics = make(config=config), []
        for step in range(2):
            part = samples[step::2]
            scores = learner.score(part, taps=(0, 2), tapped=(1,), correction=ahead)
            learner.score(part[:1])  # the floor is measured in between
            metrics.append(learner.apply(correct(part, scores.logp, correction), scores.pending))
        results.append((tensors(learner), metrics))
    (one, reusing), (other, repeating) = results
    assert_close(one, other, atol=0)
    assert [step.pop("policy/gradients_reused") for step in (*reusing, *repeating)] == [1, 1, 0, 0]
    assert reusing == repeating


def test_pending_gradients_leave_no_trace_in_an_update_without_them(make: Make, tmp_path: Path) -> None:
    """The guard changed the correction, the batch was skipped, another was scored since, the state was replaced."""
    expected, actual = CorrectionConfig(kind="token-tis"), CorrectionConfig(kind="token-mis", low=0.9, high=1.1)
    samples = near_policy(make(), make_samples(8))
    update = correct(samples, make().score(samples).logp, actual)
    learner = make()
    learner.save_state(tmp_path / "state")
    fresh, plain = learner.apply(update), tensors(learner)

    def discard(learner: FsdpLearner) -> None:
        learner.discard()
        assert all(parameter.grad is None for parameter in learner._scorer.parameters())

    def score_others(learner: FsdpLearner) -> None:
        learner.score(samples[:-1], correction=expected)

    def load(learner: FsdpLearner) -> None:
        learner.load_state(tmp_path / "state")

    for between in (None, discard, score_others, load):
        learner = make()
        pending = learner.score(samples, correction=expected).pending
        assert pending is not None and pending.correction == expected
        if between is not None:
            between(learner)
        found = learner.apply(update, None if between is None else pending)
        assert found == fresh and found["policy/gradients_reused"] == 0
        assert_close(tensors(learner), plain, atol=0)


def test_gradients_come_with_the_scores_only_where_the_update_is_one_step(make: Make) -> None:
    samples = make_samples(6)
    correction = CorrectionConfig()
    learner = make(config=one_rank(minibatches=2))
    assert learner.score(samples, correction=correction).pending is None
    assert learner.apply(samples)["policy/gradients_reused"] == 0
    learner = make()
    assert learner.score(samples).pending is None
    spoilt = [replace(sample, logp=np.full_like(sample.logp, np.nan)) for sample in samples]
    assert learner.score(spoilt, correction=correction).pending is None
    with pytest.raises(ValueError, match="NaN"):
        learner.apply(spoilt)
    assert learner.score([], correction=correction).pending is None
    assert learner.apply([])["policy/optimizer_steps"] == 0


def test_samples_that_cannot_be_scored_are_refused(make: Make) -> None:
    good = make_samples(1)[0]
    learner = make()
    for num_prompt, logp in ((0, np.zeros(len(good.token_ids), np.float32)), (good.num_prompt_tokens, good.logp[1:])):
        sample = Sample(token_ids=good.token_ids, num_prompt_tokens=num_prompt, logp=logp, advantage=0.0)
        with pytest.raises(ValueError, match=r"samples\[0\]"):
            learner.apply([sample])


def test_a_policy_whose_logits_are_more_than_its_head_is_refused(make: Make, tmp_path: Path) -> None:
    """Soft-capped logits would be scored without the cap, and every ratio would be wrong."""
    config = Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        final_logit_softcapping=0.5,
        initializer_range=0.3,
    )
    Gemma2ForCausalLM(config).save_pretrained(tmp_path / "capped")
    with pytest.raises(ValueError, match="output head"):
        make(path=tmp_path / "capped")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_sample_is_in_one_pass_and_ranks_run_equally_many(world_size: int) -> None:
    lengths = [7, 3, 30, 5, 5, 12, 1]
    plan = plan_passes(lengths, budget=15, world_size=world_size)
    assert len({len(passes) for passes in plan}) == 1, "a rank with fewer passes would leave the others waiting"
    assert sorted(i for passes in plan for indices in passes for i in indices) == list(range(len(lengths)))
    for passes in plan:
        for indices in passes:
            assert len(indices) <= 1 or len(indices) * max(lengths[i] for i in indices) <= 15


def padded_tokens(lengths: list[int], passes: Sequence[tuple[int, ...]]) -> int:
    return sum(len(indices) * max(lengths[i] for i in indices) for indices in passes)


def test_a_long_tail_is_not_paid_for_by_the_other_rollouts() -> None:
    """Passes filled up to the budget pad short rollouts to the longest of all: a third of the work is padding."""
    random = np.random.default_rng(0)
    lengths = np.clip(70 + random.lognormal(np.log(100), 0.77, 64), 74, 710).astype(int).tolist()
    (passes,) = plan_passes(lengths, budget=8192, world_size=1)
    filled = [sorted(lengths)[::-1][begin:end] for begin, end in ((0, 11), (11, 38), (38, 64))]
    assert sum(len(part) * part[0] for part in filled) > 1.25 * sum(lengths)
    assert padded_tokens(lengths, passes) < 1.15 * sum(lengths) and len(passes) <= 6


def test_passes_are_cut_where_it_costs_least() -> None:
    """Against every possible cut of a few rows."""
    lengths, budget = [40, 39, 20, 19, 6, 5, 5, 1], 80
    (passes,) = plan_passes(lengths, budget=budget, world_size=1)
    costs = []
    for chosen in range(2 ** (len(lengths) - 1)):
        bounds = [0, *(i for i in range(1, len(lengths)) if chosen >> (i - 1) & 1), len(lengths)]
        cut = [tuple(range(begin, end)) for begin, end in pairwise(bounds)]
        if all(len(part) == 1 or len(part) * lengths[part[0]] <= budget for part in cut):
            costs.append(padded_tokens(lengths, cut) + len(cut) * budget / 16)
    assert padded_tokens(lengths, passes) + len(passes) * budget / 16 == min(costs)

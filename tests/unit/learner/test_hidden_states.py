"""What the learner hands over to drafter training: no second pass, no bias by length, and no way back into the
policy."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import Qwen3Config

from contexts import one_rank
from paceline.config import BufferConfig, ObjectiveConfig
from paceline.drafters.buffer import Buffer, document_bytes
from paceline.drafters.kinds import new_drafter
from paceline.drafters.trainer import DrafterTrainer, Schedule
from paceline.learner.fsdp import FsdpLearner
from paceline.learner.hidden_states import HiddenStateTap, HiddenStateWriter, HiddenStateWriterSettings, choose
from paceline.types import Sample
from random_policy import VOCABULARY, make_policy

HIDDEN, TAPS = 64, (0, 1, 2)
CONFIG = one_rank(learning_rate=1e-3, microbatch_tokens=64)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy") / "policy", hidden_size=HIDDEN)


Make = Callable[[], FsdpLearner]


@pytest.fixture
def make(model_path: Path) -> Iterator[Make]:
    """Makes learners, one alive at a time, since a process has one process group."""
    alive: list[FsdpLearner] = []

    def make_one() -> FsdpLearner:
        for learner in alive:
            learner.close()
        alive.append(FsdpLearner(model_path, CONFIG, ObjectiveConfig(), temperature=1.0, seed=3))
        return alive[-1]

    yield make_one
    for learner in alive:
        learner.close()


def make_samples(num: int, seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(num):
        num_prompt, num_response = int(rng.integers(1, 9)), int(rng.integers(3, 40))
        samples.append(
            Sample(
                token_ids=rng.integers(0, VOCABULARY, num_prompt + num_response).astype(np.int32),
                num_prompt_tokens=num_prompt,
                logp=rng.uniform(-6, -1, num_response).astype(np.float32),
                advantage=float(rng.normal()),
            )
        )
    return samples


def fingerprint(learner: FsdpLearner) -> str:
    digest = hashlib.sha256()
    for name, tensor in learner.weights(torch.float32):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def make_trainer(learner: FsdpLearner, model_path: Path) -> DrafterTrainer:
    embedding_VD, head_VD = learner.embedding_and_head()
    drafter = new_drafter(
        "eagle3",
        Qwen3Config.from_pretrained(model_path),
        taps=TAPS,
        policy_path=model_path,
        embedding_VD=embedding_VD,
        head_VD=head_VD,
        tap_scale_K=(1.0, 1.0, 1.0),
        seed=0,
    )
    return DrafterTrainer(
        drafter, head_VD, Schedule(num_steps=None, tokens_per_step=100, warmup_steps=1, autocast=False)
    )


def run(learner: FsdpLearner, model_path: Path, directory: Path, trainer: DrafterTrainer | None) -> str:
    """Three RL steps, with or without drafter training on what each of them hands over."""
    tap = HiddenStateTap(learner, TAPS)
    buffer = Buffer(directory, BufferConfig(heldout_share=0.01), writer="rank0")
    for step in range(3):
        samples = make_samples(8, seed=step)
        if trainer is None:
            learner.score(samples)
        else:
            _, documents = tap.score(samples, range(0, 8, 2))
            buffer.put(documents, step)
            trainer.set_head(learner.embedding_and_head()[1])
            trainer.submit(buffer.draw(10_000, np.random.default_rng(step)))
            trainer.run(lambda: False)
        learner.apply(samples)
    return fingerprint(learner)


def test_drafter_training_leaves_no_trace_in_the_policy(make: Make, model_path: Path, tmp_path: Path) -> None:
    """Policy tensors hash the same with and without it, after updates that would carry any gradient that leaked."""
    untouched = run(make(), model_path, tmp_path / "off", None)
    learner = make()
    trainer = make_trainer(learner, model_path)
    before = trainer.drafter.lm_head.weight.detach().clone()
    assert run(learner, model_path, tmp_path / "on", trainer) == untouched
    assert trainer.num_steps >= 3 and not torch.equal(trainer.drafter.lm_head.weight, before), "nothing was trained"


def test_the_hash_sees_a_drafter_that_shares_a_weight_with_the_policy(
    make: Make, model_path: Path, tmp_path: Path
) -> None:
    """The planted fault: an output head that is the policy's own memory instead of a copy."""
    untouched = run(make(), model_path, tmp_path / "off", None)
    learner = make()
    trainer = make_trainer(learner, model_path)
    policy = dict(learner._scorer.policy.named_parameters())
    trainer.drafter.lm_head.weight.data = policy["model.embed_tokens.weight"].to_local().detach()  # pyright: ignore
    assert run(learner, model_path, tmp_path / "on", trainer) != untouched


def test_handing_over_adds_no_forward_pass_and_changes_no_score(make: Make) -> None:
    samples = make_samples(10)
    learner = make()
    counts = []
    results = []
    for chosen in ((), (1, 4, 7), range(10)):
        num_passes = 0

        def count(_module: nn.Module, _inputs: object) -> None:
            nonlocal num_passes
            num_passes += 1

        handle = learner._layers[0].register_forward_pre_hook(count)
        result, documents = HiddenStateTap(learner, TAPS).score(samples, chosen)
        handle.remove()
        counts.append(num_passes)
        results.append(result)
        assert [document.token_ids.tobytes() for document in documents] == [
            samples[i].token_ids.tobytes() for i in chosen
        ]
    assert counts[0] == counts[1] == counts[2] > 1
    for result in results[1:]:
        for one, other in zip(result.logp, results[0].logp, strict=True):
            np.testing.assert_array_equal(one, other)
    for i, state in results[1].states.items():
        np.testing.assert_array_equal(state.taps, results[2].states[i].taps)
        np.testing.assert_array_equal(state.last, results[2].states[i].last)


def test_what_was_handed_over_outlives_an_update(make: Make) -> None:
    """States that are views of the policy's activations, or of its weights, would change under the trainer."""
    samples = make_samples(6)
    learner = make()
    documents = HiddenStateTap(learner, TAPS).all_documents(samples)
    document = documents[0]
    embedding_VD, head_VD = learner.embedding_and_head()
    kept = [array.copy() for array in (document.taps, document.last, embedding_VD.numpy(), head_VD.numpy())]
    learner.apply(samples)
    HiddenStateTap(learner, TAPS).all_documents(make_samples(6, seed=5))
    for array, copy in zip((document.taps, document.last, embedding_VD.numpy(), head_VD.numpy()), kept, strict=True):
        np.testing.assert_array_equal(array, copy)
    for array in [array for document in documents for array in (document.taps, document.last)]:
        assert isinstance(array.base, torch.Tensor)
        assert array.base.untyped_storage().nbytes() == array.nbytes, "it holds a whole pass in memory"
    assert not torch.equal(learner.embedding_and_head()[0], embedding_VD)


def test_documents_hold_what_the_policy_thinks(make: Make) -> None:
    """The head over the last hidden states is the policy's distribution: its log-probabilities must come out."""
    samples = make_samples(4)
    learner = make()
    result, documents = HiddenStateTap(learner, TAPS).score(samples, range(4))
    embedding_VD, head_VD = learner.embedding_and_head()
    for sample, document, logp in zip(samples, documents, result.logp, strict=True):
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))
        scores_TV = (torch.from_numpy(document.last) @ head_VD.T).log_softmax(-1)[sample.num_prompt_tokens - 1 : -1]
        np.testing.assert_allclose(scores_TV.gather(1, ids[sample.num_prompt_tokens :, None])[:, 0], logp, atol=1e-4)
        np.testing.assert_allclose(document.taps[:, 0], embedding_VD[ids], atol=1e-6)


class OnGpu(torch.Tensor):
    """A tensor that numpy cannot see, as those on a GPU."""

    def numpy(self, *, force: bool = False) -> np.ndarray:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    def cpu(self, memory_format: torch.memory_format = torch.preserve_format) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def test_head_of_a_learner_on_a_gpu_is_handed_over(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy cannot see a GPU's memory: without a copy on the host the first step with drafter training would end the
    run."""
    learner = make()
    embedding_VD, head_VD = learner.embedding_and_head()
    monkeypatch.setattr(learner, "embedding_and_head", lambda: (embedding_VD, head_VD.as_subclass(OnGpu)))
    settings = HiddenStateWriterSettings(directory=tmp_path, taps=TAPS, buffer=BufferConfig())
    HiddenStateWriter(learner, settings, rank=0, seed=0).score(make_samples(4))
    found = Buffer(tmp_path, BufferConfig()).head()
    assert found is not None
    np.testing.assert_array_equal(found[1], head_VD.numpy())


def chosen_of(samples: list[Sample], seed: int, *, share: float = 1.0, budget_bytes: float = 1e12) -> list[int]:
    return choose(samples, num_taps=3, hidden_size=HIDDEN, share=share, budget_bytes=budget_bytes, seed=(seed, 0))


def test_the_choice_keeps_share_and_budget_and_differs_from_step_to_step() -> None:
    samples = make_samples(40)
    assert chosen_of(samples, 0) == list(range(40))
    half = chosen_of(samples, 0, share=0.5)
    assert len(half) == 20 and half == chosen_of(samples, 0, share=0.5), "the same on every rank"
    assert half != chosen_of(samples, 1, share=0.5)
    for seed in range(10):
        chosen = chosen_of(samples, seed, budget_bytes=200_000)
        assert 5 < len(chosen) < 40
        assert sum(document_bytes(len(samples[i].token_ids), 3, HIDDEN) for i in chosen) <= 200_000
    assert chosen_of(samples, 0, budget_bytes=10) == []


def test_a_tight_budget_does_not_leave_out_the_long_responses() -> None:
    """Filling the last bytes with whatever fits would choose short ones: the mean length must stay that of the
    batch."""
    samples = make_samples(60)
    mean = np.mean([len(sample.token_ids) for sample in samples])
    budget_bytes = 0.25 * sum(document_bytes(len(sample.token_ids), 3, HIDDEN) for sample in samples)
    lengths = [
        len(samples[i].token_ids) for seed in range(300) for i in chosen_of(samples, seed, budget_bytes=budget_bytes)
    ]
    assert np.mean(lengths) == pytest.approx(mean, rel=0.05)

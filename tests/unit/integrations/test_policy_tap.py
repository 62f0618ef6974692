"""Hidden states taken from another trainer's passes: the policy's own, of each rollout once, and at no cost to it."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from paceline.config import BufferConfig
from paceline.drafters.buffer import document_bytes
from paceline.integrations.policy_tap import PolicyTap
from paceline.learner.scoring import record_taps
from random_policy import VOCABULARY, make_policy

TAPS, HIDDEN, TEMPERATURE = (0, 1, 2), 64, 0.8
LENGTHS = [(5, 7), (2, 12), (9, 3)]
ALL = BufferConfig()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy"), hidden_size=HIDDEN)


@pytest.fixture
def policy(path: Path) -> Any:
    """With a forward pass as TRL patches it in: labels in, log-probabilities of the next tokens out, no logits."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.scale = 1.0

    def forward(self: Any, *, input_ids: Any, attention_mask: Any, labels: Any, fused_lm_head: bool = True) -> Any:
        outputs = self.base_model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        logits = self.lm_head(outputs.last_hidden_state[:, :-1]) * self.scale / TEMPERATURE
        next_ids = labels[:, 1:]
        logp = logits.log_softmax(-1).gather(-1, next_ids.clamp(min=0)[..., None])[..., 0]
        return types.SimpleNamespace(log_probs=logp.masked_fill(next_ids == -100, 0.0))

    model.forward = types.MethodType(forward, model)
    return model.train()


def make_rollouts(seed: int = 0) -> list[tuple[np.ndarray, int]]:
    rng = np.random.default_rng(seed)
    return [(rng.integers(2, VOCABULARY, prompt + response), prompt) for prompt, response in LENGTHS]


def pass_of(rollouts: list[tuple[np.ndarray, int]]) -> dict[str, torch.Tensor]:
    """Inputs as TRL makes them: prompts padded on the left, completions on the right."""
    longest = [max(column) for column in zip(*LENGTHS, strict=True)]
    shape = len(rollouts), sum(longest)
    ids, mask, labels = torch.zeros(shape, dtype=torch.long), torch.zeros(shape), torch.full(shape, -100)
    for row, (token_ids, num_prompt) in enumerate(rollouts):
        begin = longest[0] - num_prompt
        span = slice(begin, begin + len(token_ids))
        ids[row, span], mask[row, span] = torch.from_numpy(token_ids), 1.0
        labels[row, longest[0] : begin + len(token_ids)] = torch.from_numpy(token_ids[num_prompt:])
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


def make_tap(policy: Any, config: BufferConfig = ALL, **changes: Any) -> PolicyTap:
    settings: dict[str, Any] = {"passes_per_step": 1, "with_gradient": False, "temperature": TEMPERATURE} | changes
    return PolicyTap(policy, TAPS, config, **settings)


def score(policy: Any, rollouts: list[tuple[np.ndarray, int]], *, gradient: bool = False) -> torch.Tensor:
    with torch.set_grad_enabled(gradient):
        return policy(**pass_of(rollouts)).log_probs


def reference(policy: Any, token_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same hidden states from a pass over one rollout without padding."""
    with torch.no_grad(), record_taps(policy.base_model.layers, TAPS) as taps:
        last = policy.base_model(input_ids=torch.from_numpy(token_ids)[None], use_cache=False).last_hidden_state
    return torch.stack([taps[tap][0] for tap in TAPS], 1).numpy(), last[0].numpy()


class Adapters(nn.Module):
    """A wrapper as PEFT's: it calls the policy's forward and not the policy, so the policy's own hooks never run."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **kwargs: Any) -> Any:
        return self.inner.forward(**kwargs)


@pytest.mark.parametrize("wrapped", [False, True])
def test_documents_are_the_policys_hidden_states_without_padding(policy: Any, wrapped: bool) -> None:
    """One column off, and a drafter is trained to guess from what it will never see."""
    called = Adapters(policy) if wrapped else policy
    tap, rollouts = make_tap(policy, called=called), make_rollouts()
    score(called, rollouts)
    documents = tap.take()
    assert len(documents) == len(rollouts) and tap.take() == [] and tap.failures.num == 0
    for document, (token_ids, num_prompt) in zip(documents, rollouts, strict=True):
        assert document.token_ids.tolist() == token_ids.tolist() and document.num_prompt_tokens == num_prompt
        taps, last = reference(policy, token_ids)
        np.testing.assert_allclose(document.taps, taps, atol=1e-4)
        np.testing.assert_allclose(document.last, last, atol=1e-4)
        assert document.taps.dtype == document.last.dtype == np.float32


@pytest.mark.parametrize("with_gradient", [False, True])
def test_rollout_is_taken_once_and_only_from_the_passes_that_come_first(policy: Any, with_gradient: bool) -> None:
    """Later passes are further iterations, by a policy that has moved, or a reference's."""
    tap, rollouts = make_tap(policy, with_gradient=with_gradient), make_rollouts()
    score(policy, rollouts, gradient=not with_gradient)
    assert tap.take() == [], "a pass of the other kind"
    policy.eval()
    score(policy, rollouts, gradient=with_gradient)
    assert tap.take() == [], "an evaluation"
    policy.train()
    score(policy, rollouts[:2], gradient=with_gradient)
    score(policy, rollouts, gradient=with_gradient)
    assert [len(document.token_ids) for document in tap.take()] == [len(ids) for ids, _ in rollouts]
    score(policy, make_rollouts(1), gradient=with_gradient)
    assert len(tap.take()) == len(rollouts), "the next step's"
    tap.close()
    score(policy, make_rollouts(2), gradient=with_gradient)
    assert tap.take() == []


def test_rows_that_are_not_scored_are_left_out(policy: Any) -> None:
    """TRL masks truncated completions away, and a completion of one token has nothing to draft."""
    tap, rollouts = make_tap(policy), make_rollouts()
    inputs = pass_of(rollouts)
    inputs["labels"][0] = -100
    ends = inputs["labels"][1].ne(-100).nonzero()[1:]
    inputs["labels"][1, ends] = -100
    inputs["attention_mask"][1, ends] = 0
    with torch.no_grad():
        policy(**inputs)
    assert [document.token_ids.tolist() for document in tap.take()] == [rollouts[2][0].tolist()]


def test_bytes_of_a_step_are_bounded(policy: Any) -> None:
    """Hidden states are thousands of times larger than tokens: without a bound they fill the host's memory."""
    rollouts = make_rollouts()
    room = sum(document_bytes(len(ids), len(TAPS), HIDDEN) for ids, _ in rollouts[:2])
    tap = make_tap(policy, BufferConfig(capacity_mb=4 * 3 * room / 2**20), passes_per_step=3)
    for seed in range(8):
        score(policy, make_rollouts(seed))
        taken = sum(document_bytes(len(doc.token_ids), len(TAPS), HIDDEN) for doc in tap.take())
        assert 0 < taken <= room


def test_policy_whose_head_is_not_all_there_is_refused_without_an_error(
    policy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Planted: logits are scaled after the head. The pass goes on, and nothing is taken from it or from later ones."""
    policy.scale = 3.0
    expected = score(policy, make_rollouts())
    tap = make_tap(policy)
    assert torch.equal(score(policy, make_rollouts()), expected)
    score(policy, make_rollouts(1))
    assert tap.take() == [] and tap.failures.num == 1
    assert "log-probabilities" in caplog.text and "apart from the trainer's" in caplog.text


@pytest.mark.parametrize("checkpointing", [False, True])
def test_pass_and_gradients_are_as_without_hooks(policy: Any, checkpointing: bool) -> None:
    """TRL checkpoints activations by default: layers run again in the backward pass, when nothing must be taken."""
    if checkpointing:
        policy.gradient_checkpointing_enable()
    found = []
    for hooked in (False, True):
        tap = make_tap(policy, with_gradient=True) if hooked else None
        logp = score(policy, make_rollouts(), gradient=True)
        policy.zero_grad()
        logp.sum().backward()
        found.append([logp.detach(), *(weight.grad.clone() for weight in policy.parameters())])
        if tap is not None:
            assert len(tap.take()) == len(LENGTHS) and tap.failures.num == 0
    assert all(torch.equal(plain, hooked) for plain, hooked in zip(*found, strict=True))


def test_pass_that_fails_leaves_no_hooks_behind(policy: Any) -> None:
    tap, rollouts = make_tap(policy), make_rollouts()
    handle = policy.base_model.norm.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        score(policy, rollouts)
    handle.remove()
    score(policy, make_rollouts(1))
    assert len(tap.take()) == len(rollouts)
    assert not any(module._forward_hooks for module in (policy.base_model, *policy.base_model.layers))

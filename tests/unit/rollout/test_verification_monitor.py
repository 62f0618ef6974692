"""The monitor around vLLM's rejection samplers: it changes no token, costs what it may, and finds planted faults."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="wraps the installed vLLM")

from benchmarks.monitor import tokens_to_alarm
from benchmarks.planted import faulty_v1
from paceline.monitor import LEAST_TV, log_factors
from paceline.rollout.internals import verification_monitor
from paceline.rollout.internals.verification_monitor import V1Monitor, V2Monitor, VerificationMonitor

VOCABULARY, MOST = 7, 3
NUM_DRAFTS = [2, 3, 0, 1, 3, 2]
TEMPERATURES = [1.0, 0.5, 1.0, 0.0, 0.7, 1.3]
"""The fourth request is greedy."""


class Batch:
    """Ragged requests with known distributions and given tokens."""

    def __init__(self, seed: int = 0, *, one_hot: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        num = len(NUM_DRAFTS)
        self.logits_BLV = torch.randn(num, MOST + 1, VOCABULARY, generator=generator)
        self.logits_BLV[:, :, 2] = -torch.inf  # truncated
        self.draft_logits_BKV = torch.randn(num, MOST, VOCABULARY, generator=generator)
        self.draft_BK = torch.randint(VOCABULARY, (num, MOST), generator=generator)
        self.draft_BK[4, 1] = -1  # a placeholder, which is rejected
        self.num_emitted = [min(count + 1, 1 + number % 4) for number, count in enumerate(NUM_DRAFTS)]
        self.num_emitted[4] = 2
        self.ids_BL = torch.randint(3, VOCABULARY, (num, MOST + 1), generator=generator)
        self.one_hot = one_hot
        self.temperature_B = torch.tensor(TEMPERATURES)

    def proposal(self, request: int, position: int) -> torch.Tensor:
        heat = TEMPERATURES[request] or 1.0
        return (self.draft_logits_BKV[request, position].double() / heat).softmax(-1)

    def expected(self) -> tuple[np.ndarray, int]:
        """The readable twin: log evidence by test and bet, and the number of examined positions."""
        log_TE, count = np.zeros((2, 3)), 0
        for request, num_drafts in enumerate(NUM_DRAFTS):
            for position in range(min(num_drafts, self.num_emitted[request])):
                draft, token = int(self.draft_BK[request, position]), int(self.ids_BL[request, position])
                if draft < 0 or TEMPERATURES[request] == 0:
                    continue
                count += 1
                p_V = self.logits_BLV[request, position].double().softmax(-1).numpy()
                q_V = np.eye(VOCABULARY)[draft] if self.one_hot else self.proposal(request, position).numpy()
                residual_V = np.maximum(p_V - q_V, 0)
                log_TE[0] += log_factors(np.array([q_V[token] / p_V[token]]))[0]
                if residual_V.sum() >= LEAST_TV:
                    log_TE[1] += log_factors(np.array([residual_V[token] / residual_V.sum() / p_V[token]]))[0]
        return log_TE, count


def on_v1(batch: Batch, **options: bool) -> V1Monitor:
    """A monitor that has examined the batch."""
    ids_BL = batch.ids_BL.clone()
    for row, num in zip(ids_BL, batch.num_emitted, strict=True):
        row[num:] = -1
    monitor = V1Monitor(lambda *_, **__: ids_BL, time_share=1e9, token_s=1e9)
    monitor.draft_are_logits = options.get("logits", False)
    places = [(request, position) for request, num in enumerate(NUM_DRAFTS) for position in range(num)]
    proposal_NV = torch.stack([batch.proposal(*place) for place in places]).float()
    output = monitor(
        torch.stack([batch.draft_BK[place] for place in places]),
        NUM_DRAFTS,
        MOST,
        torch.tensor(NUM_DRAFTS, dtype=torch.int32).cumsum(0),
        None if batch.one_hot else proposal_NV.log() if monitor.draft_are_logits else proposal_NV,
        torch.stack([batch.logits_BLV[place] for place in places]),
        torch.zeros(len(NUM_DRAFTS), 1),
        SimpleNamespace(all_greedy=False, temperature=batch.temperature_B),
    )
    assert output is ids_BL
    return monitor


def on_v2(batch: Batch, *, state_of: Callable[[int], int] = lambda request: 5 - request) -> V2Monitor:
    """The same in V2's layout: a row more per request, and request states in another order."""
    states = torch.tensor([state_of(request) for request in range(len(NUM_DRAFTS))])
    places = [(request, position) for request, num in enumerate(NUM_DRAFTS) for position in range(num + 1)]
    tokens = [torch.tensor(0) if position == 0 else batch.draft_BK[r, position - 1] for r, position in places]
    output = batch.ids_BL, torch.tensor(batch.num_emitted)
    monitor = V2Monitor(lambda *_, **__: output, time_share=1e9, token_s=1e9)
    found = monitor(
        torch.stack([batch.logits_BLV[place] for place in places]),
        None if batch.one_hot else batch.draft_logits_BKV[states.argsort()],
        torch.stack(tokens),
        torch.nn.functional.pad((torch.tensor(NUM_DRAFTS) + 1).cumsum(0), (1, 0)).int(),
        torch.zeros(len(places)),
        states,
        torch.stack([states[request] for request, _ in places]),
        torch.tensor([position for _, position in places]),
        batch.temperature_B[states.argsort()],
        torch.zeros(len(NUM_DRAFTS)),
        MOST,
    )
    assert found is output
    return monitor


@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize("examine", [on_v1, on_v2, lambda batch: on_v1(batch, logits=True)])
def test_evidence_is_that_of_the_readable_twin(examine: Callable[[Batch], VerificationMonitor], one_hot: bool) -> None:
    """A row that is misplaced by one, a greedy request or a position behind a rejection would all break the test."""
    for seed in range(5):
        batch = Batch(seed, one_hot=one_hot)
        monitor = examine(batch)
        log_TE, count = batch.expected()
        figures = monitor.figures()
        assert (figures["monitor/positions"], figures["monitor/failures"]) == (count, 0)
        assert monitor._log_TE is not None
        np.testing.assert_allclose(monitor._log_TE.numpy(), log_TE, rtol=1e-4, atol=1e-6)


def test_logits_that_are_no_numbers_are_counted_and_left_out() -> None:
    batch = Batch()
    batch.logits_BLV[0] = torch.nan
    figures = on_v1(batch).figures()
    assert figures["monitor/not_finite"] > 0 and np.isfinite(figures["monitor/draft_log10"])


def test_failure_is_counted_and_the_tokens_are_returned() -> None:
    tokens = object()
    monitor = V1Monitor(lambda *_, **__: tokens, time_share=1e9, token_s=1e9)
    for _ in range(3):
        assert monitor(None, [1]) is tokens
    assert monitor.figures()["monitor/failures"] == 3


def test_sampler_that_fails_fails_as_without_a_monitor() -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        V1Monitor(broken)(None, [1])


def test_time_is_spent_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock on which an examination takes 1 ms and a step 10 ms, one step in ten is examined."""
    clock_s = 0.0

    class Slow(V1Monitor):
        def _rows(self, *_: Any, **__: Any) -> None:
            nonlocal clock_s
            clock_s += 1e-3
            self._num_examined += 1

    def step(*_: Any) -> None:
        nonlocal clock_s
        clock_s += 10e-3

    monkeypatch.setattr(verification_monitor.time, "perf_counter", lambda: clock_s)
    monitor = Slow(step, time_share=0.01, token_s=1.0)
    for _ in range(1000):
        monitor(None, [1])
    spent_s = monitor.figures()["monitor/seconds"]
    assert 0.9 * 0.01 * clock_s < spent_s < 0.01 * clock_s + 1e-3
    by_token = Slow(step, time_share=1.0, token_s=1e-5)
    for _ in range(1000):
        by_token(None, [1, 1, 1])
    assert by_token.figures()["monitor/seconds"] <= 1e-5 * 3000 + 1e-3


def test_right_sampler_is_not_accused_and_faults_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real sampler of V1's CPU backend; `temperature` and `accept` take longer and are in `benchmarks monitor`."""
    from vllm.v1.sample import rejection_sampler

    mended = "expand_batch_to_tokens"  # is put back: other tests want the fault
    monkeypatch.setattr(rejection_sampler, mended, getattr(rejection_sampler, mended))
    assert tokens_to_alarm(lambda stock: stock, 0, most_tokens=20_000) == float("inf")
    for fault in ("residual", "stale"):
        assert tokens_to_alarm(lambda stock, fault=fault: faulty_v1(stock, fault), 0, most_tokens=20_000) < 20_000


def test_vllm_calls_what_is_wrapped_with_these_arguments() -> None:
    """A moved argument would be a failure in each examination, and evidence about nothing."""
    from vllm.v1.sample import rejection_sampler

    def names(function: Callable[..., Any]) -> list[str]:
        kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return [name for name, one in inspect.signature(function).parameters.items() if one.kind not in kinds]

    stock = inspect.unwrap(rejection_sampler.rejection_sample)
    assert "rejection_sample" in rejection_sampler.RejectionSampler.forward.__code__.co_names
    if not isinstance(stock, VerificationMonitor):
        taken = names(V1Monitor._rows)[1:]
        assert names(stock)[: len(taken)] == taken


def test_asking_for_figures_does_not_change_what_the_monitor_knows_of_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host's call installs the monitor where nobody has; read as probabilities, logits would raise an alarm."""
    from vllm.v1.sample import rejection_sampler

    monkeypatch.setattr(verification_monitor, "_installed", [])
    monkeypatch.setattr(rejection_sampler, "rejection_sample", rejection_sampler.expand_batch_to_tokens)
    first = verification_monitor.install("v1", draft_are_logits=True)
    assert verification_monitor.install("v1") is first
    assert isinstance(first, V1Monitor) and first.draft_are_logits

"""Noise and verification of coupled speculation on the CPU's runner, without an engine."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="samples with vLLM's CPU kernel")

from paceline.certify.lossless import chi_square
from paceline.rollout.internals import coupled_cpu

NUM_ROWS, VOCABULARY = 40_000, 16


@pytest.fixture(autouse=True, scope="module")
def kernels() -> None:
    from vllm.platforms import current_platform

    current_platform.import_kernels()


@pytest.fixture
def batch(monkeypatch: pytest.MonkeyPatch) -> coupled_cpu._SampledBatch:
    fresh = coupled_cpu._SampledBatch()
    monkeypatch.setattr(coupled_cpu, "_batch", fresh)
    return fresh


def generators(*seeds: int) -> dict[int, torch.Generator]:
    return {row: torch.Generator().manual_seed(seed) for row, seed in enumerate(seeds)}


def draws(logits_V: torch.Tensor, row_N: np.ndarray, index_N: np.ndarray, *seeds: int) -> np.ndarray:
    return coupled_cpu.draw(logits_V.expand(len(row_N), -1), generators(*seeds), row_N, index_N).numpy()


def test_draws_along_a_request_have_the_distribution_and_are_independent() -> None:
    """Seeds that make overlapping noise would repeat tokens; by themselves they would look right."""
    p_V = torch.linspace(1, 3, VOCABULARY).softmax(0)
    row_N, index_N = np.zeros(NUM_ROWS, np.int64), np.arange(NUM_ROWS)
    ids_N = draws(p_V.log(), row_N, index_N, 7)
    other_N = draws(p_V.log(), row_N, index_N, 8)
    single, pair = p_V.double().numpy(), np.outer(p_V.double(), p_V.double()).ravel()
    for events_N, q in (
        (ids_N, single),
        (ids_N[1:] * VOCABULARY + ids_N[:-1], pair),
        (ids_N * VOCABULARY + other_N, pair),
    ):
        statistic, degrees = chi_square(np.bincount(events_N, minlength=len(q)), q)
        assert statistic < degrees + 6 * np.sqrt(2 * degrees)


def test_a_draw_depends_on_seed_and_index_only() -> None:
    logits_V = torch.zeros(VOCABULARY)
    alone = [int(draws(logits_V, np.array([0]), np.array([index]), 5)[0]) for index in range(64)]
    among = draws(logits_V, np.repeat([1, 0], 64), np.tile(np.arange(64), 2), 9, 5)
    assert among[:64].tolist() == alone and among[64:].tolist() != alone
    draws(logits_V, np.array([0, 1]), np.array([0, 0]), -1, 2**63 - 1)  # seeds that vLLM accepts


def test_verification_is_that_of_a_loop(batch: coupled_cpu._SampledBatch) -> None:
    """Requests with 0 to 3 drafts, greedy ones and a missing draft among them, against a loop over tokens."""
    from paceline.rollout.internals.rejection_sampler import _sampling_metadata

    rng = np.random.default_rng(0)
    num_drafts = [3, 0, 2, 3, 1, 3]
    temperature_B = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 0.0])
    metadata = _sampling_metadata(temperature_B)
    metadata.all_random, metadata.generators = False, generators(*range(6))
    batch.known_B = np.arange(6) * 5 + 3
    logits_NV = torch.from_numpy(rng.standard_normal((sum(num_drafts), 3), np.float32))
    bonus_B = torch.arange(6)[:, None] % 3
    row_N = np.repeat(np.arange(6), num_drafts)
    place_N = np.concatenate([np.arange(n) for n in num_drafts])
    own_N = coupled_cpu.draw(logits_NV, metadata.generators, row_N, batch.known_B[row_N] + place_N)
    own_N = torch.where(temperature_B[row_N] == 0, logits_NV.argmax(-1), own_N)
    draft_N = own_N.clone()
    draft_N[1], draft_N[6] = (own_N[1] + 1) % 3, -1
    found_BL = coupled_cpu._verify(
        draft_N.int(), num_drafts, 3, torch.tensor(num_drafts).cumsum(0), None, logits_NV, bonus_B, metadata
    )
    expected = []
    for request, count in enumerate(num_drafts):
        begin, emitted = sum(num_drafts[:request]), []
        for place in range(begin, begin + count):
            emitted.append(int(own_N[place]))
            if draft_N[place] != own_N[place]:
                break
        else:
            emitted.append(int(bonus_B[request]))
        expected.append(emitted + [-1] * (4 - len(emitted)))
    assert found_BL.tolist() == expected

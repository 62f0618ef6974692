"""Coupled verification on V2, scheduled asynchronously: tokens do not depend on drafts, chunks or batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from coupled_cases import (
    PENALTIES,
    accepted,
    arena_prompts,
    change_sampling,
    coupled,
    explore,
    of_arena,
    seeded,
    tokens,
)
from driven_engine import V2_CONFIG, DrivenEngine, started
from paceline import assets
from paceline.orchestrator.generate import generate_all
from paceline.types import Rollout, RolloutRequest
from random_policy import make_mtp_policy

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs

REQUESTS = seeded(arena_prompts(6), max_tokens=16)


def sample(driven: DrivenEngine, requests: list[RolloutRequest], *, limit: int | None = None) -> list[Rollout]:
    driven.run(driven.engine.set_draft_limit(limit))
    return driven.run(generate_all(driven.engine, requests))


@pytest.fixture(scope="module")
def eagle() -> Iterator[DrivenEngine]:
    """Prompts are computed in chunks, and the cache is too small for all requests at once."""

    def adjust(args: AsyncEngineArgs) -> None:
        explore(args)
        args.enable_chunked_prefill = True
        args.max_num_batched_tokens = 48

    config = V2_CONFIG.model_copy(update={"max_model_len": 96, "kv_cache_gb": 0.0005})
    yield from started(
        assets.policy("tiny"), coupled(of_arena("eagle3")), async_scheduling=True, config=config, adjust=adjust
    )


def test_drafts_chunks_and_preemption_leave_every_token_as_it_is(eagle: DrivenEngine) -> None:
    """V2 keys noise by position, and verification must key it alike, row by row."""
    (worker,) = eagle.rpc("paceline_sampler")
    assert (worker["runner"], worker["verification"], worker["scheduling"]) == ("v2", "coupled", "asynchronous")
    without, with_drafts = (sample(eagle, REQUESTS, limit=limit) for limit in (0, None))
    assert tokens(with_drafts) == tokens(without)
    num_accepted, num_drafted = accepted(with_drafts)
    assert num_accepted > 0.3 * num_drafted > 0 == accepted(without)[1]
    assert eagle.metrics()["engine/preemptions"] > 0


def test_penalties_are_coupled_too(eagle: DrivenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Penalties at a drafted position count the drafts before it. Not tested: top_p and top_k, because Triton's
    interpreter cannot run vLLM's kernel for them; vLLM refuses logit_bias and min_p with speculation."""
    requests = REQUESTS[:3]
    before = tokens(sample(eagle, requests, limit=0))
    change_sampling(monkeypatch, PENALTIES)
    without, with_drafts = (sample(eagle, requests, limit=limit) for limit in (0, None))
    assert tokens(with_drafts) == tokens(without) != before


def test_dflash_draws_all_drafts_with_the_policys_noise() -> None:
    """Drawn with the noise of other positions, sampled drafts of a drafter that is mostly right would be wrong."""
    speculation = coupled(of_arena("dflash"))
    for engine in started(assets.policy("tiny"), speculation, async_scheduling=True, adjust=explore):
        short = [request for request in REQUESTS if len(request.prompt_ids) + 16 < V2_CONFIG.max_model_len]
        without, with_drafts = (sample(engine, short, limit=limit) for limit in (0, None))
        assert tokens(with_drafts) == tokens(without)
        num_accepted, num_drafted = accepted(with_drafts)
        assert num_accepted > 0.6 * num_drafted > 0


def test_mtp_heads_that_say_what_the_policy_says_are_always_right(tmp_path: Path) -> None:
    """Sampled drafts equal the policy's draws only if both use the same noise."""
    path = make_mtp_policy(tmp_path, step=1)
    heads = {"kind": "vllm", "settings": {"method": "mtp", "draft_sample_method": "probabilistic"}}
    prompts = [request.prompt_ids[:8] for request in REQUESTS[:4]]
    for engine in started(path, coupled(heads, max_draft_length=1), async_scheduling=True):
        without, with_drafts = (sample(engine, seeded(prompts, max_tokens=12), limit=limit) for limit in (0, None))
        assert tokens(with_drafts) == tokens(without)
        num_accepted, num_drafted = accepted(with_drafts)
        assert num_accepted > 0.8 * num_drafted > 0


def test_verification_is_that_of_a_loop() -> None:
    """Rows of requests with 0 to 3 drafts, a missing draft among them."""
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    from paceline.rollout.internals.coupled_v2 import verify

    generator = torch.Generator().manual_seed(0)
    num_drafts = [3, 0, 1, 2, 3]
    begins = torch.tensor([0, *num_drafts]).cumsum(0) + torch.arange(6)
    num_rows = int(begins[-1])
    state_of = torch.tensor([4, 2, 0, 6, 1], dtype=torch.int32)
    request_N = torch.arange(5).repeat_interleave(begins.diff())
    place_N = torch.arange(num_rows) - begins[:-1][request_N]
    logits_NV = 0.3 * torch.randn(num_rows, 4, generator=generator)
    temperature, seed = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0]), torch.arange(7)
    pos = place_N + 10 * request_N
    own_N = gumbel_sample(logits_NV, state_of[request_N], temperature, seed, pos, False, False)
    draft_N = torch.cat([torch.tensor([0]), own_N[:-1]])  # each row's draft is what the row before draws
    draft_N[2], draft_N[begins[3] + 1] = (draft_N[2] + 1) % 4, -1
    found_BL, num_B = verify(
        logits_NV,
        None,
        draft_N,
        begins.int(),
        pos,
        state_of,
        state_of[request_N],
        place_N.int(),
        temperature,
        seed,
        3,
    )
    assert num_B.tolist() == [2, 1, 2, 1, 4]
    for request, count in enumerate(num_B.tolist()):
        first = int(begins[request])
        assert found_BL[request, :count].tolist() == own_N[first : first + count].tolist()

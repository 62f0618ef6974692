"""The product's engine on vLLM's V2 model runner, which GPUs use, under Triton's interpreter.

The interpreter must be on before anything imports Triton, so it is switched on here, and these tests need a process of
their own: `pytest tests/gpu_code`. In a run of all tests they are skipped, with this reason.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks.v2_runner import v2_runner

_INTERPRETED = v2_runner(os.environ, async_scheduling=False)
try:
    _INTERPRETED.__enter__()
    _too_late = None
except RuntimeError as error:
    _too_late = str(error)

from benchmarks.planted import RunningSamplerFault  # noqa: E402
from driven_engine import DrivenEngine, started  # noqa: E402  imports Triton
from paceline.config import SpeculationConfig  # noqa: E402
from paceline.rollout import speculation as engine_speculation  # noqa: E402
from random_policy import make_drafter, make_policy  # noqa: E402

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs

FEW_TOKENS = 16
"""A vocabulary so small that a few hundred tokens tell distributions apart, and an untrained drafter is often right."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    if _too_late and len(here) == len(items):
        raise pytest.UsageError(_too_late)
    for item in here:
        item.add_marker(pytest.mark.timeout(1800))  # interpreted, on a machine that may be busy
        if _too_late:
            item.add_marker(pytest.mark.skip(reason="needs a process of its own: pytest tests/gpu_code"))


def pytest_unconfigure() -> None:
    if not _too_late:
        _INTERPRETED.__exit__(None, None, None)


@pytest.fixture(scope="session")
def policy_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy"), vocabulary=FEW_TOKENS)


@pytest.fixture(scope="session")
def drafter_path(policy_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained EAGLE-3 drafter whose embedding and head are its own, so that a push does not touch the policy."""
    import torch

    from paceline.drafters.checkpoint import with_own_embeddings

    folder = tmp_path_factory.mktemp("drafter")
    equal = make_drafter(policy_path, folder / "equal")
    return with_own_embeddings(equal, folder / "own", model_path=policy_path, dtype=torch.float32)


@pytest.fixture(scope="module")
def plain(policy_path: Path) -> Iterator[DrivenEngine]:
    """No speculation, scheduled asynchronously."""
    yield from started(policy_path, async_scheduling=True)


@pytest.fixture(scope="module")
def ngram(policy_path: Path) -> Iterator[DrivenEngine]:
    """n-gram drafts, for which vLLM schedules synchronously everywhere."""
    speculation = SpeculationConfig.model_validate(
        {
            "drafter": {"kind": "ngram"},
            "max_draft_length": 3,
            "selector": {"kind": "fixed", "draft_length": 3},
        }
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_speculation, "NGRAM_MATCH", (1, 2))
        yield from started(policy_path, speculation, async_scheduling=True)


@pytest.fixture(scope="module")
def eagle(policy_path: Path, drafter_path: Path) -> Iterator[DrivenEngine]:
    """EAGLE-3 with a random draft length at every step, scheduled asynchronously; faults can be planted in its
    sampler."""
    speculation = SpeculationConfig.model_validate(
        {
            "drafter": {"kind": "eagle3", "path": str(drafter_path)},
            "max_draft_length": 3,
            "selector": {"kind": "beg_mab"},
        }
    )

    def adjust(args: AsyncEngineArgs) -> None:
        RunningSamplerFault("accept").adjust(args)
        args.scheduler_cls = "exploring_scheduler.AdaptiveScheduler"

    yield from started(policy_path, speculation, async_scheduling=True, adjust=adjust)

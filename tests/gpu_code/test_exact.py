"""The exact certificate on V2: coupled verification is LOSSLESS, and a fault in the running engine is not."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from benchmarks.planted import RunningSamplerFault
from benchmarks.v2_runner import v2_runner
from contexts import make_context
from driven_engine import V2_CONFIG
from paceline.certify.engines import certify
from paceline.certify.subject import Effort, Fault
from paceline.config import Config
from paceline.types import Prompt

EFFORT = Effort(num_prompts=4, exact_tokens=250, exact_length=12, max_seconds=1200.0)


@pytest.mark.parametrize("fault", [None, "accept"])
def test_certificate_is_exact(policy_path: Path, drafter_path: Path, fault: str | None) -> None:
    config = Config.model_validate(
        {
            "policy": {"model": str(policy_path)},
            "rollout": {"engine": V2_CONFIG.model_dump(mode="json")},
            "speculation": {
                "drafter": {"kind": "eagle3", "path": str(drafter_path)},
                "max_draft_length": 2,
                "verification": "coupled",
            },
        }
    )
    prompts = [Prompt(id=str(n), text="", token_ids=np.arange(2, 6 + n, dtype=np.int32), row={}) for n in range(4)]
    planted = None if fault is None else Fault(name=fault, about="", engine=RunningSamplerFault("accept"))
    with v2_runner(os.environ, async_scheduling=True):
        result = certify(policy_path, prompts, config, context=make_context(), effort=EFFORT, fault=planted)
    assert result.details["runner"] == "v2"
    if fault is None:
        assert result.details["failed"] == [], result.figures
        assert result.figures["drafted_tokens"] > 50 and result.figures["tokens"] >= 250
    else:
        assert "differences" in result.details["failed"]

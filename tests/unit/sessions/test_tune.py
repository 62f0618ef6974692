"""What `paceline tune` makes of measured steps."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from paceline.config import EagleDrafter, EngineConfig, SpeculationConfig
from paceline.selector.cost import Step
from paceline.selector.cost_file import Conditions
from paceline.selector.tuning import Cells, Tuning, costs_of
from paceline.sessions.tune import serve_command

SPECULATION = SpeculationConfig(drafter=EagleDrafter(path="a drafter"), max_draft_length=3)
ENGINE = EngineConfig(max_num_seqs=16)


def step(batch: int, k: int, seconds: float, accepted_at: tuple[int, ...]) -> Step:
    return Step(
        num_requests=batch,
        num_prefill_tokens=0,
        verified=k,
        drafted=k,
        context_tokens=100 * batch,
        seconds=seconds,
        proposed_at=(batch,) * k,
        accepted_at=accepted_at,
        num_emitted=batch + sum(accepted_at),
    )


def tuning(tmp_path: Path) -> Tuning:
    """One request gains from drafts, sixteen lose."""
    cells: Cells = {
        (1, 0): [step(1, 0, 0.010, ())] * 3,
        (1, 3): [step(1, 3, 0.012, (1, 1, 0))] * 3,
        (16, 0): [step(16, 0, 0.020, ())] * 3,
        (16, 3): [step(16, 3, 0.080, (16, 12, 6))] * 3,
    }
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    return Tuning(cells=cells, costs=costs_of(cells, Conditions.here(tmp_path, drafter="eagle3", engine=ENGINE)))


def test_the_length_with_most_tokens_a_second_is_best_and_plain_where_none_pays(tmp_path: Path) -> None:
    found = tuning(tmp_path)
    assert (found.best(1), found.best(16)) == (3, 0)
    assert found.gain(1) == pytest.approx(2.5) and found.gain(16) == 1
    figures = found.figures()
    assert figures["best_length_1"] == 3 and figures["gain_16"] == 1
    assert figures["acceptance_1"] == 1
    assert figures["acceptance_2"] == pytest.approx(13 / 17)  # of those whose first token was accepted


@pytest.mark.parametrize("graphs", [False, True])
def test_serve_command_is_one_that_a_shell_and_vllm_can_read(graphs: bool) -> None:
    command = serve_command(Path("/a model"), SPECULATION, ENGINE, Path("/tuned here/costs.json"), graphs=graphs)
    words = shlex.split(command.replace("\\\n", ""))
    assert words[:3] == ["vllm", "serve", "/a model"]
    options = dict(zip(words[3::2], words[4::2], strict=True))
    assert options["--dtype"] == ENGINE.dtype, "costs of one precision would serve another"
    speculative = json.loads(options["--speculative-config"])
    assert speculative["method"] == "eagle3" and speculative["num_speculative_tokens"] == 3
    own = json.loads(options["--additional-config"])["paceline"]
    assert own["selector"]["costs"] == "/tuned here/costs.json"
    assert ("--compilation-config" in options) == graphs

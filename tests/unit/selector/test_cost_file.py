"""A cost file says what it was measured on, and a run on anything else refuses it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from paceline import cli
from paceline.config import Config, EngineConfig
from paceline.measure import machine
from paceline.selector.cost_file import (
    Conditions,
    CostPoint,
    Costs,
    differences,
    load_costs,
    model_shape,
    require_same,
    save_costs,
)
from paceline.sessions.train import check_costs

POINT = CostPoint(num_requests=1, verified=0, drafted=0, context_tokens=0, seconds=1.0, num_steps=1)
SHAPE = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 100}


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text(json.dumps(SHAPE | {"transformers_version": "5.0"}))
    return tmp_path / "policy"


def measured(policy: Path, file: Path, **changed: Any) -> Path:
    """A cost file of this policy, machine and the default engine settings, apart from what is changed."""
    here = Conditions.here(policy, drafter="ngram", engine=EngineConfig())
    save_costs(file, Costs(points=(POINT,), measured_on=here.model_copy(update=changed)))
    return file


def config(policy: Path, costs: Path, **engine: Any) -> Config:
    selector = {"kind": "measured", "costs": str(costs)}
    speculation = {"drafter": {"kind": "ngram"}, "selector": selector}
    return Config.model_validate(
        {"policy": {"model": str(policy)}, "speculation": speculation, "rollout": {"engine": engine}}
    )


def test_a_file_of_this_model_machine_and_engine_is_taken(policy: Path, tmp_path: Path) -> None:
    file = measured(policy, tmp_path / "costs.json")
    check_costs(config(policy, file), policy)
    check_costs(config(policy, file, kv_cache_gb=2.0, deadline_s=7), policy)  # what no step time depends on


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"machine": "another CPU, 2 cores"}, r"machine is another CPU, 2 cores, here"),
        ({"vllm": "vllm 0.1"}, r"vllm is vllm 0\.1, here"),
        ({"drafter": "eagle3"}, "drafter is eagle3, here ngram"),
        ({"weights": "fp8"}, "weights is fp8, here full"),
        ({"dtype": "float32"}, "dtype is float32, here bfloat16"),
        ({"compile": True}, "compile is True, here False"),
        ({"max_num_seqs": 8}, "max_num_seqs is 8, here 256"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2, here 1"),
        ({"model": SHAPE | {"hidden_size": 128}}, r"\(model hidden_size is 128, here 64\)"),
        ({"model": SHAPE | {"num_experts": 8}}, "model num_experts is 8, here None"),
    ],
)
def test_a_file_of_anything_else_is_refused_with_what_differs(
    policy: Path, tmp_path: Path, changed: dict[str, Any], complaint: str
) -> None:
    file = measured(policy, tmp_path / "costs.json", **changed)
    with pytest.raises(ValueError, match=complaint):
        check_costs(config(policy, file), policy)


def test_the_refusal_names_the_command_that_measures_the_right_file(policy: Path, tmp_path: Path) -> None:
    """Costs of another precision would send the selector to the wrong length until it has unlearned them."""
    file = measured(policy, tmp_path / "costs.json")
    command = (
        rf"`paceline (tune {policy} rollout\.engine\.dtype=bfloat16 rollout\.engine\.weights=fp8 .*"
        r"rollout\.engine\.compile=false --drafter ngram --out DIR)`"
    )
    with pytest.raises(ValueError, match=command) as refused:
        check_costs(config(policy, file, weights="fp8"), policy)
    found = re.search(command, str(refused.value))
    assert found and "rollout.engine.weights=fp8" in cli.parse(found[1].split()).overrides
    here = Conditions.here(policy, drafter="eagle3", engine=EngineConfig())
    with pytest.raises(ValueError, match=r"paceline tune arena:small .* --drafter arena:small/eagle3 "):
        require_same(file, here, model="arena:small", drafter_path="arena:small/eagle3")


def test_a_file_that_does_not_say_where_it_is_from_is_refused_with_advice(policy: Path, tmp_path: Path) -> None:
    save_costs(tmp_path / "costs.json", Costs(points=(POINT,)))
    with pytest.raises(ValueError, match=r"it names none.*paceline tune"):
        check_costs(config(policy, tmp_path / "costs.json"), policy)


@pytest.mark.parametrize("text", ["{", '{"points": [], "speed": 1}', '{"format": "other", "points": []}'])
def test_wrong_cost_file_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "costs.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"selector\.costs: .* is not a cost file"):
        load_costs(file)
    with pytest.raises(ValueError, match=r"selector\.costs: got .*absent"):
        load_costs(tmp_path / "absent")


def test_the_shape_of_a_model_is_its_own_whatever_else_its_config_says() -> None:
    """A checkpoint after RL, or with vision around its language model, steps as before."""
    assert model_shape(SHAPE | {"dtype": "float32", "_name_or_path": "x"}) == SHAPE
    assert model_shape({"architectures": ["Wrapped"], "text_config": {"hidden_size": 8}}) == {
        "architectures": ["Wrapped"],
        "hidden_size": 8,
    }


def test_conditions_survive_the_file(policy: Path, tmp_path: Path) -> None:
    here = Conditions.here(policy, drafter="eagle3", engine=EngineConfig())
    save_costs(tmp_path / "costs.json", Costs(points=(POINT,), measured_on=here))
    loaded = load_costs(tmp_path / "costs.json").measured_on
    assert loaded is not None and differences(loaded, here) == []


def test_a_machine_is_its_gpus_or_its_cpu(tmp_path: Path) -> None:
    assert machine(tmp_path).endswith(" cores")
    for number in range(2):
        (tmp_path / f"0000:0{number}:00.0").mkdir()
        (tmp_path / f"0000:0{number}:00.0" / "information").write_text("Model: \t NVIDIA H100 80GB HBM3\nIRQ: 1\n")
    assert machine(tmp_path) == "2 x NVIDIA H100 80GB HBM3"

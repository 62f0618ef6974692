"""The callback for TRL, on a trainer and an engine that behave as TRL's and vLLM's; tests/engine/test_trl.py has real
ones."""

from __future__ import annotations

import logging
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drafter_cases import VOCABULARY, make_drafter, policy_config
from host_engine import HostEngine
from paceline.config import BufferConfig, DrafterTrainingConfig
from paceline.drafters.checkpoint import save
from paceline.drafters.drift import Verdict
from paceline.drafters.provenance import read_provenance
from paceline.integrations import drafter_updates

pytest.importorskip("trl", reason="TRL is not installed (requirements/trl.txt)")

from transformers import Qwen3ForCausalLM
from trl.generation import vllm_generation
from trl.trainer.utils import add_fused_lm_head

from paceline.integrations.trl import DrafterCallback, WireClient, sync_over_wire, wire_clients

PROMPT, RESPONSE = 4, 20


class Llm:
    """`vllm.LLM` as far as the callback knows it."""

    def __init__(self, engine: HostEngine) -> None:
        self.engine, self.calls = engine, list[str]()

    def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls.append(method)
        return list(self.engine.rpc(method, args))

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake {tags}")

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")


def make_trainer(engine: HostEngine, **changes: Any) -> Any:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(policy_config()).train()
    add_fused_lm_head(model)
    accelerator = SimpleNamespace(is_main_process=True, num_processes=1, unwrap_model=lambda model: model)
    generation = SimpleNamespace(mode="colocate", enable_sleep_mode=False, llm=Llm(engine))
    args = SimpleNamespace(steps_per_generation=1, num_iterations=1, gradient_accumulation_steps=1)
    settings = {
        "model": model,
        "accelerator": accelerator,
        "vllm_generation": generation,
        "args": args,
        "use_vllm": True,
        "temperature": 1.0,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_clip_max": 3.0,
        "_metrics": {"train": defaultdict(list)},
        "_buffered_inputs": None,
    }
    return SimpleNamespace(**(settings | changes))


def score(trainer: Any, *, seed: int) -> None:
    """What TRL does between generation and update."""
    ids = torch.randint(0, VOCABULARY, (12, PROMPT + RESPONSE), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[:, :PROMPT] = -100
    with torch.no_grad():
        output = trainer.model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels, fused_lm_head=True)
    logp = output.log_probs[:, -RESPONSE:]
    trainer._buffered_inputs = [
        {
            "completion_mask": torch.ones_like(logp),
            "old_per_token_logps": logp,
            "sampling_per_token_logps": logp - 0.01,
        }
    ]


@pytest.fixture
def engine(tmp_path: Path) -> HostEngine:
    save(make_drafter(), tmp_path / "drafter")
    return HostEngine(tmp_path / "drafter")


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DrafterTrainingConfig:
    """Everything that was trained is found better."""
    better = Verdict(publish=True, why="planted", before=1.0, after=2.0)
    monkeypatch.setattr(drafter_updates, "compare", lambda *args, **kwargs: (list(args[1]), better)[1])
    return DrafterTrainingConfig(
        tokens_per_step=100,
        round_tokens=100,
        buffer=BufferConfig(directory=tmp_path / "buffer"),
    )


def run(trainer: Any, callback: DrafterCallback, out: Path, *, num_steps: int = 2) -> None:
    args: Any = SimpleNamespace(output_dir=str(out))
    control: Any = None
    callback.on_train_begin(args, SimpleNamespace(global_step=0), control)  # type: ignore[arg-type]
    for step in range(1, num_steps + 1):
        trainer.vllm_generation.llm.engine.generate(1.5)
        score(trainer, seed=step)
        callback.on_step_end(args, SimpleNamespace(global_step=step), control)  # type: ignore[arg-type]
    callback.on_train_end(args, SimpleNamespace(global_step=num_steps), control)  # type: ignore[arg-type]


def test_drafter_is_trained_pushed_logged_and_left_behind(
    engine: HostEngine, training: DrafterTrainingConfig, tmp_path: Path
) -> None:
    trainer = make_trainer(engine)
    run(trainer, DrafterCallback(trainer, budget_s=0.2, training=training), tmp_path / "out")
    logged = trainer._metrics["train"]
    assert engine.version == logged["draft/published_round"][-1] >= 1  # the second if time was left
    assert logged["rollout/accepted_length"] == [1.5, 1.5] and logged["draft/failures"] == [0, 0]
    assert logged["mismatch/max_abs"] == pytest.approx([0.01] * 2, rel=1e-3)
    assert logged["draft/heldout_after"][0] == 2.0 and logged["draft/hand_over_failures"] == [0, 0]
    provenance = read_provenance(tmp_path / "out" / "drafter")
    assert provenance.rl_steps == 2 and provenance.start == str(engine.checkpoint)
    assert not trainer.model._forward_hooks and not trainer.model._forward_pre_hooks
    score(trainer, seed=9)  # TRL may go on


def test_sleeping_engine_is_awake_for_pushes_only(
    engine: HostEngine, training: DrafterTrainingConfig, tmp_path: Path
) -> None:
    """TRL's sleep mode gives the weights' memory back between generations: a push then would end the process."""
    trainer = make_trainer(engine)
    trainer.vllm_generation.enable_sleep_mode = True
    run(trainer, DrafterCallback(trainer, budget_s=0.2, training=training), tmp_path / "out", num_steps=1)
    push = ["wake ['weights']", "paceline_push", "sleep 2"]
    assert trainer.vllm_generation.llm.calls == ["paceline_drafter", "paceline_counters", *push]


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ("ranks", "each of several processes has an engine"),
        ("no vllm", "use_vllm=True"),
        ("no drafter", "planted problem"),
        ("not ours", "PACELINE="),
    ],
)
def test_what_cannot_be_trained_is_said_and_trl_goes_on(
    trouble: str,
    said: str,
    engine: HostEngine,
    training: DrafterTrainingConfig,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = make_trainer(engine, use_vllm=trouble != "no vllm")
    trainer.accelerator.num_processes = 2 if trouble == "ranks" else 1
    engine.problem = "planted problem" if trouble == "no drafter" else None
    engine.ours = trouble != "not ours"
    with caplog.at_level(logging.WARNING):
        run(trainer, DrafterCallback(trainer, budget_s=0.2, training=training), tmp_path / "out")
    assert caplog.text.count(said) == 1
    assert len(trainer._metrics["train"]["mismatch/k3"]) == 2, "raw ratios need no drafter"
    assert engine.num_pushes == 0 and not (tmp_path / "out").exists()


def test_other_ranks_do_nothing(engine: HostEngine, training: DrafterTrainingConfig, tmp_path: Path) -> None:
    trainer = make_trainer(engine)
    trainer.accelerator.is_main_process = False
    run(trainer, DrafterCallback(trainer, budget_s=0.2, training=training), tmp_path / "out")
    assert trainer.vllm_generation.llm.calls == [] and not trainer._metrics["train"]


def test_client_is_lent_and_given_back() -> None:
    module: Any = vllm_generation
    stock = module.VLLMClient
    with pytest.raises(ZeroDivisionError), wire_clients():
        assert module.VLLMClient is WireClient
        _ = 1 / 0
    assert module.VLLMClient is stock


def test_colocated_sync_sends_the_policy_and_forgets_the_cache(tmp_path: Path) -> None:
    """A cache of the old policy's keys would be sampled from."""
    model = Qwen3ForCausalLM(policy_config())
    model.save_pretrained(tmp_path / "policy")
    engine = HostEngine(tmp_path / "policy")
    trainer = make_trainer(engine, model=model)
    generation = trainer.vllm_generation
    generation._iter_named_params = lambda: ((name, weight.data) for name, weight in model.named_parameters())
    generation.llm.reset_prefix_cache = lambda: generation.llm.calls.append("reset")
    sync_over_wire(trainer)
    for version in (1, 2):
        generation.sync_weights()
        assert engine.version == version
    assert generation.llm.calls == ["paceline_push", "reset"] * 2
    assert torch.equal(engine.weights["model.norm.weight"], model.state_dict()["model.norm.weight"])
    generation.enable_sleep_mode = True
    with pytest.raises(ValueError, match="must be colocated and awake"):
        sync_over_wire(trainer)

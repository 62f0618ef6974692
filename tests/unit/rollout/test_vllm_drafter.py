"""Drafters of kind vllm: any speculative method of vLLM by its own settings, and what is refused of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from contexts import arena_config, make_context, one_rank
from paceline import assets
from paceline.cli import certify as cli_certify
from paceline.cluster.actors import LearnerActor
from paceline.config import (
    Config,
    EngineConfig,
    ObjectiveConfig,
    PolicyConfig,
    SpeculationConfig,
    VllmDrafter,
)
from paceline.learner.fsdp import FsdpLearner
from paceline.rollout.hosts import fill
from paceline.rollout.internals.drafter_model import comes_with_policy
from paceline.rollout.internals.drafter_survival import DrafterSurvival, keep_weights
from paceline.rollout.speculation import check_drafter, refuse_lossy, scheduler_settings, speculative_config, why_whole
from paceline.sessions.train import with_drafter
from paceline.types import PacelineError
from paceline.weights.check import inventory
from random_policy import make_mtp_policy, make_policy
from specs import learner_spec

ENGINE = EngineConfig(max_num_seqs=8)


def speculation(**settings: Any) -> SpeculationConfig:
    return SpeculationConfig.model_validate({"drafter": {"kind": "vllm", "settings": settings}, "max_draft_length": 3})


def test_settings_reach_vllm_as_they_are_with_what_the_scheduler_needs() -> None:
    """A setting that is lost on the way would leave vLLM's default at work without a word."""
    theirs = {"method": "draft_model", "model": "small", "draft_load_config": {"load_format": "auto"}}
    config = speculation(**theirs)
    vllm = speculative_config(config, ENGINE)
    assert {key: vllm.pop(key) for key in theirs} == theirs
    assert vllm.pop("num_speculative_tokens") == 3
    assert {length for _, _, length in vllm.pop("num_speculative_tokens_per_batch_size")} == {0, 1, 2, 3}
    assert not vllm
    assert scheduler_settings(config)["drafter"]["settings"] == theirs


def test_settings_can_be_given_on_the_command_line() -> None:
    words = ["speculation.drafter.kind=vllm", "speculation.drafter.settings.method=mtp"]
    config = arena_config([*words, "speculation.drafter.settings.draft_sample_method=probabilistic"]).speculation
    assert config is not None and isinstance(config.drafter, VllmDrafter)
    assert config.drafter.settings == {"method": "mtp", "draft_sample_method": "probabilistic"}


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({}, r"settings\.method: got None; must be one of vLLM's methods"),
        ({"method": ["mtp"]}, r"settings\.method: got \['mtp'\]; must be one of vLLM's methods"),
        ({"method": "ngram"}, r'settings\.method: got \'ngram\'; must be another: drafter\.kind = "ngram"'),
        ({"method": "custom_class"}, r'must be another: drafter\.kind = "history"'),
        ({"method": "extract_hidden_states"}, "must be another because it drafts nothing"),
        ({"method": "mtp", "num_speculative_tokens": 2}, r"left out because speculation\.max_draft_length sets it"),
        ({"method": "mtp", "num_speculative_tokens_per_batch_size": []}, r"speculation\.selector chooses"),
        ({"method": "dspark", "enable_adaptive_verification": True}, r"speculation\.selector chooses"),
    ],
)
def test_settings_that_are_ours_or_no_method_are_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        SpeculationConfig.model_validate({"drafter": {"kind": "vllm", "settings": settings}})


def test_training_is_refused() -> None:
    drafter = {"kind": "vllm", "settings": {"method": "mtp"}}
    with pytest.raises(ValueError, match=r"with drafter\.kind 'vllm'; must be off"):
        SpeculationConfig.model_validate({"drafter": drafter, "training": {"mode": "idle"}})


@pytest.mark.parametrize(
    "lossy", [{"rejection_sample_method": "synthetic"}, {"posterior_threshold": 0.1}, {"acceptance_method": "typical"}]
)
def test_lossy_settings_are_refused_like_those_of_other_drafters(lossy: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"distribution|did not sample"):
        refuse_lossy(speculative_config(speculation(method="mtp", **lossy), ENGINE))


@pytest.mark.parametrize(
    ("settings", "whole"),
    [
        ({"method": "medusa"}, True),
        ({"method": "suffix"}, True),
        ({"method": "eagle3", "parallel_drafting": True}, True),
        ({"method": "draft_model", "parallel_drafting": True}, True),
        ({"method": "dflash", "parallel_drafting": True}, False),
        ({"method": "eagle"}, False),
        ({"method": "mtp", "parallel_drafting": False}, False),
    ],
)
def test_methods_that_know_one_length_are_not_asked_for_another(
    settings: dict[str, Any], whole: bool, tmp_path: Path
) -> None:
    """vLLM asserts it, or cuts the rows of one request's drafts into those of others: the engine dies."""
    assert (why_whole(settings) is not None) == whole
    vllm = speculative_config(speculation(**settings), ENGINE)
    assert ("num_speculative_tokens_per_batch_size" not in vllm) == whole
    host = {"model": "policy", "speculative_config": {**settings, "num_speculative_tokens": 3}}
    file = tmp_path / "speculation.toml"
    file.write_text('[speculation.drafter]\nkind = "ngram"\n')
    assert ("vLLM keeps its draft length" in fill(host, str(file)).line(str(file))) == whole


def test_draft_model_that_is_not_there_and_heads_that_are_not_there_are_told_before_an_engine_starts(
    tmp_path: Path,
) -> None:
    """vLLM says `Unsupported speculative method: 'mtp'` of a policy without heads."""
    policy, heads = make_policy(tmp_path / "plain"), make_mtp_policy(tmp_path / "mtp", step=5)
    with pytest.raises(ValueError, match=r"settings\.model: got '.*nothing'; must be a directory"):
        check_drafter(speculation(method="draft_model", model=str(tmp_path / "nothing")), policy, ENGINE)
    with pytest.raises(ValueError, match=r"settings\.method: got 'mtp' with .*plain; .*has no MTP heads"):
        check_drafter(speculation(method="mtp"), policy, ENGINE)
    check_drafter(speculation(method="draft_model", model=str(policy)), policy, ENGINE)
    check_drafter(speculation(method="mtp"), heads, ENGINE)
    check_drafter(speculation(method="mtp", model=str(heads)), policy, ENGINE)


def test_draft_model_may_be_a_policy_by_name() -> None:
    config = Config(
        policy=PolicyConfig(model="arena:small"),
        speculation=speculation(method="draft_model", model="arena:tiny", draft_sample_method="greedy"),
    )
    resolved = with_drafter(config, make_context()).speculation
    assert resolved is not None and isinstance(resolved.drafter, VllmDrafter)
    path = str(assets.policy("tiny"))
    assert resolved.drafter.settings == {"method": "draft_model", "model": path, "draft_sample_method": "greedy"}
    own = Config(policy=PolicyConfig(model="arena:small"), speculation=speculation(method="mtp"))
    assert with_drafter(own, make_context()) == own


@pytest.mark.parametrize(
    ("drafter", "settings"),
    [
        ("vllm:mtp", {"method": "mtp"}),
        ("vllm:draft_model:arena:tiny", {"method": "draft_model", "model": "arena:tiny"}),
    ],
)
def test_certify_takes_a_method_by_name(drafter: str, settings: dict[str, str]) -> None:
    config = arena_config(cli_certify._drafting(drafter, None, policy="arena:small", has_speculation=False)).speculation
    assert config is not None and isinstance(config.drafter, VllmDrafter)
    assert (config.drafter.settings, config.max_draft_length) == (settings, 3)
    with pytest.raises(ValueError, match=r"^speculation\.drafter\.settings: is missing"):
        arena_config(cli_certify._drafting("vllm", None, policy="arena:small", has_speculation=False))


def test_draft_model_is_loaded_where_the_policy_is_a_dummy(tmp_path: Path) -> None:
    file = tmp_path / "mtp.toml"
    file.write_text('[speculation.drafter]\nkind = "vllm"\nsettings = {method = "mtp"}\n')
    filled = fill({"model": "policy", "load_format": "dummy"}, str(file)).arguments["speculative_config"]
    assert filled["draft_load_config"] == {"load_format": "auto"}


# MTP heads in the policy's checkpoint: transformers has no place for them, and engines need them.


def learner_of(path: Path) -> FsdpLearner:
    return FsdpLearner(path, one_rank(), ObjectiveConfig(), temperature=1.0)


def test_learner_sends_and_saves_the_heads_that_it_does_not_train(tmp_path: Path) -> None:
    """Without them an engine refuses every push, and no engine could draft with the checkpoint of a run."""
    path = make_mtp_policy(tmp_path / "mtp", step=5)
    stored = load_file(path / "model.safetensors")
    learner = learner_of(path)
    try:
        assert learner.untrained == {name for name in stored if "mtp_layers" in name}
        sent = dict(learner.weights(torch.bfloat16))
        assert {tensor.dtype for tensor in sent.values()} == {torch.bfloat16}
        assert sent.keys() == inventory(path).keys()
        learner.save(tmp_path / "saved")
    finally:
        learner.close()
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == stored.keys()
    assert all(torch.equal(saved[name], stored[name]) for name in stored)


def test_engines_in_fp8_are_refused_for_a_policy_with_heads(tmp_path: Path) -> None:
    """The sender would promise codes of layers that the policy does not have: every engine would be given up."""
    path = make_mtp_policy(tmp_path / "mtp", step=5)
    actor = LearnerActor(0)
    with pytest.raises(PacelineError, match=r"^rollout\.engine\.weights: got 'fp8' with .*mtp_layers"):
        actor.start(learner_spec(model_path=str(path), engine=EngineConfig(weights="fp8")))
    actor._learner.close()


def vllm_config(method: str, draft: str = "policy") -> Any:
    """As vLLM's SpeculativeConfig, in small."""
    return SimpleNamespace(
        method=method,
        draft_model_config=SimpleNamespace(model=draft),
        target_model_config=SimpleNamespace(model="policy"),
    )


def test_only_heads_of_the_policys_own_checkpoint_come_with_it() -> None:
    """A draft model that is a copy of the policy is a model of its own."""
    assert comes_with_policy(vllm_config("mtp"))
    assert not comes_with_policy(vllm_config("mtp", "heads"))
    assert not comes_with_policy(vllm_config("draft_model"))
    assert not comes_with_policy(None)


@pytest.mark.parametrize("comes", [True, False])
def test_heads_that_a_push_has_brought_are_not_put_back(comes: bool) -> None:
    """What differs after a push was lost, unless the push is what brought it."""
    asked: list[Any] = []

    def rpc(function: Any, args: tuple[Any, ...] = ()) -> list[dict[str, int]]:
        asked.append((function.__name__, *args))
        return [{}]

    survival = DrafterSurvival(lambda: None, comes_with_policy=comes)
    for meaning in ("push", "reload"):
        survival.before(cast("Any", meaning), rpc)
        survival.after(cast("Any", meaning), rpc)
    kept = (keep_weights.__name__,)
    assert asked[-2:] == [kept, ("restore_weights", True)], "a host's own reload brings no heads"
    assert asked[:-2] == ([("restore_weights", False)] if comes else [kept, ("restore_weights", True)])

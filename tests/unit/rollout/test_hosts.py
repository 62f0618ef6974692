"""What PACELINE fills in of a host's engine arguments: what is unset, no more, and nothing that ends the engine."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from paceline import assets, cli
from paceline.rollout.hosts import fill, given
from paceline.rollout.speculation import KEEP_LAST_BLOCK, SCHEDULER, num_mtp_heads, why_fixed
from random_policy import make_mtp_policy, make_policy


@dataclass
class Arguments:
    """As vLLM's EngineArgs, in small."""

    model: str = "policy"
    max_num_seqs: int | None = None
    tensor_parallel_size: int = 1
    scheduler_cls: str | None = None
    speculative_config: dict[str, Any] | None = None
    additional_config: dict[str, Any] = field(default_factory=dict)


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


@pytest.fixture
def ngram(tmp_path: Path) -> str:
    return write(
        tmp_path / "ngram.toml", '[speculation]\nmax_draft_length = 3\n[speculation.drafter]\nkind = "ngram"\n'
    )


@pytest.fixture
def eagle(tmp_path: Path) -> str:
    drafter = assets.drafter("tiny", "eagle3")
    return write(tmp_path / "eagle.toml", f'[speculation.drafter]\nkind = "eagle3"\npath = "{drafter}"\n')


POLICY = {"model": str(assets.policy("tiny")), "max_model_len": 256}


def test_only_what_differs_from_its_default_counts_as_set_by_the_host() -> None:
    """`LLM(...)` passes most arguments on with their defaults; taken for settings, nothing would ever be filled in."""
    assert given(Arguments(tensor_parallel_size=1, additional_config={})) == {"model": "policy"}
    assert given(Arguments(max_num_seqs=4)) == {"model": "policy", "max_num_seqs": 4}


def test_unset_arguments_are_filled_in(ngram: str) -> None:
    filling = fill(given(Arguments(max_num_seqs=8)), ngram)
    assert not filling.refused
    assert filling.arguments.keys() == {"scheduler_cls", "speculative_config", "additional_config"}
    assert filling.arguments["scheduler_cls"] == SCHEDULER
    speculative = filling.arguments["speculative_config"]
    assert (speculative["method"], speculative["num_speculative_tokens"]) == ("ngram", 3)
    assert filling.arguments["additional_config"]["paceline"]["selector"]["kind"] == "measured"
    assert json.dumps(filling.arguments), "vLLM hashes its additional_config as JSON"


@pytest.fixture
def heads(tmp_path: Path) -> Path:
    """A policy whose checkpoint has one MTP layer."""
    return make_mtp_policy(tmp_path / "heads", step=5)


def rewritten(policy: Path, **config: Any) -> Path:
    """The policy with other values in its config.json."""
    file = policy / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return policy


def test_automatic_setting_enables_mtp_heads(heads: Path) -> None:
    filling = fill({"model": str(heads)}, "auto")
    speculative = filling.arguments["speculative_config"]
    assert (speculative["method"], speculative["num_speculative_tokens"]) == ("mtp", 3)
    assert "model" not in speculative, "vLLM takes the heads from the policy's own checkpoint"
    assert filling.arguments["scheduler_cls"] == SCHEDULER
    assert filling.line("auto").startswith("PACELINE=auto fills in ") and "\n" not in filling.line("auto")


@pytest.mark.parametrize(("layers", "longest"), [(1, 3), (2, 2), (3, 3), (4, 3)])
def test_automatic_draft_length_is_one_that_vllm_takes(layers: int, longest: int, heads: Path) -> None:
    """vLLM refuses a length beyond the number of MTP layers that is not its multiple."""
    rewritten(heads, num_nextn_predict_layers=layers)
    filling = fill({"model": str(heads)}, "auto")
    assert filling.arguments["speculative_config"]["num_speculative_tokens"] == longest


def test_automatic_setting_changes_nothing_without_mtp_heads(heads: Path) -> None:
    """N-grams, which need no heads, often cost more than they gain."""
    lost = rewritten(make_policy(heads.parent / "lost"), num_nextn_predict_layers=1)  # as after fine-tuning
    for policy in (Path(POLICY["model"]), lost, rewritten(heads, num_nextn_predict_layers=0)):
        filling = fill({"model": str(policy)}, "auto")
        assert filling.arguments == {} and not filling.refused
        assert filling.line("auto") == "PACELINE=auto fills in nothing: the policy's checkpoint has no MTP heads"


def test_mtp_heads_are_found_where_checkpoints_keep_them(heads: Path) -> None:
    """DeepSeek's and GLM's are the layer after the last; a multimodal policy's numbers are in its text_config."""
    (heads / "model.safetensors").unlink()
    index = heads / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.layers.2.enorm.weight": "model-1.safetensors"}}))
    assert num_mtp_heads(heads) == 1
    (heads / "config.json").write_text(
        json.dumps({"text_config": {"num_hidden_layers": 2, "mtp_num_hidden_layers": 2}})
    )
    assert num_mtp_heads(heads) == 2
    index.write_text(json.dumps({"weight_map": {"model.layers.1.mlp.weight": "model-1.safetensors"}}))
    assert num_mtp_heads(heads) == 0


def test_automatic_setting_leaves_a_host_that_speculates_alone(heads: Path) -> None:
    filling = fill({"model": str(heads), "spec_method": "ngram"}, "auto")
    assert filling.arguments == {} and not filling.refused and "own speculation stays" in filling.line("auto")


def test_nothing_that_the_host_set_is_overwritten(ngram: str) -> None:
    host = {
        "model": "policy",
        "speculative_config": {"method": "eagle3", "num_speculative_tokens": 5, "enable_adaptive_verification": True},
        "additional_config": {"theirs": 1, "paceline": {"trace": "steps.jsonl"}},
    }
    before = json.dumps(host)
    filling = fill(host, ngram)
    assert json.dumps(host) == before
    assert filling.arguments.keys() == {"scheduler_cls", "additional_config"}
    settings = filling.arguments["additional_config"]
    assert (settings["theirs"], settings["paceline"]["trace"]) == (1, "steps.jsonl")
    assert settings["paceline"].keys() == {"trace", "selector"}, "a drafter of ours would be read by the host's"
    assert "adaptive verification stays on" in filling.line(ngram)
    own = {"paceline": {"selector": {"kind": "fixed", "draft_length": 1}}}
    assert "additional_config" not in fill(host | {"additional_config": own}, ngram).arguments


@pytest.mark.parametrize(
    "host",
    [
        {"scheduler_cls": "theirs.Scheduler"},
        {"runner": "pooling"},
        {"convert": "reward"},
        {"additional_config": object()},
    ],
)
def test_engines_that_are_not_ours_to_schedule_are_left_alone(host: dict[str, Any], ngram: str) -> None:
    """The table of draft lengths is for our scheduler; another would take it literally."""
    filling = fill(host, ngram)
    assert filling.arguments == {} and not filling.refused and filling.reasons


@pytest.mark.parametrize("name", ["speculative_config", "spec_method", "spec_model", "spec_tokens"])
def test_speculation_of_the_host_stays(name: str, ngram: str) -> None:
    value: Any = {"method": "suffix"} if name == "speculative_config" else 3 if name == "spec_tokens" else "ngram"
    assert "speculative_config" not in fill({name: value}, ngram).arguments


def test_filling_in_twice_changes_nothing_more(ngram: str) -> None:
    """vLLM makes the config of one set of arguments more than once."""
    first = fill({"model": "policy"}, ngram)
    second = fill({"model": "policy"} | first.arguments, ngram)
    assert second.arguments == {} and second.line(ngram).endswith("fills in nothing: everything is set already")


def test_drafter_is_loaded_where_the_policy_is_a_dummy(eagle: str, ngram: str) -> None:
    """Hosts that push the policy's weights start with random ones; a drafter that nobody pushes would stay random."""
    dummy = POLICY | {"load_format": "dummy"}
    loaded = fill(dummy, eagle)
    assert loaded.arguments["speculative_config"]["draft_load_config"] == {"load_format": "auto"}
    assert "draft_load_config" not in fill(POLICY, eagle).arguments["speculative_config"]
    assert "draft_load_config" not in fill(dummy, ngram).arguments["speculative_config"]


def test_drafter_that_would_be_a_dummy_is_left_out(eagle: str, ngram: str, heads: Path) -> None:
    """The V2 runner of vLLM 0.24 to 0.29 loads drafters as it loads the policy: it would be drafted at random."""
    dummy = POLICY | {"load_format": "dummy"}
    filling = fill(dummy, eagle, drafter_loads_apart=False)
    assert filling.arguments == {} and filling.refused and "VLLM_USE_V2_MODEL_RUNNER=0" in filling.line(eagle)
    assert not fill(POLICY, eagle, drafter_loads_apart=False).refused
    assert not fill(dummy, ngram, drafter_loads_apart=False).refused
    mtp = {"model": str(heads), "load_format": "dummy"}
    assert fill(mtp, "auto", drafter_loads_apart=False).refused
    assert fill(mtp, "auto").arguments["speculative_config"]["draft_load_config"] == {"load_format": "auto"}


def test_last_block_of_a_cached_prompt_is_asked_for_where_vllm_can_keep_it(eagle: str, ngram: str) -> None:
    """Older engines refuse a setting that they do not know, and would not start."""
    assert fill(POLICY, eagle).arguments["speculative_config"][KEEP_LAST_BLOCK] is True
    assert KEEP_LAST_BLOCK not in fill(POLICY, eagle, last_block_stays=False).arguments["speculative_config"]
    assert KEEP_LAST_BLOCK not in fill(POLICY, ngram).arguments["speculative_config"]


def test_drafter_of_another_policy_is_left_out(eagle: str) -> None:
    """vLLM would load it, and accept nothing."""
    filling = fill(POLICY | {"model": str(assets.policy("small"))}, eagle)
    assert filling.arguments == {} and filling.refused
    assert "hidden size" in filling.line(eagle)


def test_drafter_must_reach_as_far_as_the_policy_unless_the_host_says_less(eagle: str, tmp_path: Path) -> None:
    """Without `max_model_len` vLLM allows what the policy does, and drafts beyond the drafter's positions go wrong."""
    config = json.loads((assets.policy("tiny") / "config.json").read_text())
    write(tmp_path / "config.json", json.dumps(config | {"max_position_embeddings": 10**6}))
    host = {"model": str(tmp_path)}
    assert "positions" in fill(host, eagle).line(eagle)
    assert not fill(host | {"max_model_len": 256}, eagle).refused


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("speculation = [", "is not TOML"),
        ("[run]\nsteps = 1", "speculation: is missing"),
        ('[speculation.drafter]\nkind = "ngam"', "speculation.drafter"),
        ('[speculation.drafter]\nkind = "eagle3"\npath = "nowhere"', "model: is missing"),
        ('[speculation]\nselector = {kind = "measured", costs = "nowhere"}\ndrafter = {kind = "ngram"}', "nowhere"),
        ('[speculation]\nselector = {kind = "fixed", draft_length = 9}\ndrafter = {kind = "ngram"}', "at most 7"),
    ],
)
def test_wrong_file_costs_speculation_and_not_the_engine(text: str, reason: str, tmp_path: Path) -> None:
    """What is wrong would otherwise be found in the engine's process, and end it."""
    file = write(tmp_path / "wrong.toml", text)
    filling = fill({}, file)
    assert filling.arguments == {} and filling.refused
    assert reason in filling.line(file)


def test_missing_file_costs_speculation_and_not_the_engine(tmp_path: Path) -> None:
    assert fill({}, str(tmp_path / "nowhere.toml")).refused


def test_history_without_its_libraries_costs_speculation_and_not_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "history.toml"
    file.write_text('[speculation]\ndrafter = {kind = "history"}\n')
    assert not fill({}, str(file)).refused
    monkeypatch.setattr("paceline.rollout.hosts.find_spec", lambda name: None)
    filling = fill({}, str(file))
    assert filling.refused
    assert not filling.arguments
    assert "numba and xxhash" in filling.line(str(file))


def test_selector_must_suit_the_speculation_of_the_host(tmp_path: Path) -> None:
    """The scheduler would refuse it, in the engine's process."""
    file = write(
        tmp_path / "fixed.toml",
        '[speculation]\nselector = {kind = "fixed", draft_length = 5}\ndrafter = {kind = "ngram"}',
    )
    host = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}
    assert fill(host, file).refused
    host["speculative_config"]["num_speculative_tokens"] = 5
    assert not fill(host, file).refused


def test_wrong_sampler_gets_no_drafts(ngram: str) -> None:
    """Tokens would be drawn from a distribution that is not the policy's."""
    assert fill({}, ngram, sound_sampler=False).refused
    assert fill({"spec_method": "ngram"}, ngram, sound_sampler=False).arguments.keys() == {
        "scheduler_cls",
        "additional_config",
    }


LOCKSTEP: list[dict[str, Any]] = [
    {"data_parallel_size": 2},
    {"distributed_executor_backend": "external_launcher", "tensor_parallel_size": 2},
    {"distributed_executor_backend": "external_launcher", "pipeline_parallel_size": 2},
]
ALONE: list[dict[str, Any]] = [
    {},
    {"tensor_parallel_size": 2},
    {"distributed_executor_backend": "external_launcher"},
    {"distributed_executor_backend": "mp", "tensor_parallel_size": 2},
]


@pytest.mark.parametrize(
    ("host", "alike"), [*((host, True) for host in LOCKSTEP), *((host, False) for host in ALONE)], ids=str
)
def test_ranks_that_step_together_draft_alike(host: dict[str, Any], alike: bool, ngram: str, heads: Path) -> None:
    """Ranks that choose for themselves wait for each other for ever; and the table, which only names lengths for
    graphs, would be taken literally."""
    filling = fill(host, ngram)
    assert not filling.refused
    assert ("num_speculative_tokens_per_batch_size" not in filling.arguments["speculative_config"]) == alike
    assert ("vLLM keeps its draft length" in filling.line(ngram)) == alike
    assert fill({**host, "model": str(heads)}, "auto").refused == alike, "a fixed length may cost more than it gains"


def test_who_has_one_scheduler_may_choose() -> None:
    def why(data_parallel_size: int, executor_backend: object, world_size: int) -> str | None:
        return why_fixed(
            data_parallel_size=data_parallel_size, executor_backend=executor_backend, world_size=world_size
        )

    assert why(1, "mp", 8) is None and why(1, None, 1) is None and why(1, "external_launcher", 1) is None
    assert "2 data-parallel ranks" in str(why(2, "mp", 2))
    assert "4 ranks" in str(why(1, "external_launcher", 4))


def test_graphs_are_asked_for_on_gpus(tmp_path: Path) -> None:
    """With sizes of vLLM's own, most draft lengths run without a graph. Sizes given twice are refused by vLLM."""
    file = write(tmp_path / "long.toml", '[speculation.drafter]\nkind = "ngram"\n')
    plain = fill({"max_num_seqs": 64}, file)
    assert "cudagraph_capture_sizes" not in plain.arguments
    graphs = fill({"max_num_seqs": 64}, file, on_gpu=True)
    assert len(graphs.arguments["cudagraph_capture_sizes"]) > 8
    table = graphs.arguments["speculative_config"]["num_speculative_tokens_per_batch_size"]
    assert {length for *_, length in table} == {0, 1, 3, 7}
    assert graphs.arguments["additional_config"]["paceline"]["draft_lengths"] == (0, 1, 3, 7)
    for host in ({"enforce_eager": True}, {"compilation_config": {"mode": 3}}, {"cudagraph_capture_sizes": [8]}):
        assert "cudagraph_capture_sizes" not in fill(host, file, on_gpu=True).arguments


def test_command_prints_what_would_be_filled_in(capsys: pytest.CaptureFixture[str], ngram: str) -> None:
    assert cli.main(["explain", ngram, "max_num_seqs=64"]) == 0
    out = capsys.readouterr().out
    assert f'  scheduler_cls = "{SCHEDULER}"' in out and '"prompt_lookup_max": 4' in out
    assert cli.main(["explain", ngram, "speculative_config.method=suffix"]) == 0
    assert "  speculative_config = " not in capsys.readouterr().out
    assert cli.main(["explain", f"{ngram}.gone"]) == 1
    assert "fills in nothing: config: got " in capsys.readouterr().out

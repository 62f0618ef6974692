"""Settings with which an engine starts: what vLLM makes of them on a GPU, without one."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.config import (
    EngineConfig,
    FixedSelector,
    HistoryDrafter,
    MeasuredSelector,
    NgramDrafter,
    SpeculationConfig,
)
from paceline.rollout import arguments
from paceline.rollout.arguments import engine_args, set_environment
from paceline.rollout.speculation import graph_plan, own_settings, speculative_config
from paceline.types import PacelineError
from padded_graph import graph_for


def history(tmp_path: Path, name: str) -> SpeculationConfig:
    return SpeculationConfig(drafter=HistoryDrafter(share_directory=tmp_path / name), max_draft_length=3)


def compile_hash(policy_path: Path, config: EngineConfig, speculation: SpeculationConfig, seed: int, trace: str) -> str:
    args = engine_args(policy_path, config, seed, speculation)
    own_settings(args.additional_config)["trace"] = trace
    return args.create_engine_config().compute_hash()


def test_second_start_finds_what_the_first_one_compiled(policy_path: Path, tmp_path: Path) -> None:
    """vLLM looks compiled code up by a hash of its config. A file name of one start in it, and every start compiles
    anew; without the policy's precision in it, code for another one would be found."""
    config = EngineConfig(max_model_len=256, max_num_seqs=4, kv_cache_gb=0.05, compile=True)
    first = compile_hash(policy_path, config, history(tmp_path, "a"), 0, "first.jsonl")
    assert compile_hash(policy_path, config, history(tmp_path, "b"), 1, "second.jsonl") == first
    selector = history(tmp_path, "a").model_copy(update={"selector": FixedSelector(draft_length=2)})
    assert compile_hash(policy_path, config, selector, 0, "first.jsonl") == first
    other = config.model_copy(update={"dtype": "float32"})
    assert compile_hash(policy_path, other, history(tmp_path, "a"), 0, "first.jsonl") != first


@pytest.mark.parametrize("cpus", [None, [0]])
@pytest.mark.parametrize("on_cpu", [True, False])
def test_code_compiled_ahead_of_time_is_left_to_gpus(
    on_cpu: bool, cpus: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM cannot read it back on the CPU: an engine there would compile at every start, bound to cores or not."""
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(arguments, "on_cpu", lambda: on_cpu)
    set_environment(EngineConfig(), cpus)
    assert os.environ.get("VLLM_USE_AOT_COMPILE") == ("0" if on_cpu else None)


def test_workers_share_cores_evenly_and_leave_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with an odd number of cores must not refuse two workers."""
    monkeypatch.setattr(os, "environ", {})
    config = EngineConfig(tensor_parallel_size=2)
    set_environment(config, [3, 4, 5, 6, 7])
    assert (os.environ["VLLM_CPU_OMP_THREADS_BIND"], os.environ["OMP_NUM_THREADS"]) == ("3,4|5,6", "2")
    with pytest.raises(ValueError, match="cpus: got 1 for tensor_parallel_size 2"):
        set_environment(config, [3])


def test_fp8_weights_are_refused_on_a_cpu_without_amx(policy_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would end in its worker, after half a minute, with a stack trace about kernels."""
    monkeypatch.setattr(arguments, "has_amx", lambda: False)
    with pytest.raises(PacelineError, match=r"rollout\.engine\.weights: got 'fp8' on a CPU without AMX"):
        engine_args(policy_path, EngineConfig(weights="fp8"), 0)
    engine_args(policy_path, EngineConfig(), 0)


@pytest.mark.parametrize("precision", [{"weights": "fp8"}, {"kv_cache": "fp8"}])
def test_fp8_is_refused_on_a_gpu(precision: dict[str, str], policy_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands without a cluster, such as certify, start engines too."""
    monkeypatch.setattr(arguments, "on_cpu", lambda: False)
    with pytest.raises(ValueError, match=rf"rollout\.engine\.{next(iter(precision))}: got 'fp8' on a GPU"):
        engine_args(policy_path, EngineConfig.model_validate(precision), 0)


def test_scheduler_and_proposer_get_their_settings_either_way(tmp_path: Path) -> None:
    """`vllm serve --additional-config` gives a dict, which other plugins use too."""
    settings = {"selector": {"kind": "fixed", "draft_length": 2}}
    assert own_settings({"paceline": settings, "other": 1}) == settings
    assert own_settings({}) == {}
    args = engine_args(tmp_path, EngineConfig(), 0, history(tmp_path, "a"))
    assert own_settings(args.additional_config)["drafter"]["share_directory"] == str(tmp_path / "a")


def test_our_own_engines_are_set_by_their_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PACELINE is for other hosts: the plain engine that certify compares with would speculate too."""
    monkeypatch.setenv("PACELINE", "auto")
    assert engine_args(tmp_path, EngineConfig(), 0).speculative_config is None
    assert "PACELINE" not in os.environ


def graph_manager(speculative: dict[str, Any], sizes: list[int], *, max_num_seqs: int) -> Any:
    """vLLM's manager of the target model's graphs with its candidates, as its V2 runner makes it, without a device."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    length = speculative["num_speculative_tokens"]
    manager: Any = object.__new__(CudaGraphManager)
    manager.compilation_config = SimpleNamespace(cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=max(sizes))
    manager.vllm_config = SimpleNamespace(
        num_speculative_tokens=length,
        speculative_config=SimpleNamespace(
            uses_dynamic_speculative_decoding=lambda: True,
            num_speculative_tokens_per_batch_size=speculative["num_speculative_tokens_per_batch_size"],
        ),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
    )
    manager.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    manager.max_num_reqs = max_num_seqs
    manager.decode_query_len = length + 1
    manager.varlen_decode = False
    manager.lora_capture_cases = [0]
    manager.ubatch_runner = None
    manager._candidates, manager._capture_descs = {}, {}
    manager._init_candidates()
    return manager


@pytest.mark.parametrize(
    ("max_num_seqs", "longest", "budget_gb"), [(64, 7, 2.0), (64, 7, 0.5), (5, 7, 2.0), (250, 3, 2.0)]
)
def test_vllm_captures_what_the_plan_says(max_num_seqs: int, longest: int, budget_gb: float) -> None:
    """vLLM's own function is asked: graphs that only our plan has would be missed by every step, silently. The memory
    estimate counts the plan's graphs, so there may not be others either."""
    from vllm.config.compilation import CUDAGraphMode

    engine = EngineConfig(max_num_seqs=max_num_seqs, cuda_graph_gb=budget_gb)
    speculation = SpeculationConfig(drafter=NgramDrafter(), max_draft_length=longest, selector=MeasuredSelector())
    plan = graph_plan(speculation, engine)
    settings = speculative_config(speculation, engine, plan)
    manager = graph_manager(settings, plan.capture_sizes, max_num_seqs=max_num_seqs)
    lengths = {row[2] for row in settings["num_speculative_tokens_per_batch_size"]}
    assert {0, longest} <= lengths
    graphs = {(desc.num_reqs, desc.uniform_token_count - 1) for desc in manager._capture_descs[CUDAGraphMode.FULL]}
    assert graphs == {pair for pair in plan.pairs if pair[1] in lengths}
    if lengths != set(plan.draft_lengths):
        return  # fewer batch sizes than draft lengths: the table cannot name them all
    for k in lengths:
        for n in range(1, min(max_num_seqs, plan.ceiling // (k + 1)) + 1):
            # As the runner chooses: the first candidate that has room, for steps of this draft length.
            candidates = manager._candidates[(n * (k + 1), 0)]
            found = [(d.num_reqs, k) for d in candidates if d.uniform_token_count == k + 1 and d.num_reqs >= n]
            assert found[:1] == [graph_for(plan, n, k)], f"{n} requests with drafts of {k} tokens"


def test_graphs_are_asked_for_on_gpus_and_the_scheduler_keeps_to_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A table of one row, or sizes left to vLLM, and all draft lengths but the longest run eagerly. So does a length
    that the selector likes and the plan does not have; one that the config names is used all the same."""
    speculation = SpeculationConfig(drafter=NgramDrafter(), max_draft_length=7)
    monkeypatch.setattr(arguments, "on_cpu", lambda: False)
    args = engine_args(tmp_path, EngineConfig(), 0, speculation)
    assert not args.enforce_eager
    assert args.compilation_config.cudagraph_capture_sizes == graph_plan(speculation, EngineConfig()).capture_sizes
    assert args.speculative_config is not None
    table = args.speculative_config["num_speculative_tokens_per_batch_size"]
    assert {length for _, _, length in table} == {0, 1, 3, 7}
    assert own_settings(args.additional_config)["draft_lengths"] == (0, 1, 3, 7)
    fixed = speculation.model_copy(update={"selector": FixedSelector(draft_length=5)})
    args = engine_args(tmp_path, EngineConfig(), 0, fixed)
    assert args.speculative_config is not None
    table = args.speculative_config["num_speculative_tokens_per_batch_size"]
    assert {length for _, _, length in table} == {0, 5}
    assert own_settings(args.additional_config)["draft_lengths"] is None
    args = engine_args(tmp_path, EngineConfig(max_num_seqs=1024, cuda_graph_gb=1.2), 0, speculation)
    assert own_settings(args.additional_config)["draft_lengths"] is None, "no budget for drafts must not stop them"
    assert engine_args(tmp_path, EngineConfig(compile=False), 0, speculation).enforce_eager


def test_engines_compile_on_gpus_and_not_on_the_cpu_unless_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`paceline plan` promises step times with graphs; an engine that runs eagerly by default does not keep them."""
    for cpu, compile, eager in [
        (True, "auto", True),
        (False, "auto", False),
        (True, True, False),
        (False, True, False),
        (True, False, True),
        (False, False, True),
    ]:
        monkeypatch.setattr(arguments, "on_cpu", lambda cpu=cpu: cpu)
        config = EngineConfig.model_validate({"compile": compile})
        assert engine_args(tmp_path, config, 0).enforce_eager == eager

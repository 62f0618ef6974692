"""Canaries: what `rollout/internals/` relies on is where it was. No engine is started; run first on a new vLLM."""

from __future__ import annotations

import inspect
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from paceline.config import EngineConfig
from paceline.rollout import hosts, speculation
from paceline.rollout.arguments import engine_args
from paceline.rollout.internals import (
    coupled_cpu,
    drafter_survival,
    engine_arguments,
    engine_core,
    requests,
    scheduler_calls,
    stats,
    transfer_engine,
)
from paceline.rollout.internals.drafter_model import loads_apart
from paceline.rollout.internals.model_runner import planned_runner
from paceline.types import GroupId, RolloutId

pytest.importorskip("vllm", reason="asks the installed vLLM")


def names(record: type) -> set[str]:
    assert is_dataclass(record), f"{record.__name__} is no dataclass any more"
    return {field.name for field in fields(record)}


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_scheduler_has_what_the_selector_needs() -> None:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    source = inspect.getsource(Scheduler)
    for attribute in (
        "dynamic_sd_lookup",
        "num_spec_tokens",
        "running",
        "waiting",
        "max_num_running_reqs",
        "max_num_active_reqs",
    ):
        assert f"self.{attribute}" in source, f"Scheduler.{attribute} is gone"
    # The table is read in `schedule`, for the number of drafts that the step asks for.
    schedule = inspect.getsource(Scheduler.schedule)
    assert "self.dynamic_sd_lookup" in schedule and "num_spec_tokens_to_schedule" in schedule
    assert parameters(Scheduler.update_from_output) == ["self", "scheduler_output", "model_runner_output"]
    assert parameters(Scheduler.update_draft_token_ids) == ["self", "draft_token_ids"]
    assert issubclass(AsyncScheduler, Scheduler)
    assert parameters(KVCacheManager.evict_blocks) == ["self", "block_ids"]
    assert "self.kv_cache_manager" in source and "self.num_gpu_blocks" in inspect.getsource(BlockPool)


def test_outputs_of_a_step_have_our_fields() -> None:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
    from vllm.v1.request import Request

    ours = {"num_scheduled_tokens", "total_num_scheduled_tokens", "scheduled_spec_decode_tokens"}
    assert ours | {"num_spec_tokens_to_schedule"} <= names(SchedulerOutput)
    assert {"sampled_token_ids", "req_id_to_index"} <= names(ModelRunnerOutput)
    assert "draft_token_ids" in names(DraftTokenIds)
    assert isinstance(inspect.getattr_static(Request, "num_tokens"), property)


def test_engine_core_answers_utility_calls_by_name() -> None:
    from vllm.v1.engine import core, core_client

    assert not hasattr(core.EngineCore, scheduler_calls.NAME), "vLLM has a method of this name"
    assert "self.scheduler" in inspect.getsource(core.EngineCore.__init__)
    assert "getattr(self, method_name)" in inspect.getsource(core)
    assert parameters(core_client.AsyncMPClient.call_utility_async) == ["self", "method", "args"]
    try:
        scheduler_calls.install()
        method = getattr(core.EngineCore, scheduler_calls.NAME)
        convert = core.EngineCoreProc._convert_msgspec_args
        bound = method.__get__(object())
        assert convert(bound, ("set_draft_limit", 3)) == ("set_draft_limit", 3)
        assert convert(bound, ("counters",)) == ("counters",)
        with pytest.raises(ValueError, match="must be one of"):
            bound("shutdown")
    finally:
        delattr(core.EngineCore, scheduler_calls.NAME)


def test_api_server_has_its_engine_where_our_middleware_looks() -> None:
    import vllm.entrypoints.launchers.api_server.app_state as app_state
    from vllm.engine.protocol import EngineClient
    from vllm.entrypoints.serve.dev.rpc import api_router
    from vllm.entrypoints.serve.middleware import register

    assert "state.engine_client = engine_client" in inspect.getsource(app_state)
    assert "request.app.state.engine_client" in inspect.getsource(api_router)
    assert parameters(EngineClient.collective_rpc) == ["self", "method", "timeout", "args", "kwargs"]
    assert "args.middleware" in inspect.getsource(register) and "isclass" in inspect.getsource(register)


def test_statistics_have_our_fields() -> None:
    from vllm.v1.metrics.loggers import StatLoggerBase
    from vllm.v1.metrics.stats import IterationStats, SchedulerStats
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

    assert parameters(StatLoggerBase.record)[1:4] == ["scheduler_stats", "iteration_stats", "mm_cache_stats"]
    scheduler = SchedulerStats(spec_decoding_stats=SpecDecodingStats.new(3))
    counted = stats.totals(scheduler, IterationStats())
    assert set(counted) == set(stats.TOTALS) and not any(counted.values())
    assert set(stats.gauges(scheduler)) == set(stats.GAUGES)


def test_requests_go_in_and_come_out_as_we_expect() -> None:
    import vllm
    from vllm.inputs.engine import tokens_input
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import CompletionOutput
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestOutputCollector

    assert tokens_input([1, 2])["prompt_token_ids"] == [1, 2]
    assert parameters(AsyncLLM.add_request)[1:4] == ["request_id", "prompt", "params"]
    assert "RequestOutputCollector" in str(get_type_hints(AsyncLLM.add_request)["return"])
    assert inspect.iscoroutinefunction(RequestOutputCollector.get)
    assert {"finish_reason", "spec_decode_metrics"} <= names(CompletionOutput)
    labels_tokens = tuple(map(int, vllm.__version__.split(".")[:2])) >= (0, 32)
    assert ("weight_versions" in names(CompletionOutput)) == labels_tokens, "requests._versions has to know"
    assert "logprobs" in names(FlatLogprobs)
    assert RequestOutputKind.FINAL_ONLY
    for method in ("update_weight_version", "pause_generation", "resume_generation", "reset_prefix_cache"):
        assert inspect.iscoroutinefunction(getattr(AsyncLLM, method)), method


def test_request_ids_keep_ours_before_a_hyphen() -> None:
    from vllm.v1.engine import input_processor

    assert "-{random_uuid()" in inspect.getsource(input_processor)
    assert requests.rollout_id("12.0/train:3-8f2a") == RolloutId(GroupId(12), 3)


def test_rejection_sampler_takes_our_metadata() -> None:
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.spec_decode.llm_base_proposer import compute_probs_and_sample_next_token
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    from paceline.rollout.internals import rejection_sampler

    assert parameters(RejectionSampler.forward)[1:5] == ["metadata", "draft_probs", "logits", "sampling_metadata"]
    assert parameters(compute_probs_and_sample_next_token)[:2] == ["logits", "sampling_metadata"]
    ours = inspect.getsource(rejection_sampler)
    for record in (SamplingMetadata, SpecDecodeMetadata):
        asked = inspect.signature(record).parameters.items()
        required = [name for name, parameter in asked if parameter.default is inspect.Parameter.empty]
        assert [name for name in required if f"{name}=" not in ours] == [], f"{record.__name__} asks for more"


def test_runner_is_known_before_an_engine_starts(policy_path: Path) -> None:
    """certify would otherwise test the sampler of the other runner; tests/gpu_code has V2."""
    assert planned_runner(engine_args(policy_path, EngineConfig(max_model_len=256), 0)) == "v1"


def test_backends_can_be_registered_twice() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for _ in range(2):
        transfer_engine.register_backend("paceline_canary", "paceline.rollout.receiver", "ShmWeightTransferEngine")
    assert "paceline_canary" in WeightTransferEngineFactory._registry
    del WeightTransferEngineFactory._registry["paceline_canary"]


def test_engine_arguments_can_be_filled_in_before_their_config_is_made(
    policy_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names that PACELINE sets and looks at are vLLM's, and its config is made of what was set."""
    from vllm.config import SpeculativeConfig
    from vllm.engine.arg_utils import EngineArgs

    read = {"load_format", "max_model_len", "max_num_seqs", "enforce_eager", "runner", "convert", "compilation_config"}
    read |= {"distributed_executor_backend", "cudagraph_capture_sizes", "scheduler_cls", "additional_config"}
    assert read | {"speculative_config", *hosts._RANKS} <= names(EngineArgs)
    assert {"draft_load_config", "num_speculative_tokens_per_batch_size"} <= names(SpeculativeConfig)
    monkeypatch.setattr(EngineArgs, "create_engine_config", EngineArgs.create_engine_config)  # put back afterward
    (setting := tmp_path / "ngram.toml").write_text('[speculation.drafter]\nkind = "ngram"\n')
    filling = hosts.fill({"max_num_seqs": 4}, str(setting))
    filling.arguments["speculative_config"]["draft_load_config"] = {"load_format": "auto"}
    assert engine_arguments.fill_before_use(lambda arguments: filling.arguments)
    arguments = EngineArgs(model=str(policy_path), skip_tokenizer_init=True, max_num_seqs=4, load_format="dummy")
    assert hosts.given(arguments).keys() & read == {"max_num_seqs", "load_format"}, "defaults look set by the host"
    config = arguments.create_engine_config()
    assert config.scheduler_config.scheduler_cls == speculation.SCHEDULER
    assert speculation.own_settings(config.additional_config)["selector"]["kind"] == "measured"
    speculative = config.speculative_config
    assert speculative is not None and speculative.method == "ngram"
    assert speculative.draft_load_config is not None and speculative.draft_load_config.load_format == "auto"


def test_samplers_look_up_what_coupling_replaces() -> None:
    """Replaced where nobody looks, verification would be vLLM's again; tests/engine/test_coupled.py would say so."""
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    assert parameters(CPUModelRunner.__init__) == ["self", "vllm_config", "device"]
    assert parameters(GPUModelRunner._sample) == ["self", "logits", "spec_decode_metadata"]
    assert parameters(TopKTopPSampler.forward_cpu) == ["self", "logits", "generators", "k", "p"]
    assert "fused_gumbel_argmax" in inspect.getsource(TopKTopPSampler.forward_cpu)
    assert "= rejection_sample(" in inspect.getsource(rejection_sampler.RejectionSampler.forward)
    ours, theirs = parameters(coupled_cpu._verify), parameters(rejection_sampler.rejection_sample)
    assert ours[:-1] == theirs[: len(ours) - 1]
    assert parameters(SpecDecodeBaseProposer._sample_from_logits) == parameters(coupled_cpu._sample_drafts)
    assert {"common_attn_metadata", "num_rejected_tokens_gpu"} <= set(parameters(SpecDecodeBaseProposer.propose))
    assert "_sample_from_logits" in inspect.getsource(SpecDecodeBaseProposer._sample_draft_tokens)


def test_amx_is_asked_for_by_names_that_torch_has() -> None:
    import torch

    assert callable(torch.cpu._is_amx_tile_supported) and callable(torch.cpu._init_amx)


def test_statistics_carry_our_figures_where_there_is_no_lora() -> None:
    """tests/unit/rollout/test_stat_logger.py sends them through vLLM's encoder; here nobody else may read them."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.metrics import loggers
    from vllm.v1.metrics.stats import SchedulerStats

    assert get_type_hints(SchedulerStats)["waiting_lora_adapters"] == dict[str, int]
    assert "waiting_lora_adapters" not in inspect.getsource(loggers.LoggingStatLogger)
    record = inspect.getsource(loggers.PrometheusStatLogger.record)
    assert "waiting_lora_adapters" not in record.partition("if self.gauge_lora_info is not None")[0]
    assert "waiting_lora_adapters" not in inspect.getsource(Scheduler)
    manager = inspect.getsource(loggers.StatLoggerManager.__init__)
    assert manager.index("extend(custom_stat_loggers)") < manager.index("default_logger_factory"), "ours comes first"


def test_drafter_may_be_loaded_apart_from_a_policy_of_dummies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that pushes the policy later would draft at random, and nobody would say so."""
    import vllm
    from vllm.platforms import current_platform

    eagle = Path(vllm.__file__).parent / "v1/worker/gpu/spec_decode/eagle/utils.py"
    assert "draft_load_config" in eagle.read_text(), "loads_apart says that vLLM reads it since 0.30"
    monkeypatch.setattr(vllm, "__version__", "0.29.0")
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    assert not loads_apart()
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert loads_apart()


def test_engine_core_passes_on_what_is_done_to_weights() -> None:
    """A drafter would be lost again without a word: nobody would be told of a sleep or a reload."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core import EngineCore, EngineCoreProc
    from vllm.v1.executor import Executor
    from vllm.v1.worker.gpu_worker import Worker

    assert parameters(EngineCore.sleep)[1] == "level" and parameters(EngineCore.wake_up) == ["self", "tags"]
    assert parameters(EngineCore.collective_rpc) == ["self", "method", "timeout", "args", "kwargs"]
    assert parameters(Executor.collective_rpc)[1:5] == ["method", "timeout", "args", "kwargs"]
    for method in drafter_survival._MEANINGS:
        assert callable(getattr(Worker, method)), method
        assert method == "reload_weights" or f'"{method}"' in inspect.getsource(AsyncLLM), method
    assert parameters(Worker.sleep) == ["self", "level"] and parameters(Worker.wake_up) == ["self", "tags"]
    assert callable(Worker.get_draft_model) and callable(Worker.get_model)
    stock = {name: getattr(EngineCore, name) for name in engine_core.WATCHED}
    try:
        for _ in range(2):
            engine_core.install()
        assert getattr(EngineCore.sleep, "__wrapped__") is stock["sleep"], "wrapped twice"  # noqa: B009
        bound = EngineCore.collective_rpc.__get__(object())
        assert EngineCoreProc._convert_msgspec_args(bound, ("reload_weights", None, (), None))[0] == "reload_weights"
    finally:
        for name, method in stock.items():
            setattr(EngineCore, name, method)


def test_servers_pass_names_and_arguments_of_a_call_on() -> None:
    """`POST /collective_rpc` is the way to an engine of another process."""
    from vllm import LLM
    from vllm.entrypoints.serve.dev.rpc import api_router
    from vllm.v1.serial_utils import run_method
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    source = inspect.getsource(api_router.collective_rpc)
    assert 'body.get("method")' in source and "args=tuple(args), kwargs=kwargs" in source
    assert "isinstance(result, dict | list)" in source, "an answer that is a dict would come as text"
    assert parameters(LLM.collective_rpc) == ["self", "method", "timeout", "args", "kwargs"]
    assert "self.worker" in inspect.getsource(WorkerWrapperBase), "calls.py: the worker is elsewhere"
    assert run_method("worker", lambda worker, number: (worker, number), (3,), {}) == ("worker", 3)

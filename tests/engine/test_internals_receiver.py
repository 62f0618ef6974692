"""Canaries for what the weight receiver touches inside vLLM. No engine is started: each test names what moved.

A test here that fails after an upgrade of vLLM says which file of `rollout/internals/` has to follow.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch


def parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def mentions(subject: Any, *texts: str) -> list[str]:
    """Which of the texts the source of `subject` does not contain."""
    source = inspect.getsource(subject)
    return [text for text in texts if text not in source]


def test_canaries_can_fail() -> None:
    assert mentions(mentions, "inspect.getsource", "no such" + " text") == ["no such text"]


def test_backend_can_be_made_and_aimed_without_the_worker() -> None:
    """transfer_engine.py: a host's backend is another, and ours stands beside it."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.v1.worker.gpu_worker import Worker

    from paceline.rollout.receiver import PushReceiver

    assert PushReceiver.__abstractmethods__ == frozenset(), "receiver.py: the base class has new abstract methods"
    assert parameters(WeightTransferEngine.__init__)[1:] == ["config", "vllm_config", "device", "model"]
    assert parameters(WeightTransferEngine.set_weight_update_target) == ["self", "model", "model_config"]
    assert parameters(WeightTransferEngine.reset_weight_update_target) == ["self"]
    assert parameters(WeightTransferEngine.update_weights) == ["self", "update_info"]
    assert parameters(set_current_vllm_config)[0] == "vllm_config"
    assert parameters(Worker.init_weight_transfer_engine) == ["self", "init_info"]
    # What the worker does for its own engine, and `aimed` for ours.
    assert not mentions(Worker.update_weights, "set_current_vllm_config(self.vllm_config)", "update_weights(")
    assert not mentions(Worker._set_draft_weight_update_target, "speculative_config.draft_model_config")


def test_backend_gets_objects_and_not_copies() -> None:
    """`update_weights` makes the update info from the dict that receive_push gives, with the push and its memory in
    it."""
    from vllm.distributed.weight_transfer.base import WeightTransferEngine

    from paceline.rollout.receiver import PushInfo

    memory = torch.zeros(3, dtype=torch.uint8)
    host = SimpleNamespace(update_info_cls=PushInfo)
    info = WeightTransferEngine.parse_update_info(host, {"push": "a push", "memory": memory})  # type: ignore[arg-type]
    assert info.memory is memory


def test_drafter_session_changes_model_and_config() -> None:
    """`_inventory` reads the checkpoint of whichever model is the target."""
    from vllm.distributed.weight_transfer.base import WeightTransferEngine

    assert not mentions(WeightTransferEngine.set_weight_update_target, "self.model = model", "self.model_config =")


def test_factory_can_be_asked_for_the_names_that_it_knows() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    assert isinstance(WeightTransferEngineFactory._registry, dict), "plugin.py asks it before it registers `paceline`"
    assert parameters(WeightTransferEngineFactory.register_engine) == ["name", "module_path_or_cls", "class_name"]


def test_reload_has_the_functions_that_reload_py_calls() -> None:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
    from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
    from vllm.model_executor.model_loader.reload import finalize_layerwise_processing, initialize_layerwise_reload

    assert parameters(initialize_layerwise_reload) == ["model"]
    assert parameters(finalize_layerwise_processing) == ["model", "model_config"]
    assert parameters(disable_mtp_completeness_check) == []
    stock = (NCCLWeightTransferEngine.receive_weights, "disable_mtp_completeness_check")
    assert not mentions(*stock), "reload.py: vLLM's own backends load in another way now"


def test_tied_head_is_repacked_by_the_method_that_reload_py_calls() -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        UnquantizedEmbeddingMethod,
        VocabParallelEmbedding,
    )

    assert issubclass(ParallelLMHead, VocabParallelEmbedding)
    packs = UnquantizedEmbeddingMethod.process_weights_after_loading
    assert not mentions(packs, "is_cpu()", "dispatch_cpu_unquantized_gemm(layer"), (
        "reload.py: heads are packed otherwise"
    )
    assert not mentions(UnquantizedEmbeddingMethod.tie_weights, "layer.weight = embed_tokens.weight")


def test_fp8_layer_holds_codes_and_scales_where_fp8_layers_py_reads_them() -> None:
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.quantization.online.fp8 import Fp8PerBlockOnlineLinearMethod

    assert not mentions(LinearBase, "self.quant_method")
    made = Fp8PerBlockOnlineLinearMethod.process_weights_after_loading
    assert not mentions(made, '"weight"', '"weight_scale_inv"'), "fp8_layers.py: codes or scales have another name"


def test_codes_come_back_in_order() -> None:
    """The layout that codes_in_order undoes: tiles of 32 rows, in each the pairs of columns one after another."""
    from paceline.rollout.internals.fp8_layers import codes_in_order

    codes_NK = torch.arange(64 * 8, dtype=torch.int32).to(torch.uint8).view(64, 8)
    packed = codes_NK.view(2, 32, 4, 2).transpose(1, 2).reshape(64, 8)
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(packed, requires_grad=False)
    assert torch.equal(codes_in_order(layer), codes_NK)
    assert not torch.equal(packed, codes_NK)


def test_attention_has_the_scales_that_kv_scales_py_sets() -> None:
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.attention import attention as module
    from vllm.model_executor.models.utils import extract_layer_index
    from vllm.utils.torch_utils import is_quantized_kv_cache

    names = [f"layer._{part}_scale_float = 1.0" for part in "qkv"] + [f'"_{part}_scale"' for part in "qkv"]
    names += [f"layer._{part}_scale_cpu = " for part in "kv"]
    assert not mentions(module, *names), "kv_scales.py: scales have other names"
    assert not mentions(Attention, "self.layer_name", "self.kv_cache_dtype")
    assert extract_layer_index("model.layers.7.self_attn.attn") == 7
    assert [is_quantized_kv_cache(name) for name in ("fp8", "auto")] == [True, False]


def test_scales_are_set_and_read_in_both_places(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.fp8 import KvScales
    from paceline.rollout.internals import kv_scales

    attention = SimpleNamespace(**{f"_{part}_scale": torch.tensor(1.0) for part in "qkv"})
    attention._k_scale_cpu, attention._v_scale_cpu = torch.tensor(1.0), torch.tensor(1.0)
    monkeypatch.setattr(kv_scales, "scaled_attention", lambda _model: [(0, attention)])
    kv_scales.set_kv_scales(torch.nn.Module(), KvScales(version=1, q=(0.5,), k=(0.25,), v=(2.0,)))
    assert kv_scales.held_kv_scales(torch.nn.Module()) == {
        "kv_scales.layers.0.q": (0.5, 0.5),
        "kv_scales.layers.0.k": (0.25, 0.25),
        "kv_scales.layers.0.v": (2.0, 2.0),
    }
    assert (float(attention._k_scale_cpu), float(attention._v_scale_cpu)) == (0.25, 2.0)


def test_worker_gives_out_both_models() -> None:
    from vllm.v1.worker.gpu_worker import Worker

    assert parameters(Worker.get_model) == parameters(Worker.get_draft_model) == ["self"]


def test_runners_have_the_parts_that_model_runner_py_reads() -> None:
    """Both runners as text: importing V2's takes Triton, which V1's CPU build switches off."""
    import vllm.v1.worker as package
    from vllm.v1.worker.gpu_worker import Worker

    assert not mentions(Worker, "self.use_v2_model_runner = "), "model_runner.py: the worker does not say any more"
    for file, names in {
        "gpu_model_runner.py": ("self.drafter = ", "self.sampler = ", "self.rejection_sampler = "),
        "gpu/model_runner.py": ("self.speculator = ", "self.sampler", "self.rejection_sampler = "),
    }.items():
        source = (Path(package.__path__[0]) / file).read_text(encoding="utf-8")
        assert [name for name in names if name not in source] == [], f"model_runner.py: {file} has other names"


def test_v2s_rejection_sampler_takes_our_tensors() -> None:
    """As text too. A parameter that moved would verify with another tensor, and say so at best by a wrong shape."""
    import ast

    import vllm.v1.worker.gpu as package

    def names(file: str, function: str) -> list[str]:
        tree = ast.parse((Path(package.__path__[0]) / file).read_text(encoding="utf-8"))
        (found,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function]
        return [argument.arg for argument in found.args.args]

    assert names("spec_decode/rejection_sampler_utils.py", "rejection_sample")[:11] == [
        "target_logits",
        "draft_logits",
        "draft_sampled",
        "cu_num_logits",
        "pos",
        "idx_mapping",
        "expanded_idx_mapping",
        "expanded_local_pos",
        "temperature",
        "seed",
        "num_speculative_steps",
    ]
    drawn = ["logits", "expanded_idx_mapping", "temperature", "seed", "pos", "apply_temperature", "is_drafting"]
    assert names("sample/gumbel.py", "gumbel_sample")[:9] == [*drawn, "logits_cache", "logits_cache_col"]
    assert names("sample/gumbel.py", "apply_temperature") == ["logits", "expanded_idx_mapping", "temperature"]


def test_shared_weights_are_found_by_identity() -> None:
    from paceline.rollout.internals.drafter_model import shared_with_policy

    policy = torch.nn.ModuleDict({"embed_tokens": torch.nn.Embedding(3, 2), "lm_head": torch.nn.Linear(2, 3)})
    drafter = torch.nn.ModuleDict({"lm_head": torch.nn.Linear(2, 3), "embed_tokens": policy["embed_tokens"]})
    worker: Any = SimpleNamespace(get_model=lambda: policy, get_draft_model=lambda: drafter)
    assert shared_with_policy(worker) == {"embed_tokens"}


def test_heads_use_the_policys_embedding_and_output_head() -> None:
    """A push of the policy reaches them there, because vLLM puts the policy's modules into the heads' model."""
    from vllm.config import SpeculativeConfig
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    from vllm.v1.worker.gpu.spec_decode.eagle import utils

    assert not mentions(
        SpecDecodeBaseProposer,
        "self.model.model.embed_tokens = target_embed_tokens",
        "self.model.lm_head = target_language_model.lm_head",
    )
    assert not mentions(utils, "draft_inner.embed_tokens = target_embed", "eagle_model.lm_head = target_lm_head")
    names = SpeculativeConfig.__dataclass_fields__
    assert {"method", "draft_model_config", "target_model_config"} <= names.keys(), "drafter_model.comes_with_policy"


def test_methods_of_one_draft_length_still_know_no_other() -> None:
    """`speculation.why_whole` names them; it can let one go that takes other lengths."""
    from vllm.v1.spec_decode import llm_base_proposer, medusa, ngram_proposer_gpu, suffix_decoding

    assert not mentions(medusa, "assert num_speculative_tokens == self.num_speculative_tokens\n")
    assert not mentions(suffix_decoding, "assert num_speculative_tokens == self.num_speculative_tokens\n")
    assert not mentions(ngram_proposer_gpu, "assert num_speculative_tokens == self.k\n")
    assert not mentions(
        llm_base_proposer,
        "batch_size * self.extra_slots_per_request",  # set once, by the longest draft
        "draft_token_ids.view(-1, self.num_speculative_tokens)",  # set at every step
    )


def test_processes_have_the_names_that_processes_py_looks_for() -> None:
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor

    from paceline.rollout.internals.processes import ENGINE_CORE, WORKER

    assert not mentions(utils, f'else "{ENGINE_CORE}"'), "processes.py: EngineCore has another name"
    assert not mentions(multiproc_executor, f'name=f"{WORKER}-'), "processes.py: workers have another name"


def test_worker_of_one_core_process_still_needs_an_executor_of_ours_on_cpus() -> None:
    """`executor.py` can go when vLLM's CPU platform takes the backend "uni", as on GPUs."""
    from vllm.platforms import cpu
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    assert not mentions(cpu, 'parallel_config.distributed_executor_backend == "uni"', 'backend = "mp"')
    assert "_init_executor" in vars(UniProcExecutor)


def test_worker_takes_an_extension_whose_names_are_its_own() -> None:
    from vllm.v1.worker.gpu_worker import Worker

    from planted import FaultyWorkerExtension

    names = {name for name in dir(FaultyWorkerExtension) if not name.startswith("__")}
    assert not [name for name in names if hasattr(Worker, name)], (
        "worker.py: vLLM's worker has a method of that name now"
    )


def test_platform_is_asked_of_vllm() -> None:
    from vllm.platforms import current_platform

    from paceline.rollout.internals.platform import on_cpu

    assert on_cpu() == current_platform.is_cpu()

"""The weight wire as vLLM sees it: transfer backends for its workers, and the sender for GPUs.

On the CPU `paceline_shm` checks a whole push before it touches the model. On GPUs vLLM's own NCCL and IPC backends carry the bytes,
and ours fingerprint what leaves and what arrives. Only vLLM's processes and a GPU learner import this module.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.model_executor.layers.linear import LinearBase
from vllm.utils.torch_utils import is_quantized_kv_cache

from paceline.precision import KvScales
from paceline.rollout.transfer import (
    Push,
    PushReport,
    ShmReceiver,
    Target,
    TensorSpec,
    check_precision,
    fingerprint,
    inventory,
    quantised_fingerprints,
    scale_fingerprint,
)
from paceline.types import PacelineError, PushRefusedError

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker


class _HeldWeights(WeightTransferEngine[Any, Any]):
    """What a worker knows about the weights that its models hold."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.applied: dict[Target, PushReport] = {}
        self.weights_unknown = False
        """True from before the first byte is written into a model until after the last: a worker that failed in between holds
        parts of two versions."""


@dataclass
class ShmInitInfo(WeightTransferInitInfo):
    """Nothing to agree on beforehand: every push names its segment."""


@dataclass
class ShmUpdateInfo(WeightTransferUpdateInfo):
    """A `Push` field by field, because vLLM makes this object from a dict."""

    version: int
    target: Target
    segment: str
    entries: list[dict[str, Any]]
    quantised: dict[str, str]
    kv_scales: dict[str, Any] | None


class ShmWeightTransferEngine(_HeldWeights):
    """Backend `paceline_shm`: read from shared memory, check everything, then load."""

    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._receiver = ShmReceiver()
        self._expected: dict[str, Mapping[str, TensorSpec]] = {}
        self._loading: tuple[Push, float, float] | None = None

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        """Nothing yet: vLLM's reload takes the old weights away as it begins, and a refused push must leave them in place."""

    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        push = Push.from_dict(vars(update_info))
        started_s = time.monotonic()
        if push.target == "policy":
            fp8_weights = any(True for _ in _quantised_layers(self.model))
            check_precision(push, fp8_weights=fp8_weights, num_kv_scales=len(_scaled_attention(self.model)))
        weights = self._receiver.check(push, self._inventory())
        self._loading = (push, started_s, time.monotonic())
        self.weights_unknown = True
        initialize_layerwise_reload(self.model)
        with disable_mtp_completeness_check():
            cast("Any", self.model).load_weights(weights)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        assert self._loading is not None, "receive_weights comes first"
        push, started_s, verified_s = self._loading
        finalize_layerwise_reload(self.model, self.model_config)
        _repack_tied_heads(self.model)
        held = {entry.name: entry.fingerprint for entry in push.entries}  # as found here: `check` raises when one differs
        if push.kv_scales is not None:
            set_kv_scales(self.model, push.kv_scales)
        if push.target == "policy":
            held |= _held_quantised(self.model) | _held_kv_scales(self.model)
        self.applied[push.target] = PushReport(
            version=push.version,
            fingerprints=held,
            verify_s=verified_s - started_s,
            load_s=time.monotonic() - verified_s,
        )
        self._loading = None
        self.weights_unknown = False

    def shutdown(self) -> None:
        self._receiver.close()

    def _inventory(self) -> Mapping[str, TensorSpec]:
        checkpoint = self.model_config.model  # the drafter's in a drafter session
        if checkpoint not in self._expected:
            self._expected[checkpoint] = inventory(checkpoint)
        return self._expected[checkpoint]


def _repack_tied_heads(model: torch.nn.Module) -> None:
    """Give an output head that is tied to the embedding the new weights, on the CPU.

    There vLLM computes a head from a packed copy of its weights and packs anew what a reload brings. To a tied head it brings
    nothing, so that goes on with the old embedding while everything else is new. Seen in vLLM 0.32; the policy of
    tests/engine/test_transfer.py is tied, so this can go when its log-probabilities are right without it.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        UnquantizedEmbeddingMethod,
        VocabParallelEmbedding,
    )

    heads = [module for module in model.modules() if isinstance(module, ParallelLMHead)]
    embeddings = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding) and module not in heads]
    for head in heads:
        tied = any(head.weight is embedding.weight for embedding in embeddings)
        if tied and isinstance(head.quant_method, UnquantizedEmbeddingMethod):
            head.quant_method.process_weights_after_loading(head)  # does nothing on a GPU


def _quantised_layers(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    from vllm.model_executor.layers.quantization.online.fp8 import Fp8PerBlockOnlineLinearMethod

    for name, module in model.named_modules():
        if isinstance(module, LinearBase) and isinstance(module.quant_method, Fp8PerBlockOnlineLinearMethod):
            yield name, module


def held_fp8(worker: Worker) -> dict[str, str]:
    model = worker.get_model()
    return _held_quantised(model) | _held_kv_scales(model)


def plant_fault(worker: Worker, kind: str) -> None:
    """One bit of one layer (`weight`), one block's scale (`scale`), or the KV scales that a reload leaves (`kv_scales`)."""
    model = worker.get_model()
    if kind in ("weight", "scale"):
        _, layer = next(_quantised_layers(model))
        if kind == "weight":
            cast("torch.Tensor", layer.weight).data.view(torch.uint8)[0, 0] ^= 1
        else:
            cast("torch.Tensor", layer.weight_scale_inv).data[0, 0] *= 2
    elif kind == "kv_scales":
        ones = (1.0,) * len(_scaled_attention(model))
        set_kv_scales(model, KvScales(version=0, q=ones, k=ones, v=ones))
    else:
        raise ValueError(f"kind: got {kind!r}; must be weight, scale or kv_scales")


def _held_quantised(model: torch.nn.Module) -> dict[str, str]:
    """Fingerprints of every FP8 layer, from the memory that its kernel reads."""
    held: dict[str, str] = {}
    for name, module in _quantised_layers(model):
        codes, scale = module.weight, module.weight_scale_inv
        assert isinstance(codes, torch.Tensor) and isinstance(scale, torch.Tensor)
        held |= quantised_fingerprints(name, _unpacked(codes) if codes.device.type == "cpu" else codes, scale)
    return held


def _unpacked(packed_NK: torch.Tensor) -> torch.Tensor:
    """The codes of an FP8 layer on the CPU in the order of the matrix. There vLLM packs them for AMX tiles, 32 rows by pairs of
    columns, and keeps nothing else; tests/engine/test_fp8.py fails if it packs them otherwise."""
    num_rows, num_columns = packed_NK.shape
    tiles = packed_NK.detach().view(torch.uint8).view(num_rows // 32, num_columns // 2, 32, 2)
    return tiles.transpose(1, 2).reshape(num_rows, num_columns).view(packed_NK.dtype)


def set_kv_scales(model: torch.nn.Module, scales: KvScales) -> None:
    """Put scales where attention kernels read them: some from a tensor, some from a number beside it. A reload has set them to 1.

    The KV cache must be empty or computed anew: what lies in it was written with the old scales (`VllmEngine.on_new_weights`)."""
    for layer, attention in _scaled_attention(model):
        for part, scale in (("q", scales.q[layer]), ("k", scales.k[layer]), ("v", scales.v[layer])):
            getattr(attention, f"_{part}_scale").fill_(scale)
            setattr(attention, f"_{part}_scale_float", scale)
        attention._k_scale_cpu.fill_(scales.k[layer])
        attention._v_scale_cpu.fill_(scales.v[layer])


def _held_kv_scales(model: torch.nn.Module) -> dict[str, str]:
    """Fingerprints of the scales, read back from both places; where the two differ it is neither's."""
    held: dict[str, str] = {}
    for layer, attention in _scaled_attention(model):
        for part in "qkv":
            places = (float(getattr(attention, f"_{part}_scale")), getattr(attention, f"_{part}_scale_float"))
            held[f"kv_scales.layers.{layer}.{part}"] = "+".join(sorted({scale_fingerprint(scale) for scale in places}))
    return held


def _scaled_attention(model: torch.nn.Module) -> list[tuple[int, Any]]:
    """Attention layers whose KV cache is in FP8, by their place in the model."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.models.utils import extract_layer_index

    layers = (module for module in model.modules() if isinstance(module, Attention))
    return [(extract_layer_index(layer.layer_name), layer) for layer in layers if is_quantized_kv_cache(layer.kv_cache_dtype)]


def receive_push(worker: Worker, push: Push) -> PushReport:
    """One push through vLLM's own lifecycle. A refusal is an answer and not an error: vLLM's rpc would turn an error into text."""
    engine = worker.weight_transfer_engine
    if not isinstance(engine, ShmWeightTransferEngine):
        raise PacelineError(f"weight_transfer_config: got backend {type(engine).__name__}; must be paceline_shm to receive a push")
    if push.target == "drafter" and not worker.supports_draft_weight_updates():
        return PushReport(version=push.version, refused="drafter: this engine runs without one", fingerprints={})
    if push.target == "drafter" and (problem := _cannot_reload_drafter(worker, push)) is not None:
        return PushReport(version=push.version, refused=problem, fingerprints={})
    try:
        if push.target == "drafter":
            worker.start_draft_weight_update()
        else:
            worker.start_weight_update()
        worker.update_weights(push.to_dict())
    except PushRefusedError as error:
        return PushReport(version=push.version, refused=str(error), fingerprints={})
    worker.finish_weight_update()
    return engine.applied[push.target]


def _cannot_reload_drafter(worker: Worker, push: Push) -> str | None:
    """Why these weights must not reach the drafter, if they must not."""
    from vllm.platforms import current_platform

    # vLLM 0.32 builds DFlash's context projection at the end of a reload, on the CPU from layers that it has packed by then and so
    # emptied: the engine dies in its next step. tests/engine/test_drafters.py pushes one; this can go when that ends well.
    speculation = worker.vllm_config.speculative_config
    if current_platform.is_cpu() and speculation is not None and speculation.method == "dflash":
        return "drafter: vLLM's CPU backend cannot take new weights of a DFlash drafter"
    if shared := _shared_with_policy(worker) & {entry.name.split(".")[0] for entry in push.entries}:
        return (
            f"drafter: vLLM shares {', '.join(sorted(shared))} between drafter and policy, because they were equal when it loaded "
            "them, and a push would overwrite the policy's: start from `draft.checkpoint.with_own_ends`"
        )
    return None


def _shared_with_policy(worker: Worker) -> set[str]:
    """Layers with weights that are one object in both models, by the names that a drafter's checkpoint has for them."""
    of_policy = {id(weight) for weight in worker.get_model().parameters()}
    drafter: Any = worker.model_runner.drafter
    return {name.split(".")[-2] for name, weight in drafter.model.named_parameters() if id(weight) in of_policy}


def applied(worker: Worker) -> Mapping[Target, PushReport]:
    """What the worker's models hold, as far as pushes brought it. A model that no push has reached holds its checkpoint."""
    engine = worker.weight_transfer_engine
    if not isinstance(engine, _HeldWeights):
        raise PacelineError(f"weight_transfer_config: got backend {type(engine).__name__}; must be one of Paceline's")
    if engine.weights_unknown:
        raise PacelineError("a push failed after it had begun to change the model: nobody knows what it holds")
    return engine.applied


# GPUs. Not run on a GPU yet: kept thin over what vLLM tests itself.


class _Witness(torch.nn.Module):
    """Stands in for the model while a stock backend receives, and fingerprints each tensor before the model gets it."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self.fingerprints: dict[str, str] = {}
        self.not_finite: list[str] = []

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        weights = list(weights)
        for name, tensor in weights:
            self.fingerprints[name] = fingerprint(tensor)
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                self.not_finite.append(name)
        cast("Any", self.model).load_weights(weights)


class _Fingerprinted(_HeldWeights):
    """Mixed in before a stock backend.

    Stock backends write into the model while the bytes arrive, so nothing can be refused. What arrives wrong leaves
    `weights_unknown`, or fingerprints that `mismatched` tells from the sender's: the caller must push again before it resumes the
    engine, and give the engine up when that fails too.
    """

    def start_weight_update(self) -> None:
        self.weights_unknown = True
        self._arrived: dict[str, str] = {}
        super().start_weight_update()  # pyright: ignore[reportAbstractUsage]  the stock backend is next in line

    def receive_weights(self, update_info: Any) -> None:
        model = self.model
        self.model = witness = _Witness(model)
        try:
            super().receive_weights(update_info)  # pyright: ignore[reportAbstractUsage]  as above
        finally:
            self.model = model
        if witness.not_finite:
            raise PacelineError(f"{witness.not_finite[0]}: holds a NaN or an infinity, and is loaded")
        self._arrived |= witness.fingerprints

    def finish_weight_update(self) -> None:
        super().finish_weight_update()  # pyright: ignore[reportAbstractUsage]  as above
        target: Target = "policy" if self.model is self._default_model else "drafter"
        self.applied[target] = PushReport(version=None, fingerprints=self._arrived)
        self.weights_unknown = False


class FingerprintedNcclEngine(_Fingerprinted, NCCLWeightTransferEngine):
    """Backend `paceline_nccl`. Not run on a GPU yet."""


class FingerprintedIpcEngine(_Fingerprinted, IPCWeightTransferEngine):
    """Backend `paceline_ipc`. Not run on a GPU yet."""


class _FingerprintedSource(WeightSource):
    def __init__(self, metadata: Callable[[], list[ParamMeta]], weights: Callable[[], Iterator[tuple[str, torch.Tensor]]]) -> None:
        self._metadata = metadata
        self._weights = weights
        self.fingerprints: dict[str, str] = {}

    def metadata(self) -> list[ParamMeta]:
        return self._metadata()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.fingerprints = {}
        for name, tensor in self._weights():
            self.fingerprints[name] = fingerprint(tensor)
            yield name, tensor


class GpuSender:
    """vLLM's own sender, with fingerprints. Not run on a GPU yet.

    `init_info` chooses and opens the transport (`NCCLTrainerInitInfo`, `IPCTrainerInitInfo`). Made and called on every rank of the
    learner, because gathering is collective; `client` is only used on rank 0.
    """

    def __init__(
        self,
        init_info: TrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        metadata: Callable[[], list[ParamMeta]],
        weights: Callable[[], Iterator[tuple[str, torch.Tensor]]],
    ) -> None:
        self._source = _FingerprintedSource(metadata, weights)
        self._engine = WeightTransferTrainerFactory.trainer_init(init_info, client=client, source=self._source)

    def send(self) -> Mapping[str, str]:
        """Send once to all engines; the fingerprints are to be compared with every engine's `applied_fingerprints`."""
        self._engine.send_weights()
        return self._source.fingerprints


def nccl_wire(
    *,
    rank: int,
    address: str,
    port: int,
    num_workers: int,
    client: VLLMWeightSyncClient,
    weights: Callable[[], Iterator[tuple[str, torch.Tensor]]],
    specs: Iterable[tuple[str, torch.dtype, tuple[int, ...]]],
) -> GpuSender:
    """vLLM's NCCL transport between one learner and all workers of all engines. Not run on a GPU yet."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    metadata = [ParamMeta(*spec) for spec in specs]
    init_info = NCCLTrainerInitInfo(master_address=address, master_port=port, world_size=1 + num_workers, rank=rank)
    return GpuSender(init_info, client=client, metadata=lambda: metadata, weights=weights)

"""Receive weights in vLLM's worker: the backend `paceline` checks a whole push before it changes the model.

vLLM keeps one backend per worker, for policy and drafter. If the host configures another or none, ours is kept beside
it (`internals/transfer_engine.py`). The message names the transport of its bytes (`paceline.weights`).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from paceline.rollout.internals.drafter_model import comes_with_policy, shared_with_policy
from paceline.rollout.internals.fp8_layers import codes_in_order, held_scale, quantized_layers
from paceline.rollout.internals.kv_scales import held_kv_scales, scaled_attention, set_kv_scales
from paceline.rollout.internals.reload import finish_loading, load_weights, reload_problem
from paceline.rollout.internals.transfer_engine import aimed, engine_of
from paceline.types import PacelineError, PushRefusedError
from paceline.weights.check import TensorSpec, check_precision, check_push, inventory
from paceline.weights.distributed import DistributedReceiver, GroupAddress
from paceline.weights.fingerprint import quantized_fingerprints, scale_fingerprint
from paceline.weights.message import Push, PushReport, Target
from paceline.weights.shared_memory import ShmReceiver

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker


@dataclass
class JoinInfo(WeightTransferInitInfo):
    """Used by the distributed transport only: a push through shared memory names its segment."""

    address: dict[str, Any]
    """A `GroupAddress`."""
    first_rank: int
    """Rank of the engine's first worker."""


@dataclass
class PushInfo(WeightTransferUpdateInfo):
    """A push and its bytes."""

    push: Push
    memory: torch.Tensor


class PushReceiver(WeightTransferEngine[JoinInfo, PushInfo]):
    """Backend `paceline`."""

    init_info_cls = JoinInfo
    update_info_cls = PushInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.applied: dict[Target, PushReport] = {}
        self.weights_unknown = False
        """True while a model is being written: a worker that failed in between holds parts of two versions."""
        self._shared_memory = ShmReceiver()
        self._distributed = DistributedReceiver(self.device)
        self._expected: dict[str, Mapping[str, TensorSpec]] = {}
        self._loading: tuple[Push, list[tuple[str, torch.Tensor]], float, float] | None = None
        self.heads: tuple[torch.nn.Module, Any] | None = None
        """MTP heads in the policy's checkpoint, and their config: every push of the policy updates them."""

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        self._distributed.join(GroupAddress(**init_info.address), init_info.first_rank + self.parallel_config.rank)

    def fetch(self, push: Push) -> torch.Tensor:
        """Return the bytes of a push."""
        return self._distributed.fetch(push) if push.transport == "distributed" else self._shared_memory.fetch(push)

    def start_weight_update(self) -> None:
        """Do nothing: vLLM's reload frees the old weights at its start, and a refused push must keep them."""

    def receive_weights(self, update_info: PushInfo) -> None:
        push = update_info.push
        started_s = time.monotonic()
        if push.target == "policy":
            check_precision(
                push,
                fp8_weights=any(True for _ in quantized_layers(self.model)),
                num_workers=self.parallel_config.tensor_parallel_size,
                num_kv_scales=len(scaled_attention(self.model)),
            )
        weights = check_push(push, self._inventory(), update_info.memory)
        self._loading = (push, weights, started_s, time.monotonic())
        self.weights_unknown = True
        load_weights(self.model, weights)

    def finish_weight_update(self) -> None:
        assert self._loading is not None, "receive_weights comes first"
        push, weights, started_s, verified_s = self._loading
        finish_loading(self.model, self.model_config)
        if self.heads is not None:
            # They use the policy's embedding and output head, which are updated by now.
            load_weights(self.heads[0], weights)
            finish_loading(*self.heads)
        held = {entry.name: entry.fingerprint for entry in push.entries}  # verified by `check_push`
        if push.kv_scales is not None:
            set_kv_scales(self.model, push.kv_scales)
        if push.target == "policy":
            held |= held_fp8(self.model)
        self.applied[push.target] = PushReport(
            version=push.version,
            fingerprints=held,
            verify_s=verified_s - started_s,
            load_s=time.monotonic() - verified_s,
        )
        if self.heads is not None:
            self.applied["drafter"] = self.applied["policy"]
        self._loading = None
        self.weights_unknown = False

    def shutdown(self) -> None:
        self._shared_memory.close()
        self._distributed.close()

    def _inventory(self) -> Mapping[str, TensorSpec]:
        checkpoint = self.model_config.model  # the drafter's if it is the target
        if checkpoint not in self._expected:
            self._expected[checkpoint] = inventory(checkpoint)
        return self._expected[checkpoint]


def receive_push(worker: Worker, push: Push) -> PushReport:
    """Check a push and load it, with any backend of the host. Refusals are returned, because vLLM's rpc turns errors
    into text."""
    receiver = engine_of(worker, PushReceiver)
    try:
        memory = receiver.fetch(push)  # always: a broadcast waits for every worker
        names = {entry.name for entry in push.entries}
        if push.target == "drafter" and (problem := drafter_problem(worker, names)) is not None:
            raise PushRefusedError(f"drafter: {problem}")
        receiver.heads = _heads(worker) if push.target == "policy" else None
        with aimed(receiver, worker, push.target):
            receiver.update_weights({"push": push, "memory": memory})
            receiver.finish_weight_update()
    except PushRefusedError as error:
        return PushReport(version=push.version, refused=str(error))
    return receiver.applied[push.target]


def applied(worker: Worker) -> Mapping[Target, PushReport]:
    """Return the last push of each model. Models without a push hold their checkpoint."""
    receiver = engine_of(worker, PushReceiver)
    if receiver.weights_unknown:
        raise PacelineError("a push failed while it changed the model: its weights are unknown")
    return receiver.applied


def _heads(worker: Worker) -> tuple[torch.nn.Module, Any] | None:
    speculation, model = worker.speculative_config, worker.get_draft_model()
    if speculation is None or model is None or not comes_with_policy(speculation):
        return None
    return model, speculation.draft_model_config


def drafter_problem(worker: Worker, names: Collection[str]) -> str | None:
    """Return why this engine's drafter cannot take weights of these names, None if it can."""
    speculation = worker.speculative_config
    if speculation is None or speculation.draft_model_config is None or worker.get_draft_model() is None:
        return "this engine has none"
    if comes_with_policy(speculation):
        return "it is a part of the policy's checkpoint, and pushes of the policy update it"
    if (problem := reload_problem(speculation.method)) is not None:
        return problem
    if shared := shared_with_policy(worker) & {name.split(".")[0] for name in names}:
        return (
            f"vLLM shares {', '.join(sorted(shared))} between drafter and policy, because they were equal at load, and "
            "a push would overwrite the policy's: start from `drafters.checkpoint.with_own_embeddings`"
        )
    return None


def held_fp8(model: torch.nn.Module) -> dict[str, str]:
    """Return current fingerprints of the quantized layers and KV scales, from the memory of their kernels."""
    held: dict[str, str] = {}
    for name, layer in quantized_layers(model):
        held |= quantized_fingerprints(name, codes_in_order(layer), held_scale(layer))
    for name, copies in held_kv_scales(model).items():
        # If the two copies of a scale differ, join their fingerprints: the result matches nothing.
        held[name] = "+".join(sorted({scale_fingerprint(scale) for scale in copies}))
    return held

"""TRL: a callback for `GRPOTrainer` that trains its engine's drafter, and weight sync over Paceline's wire.

    trainer = GRPOTrainer(...)                       # PACELINE=speculation.toml in the environment (docs/hosts.md)
    trainer.add_callback(DrafterCallback(trainer))

    generate ──▶ score (hooks: policy_tap.py) ──▶ update of the policy ──▶ on_step_end: drafter_updates.py ──▶ engine
       │                     │                                                 │
       └── log-probs ────────┴──▶ raw importance ratios ──▶ mismatch/* ────────┴──▶ TRL's own logs

Colocated engines are called in their process, servers through `POST /collective_rpc`. TRL logs importance ratios after
truncation and masking; this callback also logs the raw ratios, with the names of Paceline's own metrics.

Rank 0 trains and pushes. Unsupported: one engine in each of several processes (each would get a different drafter, and
tensor-parallel ranks that draft differently deadlock), sharded policies (FSDP, ZeRO-3), servers on another machine.

Relied upon in TRL 1.16, besides public arguments: `GRPOTrainer.vllm_generation` (`mode`, `llm`, `vllm_client`,
`enable_sleep_mode`, `sync_weights`, `_iter_named_params`), `_metrics`, `_buffered_inputs`, and calls of the policy with
`input_ids`, `attention_mask` and `labels` that return `log_probs`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient

from paceline.config import BufferConfig, DrafterTrainingConfig
from paceline.drafters.checkpoint import taps_among
from paceline.drafters.failures import Failures
from paceline.drafters.provenance import Provenance
from paceline.integrations.drafter_updates import DrafterUpdater
from paceline.integrations.engine_wire import EngineWire, Rpc, http_rpc
from paceline.integrations.policy_tap import PolicyTap
from paceline.integrations.raw_ratios import mismatch_metrics
from paceline.rollout.calls import PUSH

if TYPE_CHECKING:
    from trl import GRPOTrainer  # pyright: ignore[reportPrivateImportUsage]  public in its docs

logger = logging.getLogger(__name__)
TRAINING = DrafterTrainingConfig(buffer=BufferConfig(keep_versions=16))
"""Keep rollouts longer than in Paceline's runs: generations may be small, and only a tenth of the prompts is held
out."""


class DrafterCallback(TrainerCallback):
    """Train the drafter after every step of TRL's trainer, and log Paceline's metrics. Never raises."""

    def __init__(
        self, trainer: GRPOTrainer, *, budget_s: float = 2.0, training: DrafterTrainingConfig = TRAINING, seed: int = 0
    ) -> None:
        """`budget_s`: mean seconds of drafter training after each optimizer step. Settings of `training` for idle
        engines have no effect."""
        self._trainer: Any = trainer
        self._budget_s, self._training, self._seed = budget_s, training, seed
        self._updater: DrafterUpdater | None = None
        self._tap: PolicyTap | None = None
        self._start = ""
        self._judged: object = None
        """The last generation with logged ratios."""
        self._failures = Failures(
            lambda what, error: logger.error("Paceline's callback: %s; TRL continues without it", what, exc_info=error)
        )

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if not self._trainer.accelerator.is_main_process:
            return
        with self._failures.contained("start failed"):
            if (problem := _unsupported(self._trainer)) is None:
                problem = self._begin(EngineWire(_rpc(self._trainer)))
            if problem is not None:
                logger.warning("Paceline trains no drafter here: %s", problem)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if not self._trainer.accelerator.is_main_process:
            return
        with self._failures.contained("raw ratios failed"):
            self._log_ratios()
        with self._failures.contained("drafter training failed"):
            self._update(state.global_step)
        if self._failures.num:
            self._log({"paceline/callback_failures": float(self._failures.num)})

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._save(Path(str(args.output_dir)) / f"checkpoint-{state.global_step}" / "drafter", state)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Save the engine's drafter in `output_dir`, as a checkpoint for stock vLLM."""
        self._save(Path(str(args.output_dir)) / "drafter", state)
        for part in (self._tap, self._updater):
            if part is not None:
                part.close()
        self._tap = self._updater = None

    def _begin(self, wire: EngineWire) -> str | None:
        """Query the engine's drafter and install hooks in the policy; return a problem, if any."""
        trainer, drafter = self._trainer, wire.drafter()
        if drafter.problem is not None:
            return drafter.problem
        called = trainer.accelerator.unwrap_model(trainer.model)
        policy = called.get_base_model() if hasattr(called, "get_base_model") else called
        args, checkpoint = trainer.args, Path(drafter.checkpoint)
        steps_per_rollout = args.steps_per_generation * args.num_iterations
        scored = trainer.vllm_importance_sampling_correction or args.gradient_accumulation_steps % steps_per_rollout
        self._start = drafter.checkpoint
        draft_length = drafter.draft_length
        self._updater = DrafterUpdater(wire, checkpoint, self._training, draft_length=draft_length, seed=self._seed)
        self._tap = PolicyTap(
            policy,
            taps_among(checkpoint, policy.config.get_text_config().num_hidden_layers),
            self._training.buffer,
            passes_per_step=args.steps_per_generation,
            with_gradient=not scored,
            temperature=trainer.temperature,
            called=called,
            seed=self._seed,
        )
        logger.info(
            "Paceline trains the %s drafter %s for %.1f s after each step", drafter.kind, checkpoint, self._budget_s
        )
        return None

    def _update(self, step: int) -> None:
        if self._updater is None or self._tap is None:
            return
        self._updater.add(self._tap.take(), step)
        self._updater.update(self._tap.head_VD, self._budget_s)
        self._log(self._updater.metrics() | {"draft/hand_over_failures": float(self._tap.failures.num)})
        if self._updater.given_up:
            self._tap.close()

    def _log_ratios(self) -> None:
        """Log raw ratios of this rank's last generation once."""
        batches: Sequence[Mapping[str, torch.Tensor]] | None = self._trainer._buffered_inputs
        if batches is not None and batches is not self._judged:
            self._judged = batches
            self._log(mismatch_metrics(batches, cap=self._trainer.vllm_importance_sampling_clip_max or 2.0))

    def _log(self, metrics: Mapping[str, float]) -> None:
        """Add to TRL's next log, which averages over steps."""
        for key, value in metrics.items():
            self._trainer._metrics["train"][key].append(value)

    def _save(self, directory: Path, state: TrainerState) -> None:
        if self._updater is None:
            return
        provenance = Provenance(
            policy=self._trainer.model.name_or_path,
            data="rollouts of a TRL run",
            start=self._start,
            num_tokens=self._updater.num_tokens,
            seed=self._seed,
            rl_steps=state.global_step,
        )
        self._updater.save(directory, provenance)


def _unsupported(trainer: Any) -> str | None:
    """Return why this engine's drafter cannot be trained, if so."""
    if not trainer.use_vllm:
        return "TRL generates without vLLM; set use_vllm=True"
    if trainer.vllm_generation.mode == "colocate" and trainer.accelerator.num_processes > 1:
        return "each of several processes has an engine; use vllm_mode='server', or one process"
    return None


def _rpc(trainer: Any) -> Rpc:
    """Return calls to the trainer's engine or server."""
    generation = trainer.vllm_generation
    if generation.mode == "server":
        return http_rpc(generation.vllm_client.base_url)

    def call(method: str, args: Sequence[Any]) -> Sequence[Any]:
        return generation.llm.collective_rpc(method, args=tuple(args))

    def call_awake(method: str, args: Sequence[Any]) -> Sequence[Any]:
        """Wake the engine, which TRL keeps asleep without weights between generations."""
        if method != PUSH:
            return call(method, args)
        generation.llm.wake_up(tags=["weights"])
        try:
            return call(method, args)
        finally:
            generation.llm.sleep(level=2)  # TRL sends the policy before it generates

    return call_awake if generation.enable_sleep_mode else call


# Weight sync over Paceline's wire: shared memory and fingerprints, without CUDA. TRL cannot sync on CPUs: in colocated
# mode it writes into parameters that vLLM's CPU backend has packed, and with a server it needs NCCL. The first two
# functions go when TRL syncs weights on CPUs; CI uses them to test stock TRL. Not yet run on GPUs.


def sync_over_wire(trainer: GRPOTrainer) -> None:
    """Make a trainer in colocated mode sync its weights over the wire."""
    generation: Any = trainer.vllm_generation
    if generation.mode != "colocate" or generation.enable_sleep_mode:
        raise ValueError(
            f"trainer: got vllm_mode {generation.mode!r} and vllm_enable_sleep_mode {generation.enable_sleep_mode}; "
            "must be colocated and awake (`wire_clients` is for servers)"
        )
    wire = EngineWire(_rpc(trainer))

    def sync_weights() -> None:
        wire.push_policy(generation._iter_named_params())
        generation.llm.reset_prefix_cache()

    generation.sync_weights = sync_weights


class WireClient(VLLMClient):
    """TRL's client of a vLLM server, with weights over the wire instead of NCCL."""

    def init_communicator(self, device: torch.device | str | int = 0) -> None:
        self._wire = EngineWire(http_rpc(self.base_url))
        self._wire.counters()  # raise here if endpoints are missing

    def update_named_params(
        self, metadata: list[tuple[str, str, list[int]]], named_params: Iterator[tuple[str, torch.Tensor]]
    ) -> None:
        self._wire.push_policy(named_params)

    def close_communicator(self) -> None:
        self._wire.close()


@contextmanager
def wire_clients() -> Iterator[None]:
    """Make trainers in server mode that are created inside sync their weights over the wire."""
    module: Any = vllm_generation
    stock, module.VLLMClient = module.VLLMClient, WireClient
    try:
        yield
    finally:
        module.VLLMClient = stock


class WireTransfer:
    """`weight_transfer` of TRL's `AsyncGRPOTrainer` (its WeightTransferProtocol) over the wire."""

    def __init__(self, server_url: str, server_timeout_s: float = 240.0) -> None:
        from trl.experimental.async_grpo.vllm_client import VLLMClient as AsyncClient

        self._client = AsyncClient(server_url, server_timeout_s)
        self._wire = EngineWire(http_rpc(server_url))

    def init_weight_transfer(self) -> None:
        self._client.wait_for_server_ready()
        self._wire.counters()  # raise here if endpoints are missing

    def pause(self) -> None:
        self._client.pause()

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._wire.push_policy(iterator)

    def resume(self) -> None:
        self._client.resume()

    def destroy(self) -> None:
        self._wire.close()

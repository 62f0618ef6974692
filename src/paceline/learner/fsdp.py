"""FSDP2 learner: score rollouts, update the policy and gather its weights.

Every rank is one process with one FsdpLearner. All ranks make the same calls with the same arguments (SPMD):

    samples ──▶ plan_passes: dealt to ranks by length, cut into micro-batches ──▶ TokenScorer (FSDP2) ──▶ logp, entropy
                     every rank runs the same number of passes                        │
                                                                     policy_loss ──▶ backward ──▶ clip ──▶ AdamW

If an update is one optimizer step, `score` can compute the gradients in the same pass: the correction of a rollout
follows from its own log-probabilities. They stay pending in the parameters until `apply` or `discard`. `apply` without
them runs a second pass, with the same result bit for bit.

FSDP2 gathers parameters and reduces gradients inside each pass, so a rank without samples runs an empty pass to avoid
a deadlock. The loss is divided by counts of the whole minibatch, so the number of ranks and the micro-batch size change
the result only by rounding.

Dimension suffixes: B rollouts, S padded tokens (prompt and response), T padded response tokens, N response tokens
without padding, D hidden size, V vocabulary, K taps.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# torch and transformers are partially typed.

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore, Store  # pyright: ignore[reportPrivateImportUsage]  public in its docs
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from paceline.config import CorrectionConfig, LearnerConfig, ObjectiveConfig
from paceline.fp8 import KvScales
from paceline.learner.batch import PaddedBatch, make_batch, plan_passes
from paceline.learner.calibration import SHARE, Calibration, calibration_metrics, choose, has_qk_norm, scales_of
from paceline.learner.checkpoint import full_weight, load_policy, output_head, read_tensors, write_checkpoint
from paceline.learner.correction import correct
from paceline.learner.objective import LossSums, loss_normalizer, policy_loss
from paceline.learner.rank import join_ranks, prepare_device, shard_policy
from paceline.learner.scoring import HiddenStates, RankScores, TokenScorer, hidden_states_of, record_taps, unflatten
from paceline.learner.state import LearnerCounters, read_state, write_state
from paceline.types import DeviceKind, PendingGradients, Sample


class FsdpLearner:
    """One rank of the learner. All methods are collective."""

    def __init__(
        self,
        model_path: str | Path,
        config: LearnerConfig,
        objective: ObjectiveConfig,
        *,
        temperature: float,
        seed: int = 0,
        rank: int = 0,
        store: Store | None = None,
        num_threads: int | None = None,
        device: DeviceKind | None = None,
    ) -> None:
        """Load and shard the policy. `temperature` is the sampling temperature of the rollouts; `store` connects
        several ranks; `device` None selects a GPU if this process has one."""
        if not temperature > 0:
            raise ValueError(f"temperature: got {temperature}; must be above 0 because logits are divided by it")
        if config.world_size > 1 and store is None:
            raise ValueError(f"store: got None; must be given because it connects {config.world_size} ranks")
        self._path = Path(model_path)
        self._config = config
        self._objective = objective
        self._rank = rank
        self._world_size = config.world_size
        self._seed = seed
        self._num_updates = 0
        self._num_steps = 0
        self._pending: PendingGradients | None = None
        self._pending_sums = LossSums()
        self._num_pending = 0
        self.kv_scales: KvScales | None = None
        """Scales of an FP8 KV cache; None before the first `calibrate`."""
        self._device = prepare_device(rank, seed, num_threads, device)
        policy, self._names = load_policy(self._path)
        self.untrained = self._names - policy.state_dict().keys()
        """Names of checkpoint tensors that transformers does not load, such as MTP heads. Sent to engines unchanged."""
        join_ranks(config, rank, self._device, store or HashStore())
        self._scorer = TokenScorer(policy, temperature)
        self._layers = shard_policy(self._scorer, config, self._device)
        self._optimizer = torch.optim.AdamW(
            self._scorer.parameters(),
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
        )

    @property
    def num_updates(self) -> int:
        """Number of policy updates, including updates before a restored state."""
        return self._num_updates

    @property
    def hidden_size(self) -> int:
        return self._scorer.policy.config.get_text_config().hidden_size

    @property
    def num_kv_heads(self) -> int:
        text = self._scorer.policy.config.get_text_config()
        return getattr(text, "num_key_value_heads", None) or text.num_attention_heads

    def score(
        self,
        samples: Sequence[Sample],
        taps: Sequence[int] = (),
        tapped: Collection[int] | None = None,
        correction: CorrectionConfig | None = None,
    ) -> RankScores:
        """Score every response token under the current policy. With `taps`, also keep the hidden states of the samples
        in `tapped` (all if None). With `correction`, also compute the gradients of the samples that it corrects and
        hold them as pending, unless an update takes several optimizer steps. Replaces pending gradients."""
        self._check(samples, trained_on=False)
        for tap in taps:
            if not 0 <= tap <= len(self._layers):
                raise ValueError(f"taps: got {tap}; must be 0..{len(self._layers)} because tap i follows layer i")
        wanted = frozenset(range(len(samples)) if tapped is None else tapped)
        bounds = np.cumsum([0] + [sample.num_response_tokens for sample in samples])
        # Zero for samples of other ranks, so that the sum over ranks keeps every value bit for bit.
        scores = torch.zeros(2, int(bounds[-1]), device=self._device)
        states: dict[int, HiddenStates] = {}
        sums, normalizer = LossSums(), self._normalizer(samples)
        if correction is not None:
            self.discard()
            if not self._can_hold_gradients(samples):
                correction = None
        for batch in self._passes(samples):
            rows = [row for row, index in enumerate(batch.indices) if index in wanted] if taps else []
            with (
                torch.set_grad_enabled(correction is not None),
                record_taps(self._layers, taps if rows else ()) as recorded,
            ):
                logp_N, entropy_N, hidden_BSD = self._scorer(batch.input_ids_BS, batch.position_N, batch.target_N)
            if correction is not None:
                corrected = self._corrected(samples, batch, logp_N, correction)
                sums = sums.merge(self._backward(corrected, logp_N, entropy_N, normalizer))
            if not batch.indices:
                continue
            columns = np.concatenate([np.arange(int(bounds[i]), int(bounds[i + 1])) for i in batch.indices])
            scores[:, torch.from_numpy(columns).to(self._device)] = torch.stack([logp_N.detach(), entropy_N])
            if rows:
                states |= hidden_states_of(samples, batch.indices, rows, [recorded[tap] for tap in taps], hidden_BSD)
        self._root.reshard()  # without a backward pass the root, with the whole embedding, would stay gathered
        dist.all_reduce(scores)
        logp, entropy = (np.split(row, bounds[1:-1])[: len(samples)] for row in scores.cpu().numpy())
        pending = None
        if correction is not None:
            self._num_pending += 1
            pending = self._pending = PendingGradients(id=self._num_pending, correction=correction)
            self._pending_sums = self._over_ranks(sums)
        return RankScores(logp=tuple(logp), entropy=tuple(entropy), states=states, pending=pending)

    def apply(self, samples: Sequence[Sample], pending: PendingGradients | None = None) -> dict[str, float]:
        """Update the policy and return metrics, the same on every rank. Use the pending gradients if this learner still
        holds them; otherwise take `minibatches` optimizer steps on the samples."""
        self._check(samples, trained_on=True)
        sums = LossSums()
        grad_norms: list[float] = []
        reused = pending is not None and pending == self._pending
        if reused:
            sums, self._pending = self._pending_sums, None
            grad_norms.append(self._step())
        else:
            self.discard()
            for minibatch in self._minibatches(samples):
                sums = sums.merge(self._accumulate(minibatch))
                grad_norms.append(self._step())
        self._num_updates += 1
        metrics = {
            "policy/learning_rate": self._learning_rate(max(0, self._num_steps - 1)),
            "policy/optimizer_steps": float(len(grad_norms)),
            "policy/skipped_steps": float(np.count_nonzero(~np.isfinite(grad_norms))),
            "policy/num_tokens": sums.num_tokens,
            "policy/gradients_reused": float(reused),
        }
        if not grad_norms:  # every group was dropped, and the means below would be NaN
            return metrics
        count = max(1.0, sums.num_tokens)
        return metrics | {
            "policy/loss": sums.loss / len(grad_norms),
            "policy/grad_norm": float(np.mean(grad_norms)),
            "policy/entropy": sums.entropy / count,
            "policy/clip_share": sums.clipped / count,
            "policy/ratio_mean": sums.ratio / count,
            "policy/k1": sums.k1 / count,
            "policy/k3": sums.k3 / count,
        }

    def discard(self) -> None:
        self._pending = None
        self._optimizer.zero_grad()

    def calibrate(self, samples: Sequence[Sample], version: int, share: float = SHARE) -> dict[str, float]:
        """Calibrate the KV scales of policy `version` on some of the samples, and store them in `kv_scales`. Return
        metrics, the same on every rank; `saturated_share` is the share of values that the previous scales would have
        clipped."""
        self._check(samples, trained_on=False)
        lengths = [len(sample.token_ids) for sample in samples]
        chosen = choose(lengths, share, np.random.default_rng((self._seed, version)))
        seen = Calibration(len(self._layers), self.kv_scales)
        picked = [samples[i] for i in chosen]
        for batch in self._passes(picked):
            length_B = torch.tensor([len(picked[i].token_ids) for i in batch.indices] or [0], device=self._device)
            valid_BS = torch.arange(batch.input_ids_BS.shape[1], device=self._device) < length_B[:, None]
            with torch.no_grad(), seen.listen(self._scorer.policy, valid_BS):
                self._scorer(batch.input_ids_BS, batch.position_N[:1], batch.target_N[:1])
        self._root.reshard()
        amax_3L = seen.amax().to(self._device)
        sums_3L = torch.stack([seen.saturated_L, seen.underflow_L, seen.count_L]).to(self._device)
        dist.all_reduce(amax_3L, dist.ReduceOp.MAX)
        dist.all_reduce(sums_3L)
        known = self.kv_scales is not None
        self.kv_scales = scales_of(amax_3L, version)
        return calibration_metrics(self.kv_scales, sums_3L, known=known) | {
            "precision/qk_norm": float(has_qk_norm(self._layers[0])),
            "precision/calibration_tokens": float(sum(lengths[i] for i in chosen)),
        }

    def weights(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield copies of the full tensors by checkpoint name; rank 0 also yields the untrained tensors. Gathering is
        collective: every rank must consume every tensor."""
        # A tied output head is in the state dict twice. The checkpoint's names decide whether it is written twice.
        for name, shard in self._scorer.policy.state_dict().items():
            if name in self._names:
                copied = shard.to(dtype, copy=True)
                yield name, copied.full_tensor() if isinstance(copied, DTensor) else copied
        if self._rank == 0:
            yield from read_tensors(self._path, self.untrained, dtype)

    def embedding_and_head(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy the embedding and the output head in float32. A tied head is the embedding."""
        return full_weight(self._scorer.policy.get_input_embeddings()), full_weight(output_head(self._scorer.policy))

    def save(self, path: str | Path, dtype: torch.dtype = torch.float32) -> None:
        """Write a Hugging Face checkpoint directory atomically, with SHA256SUMS because safetensors has no checksum.
        The default dtype keeps the master weights bit for bit."""
        target = Path(path)
        if target.exists():
            raise ValueError(f"path: got {target}, which exists; must be new because checkpoints are never overwritten")
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in self.weights(dtype):
            if self._rank == 0:  # other ranks only take part in gathering
                tensors[name] = tensor.contiguous().cpu()
        if self._rank == 0:
            write_checkpoint(target, self._path, tensors, dtype)
        dist.barrier()  # the checkpoint exists when `save` returns on any rank

    def save_state(self, path: str | Path) -> None:
        """Write parameters, optimizer state and counters into a new directory that every rank can access."""
        counters = LearnerCounters(num_updates=self._num_updates, num_steps=self._num_steps, kv_scales=self.kv_scales)
        write_state(Path(path), self._parameters(), self._optimizer, counters)

    def load_state(self, path: str | Path) -> None:
        """Restore a directory written by `save_state`, with any number of ranks."""
        self.discard()
        counters = read_state(Path(path), self._parameters(), self._optimizer)
        self._num_updates, self._num_steps = counters.num_updates, counters.num_steps
        self.kv_scales = counters.kv_scales

    def close(self) -> None:
        """Destroy the process group. The learner is unusable afterward."""
        if dist.is_initialized():
            dist.destroy_process_group()

    @property
    def _root(self) -> FSDPModule:
        assert isinstance(self._scorer, FSDPModule)
        return self._scorer

    def _parameters(self) -> dict[str, nn.Parameter]:
        self._scorer.state_dict()  # makes FSDP2 reshard the parameters
        return dict(self._scorer.named_parameters())

    def _check(self, samples: Sequence[Sample], *, trained_on: bool) -> None:
        for i, sample in enumerate(samples):
            if not 1 <= sample.num_prompt_tokens <= len(sample.token_ids):
                raise ValueError(
                    f"samples[{i}].num_prompt_tokens: got {sample.num_prompt_tokens}; must be "
                    f"1..{len(sample.token_ids)} because the first response token needs a token before it"
                )
            # NaN from an engine may be scored, so that the guard can count it and name the engine.
            if len(sample.logp) != sample.num_response_tokens or (trained_on and np.isnan(sample.logp).any()):
                raise ValueError(
                    f"samples[{i}].logp: got {len(sample.logp)} values, {np.isnan(sample.logp).sum()} NaN; must be a "
                    f"number for each of {sample.num_response_tokens} response tokens because ratios are computed from "
                    "them"
                )

    def _passes(self, samples: Sequence[Sample]) -> Iterator[PaddedBatch]:
        lengths = [len(sample.token_ids) for sample in samples]
        plan = plan_passes(lengths, budget=self._config.microbatch_tokens, world_size=self._world_size)
        return (make_batch(samples, indices, self._device) for indices in plan[self._rank])

    def _minibatches(self, samples: Sequence[Sample]) -> Iterator[list[Sample]]:
        """Split the samples randomly into parts of equal size, the same on every rank."""
        order = np.arange(len(samples))
        if self._config.minibatches > 1:  # neighbors share a group: in order, a step would see few prompts
            order = np.random.default_rng((self._seed, self._num_updates)).permutation(len(samples))
        for part in np.array_split(order, self._config.minibatches):
            if len(part):
                yield [samples[i] for i in part]

    def _accumulate(self, samples: Sequence[Sample]) -> LossSums:
        """Accumulate the gradients of one minibatch, and return its sums over all ranks."""
        sums, normalizer = LossSums(), self._normalizer(samples)
        for batch in self._passes(samples):
            logp_N, entropy_N, _ = self._scorer(batch.input_ids_BS, batch.position_N, batch.target_N)
            sums = sums.merge(self._backward(batch, logp_N, entropy_N, normalizer))
        return self._over_ranks(sums)

    def _backward(
        self, batch: PaddedBatch, logp_N: torch.Tensor, entropy_N: torch.Tensor, normalizer: float
    ) -> LossSums:
        part = policy_loss(
            logp_BT=unflatten(logp_N, batch.mask_BT),
            old_logp_BT=batch.old_logp_BT,
            weight_BT=batch.weight_BT,
            entropy_BT=unflatten(entropy_N, batch.mask_BT),
            advantage_B=batch.advantage_B,
            mask_BT=batch.mask_BT,
            normalizer=normalizer,
            config=self._objective,
        )
        # FSDP2 averages gradients over ranks, but the normalizer already counts every rank.
        (part.loss * self._world_size).backward()
        return part.sums

    def _normalizer(self, samples: Sequence[Sample]) -> float:
        return loss_normalizer([sample.num_response_tokens for sample in samples], self._objective.loss)

    def _can_hold_gradients(self, samples: Sequence[Sample]) -> bool:
        """Return whether an update on the samples is one optimizer step. `apply` refuses NaN from engines."""
        finite = not any(np.isnan(sample.logp).any() for sample in samples)
        return self._config.minibatches == 1 and len(samples) > 0 and finite

    def _corrected(
        self, samples: Sequence[Sample], batch: PaddedBatch, logp_N: torch.Tensor, correction: CorrectionConfig
    ) -> PaddedBatch:
        """Correct the samples of one pass. Weights depend on one rollout only, so the result equals `correct` on all
        samples."""
        if not batch.indices:
            return batch
        chosen = [samples[i] for i in batch.indices]
        bounds = np.cumsum([sample.num_response_tokens for sample in chosen])[:-1]
        logp = np.split(logp_N.detach().cpu().numpy(), bounds)
        return make_batch(correct(chosen, logp, correction), tuple(range(len(chosen))), self._device)

    def _over_ranks(self, sums: LossSums) -> LossSums:
        total = torch.tensor(sums.values(), dtype=torch.float64, device=self._device)
        dist.all_reduce(total)
        return LossSums.of(total.tolist())

    def _step(self) -> float:
        """Clip, step, and return the gradient norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self._scorer.parameters(), self._config.max_grad_norm)
        grad_norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
        if np.isfinite(grad_norm):  # NaN would destroy the policy; `policy/skipped_steps` counts it
            for group in self._optimizer.param_groups:
                group["lr"] = self._learning_rate(self._num_steps)
            self._optimizer.step()
            self._num_steps += 1
        self._optimizer.zero_grad()
        return grad_norm

    def _learning_rate(self, step: int) -> float:
        return self._config.learning_rate * min(1.0, (step + 1) / max(1, self._config.warmup_steps))

"""The learner: a transformers policy under FSDP2 that scores rollouts, updates itself and hands out its weights.

Every rank is one process with one FsdpLearner, and every rank is called with the same arguments (SPMD):

    samples ──▶ plan_passes: dealt to ranks by length, cut into micro-batches ──▶ TokenScorer (FSDP2) ──▶ logp, entropy
                     every rank runs the same number of passes                        │
                                                                     policy_loss ──▶ backward ──▶ clip ──▶ AdamW

Where an update is one optimizer step, `logp` can compute its gradients in the pass that scores the samples: each
rollout's correction follows from its own log-probabilities. `update` then only steps, if it is given just these samples
with just that correction; else it computes the gradients itself, which has the same result bit for bit.

FSDP2 gathers parameters and reduces gradients inside each pass, so a rank that runs out of samples runs an empty pass:
the others would wait for it for ever. The loss is divided by counts of the whole minibatch, so that the number of ranks
and the cut into micro-batches change the result by rounding only.

Dimension suffixes: B rollouts, S padded tokens (prompt and response), T padded response tokens, N response tokens
without padding, D hidden size, V vocabulary, K taps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore, Store  # pyright: ignore[reportPrivateImportUsage]  public in its docs
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from paceline.config import CalibrationConfig, CorrectionConfig, LearnerConfig, ObjectiveConfig
from paceline.fp8 import KvScales
from paceline.learner.batch import PaddedBatch, make_batch, plan_passes
from paceline.learner.calibration import Calibration, calibration_metrics, choose, has_qk_norm, scales_of
from paceline.learner.checkpoint import full_weight, load_policy, output_head, read_tensors, write_checkpoint
from paceline.learner.correction import correct, same_for_the_loss
from paceline.learner.objective import LossSums, loss_normaliser, policy_loss
from paceline.learner.rank import join_ranks, prepare_device, shard_policy
from paceline.learner.scoring import HiddenStates, LogpResult, TokenScorer, hidden_states_of, record_taps, unflatten
from paceline.learner.state import LearnerCounters, read_state, write_state
from paceline.types import DeviceKind, Sample


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Ahead:
    """Gradients that a scoring pass has left in the parameters."""

    samples: Sequence[Sample]
    """The corrected samples that they are of."""
    sums: LossSums


class FsdpLearner:
    """One rank of the learner. All methods are collective: ranks call them in the same order with the same
    arguments."""

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
        """`store` is where the ranks meet; a single rank needs none. `temperature` is that of the rollouts: their
        log-probabilities are taken after it. `device` None is a GPU if this process has one."""
        if not temperature > 0:
            raise ValueError(f"temperature: got {temperature}; must be above 0 because logits are divided by it")
        if config.world_size > 1 and store is None:
            raise ValueError(f"store: got None; must be given because {config.world_size} ranks have to meet somewhere")
        self._path = Path(model_path)
        self._config = config
        self._objective = objective
        self._rank = rank
        self._world_size = config.world_size
        self._seed = seed
        self._num_updates = 0
        self._num_steps = 0
        self._ahead: _Ahead | None = None
        self.kv_scales: KvScales | None = None
        """Scales for an FP8 KV cache; None before the first `calibrate`."""
        self._device = prepare_device(rank, seed, num_threads, device)
        policy, self._names = load_policy(self._path)
        self.untrained = self._names - policy.state_dict().keys()
        """Tensors of the checkpoint that transformers leaves out, such as MTP heads. Engines get them as they are."""
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
        """Policy updates so far, those before a restored state included."""
        return self._num_updates

    @property
    def hidden_size(self) -> int:
        return self._scorer.policy.config.get_text_config().hidden_size

    @property
    def num_kv_heads(self) -> int:
        """Key-value heads of a layer."""
        text = self._scorer.policy.config.get_text_config()
        return getattr(text, "num_key_value_heads", None) or text.num_attention_heads

    def logp(
        self,
        samples: Sequence[Sample],
        taps: Sequence[int] = (),
        tapped: Collection[int] | None = None,
        correction: CorrectionConfig | None = None,
    ) -> LogpResult:
        """Score every response token under the current policy; with `taps`, keep the hidden states of the samples in
        `tapped` (of all if None) as well. Hooks record them in the same forward pass.

        With `correction`, an update on the samples as it corrects them is expected next: if that is one optimizer step,
        its gradients come from the same pass.
        """
        self._check(samples, trained_on=False)
        for tap in taps:
            if not 0 <= tap <= len(self._layers):
                raise ValueError(
                    f"taps: got {tap}; must be 0..{len(self._layers)} because tap i stands after i of the layers"
                )
        wanted = frozenset(range(len(samples)) if tapped is None else tapped)
        bounds = np.cumsum([0] + [sample.num_response_tokens for sample in samples])
        # Zero where another rank scores: adding up the ranks then leaves every value exactly as its rank computed it.
        scores = torch.zeros(2, int(bounds[-1]), device=self._device)
        states: dict[int, HiddenStates] = {}
        sums, normaliser = LossSums(), self._normaliser(samples)
        if correction is not None:
            self._forget_gradients()
            if not self._can_go_ahead(samples):
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
                sums = sums.merge(self._backward(corrected, logp_N, entropy_N, normaliser))
            if not batch.indices:
                continue
            columns = np.concatenate([np.arange(bounds[i], bounds[i + 1]) for i in batch.indices])
            scores[:, torch.from_numpy(columns).to(self._device)] = torch.stack([logp_N.detach(), entropy_N])
            if rows:
                states |= hidden_states_of(samples, batch.indices, rows, [recorded[tap] for tap in taps], hidden_BSD)
        self._root.reshard()  # without a backward pass the root stays gathered, which is the whole embedding
        if self._world_size > 1:
            dist.all_reduce(scores)
        logp, entropy = (np.split(row, bounds[1:-1])[: len(samples)] for row in scores.cpu().numpy())
        if correction is not None:
            # Of all samples on every rank, so that all of them decide alike whether `update` is about these.
            self._ahead = _Ahead(samples=correct(samples, logp, correction), sums=self._over_ranks(sums))
        return LogpResult(logp=tuple(logp), entropy=tuple(entropy), states=states)

    def update(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Update on the samples in `minibatches` optimizer steps; returns metrics, the same on every rank."""
        self._check(samples, trained_on=True)
        sums = LossSums()
        grad_norms: list[float] = []
        ahead = self._ahead
        reused = ahead is not None and same_for_the_loss(ahead.samples, samples)
        if ahead is not None and reused:
            sums, self._ahead = ahead.sums, None
            grad_norms.append(self._step())
        else:
            self._forget_gradients()
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
        if not grad_norms:  # every group was dropped: there is nothing to report, and a mean of nothing would be NaN
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

    def calibrate(
        self, samples: Sequence[Sample], version: int, settings: CalibrationConfig | None = None
    ) -> dict[str, float]:
        """Calibrate the KV scales of the current policy on some of the samples and keep them in `kv_scales`, as
        `version`.

        Returns metrics, the same on every rank. `saturated_share` is what the previous scales would have cut off.
        """
        self._check(samples, trained_on=False)
        lengths = [len(sample.token_ids) for sample in samples]
        settings = settings or self._config.calibration
        chosen = choose(lengths, settings, np.random.default_rng((self._seed, version)))
        seen = Calibration(len(self._layers), settings, self.kv_scales)
        picked = [samples[i] for i in chosen]
        for batch in self._passes(picked):
            length_B = torch.tensor([len(picked[i].token_ids) for i in batch.indices] or [0], device=self._device)
            valid_BS = torch.arange(batch.input_ids_BS.shape[1], device=self._device) < length_B[:, None]
            with torch.no_grad(), seen.listen(self._scorer.policy, valid_BS):
                self._scorer(batch.input_ids_BS, batch.position_N[:1], batch.target_N[:1])
        self._root.reshard()
        amax_3L = seen.amax().to(self._device)
        sums_3L = torch.stack([seen.saturated_L, seen.underflow_L, seen.count_L]).to(self._device)
        if self._world_size > 1:
            dist.all_reduce(amax_3L, dist.ReduceOp.MAX)
            dist.all_reduce(sums_3L)
        known = self.kv_scales is not None
        self.kv_scales = scales_of(amax_3L, settings.margin, version)
        return calibration_metrics(self.kv_scales, sums_3L, known=known) | {
            "precision/qk_norm": float(has_qk_norm(self._layers[0])),
            "precision/calibration_tokens": float(sum(lengths[i] for i in chosen)),
        }

    def weights(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield full tensors under their checkpoint names, one at a time; on rank 0 the untrained ones too. Each is a
        copy, so a later update does not change it. Gathering is collective: every rank must take every tensor."""
        for name, shard in self._sharded():
            copied = shard.to(dtype, copy=True)
            yield name, copied.full_tensor() if isinstance(copied, DTensor) else copied
        if self._rank == 0:
            yield from read_tensors(self._path, self.untrained, dtype)

    def embedding_and_head(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy the embedding and the output head in float32; a tied head is the embedding. Collective, as `weights`."""
        return full_weight(self._scorer.policy.get_input_embeddings()), full_weight(output_head(self._scorer.policy))

    def save(self, path: str | Path, dtype: torch.dtype = torch.float32) -> None:
        """Write a Hugging Face checkpoint directory in one move, with the SHA-256 of every file in SHA256SUMS:
        safetensors has no checksum, and one flipped byte loads silently. The default keeps the master weights bit for
        bit."""
        target = Path(path)
        if target.exists():
            raise ValueError(f"path: got {target}, which exists; must be new because a checkpoint is never overwritten")
        tensors = {}
        for name, tensor in self.weights(dtype):
            if self._rank == 0:  # the other ranks only take part in the gathering
                tensors[name] = tensor.contiguous().cpu()
        if self._rank == 0:
            write_checkpoint(target, self._path, tensors, dtype)
        dist.barrier()  # when save returns, the checkpoint is there, whichever rank asks

    def save_state(self, path: str | Path) -> None:
        """Write all that the next update depends on into a new directory, which every rank must see."""
        counters = LearnerCounters(num_updates=self._num_updates, num_steps=self._num_steps, kv_scales=self.kv_scales)
        write_state(Path(path), self._parameters(), self._optimizer, counters)

    def load_state(self, path: str | Path) -> None:
        """Go on from a directory that `save_state` wrote, with this or another number of ranks."""
        self._forget_gradients()
        counters = read_state(Path(path), self._parameters(), self._optimizer)
        self._num_updates, self._num_steps = counters.num_updates, counters.num_steps
        self.kv_scales = counters.kv_scales

    def close(self) -> None:
        """Leave the process group; the learner cannot be used any more."""
        if dist.is_initialized():
            dist.destroy_process_group()

    @property
    def _root(self) -> FSDPModule:
        assert isinstance(self._scorer, FSDPModule)
        return self._scorer

    def _parameters(self) -> dict[str, nn.Parameter]:
        self._scorer.state_dict()  # FSDP2 puts the shards back in place for it
        return dict(self._scorer.named_parameters())

    def _sharded(self) -> Iterator[tuple[str, torch.Tensor]]:
        # A tied output head is in the state dict twice; the checkpoint's own names say whether it is written twice.
        state = self._scorer.policy.state_dict()
        return ((name, tensor) for name, tensor in state.items() if name in self._names)

    def _check(self, samples: Sequence[Sample], *, trained_on: bool) -> None:
        for i, sample in enumerate(samples):
            if not 1 <= sample.num_prompt_tokens <= len(sample.token_ids):
                raise ValueError(
                    f"samples[{i}].num_prompt_tokens: got {sample.num_prompt_tokens}; must be "
                    f"1..{len(sample.token_ids)} because the first response token needs a token before it"
                )
            # An engine's NaN may be scored: telling how many there are, and of which engine, is the guard's work.
            if len(sample.logp) != sample.num_response_tokens or (trained_on and np.isnan(sample.logp).any()):
                raise ValueError(
                    f"samples[{i}].logp: got {len(sample.logp)} values, {np.isnan(sample.logp).sum()} of them NaN; "
                    f"must be a number for each of the {sample.num_response_tokens} response tokens because ratios are "
                    "taken against them"
                )

    def _passes(self, samples: Sequence[Sample]) -> Iterator[PaddedBatch]:
        lengths = [len(sample.token_ids) for sample in samples]
        plan = plan_passes(lengths, budget=self._config.microbatch_tokens, world_size=self._world_size)
        return (make_batch(samples, indices, self._device) for indices in plan[self._rank])

    def _minibatches(self, samples: Sequence[Sample]) -> Iterator[list[Sample]]:
        """The samples in random parts of equal size, the same on every rank."""
        order = np.arange(len(samples))
        if self._config.minibatches > 1:  # neighbours are of one group: in order, a step would see few prompts
            order = np.random.default_rng((self._seed, self._num_updates)).permutation(len(samples))
        for part in np.array_split(order, self._config.minibatches):
            if len(part):
                yield [samples[i] for i in part]

    def _accumulate(self, samples: Sequence[Sample]) -> LossSums:
        """Gradients of one minibatch, and its sums over all ranks."""
        sums, normaliser = LossSums(), self._normaliser(samples)
        for batch in self._passes(samples):
            logp_N, entropy_N, _ = self._scorer(batch.input_ids_BS, batch.position_N, batch.target_N)
            sums = sums.merge(self._backward(batch, logp_N, entropy_N, normaliser))
        return self._over_ranks(sums)

    def _backward(
        self, batch: PaddedBatch, logp_N: torch.Tensor, entropy_N: torch.Tensor, normaliser: float
    ) -> LossSums:
        part = policy_loss(
            logp_BT=unflatten(logp_N, batch.mask_BT),
            old_logp_BT=batch.old_logp_BT,
            weight_BT=batch.weight_BT,
            entropy_BT=unflatten(entropy_N, batch.mask_BT),
            advantage_B=batch.advantage_B,
            mask_BT=batch.mask_BT,
            normaliser=normaliser,
            config=self._objective,
        )
        # FSDP2 averages gradients over ranks, while the normaliser already counts all of them.
        (part.loss * self._world_size).backward()
        return part.sums

    def _normaliser(self, samples: Sequence[Sample]) -> float:
        return loss_normaliser([sample.num_response_tokens for sample in samples], self._objective.loss)

    def _can_go_ahead(self, samples: Sequence[Sample]) -> bool:
        """Whether an update on these is one step on the present policy. An engine's NaN is refused by `update`."""
        finite = not any(np.isnan(sample.logp).any() for sample in samples)
        return self._config.minibatches == 1 and len(samples) > 0 and finite

    def _corrected(
        self, samples: Sequence[Sample], batch: PaddedBatch, logp_N: torch.Tensor, correction: CorrectionConfig
    ) -> PaddedBatch:
        """The batch as `correct` makes it once the whole batch is scored: a rollout's weights are its own."""
        if not batch.indices:
            return batch
        chosen = [samples[i] for i in batch.indices]
        bounds = np.cumsum([sample.num_response_tokens for sample in chosen])[:-1]
        logp = np.split(logp_N.detach().cpu().numpy(), bounds)
        return make_batch(correct(chosen, logp, correction), tuple(range(len(chosen))), self._device)

    def _forget_gradients(self) -> None:
        self._ahead = None
        self._optimizer.zero_grad()

    def _over_ranks(self, sums: LossSums) -> LossSums:
        if self._world_size == 1:
            return sums
        total = torch.tensor(sums.values(), dtype=torch.float64, device=self._device)
        dist.all_reduce(total)
        return LossSums.of(total.tolist())

    def _step(self) -> float:
        """Clip, step, and return the gradient's norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self._scorer.parameters(), self._config.max_grad_norm)
        grad_norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
        if np.isfinite(grad_norm):  # a step along NaN would destroy the policy; the count of skipped steps tells of it
            for group in self._optimizer.param_groups:
                group["lr"] = self._learning_rate(self._num_steps)
            self._optimizer.step()
            self._num_steps += 1
        self._optimizer.zero_grad()
        return grad_norm

    def _learning_rate(self, step: int) -> float:
        return self._config.learning_rate * min(1.0, (step + 1) / max(1, self._config.warmup_steps))

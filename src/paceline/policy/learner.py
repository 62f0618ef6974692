"""The learner: a transformers policy under FSDP2 that scores rollouts, updates itself and hands out its weights.

Every rank is one process with one FsdpLearner, and every rank is called with the same arguments (SPMD):

    samples ──▶ plan_passes: dealt to ranks by length, cut into micro-batches ──▶ TokenScorer (FSDP2) ──▶ logp, entropy
                     every rank runs the same number of passes                        │
                                                                     policy_loss ──▶ backward ──▶ clip ──▶ AdamW

FSDP2 gathers parameters and reduces gradients inside each pass, so a rank that runs out of samples runs an empty pass: the others
would wait for it for ever. The loss is divided by counts of the whole minibatch, so that the number of ranks and the cut into
micro-batches change the result by rounding only.

Dimension suffixes: B rollouts, S padded tokens (prompt and response), T padded response tokens, N response tokens without padding,
D hidden size, V vocabulary, K taps.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils import deterministic
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from paceline.config import CalibrationConfig, LearnerConfig, ObjectiveConfig
from paceline.origin import sha256
from paceline.policy.batch import Batch, make_batch, plan_passes
from paceline.policy.calibration import Calibration, calibration_metrics, choose, has_qk_norm, scales_of
from paceline.policy.objective import LossSums, loss_normaliser, policy_loss
from paceline.precision import KvScales
from paceline.types import Floats, Sample

_CHUNK_ELEMENTS = 1 << 26
"""Logits held at once: 256 MB in float32. Eight thousand tokens of a vocabulary of 150,000 would need 5 GB, and as much again for
their gradient."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HiddenStates:
    """Hidden states of one sample, prompt included; float32."""

    taps: Floats
    """[tokens, taps, hidden]: the residual stream after i decoder layers for each tap i, which is vLLM's numbering of auxiliary
    hidden states; 0 is what the first layer reads."""
    last: Floats
    """[tokens, hidden]: after the final norm; what the output head reads."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogpResult:
    """Scores of samples in the caller's order, the same on every rank; hidden states stay on the rank that computed them."""

    logp: tuple[Floats, ...]
    """Of each response token, at the rollout temperature."""
    entropy: tuple[Floats, ...]
    """Of the distribution that each response token was drawn from."""
    states: Mapping[int, HiddenStates]
    """By index into the samples; empty without taps. Together the ranks hold every sample that was asked for once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSpec:
    """One tensor of `weights()`, known without gathering it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class TokenScorer(nn.Module):
    """The policy with a forward pass that scores chosen tokens only: prompt tokens never reach the output head.

    It is the root that FSDP2 shards, because FSDP2 gathers the root's parameters in the root's forward pass and nowhere else.
    """

    def __init__(self, policy: PreTrainedModel, temperature: float) -> None:
        super().__init__()
        self.policy = policy
        self.temperature = temperature
        self.chunk_tokens = max(1, _CHUNK_ELEMENTS // policy.config.get_text_config().vocab_size)

    def forward(
        self, input_ids_BS: torch.Tensor, position_N: torch.Tensor, target_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """logp_N (differentiable), entropy_N and hidden_BSD after the final norm (both not)."""
        hidden_BSD = self.policy.base_model(input_ids=input_ids_BS, use_cache=False).last_hidden_state
        hidden_ND = hidden_BSD.flatten(0, 1).index_select(0, position_N)
        if len(position_N) <= self.chunk_tokens:
            logp_N, entropy_N = self.score(hidden_ND, target_N)
        else:
            parts = [
                checkpoint(self.score, *chunk, use_reentrant=False, preserve_rng_state=False)
                for chunk in zip(hidden_ND.split(self.chunk_tokens), target_N.split(self.chunk_tokens), strict=True)
            ]
            logp_N, entropy_N = (torch.cat(column) for column in zip(*parts, strict=True))
        return logp_N, entropy_N, hidden_BSD.detach()

    def score(self, hidden_ND: torch.Tensor, target_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # In float32 whatever the dtype of the policy: a bfloat16 logsumexp is off by more than the whole mismatch to the engine.
        logits_NV = _head(self.policy)(hidden_ND).float() / self.temperature
        logsumexp_N = logits_NV.logsumexp(-1)
        logp_N = logits_NV.gather(-1, target_N[:, None])[:, 0] - logsumexp_N
        with torch.no_grad():
            entropy_N = logsumexp_N - (logits_NV.softmax(-1) * logits_NV).sum(-1)
        return logp_N, entropy_N


class FsdpLearner:
    """One rank of the learner. Methods are collective: all ranks call them in the same order with the same arguments."""

    def __init__(
        self,
        model_path: str | Path,
        config: LearnerConfig,
        objective: ObjectiveConfig,
        *,
        temperature: float,
        seed: int = 0,
        rank: int = 0,
        init_method: str | None = None,
        num_threads: int | None = None,
    ) -> None:
        """`init_method` is where the ranks meet, as torch.distributed spells it (`tcp://127.0.0.1:29500`, `file:///shared/meeting`);
        a single rank needs none. `temperature` is that of the rollouts: their log-probabilities are taken after it."""
        if not temperature > 0:
            raise ValueError(f"temperature: got {temperature}; must be above 0 because logits are divided by it")
        if config.world_size > 1 and init_method is None:
            raise ValueError(f"init_method: got None; must be given because {config.world_size} ranks have to meet somewhere")
        self._path = Path(model_path)
        self._config = config
        self._objective = objective
        self._rank = rank
        self._world_size = config.world_size
        self._seed = seed
        self._num_updates = 0
        self._num_steps = 0
        self.kv_scales: KvScales | None = None
        """For an FP8 KV cache; None before the first `calibrate`."""
        self._device = _prepare_device(rank, seed, num_threads)
        policy, self._names = _load_policy(self._path)
        _join(config, rank, self._device, init_method)
        self._scorer = TokenScorer(policy, temperature)
        self._layers = _shard(self._scorer, config, self._device)
        self._optimizer = torch.optim.AdamW(
            self._scorer.parameters(),
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
        )

    @property
    def hidden_size(self) -> int:
        return self._scorer.policy.config.get_text_config().hidden_size

    def logp(self, samples: Sequence[Sample], taps: Sequence[int] = (), tapped: Collection[int] | None = None) -> LogpResult:
        """Score every response token under the current policy; with `taps`, keep the hidden states of the samples in `tapped` (of
        all if None) as well. They come from the same forward pass: it is only listened to."""
        self._check(samples, trained_on=False)
        for tap in taps:
            if not 0 <= tap <= len(self._layers):
                raise ValueError(f"taps: got {tap}; must be 0..{len(self._layers)} because tap i stands after i of the layers")
        wanted = frozenset(range(len(samples)) if tapped is None else tapped)
        bounds = np.cumsum([0] + [sample.num_response_tokens for sample in samples])
        # Zero where another rank scores: adding up the ranks then leaves every value exactly as its rank computed it.
        scores = torch.zeros(2, int(bounds[-1]), device=self._device)
        states: dict[int, HiddenStates] = {}
        for batch in self._passes(samples):
            rows = [row for row, index in enumerate(batch.indices) if index in wanted] if taps else []
            with torch.no_grad(), _record(self._layers, taps if rows else ()) as recorded:
                logp_N, entropy_N, hidden_BSD = self._scorer(batch.input_ids_BS, batch.position_N, batch.target_N)
            if not batch.indices:
                continue
            columns = np.concatenate([np.arange(bounds[i], bounds[i + 1]) for i in batch.indices])
            scores[:, torch.from_numpy(columns).to(self._device)] = torch.stack([logp_N, entropy_N])
            if rows:
                states |= _hidden_states(samples, batch.indices, rows, [recorded[tap] for tap in taps], hidden_BSD)
        self._root.reshard()  # without a backward pass the root stays gathered, which is the whole embedding
        if self._world_size > 1:
            dist.all_reduce(scores)
        logp, entropy = (np.split(row, bounds[1:-1]) for row in scores.cpu().numpy())
        return LogpResult(logp=tuple(logp[: len(samples)]), entropy=tuple(entropy[: len(samples)]), states=states)

    def update(self, samples: Sequence[Sample]) -> dict[str, float]:
        """One pass over the samples in `minibatches` optimizer steps; returns the update's metrics, the same on every rank."""
        self._check(samples, trained_on=True)
        sums = LossSums()
        grad_norms: list[float] = []
        for minibatch in self._minibatches(samples):
            sums = sums.merge(self._accumulate(minibatch))
            grad_norms.append(self._step())
        self._num_updates += 1
        metrics = {
            "policy/learning_rate": self._learning_rate(max(0, self._num_steps - 1)),
            "policy/optimizer_steps": float(len(grad_norms)),
            "policy/skipped_steps": float(np.count_nonzero(~np.isfinite(grad_norms))),
            "policy/num_tokens": sums.num_tokens,
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

    def calibrate(self, samples: Sequence[Sample], version: int, settings: CalibrationConfig | None = None) -> dict[str, float]:
        """Find the KV scales of the policy as it is now, from some of the samples; `kv_scales` holds them afterwards, as `version`.

        Returns metrics, the same on every rank. `saturated_share` is what the scales in use until now would have cut off.
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

    def weight_metadata(self, dtype: torch.dtype) -> tuple[WeightSpec, ...]:
        """What `weights(dtype)` will yield, in its order."""
        return tuple(WeightSpec(name=name, dtype=dtype, shape=tuple(tensor.shape)) for name, tensor in self._sharded())

    def weights(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Full tensors under their checkpoint names, one at a time. Each is a copy, so a later update does not change it. Gathering
        is collective: every rank must take every tensor."""
        for name, shard in self._sharded():
            copied = shard.to(dtype, copy=True)
            yield name, copied.full_tensor() if isinstance(copied, DTensor) else copied

    def ends(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the embedding and the output head in float32; a tied head is the embedding. Collective, as `weights` is."""
        return _full_weight(self._scorer.policy.get_input_embeddings()), _full_weight(_head(self._scorer.policy))

    def save(self, path: str | Path, dtype: torch.dtype = torch.float32) -> None:
        """Write a Hugging Face checkpoint directory in one move, with the SHA-256 of every file in checksums.json: safetensors has
        no checksum, and one flipped byte loads silently. The default keeps the master weights bit for bit."""
        target = Path(path)
        if target.exists():
            raise ValueError(f"path: got {target}, which exists; must be new because a checkpoint is never overwritten")
        tensors = {}
        for name, tensor in self.weights(dtype):
            if self._rank == 0:  # the other ranks only take part in the gathering
                tensors[name] = tensor.contiguous().cpu()
        if self._rank == 0:
            _write_checkpoint(target, self._path, tensors, dtype)
        dist.barrier()  # when save returns, the checkpoint is there, whichever rank asks

    def close(self) -> None:
        """Leave the process group; the learner cannot be used any more."""
        if dist.is_initialized():
            dist.destroy_process_group()

    @property
    def _root(self) -> FSDPModule:
        assert isinstance(self._scorer, FSDPModule)
        return self._scorer

    def _sharded(self) -> Iterator[tuple[str, torch.Tensor]]:
        # A tied output head is in the state dict twice; the checkpoint's own names say whether it is written twice.
        state = self._scorer.policy.state_dict()
        return ((name, tensor) for name, tensor in state.items() if name in self._names)

    def _check(self, samples: Sequence[Sample], *, trained_on: bool) -> None:
        for i, sample in enumerate(samples):
            if not 1 <= sample.num_prompt_tokens <= len(sample.token_ids):
                raise ValueError(
                    f"samples[{i}].num_prompt_tokens: got {sample.num_prompt_tokens}; must be 1..{len(sample.token_ids)} "
                    "because the first response token needs a token before it"
                )
            # An engine's NaN may be scored: telling how many there are, and of which engine, is the guard's work.
            if len(sample.logp) != sample.num_response_tokens or (trained_on and np.isnan(sample.logp).any()):
                raise ValueError(
                    f"samples[{i}].logp: got {len(sample.logp)} values, {np.isnan(sample.logp).sum()} of them NaN; must be a "
                    f"number for each of the {sample.num_response_tokens} response tokens because ratios are taken against them"
                )

    def _passes(self, samples: Sequence[Sample]) -> Iterator[Batch]:
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
        normaliser = loss_normaliser([sample.num_response_tokens for sample in samples], self._objective.loss)
        sums = LossSums()
        for batch in self._passes(samples):
            logp_N, entropy_N, _ = self._scorer(batch.input_ids_BS, batch.position_N, batch.target_N)
            part = policy_loss(
                logp_BT=_unflatten(logp_N, batch.mask_BT),
                old_logp_BT=batch.old_logp_BT,
                weight_BT=batch.weight_BT,
                entropy_BT=_unflatten(entropy_N, batch.mask_BT),
                advantage_B=batch.advantage_B,
                mask_BT=batch.mask_BT,
                normaliser=normaliser,
                config=self._objective,
            )
            # FSDP2 averages gradients over ranks, while the normaliser already counts all of them.
            (part.loss * self._world_size).backward()
            sums = sums.merge(part.sums)
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


def _prepare_device(rank: int, seed: int, num_threads: int | None) -> torch.device:
    """Seed the process and pick its device."""
    torch.manual_seed(seed)
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    if torch.cuda.is_available():
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    # Not on GPUs, where some kernels have no deterministic form and would raise.
    torch.use_deterministic_algorithms(True)
    # Deterministic mode also writes NaN over every new tensor, an aid in debugging that costs time.
    deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]  a property made at run time
    return torch.device("cpu")


def _join(config: LearnerConfig, rank: int, device: torch.device, init_method: str | None) -> None:
    """Meet the other ranks. The timeout bounds how long a rank waits for one that died."""
    store = HashStore() if init_method is None else None
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=init_method,
        store=store,
        rank=rank,
        world_size=config.world_size,
        timeout=timedelta(seconds=config.deadline_s),
    )


def _load_policy(path: Path) -> tuple[PreTrainedModel, frozenset[str]]:
    """The policy in float32, and the names of the tensors in its checkpoint. Refuses what would be learnt or sent wrongly."""
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ValueError(f"model_path: got {path}; must be a directory with safetensors because other formats can run code")
    names: set[str] = set()
    for file in files:
        with safe_open(file, "pt") as tensors:
            names.update(tensors.keys())
    disable_progress_bar()  # one bar per rank and load, drawn over the run's own console
    policy = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa", use_safetensors=True)
    policy.eval()  # dropout would make log-probabilities of one policy differ from call to call
    missing = sorted({name for name, _ in policy.named_parameters()} - names)
    if missing:
        raise ValueError(
            f"model_path: got {path}, whose tensors transformers renames or merges on loading (such as {missing[0]}); must be an "
            "architecture with the same names in memory and in the checkpoint because engines are sent the names in memory"
        )
    probe = torch.arange(2)[None]
    with torch.no_grad():
        expected = policy(input_ids=probe, use_cache=False).logits
        scored = _head(policy)(policy.base_model(input_ids=probe, use_cache=False).last_hidden_state)
    if not torch.allclose(expected, scored, rtol=1e-4, atol=1e-4):
        raise ValueError(
            f"model_path: got {path}, a {type(policy).__name__}, whose logits are not its output head over its last hidden state; "
            "must be a plain causal model because the learner applies the head to response tokens only (no soft-capping or scaling)"
        )
    return policy, frozenset(names)


def _head(policy: PreTrainedModel) -> nn.Module:
    head = policy.get_output_embeddings()
    assert head is not None, "a causal model has an output head"
    return head


def _full_weight(module: nn.Module) -> torch.Tensor:
    assert isinstance(module.weight, torch.Tensor)
    copied = module.weight.detach().to(torch.float32, copy=True)
    return copied.full_tensor() if isinstance(copied, DTensor) else copied


def _shard(scorer: TokenScorer, config: LearnerConfig, device: torch.device) -> list[nn.Module]:
    """Apply FSDP2 to every decoder layer and to the rest; returns the layers."""
    mesh = init_device_mesh(device.type, (config.world_size,))
    precision = MixedPrecisionPolicy()
    if config.dtype == "bfloat16":  # gradients are reduced in float32: the sum over ranks must not lose what each of them found
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers = scorer.policy.base_model.layers
    assert isinstance(layers, nn.ModuleList)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(scorer, mesh=mesh, mp_policy=precision)
    return list(layers)


@contextmanager
def _record(layers: Sequence[nn.Module], taps: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
    """Outputs of the tapped layers, and the first layer's input for tap 0. Taken by hooks because transformers' own list of hidden
    states ends with the normed output in place of the last layer's."""
    recorded: dict[int, torch.Tensor] = {}

    def keep(tap: int) -> Callable[[nn.Module, Any, Any], None]:
        return lambda _module, _inputs, output: recorded.update({tap: output})

    handles = [layers[tap - 1].register_forward_hook(keep(tap)) for tap in set(taps) if tap]
    if 0 in taps:
        handles.append(layers[0].register_forward_pre_hook(lambda _module, inputs: recorded.update({0: inputs[0]})))
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


def _hidden_states(
    samples: Sequence[Sample], indices: tuple[int, ...], rows: Sequence[int], tapped: Sequence[torch.Tensor], last_BSD: torch.Tensor
) -> dict[int, HiddenStates]:
    """Of these rows, in host memory and without their padding."""
    states: dict[int, HiddenStates] = {}
    for row in rows:
        length = len(samples[indices[row]].token_ids)
        taps_SKD = torch.stack([tap_BSD[row, :length] for tap_BSD in tapped], 1)
        states[indices[row]] = HiddenStates(
            taps=taps_SKD.to("cpu", torch.float32).numpy(),
            last=last_BSD[row, :length].to("cpu", torch.float32, copy=True).numpy(),  # of its own: a view would hold the whole pass
        )
    return states


def _unflatten(value_N: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Response tokens back into their padded rows; padding is zero."""
    return torch.zeros(mask_BT.shape, device=value_N.device).masked_scatter(mask_BT, value_N)


def _write_checkpoint(target: Path, source: Path, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Weights as given, everything else (tokenizer, generation config) as the policy came; complete or not there at all."""
    partial = target.with_name(f".{target.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)  # left by a crash
    partial.mkdir(parents=True)
    for file in source.iterdir():
        if (
            file.is_file()
            and not file.name.startswith(".")
            and ".safetensors" not in file.suffixes
            and file.name != "checksums.json"
        ):
            shutil.copyfile(file, partial / file.name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)  # the older name of the same field
    config["dtype"] = str(dtype).removeprefix("torch.")
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    checksums = {file.name: sha256(file) for file in sorted(partial.iterdir())}
    (partial / "checksums.json").write_text(json.dumps(checksums, indent=2) + "\n", encoding="utf-8")
    partial.replace(target)

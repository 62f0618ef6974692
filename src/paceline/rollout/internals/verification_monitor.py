"""Collect evidence against losslessness in vLLM's rejection sampler while it verifies drafts (`paceline.monitor`).

`install` wraps the global `rejection_sample` that each runner's sampler looks up at every call. The wrapper returns the
output of the function that it found there, unchanged. In some verifications it computes p and q of a block of rows
beforehand, and multiplies the evidence by the factors of the emitted tokens afterwards. It examines drafted positions
that are reached, in requests with a temperature above 0.

A verification is examined only if the time spent so far is below shares of the engine's time and of its tokens so far,
and the block is chosen by a counter and by shapes. Both are known before the tokens of the verification are drawn. A
test martingale may leave out any token for reasons known before it: the expected factor of each other token, given the
past, stays at most 1. (Choosing by the outcome would break this.)

Evidence stays on the device until it is read, so nothing waits for the GPU; there the measured time is the launches'.
An exception is counted and costs an examination, never a rollout.

Relied upon:
  vllm/v1/sample/rejection_sampler.py                         rejection_sample, looked up by RejectionSampler.forward;
                                                              -1 follows the last token of a row
  vllm/v1/sample/metadata.py                                  all_greedy and temperature of SamplingMetadata
  vllm/v1/worker/gpu/spec_decode/rejection_sampler.py         rejection_sample, looked up by RejectionSampler._verify
  vllm/v1/worker/gpu/spec_decode/rejection_sampler_utils.py   draft logits before temperature, by request and step;
                                                              -1 for drafts to reject

Goes when vLLM has a hook that sees logits, drafts and tokens of a verification.
"""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from paceline.monitor import BETS, CAP, LEAST_TV

if TYPE_CHECKING:
    from vllm.v1.sample.metadata import SamplingMetadata

logger = logging.getLogger("vllm.plugins.paceline")

TIME_SHARE, TOKEN_S = 0.8e-3, 0.8e-6
"""Share of the engine's time, and seconds per token, until which a verification may be examined. An examination may
exceed them by its own duration; 1e-3 and 1 us are promised."""
_LONGEST_STEP_S = 1.0
"""A longer time between two verifications counts as this one: the engine was idle."""
_BLOCK, _GPU_BLOCK = 2**14, 2**22
"""Most logits of an examination, but at least a row. On CPUs more would wake up other threads; on a GPU, launches cost
more than the work."""

# Dimensions: B requests, N rows (positions) of a verification, R examined rows, L = K + 1, V vocabulary, T tests
# (draft, residual), E bets.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Examined rows before verification."""

    request_R: torch.Tensor
    column_R: torch.Tensor
    """Position within the request's output."""
    draft_R: torch.Tensor
    chosen_R: torch.Tensor
    """Rows with a draft, in requests that are not greedy."""
    p_RV: torch.Tensor
    q_RV: torch.Tensor | None
    """None for drafts without a distribution."""


class VerificationMonitor(ABC):
    """A `rejection_sample` that collects evidence."""

    def __init__(
        self, wrapped: Callable[..., Any], *, time_share: float = TIME_SHARE, token_s: float = TOKEN_S
    ) -> None:
        self.wrapped = wrapped
        self.time_share, self.token_s = time_share, token_s
        self._born_s = time.time()
        self._last_s = time.perf_counter()
        self._elapsed_s = self._spent_s = 0.0
        self._num_tokens = self._num_examined = self._num_failures = 0
        self._log_TE: torch.Tensor | None = None
        self._peak_T: torch.Tensor
        self._counts: torch.Tensor
        """Examined positions, and positions left out because p or q is not finite."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        began_s = time.perf_counter()
        self._elapsed_s += min(began_s - self._last_s, _LONGEST_STEP_S)
        self._last_s = began_s
        rows = self._before(args, kwargs) if self._is_due() else None
        self._spent_s += time.perf_counter() - began_s
        output = self.wrapped(*args, **kwargs)
        if rows is not None:
            again_s = time.perf_counter()
            self._after(rows, output)
            self._spent_s += time.perf_counter() - again_s
        self._num_tokens += self._num_requests(args, kwargs)
        return output

    def figures(self) -> dict[str, float]:
        """Return evidence and counts since the start, by metric key. Waits for the device."""
        peaks, counts = [0.0, 0.0], [0.0, 0.0]
        if self._log_TE is not None:
            peaks, counts = self._peak_T.tolist(), self._counts.tolist()
        return {
            "monitor/draft_log10": peaks[0] / math.log(10),
            "monitor/residual_log10": peaks[1] / math.log(10),
            "monitor/positions": counts[0],
            "monitor/not_finite": counts[1],
            "monitor/examined": float(self._num_examined),
            "monitor/seconds": self._spent_s,
            "monitor/tokens": float(self._num_tokens),
            "monitor/step_s": self._elapsed_s,
            "monitor/failures": float(self._num_failures),
            "monitor/born_s": self._born_s,
        }

    @abstractmethod
    def _rows(self, *args: Any, **kwargs: Any) -> Rows | None:
        """Return rows to examine, from the arguments of `rejection_sample`; None if there are none."""

    @abstractmethod
    def _num_requests(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Return the number of requests; each gets at least one token."""

    @abstractmethod
    def _emitted(self, rows: Rows, output: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the token of each row, and whether the row was reached."""

    def _is_due(self) -> bool:
        return self._spent_s <= min(self.time_share * self._elapsed_s, self.token_s * self._num_tokens)

    def _block(self, logits_NV: torch.Tensor) -> range:
        """Return the rows of this examination; blocks take turns."""
        num_rows, vocabulary = logits_NV.shape
        size = max(1, (_BLOCK if logits_NV.device.type == "cpu" else _GPU_BLOCK) // vocabulary)
        begin = self._num_examined % -(-num_rows // size) * size
        self._num_examined += 1
        return range(begin, min(begin + size, num_rows))

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Rows | None:
        try:
            with torch.inference_mode():
                return self._rows(*args, **kwargs)
        except Exception:  # noqa: BLE001  counted as monitor/failures
            self._failed()
            return None

    def _after(self, rows: Rows, output: Any) -> None:
        try:
            with torch.inference_mode():
                self._add(rows, *self._emitted(rows, output))
        except Exception:  # noqa: BLE001  as above
            self._failed()

    def _failed(self) -> None:
        self._num_failures += 1
        if self._num_failures == 1:
            logger.exception("the losslessness monitor failed; rollouts continue")

    def _add(self, rows: Rows, token_R: torch.Tensor, reached_R: torch.Tensor) -> None:
        p_RV, q_RV = rows.p_RV, rows.q_RV
        at_R1 = token_R.long().clamp(0, p_RV.shape[1] - 1)[:, None]
        p_R = p_RV.gather(1, at_R1)[:, 0]
        if q_RV is None:
            q_R = (token_R == rows.draft_R).double()
            tv_R = 1 - p_RV.gather(1, rows.draft_R.long().clamp(min=0)[:, None])[:, 0]
        else:
            q_R = q_RV.gather(1, at_R1)[:, 0]
            tv_R = (p_RV - q_RV).clamp(min=0).sum(1)
        chosen_R = rows.chosen_R & reached_R
        finite_R = p_R.isfinite() & q_R.isfinite() & tv_R.isfinite()
        # A right sampler emits no token with p = 0.
        draft_R = torch.where(p_R > 0, (q_R / p_R).clamp(max=CAP), CAP)
        residual_R = torch.where(p_R > 0, ((1 - q_R / p_R).clamp(min=0) / tv_R).clamp(max=CAP), CAP)
        valid_TR = torch.stack([chosen_R & finite_R, chosen_R & finite_R & (tv_R >= LEAST_TV)])
        ratio_TR = torch.stack([draft_R, residual_R])
        if self._log_TE is None:
            self._log_TE = p_R.new_zeros(2, len(BETS))
            self._peak_T, self._counts = p_R.new_zeros(2), p_R.new_zeros(2)
        factors_TRE = torch.stack([torch.log1p(bet * (ratio_TR - 1)) for bet in BETS], -1)
        self._log_TE += torch.where(valid_TR[..., None], factors_TRE, 0.0).sum(1)
        self._peak_T = torch.maximum(self._peak_T, self._log_TE.logsumexp(1) - math.log(len(BETS)))
        self._counts += torch.stack([(chosen_R & finite_R).sum(), (chosen_R & ~finite_R).sum()])


class V1Monitor(VerificationMonitor):
    """For V1. Its drafter provides probabilities, or with `draft_are_logits` logits after temperature."""

    draft_are_logits = False

    def _rows(
        self,
        draft_token_ids: torch.Tensor,
        num_draft_tokens: list[int],
        max_spec_len: int,
        cu_num_draft_tokens: torch.Tensor,
        draft_probs: torch.Tensor | None,
        target_logits: torch.Tensor,
        bonus_token_ids: torch.Tensor,
        sampling_metadata: SamplingMetadata,
        *_: Any,
        **__: Any,
    ) -> Rows | None:
        if sampling_metadata.all_greedy or not len(draft_token_ids) or sampling_metadata.temperature is None:
            return None
        block = self._block(target_logits)
        chosen = slice(block.start, block.stop)
        row_R = torch.arange(block.start, block.stop, device=target_logits.device)
        ends_B = cu_num_draft_tokens.to(row_R)
        request_R = torch.searchsorted(ends_B, row_R, right=True)
        begins_B = torch.nn.functional.pad(ends_B, (1, -1))
        draft_R = draft_token_ids[chosen]
        q_RV = None
        if draft_probs is not None:
            q_RV = _distribution(draft_probs[chosen]) if self.draft_are_logits else _normalized(draft_probs[chosen])
        return Rows(
            request_R=request_R,
            column_R=row_R - begins_B[request_R],
            draft_R=draft_R,
            chosen_R=(draft_R >= 0) & (sampling_metadata.temperature[request_R] > 0),
            p_RV=_distribution(target_logits[chosen]),
            q_RV=q_RV,
        )

    def _num_requests(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        return len(args[1] if len(args) > 1 else kwargs["num_draft_tokens"])

    def _emitted(self, rows: Rows, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        token_R = output[rows.request_R, rows.column_R]
        return token_R, token_R >= 0


class V2Monitor(VerificationMonitor):
    """For V2. Its drafter provides logits before temperature.

    A request's last row is its bonus token's and has no draft. Block verification decides on a token by later drafts,
    so only its first position is examined."""

    def _rows(
        self,
        target_logits: torch.Tensor,
        draft_logits: torch.Tensor | None,
        draft_sampled: torch.Tensor,
        cu_num_logits: torch.Tensor,
        pos: torch.Tensor,
        idx_mapping: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        expanded_local_pos: torch.Tensor,
        temperature: torch.Tensor,
        seed: torch.Tensor,
        num_speculative_steps: int,
        *_: Any,
        use_block_verification: bool = False,
        **__: Any,
    ) -> Rows | None:
        num_rows, vocabulary = target_logits.shape
        if num_rows < 2 or num_rows == len(idx_mapping):  # nothing was drafted
            return None
        if draft_logits is not None:
            vocabulary = min(vocabulary, draft_logits.shape[-1])
        block = self._block(target_logits)
        chosen = slice(block.start, block.stop)
        row_R = torch.arange(block.start, block.stop, device=target_logits.device)
        ends_B = cu_num_logits[1:].to(row_R)
        request_R = torch.searchsorted(ends_B, row_R, right=True).clamp(max=len(idx_mapping) - 1)
        state_R, column_R = expanded_idx_mapping[chosen].long(), expanded_local_pos[chosen].long()
        temperature_R = temperature[state_R]
        draft_R = draft_sampled[(row_R + 1).clamp(max=num_rows - 1)]
        chosen_R = (row_R + 1 < ends_B[request_R]) & (draft_R >= 0) & (temperature_R > 0)
        if use_block_verification:
            chosen_R &= column_R == 0
        q_RV = None
        if draft_logits is not None:
            step_R = column_R.clamp(max=num_speculative_steps - 1)
            heat_R = torch.where(temperature_R > 0, temperature_R, 1.0)
            q_RV = _distribution(draft_logits[state_R, step_R, :vocabulary].double() / heat_R[:, None])
        return Rows(
            request_R=request_R,
            column_R=column_R,
            draft_R=draft_R,
            chosen_R=chosen_R,
            p_RV=_distribution(target_logits[chosen, :vocabulary]),
            q_RV=q_RV,
        )

    def _num_requests(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        return len(args[5] if len(args) > 5 else kwargs["idx_mapping"])

    def _emitted(self, rows: Rows, output: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        ids_BL, num_sampled_B = output
        column_R = rows.column_R.clamp(max=ids_BL.shape[1] - 1)
        return ids_BL[rows.request_R, column_R], rows.column_R < num_sampled_B[rows.request_R]


def _distribution(logits_RV: torch.Tensor) -> torch.Tensor:
    if logits_RV.device.type != "cpu":
        return logits_RV.double().softmax(-1)
    # torch's `softmax` and `exp` wake up other threads for a few thousand numbers, which takes milliseconds where
    # cores are busy.
    logits = logits_RV.double().numpy()
    with np.errstate(invalid="ignore"):
        weights = np.exp(logits - logits.max(-1, keepdims=True))
    return torch.from_numpy(weights / weights.sum(-1, keepdims=True))


def _normalized(probs_RV: torch.Tensor) -> torch.Tensor:
    """Return probabilities that sum to at most 1, as the test requires of any input."""
    probs_RV = probs_RV.double()
    return probs_RV / probs_RV.sum(-1, keepdim=True).clamp(min=1.0)


_RUNNERS: dict[str, tuple[str, type[VerificationMonitor]]] = {
    "v1": ("vllm.v1.sample.rejection_sampler", V1Monitor),
    "v2": ("vllm.v1.worker.gpu.spec_decode.rejection_sampler", V2Monitor),
}
_installed: list[VerificationMonitor] = []
_problems: list[str] = []


def install(runner: Literal["v1", "v2"], *, draft_are_logits: bool = False) -> VerificationMonitor:
    """Wrap the rejection sampler of this process, once."""
    name, kind = _RUNNERS[runner]
    module = import_module(name)
    monitor = module.rejection_sample
    if not isinstance(monitor, VerificationMonitor):
        monitor = module.rejection_sample = kind(module.rejection_sample)  # pyright: ignore[reportAttributeAccessIssue]
        _installed.append(monitor)
        if isinstance(monitor, V1Monitor):  # a later call does not know how this process verifies
            monitor.draft_are_logits = draft_are_logits
    return monitor


def start(runner: Literal["v1", "v2"], *, draft_are_logits: bool = False) -> None:
    """Install the monitor; a failure is counted."""
    try:
        install(runner, draft_are_logits=draft_are_logits)
    except Exception as error:
        _problems.append(repr(error))
        logger.exception("the losslessness monitor cannot be installed")


def figures() -> dict[str, float]:
    """Return the figures of this process's monitor that has seen most; failures only if there is none."""
    seen = [monitor.figures() for monitor in _installed]
    found = max(seen, key=lambda each: each["monitor/tokens"], default={"monitor/failures": 0.0})
    return found | {"monitor/failures": found["monitor/failures"] + len(_problems)}

"""Hidden states of a policy inside another trainer, recorded by hooks during the trainer's own passes.

    trainer ── policy(input_ids, attention_mask, labels) ──▶ layers ──▶ backbone ──▶ log-probabilities
                          │                                  hooks: taps, last hidden states
                          └── rows of new rollouts ──▶ some of them, within a byte budget ──▶ documents

A row is padding, prompt, completion, padding: `attention_mask` is 0 on padding, and `labels` are -100 outside of scored
tokens. A rollout is recorded in the first pass over it only; a trainer may pass over it again, for several iterations
or (with adapters disabled) for a reference policy.

As a check, the policy's head applied to the first document's last hidden states must reproduce the log-probabilities
that the pass returned. No exception reaches the trainer: a failure is counted, logged once, and ends the recording.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from paceline.config import BufferConfig
from paceline.drafters.buffer import document_bytes, step_bytes
from paceline.drafters.failures import Failures
from paceline.drafters.packing import Document
from paceline.learner.batch import draw
from paceline.learner.checkpoint import output_head
from paceline.learner.scoring import record_taps
from paceline.types import PacelineError

logger = logging.getLogger(__name__)
_MOST_SEEN = 65_536
_CHECKED_TOKENS = 16
_LARGEST_GAP = 0.1
"""Largest mean difference between two computations of log-probabilities in bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Row:
    """A rollout in a pass."""

    number: int
    real_S: torch.Tensor
    """Mask of columns that are not padding, on the CPU."""
    token_ids: np.ndarray[Any, Any]
    num_prompt_tokens: int

    @property
    def num_response_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


class PolicyTap:
    """Hooks on one policy."""

    def __init__(
        self,
        policy: PreTrainedModel,
        taps: Sequence[int],
        config: BufferConfig,
        *,
        passes_per_step: int,
        with_gradient: bool,
        temperature: float = 1.0,
        called: nn.Module | None = None,
        seed: int = 0,
    ) -> None:
        """Tap a policy; `called` is the module that the trainer calls if it wraps the policy in adapters.

        `passes_per_step` passes share a step's rollouts and byte budget. `with_gradient` selects passes of the update
        instead of scoring passes, if rollouts occur there first. `temperature` is the trainer's."""
        layers = getattr(policy.base_model, "layers", None)
        if not isinstance(layers, nn.ModuleList):
            raise PacelineError(
                f"{type(policy).__name__}: has no list of layers at `layers`; drafters of such policies cannot be "
                "trained in other trainers"
            )
        self.policy = policy
        self._called = called or policy
        self._layers, self._taps = list(layers), tuple(taps)
        self._budget = step_bytes(config) / max(1, passes_per_step)
        self._with_gradient, self._temperature = with_gradient, temperature
        self._rng = np.random.default_rng(seed)
        self._seen: dict[bytes, None] = {}
        self._documents: list[Document] = []
        self._checked = False
        self._rows: list[_Row] = []
        self._recording = ExitStack()
        self._recorded: dict[int, torch.Tensor] = {}
        self._last: list[torch.Tensor] = []
        self.failures = Failures(self._give_up)
        _ = self.head_VD  # raise here, not in a pass
        self._handles = [
            self._called.register_forward_pre_hook(self._begin, with_kwargs=True),
            self._called.register_forward_hook(self._end, with_kwargs=True),
        ]

    @property
    def head_VD(self) -> torch.Tensor:  # noqa: N802  a dimension suffix
        """Return the policy's current output head, not a copy."""
        head = output_head(self.policy).weight
        assert isinstance(head, torch.Tensor)
        if isinstance(head, DTensor) or not head.numel():
            raise PacelineError(
                "the policy's output head is sharded (FSDP, ZeRO-3); drafter training needs the whole policy in one "
                "process"
            )
        return head.detach()

    def take(self) -> list[Document]:
        """Return the documents since the last call."""
        documents, self._documents = self._documents, []
        return documents

    def close(self) -> None:
        """Remove the hooks."""
        self._recording.close()
        for handle in self._handles:
            handle.remove()

    def _begin(self, _module: nn.Module, _args: Any, kwargs: Mapping[str, Any]) -> None:
        self._recording.close()  # of an unfinished pass
        self._rows = []
        if not self.policy.training or torch.is_grad_enabled() != self._with_gradient or kwargs.get("labels") is None:
            return
        with self.failures.contained("take"):
            self._rows = self._choose(list(self._new_rows(kwargs)))
            if self._rows:
                self._last = []
                self._recorded = self._recording.enter_context(record_taps(self._layers, self._taps))
                handle = self.policy.base_model.register_forward_hook(
                    lambda _module, _inputs, output: self._last.append(output.last_hidden_state.detach())
                )
                self._recording.callback(handle.remove)

    def _end(self, _module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        self._recording.close()
        if not self._rows:
            return
        with self.failures.contained("take"):
            (last_BSD,) = self._last
            if not self._checked:
                self._check(self._rows[0], last_BSD, output.log_probs)
                self._checked = True
            self._documents += [self._document(row, last_BSD) for row in self._rows]
        self._rows, self._last, self._recorded = [], [], {}

    def _new_rows(self, kwargs: Mapping[str, Any]) -> Iterator[_Row]:
        ids_BS, real_BS, scored_BS = (
            tensor.cpu() for tensor in (kwargs["input_ids"], kwargs["attention_mask"].bool(), kwargs["labels"] != -100)
        )
        for number, (ids_S, real_S, scored_S) in enumerate(zip(ids_BS, real_BS, scored_BS, strict=True)):
            token_ids = ids_S[real_S].numpy().astype(np.int32)
            key = xxhash.xxh3_128_digest(token_ids.tobytes())
            num_prompt_tokens = len(token_ids) - int(scored_S.sum())
            row = _Row(number=number, real_S=real_S, token_ids=token_ids, num_prompt_tokens=num_prompt_tokens)
            if key not in self._seen and row.num_prompt_tokens and row.num_response_tokens > 1:
                yield row
            self._seen[key] = None
        while len(self._seen) > _MOST_SEEN:
            del self._seen[next(iter(self._seen))]

    def _choose(self, rows: Sequence[_Row]) -> list[_Row]:
        hidden_size = self.policy.config.get_text_config().hidden_size
        sizes = [document_bytes(len(row.token_ids), len(self._taps), hidden_size) for row in rows]
        return [rows[i] for i in sorted(draw(sizes, self._budget, self._rng))]

    def _document(self, row: _Row, last_BSD: torch.Tensor) -> Document:
        real_S = row.real_S.to(last_BSD.device)
        taps_SKD = torch.stack([self._recorded[tap][row.number][real_S] for tap in self._taps], 1)
        return Document(
            token_ids=row.token_ids,
            num_prompt_tokens=row.num_prompt_tokens,
            taps=taps_SKD.to("cpu", torch.float32).numpy(),
            last=last_BSD[row.number][real_S].to("cpu", torch.float32).numpy(),
        )

    @torch.no_grad()
    def _check(self, row: _Row, last_BSD: torch.Tensor, logp_BS: torch.Tensor) -> None:
        """Compare a row's first log-probabilities, from its hidden states, with the trainer's `logp_BS`."""
        first = int(row.real_S.nonzero()[0]) + row.num_prompt_tokens - 1
        span = slice(first, first + min(_CHECKED_TOKENS, row.num_response_tokens))
        drawn_N = torch.from_numpy(row.token_ids[row.num_prompt_tokens :][:_CHECKED_TOKENS]).long()
        logits_NV = last_BSD[row.number, span].float() @ self.head_VD.float().T / self._temperature
        own_N = logits_NV.log_softmax(-1).cpu().gather(1, drawn_N[:, None])[:, 0]
        gap = float((own_N - logp_BS[row.number, span].float().cpu()).abs().mean())
        if not gap <= _LARGEST_GAP:
            raise PacelineError(
                f"recorded hidden states give log-probabilities {gap:.3g} apart from the trainer's; must be within "
                f"{_LARGEST_GAP} because a drafter would not be trained on the policy: the policy scales or caps its "
                "logits, or the trainer pads differently"
            )

    def _give_up(self, _what: str, error: BaseException) -> None:
        self._rows = []
        self.close()
        logger.error("recording of hidden states has ended; the drafter stays unchanged", exc_info=error)

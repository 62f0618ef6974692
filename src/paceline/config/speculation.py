"""Speculative decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from paceline.config.base import Section
from paceline.config.drafter_training import DrafterTrainingConfig


class NgramDrafter(Section):
    """Continue earlier occurrences of the request's last tokens."""

    kind: Literal["ngram"] = "ngram"


class HistoryDrafter(Section):
    """Continue sibling and earlier rollouts of the same prompt."""

    kind: Literal["history"] = "history"
    capacity_mb: float = Field(default=256, gt=0)
    """Memory of the index in each engine, in MiB; the oldest rollouts are evicted first."""
    share_directory: Path | None = None
    """Directory through which the engines of a node share finished rollouts. None keeps each engine's history
    private."""


class LearnedDrafter(Section):
    path: str = ""
    """A checkpoint in speculators' format, as `paceline draft train` writes it: a directory or a Hugging Face name. The
    arena's drafters are `arena:small/eagle3`, `arena:small/dflash` and so on. Empty with `init = "random"`."""
    init: Literal["checkpoint", "random"] = "checkpoint"
    """`checkpoint` loads `path`. `random` starts from random weights: engines draft from history until the trained
    drafter is worth their restart."""
    draft_sampling: Literal["probabilistic", "greedy"] = "probabilistic"
    """Sampling of draft tokens. Both are lossless; `probabilistic` has a higher acceptance rate at temperature 1."""
    weights: Literal["full", "fp8"] = "full"
    """Precision of the drafter's weights in engines. It affects speed and acceptance, never the distribution."""

    @model_validator(mode="after")
    def _has_weights(self) -> Self:
        if self.init == "checkpoint" and not self.path:
            raise ValueError(
                "speculation.drafter.path: is missing; must be a checkpoint, or speculation.drafter.init=random"
            )
        if self.init == "random" and self.path:
            raise ValueError(
                f"speculation.drafter.path: got {self.path!r} with init 'random'; must be left out because nothing is "
                "loaded"
            )
        return self


class EagleDrafter(LearnedDrafter):
    """Draft one token per pass, conditioned on the previous ones (EAGLE-3)."""

    kind: Literal["eagle3"] = "eagle3"


class ParallelDrafter(LearnedDrafter):
    """Draft all k tokens in one pass, independently of each other (DFlash)."""

    kind: Literal["dflash"] = "dflash"


class VllmDrafter(Section):
    """Any other speculative method of vLLM: draft models, MTP heads, DSpark, P-EAGLE."""

    kind: Literal["vllm"] = "vllm"
    settings: dict[str, Any]
    """vLLM's `speculative_config`: `method` (draft_model, mtp, eagle, dspark, ...), `model` (a checkpoint directory, or
    a policy such as arena:tiny; MTP heads in the policy's checkpoint need none) and the method's other settings, such
    as `draft_sample_method = "probabilistic"`."""

    @model_validator(mode="after")
    def _ours_or_theirs(self) -> Self:
        key, method = "speculation.drafter.settings", self.settings.get("method")
        if not method or not isinstance(method, str) or method in _NOT_THEIRS:
            instead = _NOT_THEIRS.get(str(method), "one of vLLM's methods, such as draft_model or mtp")
            raise ValueError(f"{key}.method: got {method!r}; must be {instead}")
        for name, instead in _SET_BY_US.items():
            if name in self.settings:
                raise ValueError(f"{key}.{name}: got {self.settings[name]!r}; must be left out because {instead}")
        return self


_NOT_THEIRS = {
    "ngram": 'another: drafter.kind = "ngram" drafts by n-grams',
    "ngram_gpu": 'another: drafter.kind = "ngram" drafts by n-grams',
    "custom_class": 'another: drafter.kind = "history" is the model-free drafter that learns from rollouts',
    "extract_hidden_states": "another because it drafts nothing",
}
_SET_BY_US = {
    "num_speculative_tokens": "speculation.max_draft_length sets it",
    "num_speculative_tokens_per_batch_size": "speculation.selector chooses the draft length",
    "enable_adaptive_verification": "speculation.selector chooses the draft length",
}

DrafterConfig = Annotated[
    NgramDrafter | HistoryDrafter | EagleDrafter | ParallelDrafter | VllmDrafter, Field(discriminator="kind")
]


class MeasuredSelector(Section):
    """Choose the draft length with the highest measured rate at this batch size."""

    kind: Literal["measured"] = "measured"
    costs: Path | None = None
    """Cost file of `paceline tune` to start from. Without one the selector learns within 200 steps."""


class FixedSelector(Section):
    """Always use the same draft length."""

    kind: Literal["fixed"] = "fixed"
    draft_length: int = Field(ge=0)
    """Tokens drafted at every step; 0 disables drafting."""


class TableSelector(Section):
    """Choose the draft length by batch size from a fixed table, as vLLM does."""

    kind: Literal["table"] = "table"
    ranges: tuple[tuple[int, int, int], ...]
    """Rows of (smallest batch, largest batch, draft length); larger batches use the last row."""


class BanditSelector(Section):
    """BEG-MAB of the TLT paper: epsilon-greedy over buckets of batch sizes."""

    kind: Literal["beg_mab"] = "beg_mab"


class SimpleSelector(Section):
    """Choose the draft length with the best moving average of tokens per second in a bucket of batch sizes; one step in
    fifty tries a neighbor."""

    kind: Literal["simple"] = "simple"


SelectorConfig = Annotated[
    MeasuredSelector | FixedSelector | TableSelector | BanditSelector | SimpleSelector, Field(discriminator="kind")
]


class SpeculationConfig(Section):
    drafter: DrafterConfig
    max_draft_length: int = Field(default=7, ge=1, le=16)
    """Maximum number of draft tokens per verification. The selector chooses from 0 to this."""
    verification: Literal["standard", "coupled"] = "standard"
    """`standard` accepts drafts by vLLM's rejection sampling: the distribution is the policy's, the tokens depend on
    the drafts. `coupled` accepts a draft if it is the token that the policy draws without speculation, so tokens do not
    depend on drafts, engines or batches. On GPUs it needs vLLM's V2 runner."""
    selector: SelectorConfig = MeasuredSelector()
    training: DrafterTrainingConfig = DrafterTrainingConfig()

    @property
    def has_random_drafter(self) -> bool:
        """Return whether the drafter must be trained before engines can use it."""
        return isinstance(self.drafter, LearnedDrafter) and self.drafter.init == "random"

    @property
    def from_history(self) -> SpeculationConfig:
        """The same settings with the history drafter, without the cost file of the other drafter."""
        selector = self.selector
        if isinstance(selector, MeasuredSelector):
            selector = selector.model_copy(update={"costs": None})
        return SpeculationConfig(
            drafter=HistoryDrafter(),
            max_draft_length=self.max_draft_length,
            verification=self.verification,
            selector=selector,
        )

    @model_validator(mode="after")
    def _verifiable(self) -> SpeculationConfig:
        method = self.drafter.settings.get("rejection_sample_method") if isinstance(self.drafter, VllmDrafter) else None
        if self.verification == "coupled" and method is not None:
            raise ValueError(
                f"speculation.drafter.settings.rejection_sample_method: got {method!r} with speculation.verification "
                "'coupled'; must be left out because coupling replaces it"
            )
        return self

    @model_validator(mode="after")
    def _trainable(self) -> SpeculationConfig:
        mode = self.training.mode
        if self.has_random_drafter and mode == "off":
            raise ValueError(
                "speculation.drafter.init: got 'random' with speculation.training.mode 'off'; must be trained: set "
                "speculation.training.mode=idle"
            )
        if mode != "off" and not isinstance(self.drafter, LearnedDrafter):
            raise ValueError(
                f"speculation.training.mode: got {mode!r} with drafter.kind {self.drafter.kind!r}; "
                "must be off because only drafters of kind eagle3 and dflash can be trained"
            )
        return self

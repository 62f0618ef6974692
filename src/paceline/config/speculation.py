"""Speculative decoding: the drafter, how far it drafts, and whether it is trained during the run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from paceline.config.base import Section
from paceline.config.drafter_training import DrafterTrainingConfig


class _MatchingDrafter(Section):
    """A drafter that continues what it finds again; its matches have from `min_match` to `max_match` tokens."""

    min_match: int
    max_match: int

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min_match > self.max_match:
            raise ValueError(
                f"speculation.drafter.min_match: got {self.min_match} with max_match {self.max_match}; must not be "
                "above it because no match could be long enough"
            )
        return self


class NgramDrafter(_MatchingDrafter):
    kind: Literal["ngram"] = "ngram"
    min_match: int = Field(default=2, ge=1)
    """Shortest repeated run of tokens within the request itself that is continued."""
    max_match: int = Field(default=4, ge=1)
    """Longest repeated run of tokens that is searched for."""


class HistoryDrafter(_MatchingDrafter):
    kind: Literal["history"] = "history"
    min_match: int = Field(default=2, ge=1)
    """Shortest run of tokens that is looked up in the prompt's sibling and earlier rollouts."""
    max_match: int = Field(default=16, ge=1)
    """Number of latest tokens by which candidates are compared."""
    capacity_mb: float = Field(default=256, gt=0)
    """Memory of the index in each engine, in MiB; the oldest rollouts leave first."""
    share_directory: Path | None = None
    """Directory through which engines on one node share finished rollouts. None keeps each engine's history to
    itself."""


class LearnedDrafter(Section):
    path: str
    """A speculators checkpoint (`paceline draft train` makes one), `arena` for the one that belongs to an arena policy,
    or `new` for one that the run trains from nothing: engines draft from history until it pays for their restart."""
    draft_sampling: Literal["probabilistic", "greedy"] = "probabilistic"
    """How the drafter proposes. Probabilistic accepts clearly more at temperature 1; both are lossless."""
    weights: Literal["full", "fp8"] = "full"
    """Precision of the drafter's weights in engines, chosen apart from the policy's. It changes speed and acceptance,
    never what is sampled."""


class EagleDrafter(LearnedDrafter):
    """EAGLE-3 drafts one token a pass, each conditioned on those before it."""

    kind: Literal["eagle3"] = "eagle3"


class ParallelDrafter(LearnedDrafter):
    """DFlash drafts all k tokens in one pass, none conditioned on the others."""

    kind: Literal["dflash"] = "dflash"


class VllmDrafter(Section):
    """Any other speculative method of vLLM: a draft model, the policy's own MTP heads, DSpark, P-EAGLE and so on."""

    kind: Literal["vllm"] = "vllm"
    settings: dict[str, Any]
    """vLLM's `speculative_config`, handed on as it is: `method` (draft_model, mtp, eagle, dspark, ...), `model` (a
    checkpoint directory, or a policy such as arena:tiny; MTP heads in the policy's own checkpoint need none) and what
    else the method has, such as `draft_sample_method = "probabilistic"`."""

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
    "num_speculative_tokens": "speculation.max_draft_length says it",
    "num_speculative_tokens_per_batch_size": "speculation.selector chooses the draft length",
    "enable_adaptive_verification": "speculation.selector chooses the draft length",
}

DrafterConfig = Annotated[
    NgramDrafter | HistoryDrafter | EagleDrafter | ParallelDrafter | VllmDrafter, Field(discriminator="kind")
]


class MeasuredSelector(Section):
    """Choose the draft length that measured best at this batch size, learnt while the engine runs."""

    kind: Literal["measured"] = "measured"
    costs: Path | None = None
    """A cost file of `paceline tune` as the prior; without one the selector learns from nothing within 200
    steps."""
    explore: float = Field(default=0.02, ge=0, lt=0.5)
    """Largest share of steps spent on a draft length that is not the best known one."""
    margin: float = Field(default=0.03, ge=0)
    """Relative gain that a new draft length must promise to be taken: hysteresis against flapping."""


class FixedSelector(Section):
    """Use one draft length at every step."""

    kind: Literal["fixed"] = "fixed"
    draft_length: int = Field(ge=0)
    """Tokens drafted at every step; 0 drafts none."""


class TableSelector(Section):
    """Choose draft lengths by batch size from a table that is fixed at start, as vLLM's own."""

    kind: Literal["table"] = "table"
    ranges: tuple[tuple[int, int, int], ...]
    """Rows of (smallest batch, largest batch, draft length); the last row holds beyond its largest batch."""


class BanditSelector(Section):
    """BEG-MAB of the TLT paper: epsilon-greedy over buckets of batch sizes, by the median reward of a sliding
    window."""

    kind: Literal["beg_mab"] = "beg_mab"
    thresholds: tuple[int, ...] = (4, 16)
    """Batch sizes at which a new bucket starts (after the first)."""
    epsilon: float = Field(default=0.1, ge=0, le=1)
    """Probability of a random draft length at a step."""
    window: int = Field(default=10, ge=1)
    """Number of latest rewards of a draft length whose median ranks it."""


class SimpleSelector(Section):
    """Take the draft length with the best moving average of tokens per second in a bucket of batch sizes; one step in
    fifty tries a neighbour."""

    kind: Literal["simple"] = "simple"


SelectorConfig = Annotated[
    MeasuredSelector | FixedSelector | TableSelector | BanditSelector | SimpleSelector, Field(discriminator="kind")
]


class SpeculationConfig(Section):
    drafter: DrafterConfig
    max_draft_length: int = Field(default=7, ge=1, le=16)
    """Largest number of tokens proposed per verification. The selector chooses from 0 to this."""
    selector: SelectorConfig = MeasuredSelector()
    training: DrafterTrainingConfig = DrafterTrainingConfig()

    @property
    def has_new_drafter(self) -> bool:
        """Whether the drafter has to be trained before it is of use."""
        return isinstance(self.drafter, LearnedDrafter) and self.drafter.path == "new"

    @property
    def from_history(self) -> SpeculationConfig:
        """The same with the history drafter. A cost file is of engines with the other one."""
        selector = self.selector
        if isinstance(selector, MeasuredSelector):
            selector = selector.model_copy(update={"costs": None})
        return SpeculationConfig(drafter=HistoryDrafter(), max_draft_length=self.max_draft_length, selector=selector)

    @model_validator(mode="after")
    def _trainable(self) -> SpeculationConfig:
        if self.has_new_drafter and self.training.mode == "off":
            raise ValueError(
                "speculation.drafter.path: got 'new' with speculation.training.mode 'off'; must be a checkpoint "
                "because a new drafter guesses nothing before it is trained: set speculation.training.mode=idle"
            )
        if self.training.mode != "off" and not isinstance(self.drafter, LearnedDrafter):
            raise ValueError(
                f"speculation.training.mode: got {self.training.mode!r} with drafter.kind {self.drafter.kind!r}; "
                "must be off because only drafters of kind eagle3 and dflash are trained"
            )
        return self

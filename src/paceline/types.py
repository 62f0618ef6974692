"""Records shared by all rooms, and the protocols of engine, learner and weight sender.

Rollouts carry everything that later stages need, so nothing downstream queries the engine. Records are frozen. Their
arrays are numpy, which Ray's object store ships without a copy, and read-only by convention.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

from paceline.config import CorrectionConfig

Tokens = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
VersionSpans = tuple[tuple[int, int], ...]
"""Policy version and number of tokens of each span of a response, in order."""
DeviceKind = Literal["cpu", "gpu"]
"""Device of a run's processes."""
Purpose = Literal["train", "eval"]


class GroupId(NamedTuple):  # hashed in C, because the fleet hashes ids several times per rollout
    """Identity of a group of rollouts, such as "17.1/train". An aborted group is sampled again as another attempt."""

    number: int
    """Position among the prompts of its purpose."""
    attempt: int = 0
    purpose: Purpose = "train"

    def __str__(self) -> str:
        return f"{self.number}.{self.attempt}/{self.purpose}"

    @classmethod
    def parse(cls, text: str) -> GroupId:
        number, attempt, purpose = re.split("[./]", text)
        return cls(int(number), attempt=int(attempt), purpose=cast("Purpose", purpose))


class RolloutId(NamedTuple):
    """Identity of a rollout, such as "17.0/train:3": its group and its index in the group."""

    group_id: GroupId
    index: int  # pyright: ignore[reportIncompatibleMethodOverride]  hides tuple.index, which nothing calls

    def __str__(self) -> str:
        return f"{self.group_id}:{self.index}"

    @classmethod
    def parse(cls, text: str) -> RolloutId:
        group_id, index = text.split(":")
        return cls(GroupId.parse(group_id), int(index))


class PacelineError(Exception):
    """Base of Paceline's errors. Invalid settings raise ValueError."""


class EngineLostError(PacelineError):
    """An engine died, missed a deadline or may hold a half-written policy. It must not be used again."""

    def __init__(self, engine: str, why: str) -> None:
        super().__init__(engine, why)  # arguments for pickle, between processes
        self.engine = engine
        self.why = why

    def __str__(self) -> str:
        return f"engine {self.engine} is lost: {self.why}"


class LearnerLostError(PacelineError):
    """A learner process died or missed a deadline, and could not be restarted."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why

    def __str__(self) -> str:
        return f"the learner is lost: {self.why}"


class PushRefusedError(PacelineError):
    """An engine refused a weight push before it changed the model. It keeps its version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One task for the policy.

    Example: Prompt(id="train/17", text="12 + 7 = ?", token_ids=np.array([5, 6, 7], np.int32), row={"answer": 19})
    """

    id: str
    """Stable across epochs, as a key to earlier lengths."""
    text: str
    token_ids: Tokens
    row: Mapping[str, Any]
    """Dataset row, for the reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """One response to sample."""

    group_id: GroupId
    index: int
    prompt_ids: Tokens
    max_tokens: int
    temperature: float
    seed: int | None = None
    """Seed of the tokens, for engines whose noise is keyed by seed and position: those without speculation or with
    coupled verification. None draws at random."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of tokens before temperature, to find out how close a draw was."""

    @classmethod
    def of(cls, prompt: Prompt, number: int, *, max_tokens: int, temperature: float, index: int = 0) -> RolloutRequest:
        """Return a request for a prompt outside of the loop; `number` identifies its group."""
        ids = prompt.token_ids
        return cls(
            group_id=GroupId(number), index=index, prompt_ids=ids, max_tokens=max_tokens, temperature=temperature
        )

    @property
    def id(self) -> RolloutId:
        return RolloutId(self.group_id, self.index)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """One sampled response with its behavior log-probabilities and policy versions."""

    group_id: GroupId
    index: int
    prompt_ids: Tokens
    token_ids: Tokens
    logp: Floats
    """Log-probability of each token under its sampling distribution (after temperature)."""
    finish_reason: Literal["stop", "length"]
    version_spans: VersionSpans
    """Covers all tokens; several spans if a sync came in between (asynchronous training)."""
    engine: str
    started_s: float
    """Seconds on the machine's monotonic clock; a RemoteEngine converts them to the driver's clock."""
    finished_s: float
    num_verifications: int = 0
    """Engine steps in which the policy verified a draft of this rollout."""
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def id(self) -> RolloutId:
        return RolloutId(self.group_id, self.index)

    @property
    def policy_version(self) -> int:
        """Version of the first token, the oldest."""
        return self.version_spans[0][0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """All rollouts of one prompt, by index."""

    group_id: GroupId
    prompt: Prompt
    rollouts: tuple[Rollout, ...]

    @property
    def policy_version(self) -> int:
        """Version of the oldest token."""
        return min(rollout.policy_version for rollout in self.rollouts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """Training sample of the learner: a rollout with its advantage."""

    token_ids: Tokens
    """Prompt and response."""
    num_prompt_tokens: int
    logp: Floats
    """Behavior log-probabilities of the response tokens."""
    advantage: float
    version_spans: VersionSpans = ()
    """Spans of the rollout. If empty, all tokens count as drawn by the current policy."""
    engine: str = ""
    """Engine that drew the rollout, to tell a mismatch of one engine from a mismatch of all."""
    rollout_id: RolloutId | None = None
    old_logp: Floats | None = None
    """The learner's log-probabilities before the update. If None, the loss uses `logp` (see correction.py)."""
    weight: Floats | None = None
    """Weight of each response token in the loss; None is 1."""

    @classmethod
    def of(cls, rollout: Rollout, advantage: float) -> Sample:
        return cls(
            token_ids=np.concatenate([rollout.prompt_ids, rollout.token_ids]),
            num_prompt_tokens=len(rollout.prompt_ids),
            logp=rollout.logp,
            advantage=advantage,
            version_spans=rollout.version_spans,
            engine=rollout.engine,
            rollout_id=rollout.id,
        )

    @classmethod
    def of_prompt(cls, prompt: Prompt) -> Sample:
        tokens, nothing = prompt.token_ids, np.empty(0, np.float32)
        return cls(token_ids=tokens, num_prompt_tokens=len(tokens), logp=nothing, advantage=0.0)

    @property
    def num_response_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingGradients:
    """Gradients of the last scored samples, which the learner holds until `apply` or `discard`."""

    id: int
    correction: CorrectionConfig
    """Correction of the samples that the gradients were computed with."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scores:
    """Scores of samples under the current policy."""

    logp: Sequence[Floats]
    """Log-probabilities of each sample's response tokens."""
    pending: PendingGradients | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """Answer of one engine to one push."""

    engine: str
    version: int
    num_tensors: int
    num_bytes: int
    seconds: float
    scales_version: int | None = None
    """Policy version of the push's KV scales; None without scales."""
    mismatched: tuple[str, ...] = ()
    """Tensors with different fingerprints at sender and receiver."""
    error: str | None = None
    """Why the push was refused or the engine lost; None if the engine now has `version`."""
    lost: bool = False
    """True if the engine must not be used again."""

    @property
    def ok(self) -> bool:
        return self.error is None and not self.mismatched


@dataclass(frozen=True, slots=True)
class DraftBin:
    """Draft counts of an engine in a short time interval. Readers compute means."""

    begin_s: float
    """Seconds on the machine's monotonic clock; a RemoteEngine converts them to the driver's clock."""
    width_s: float
    num_steps: float
    draft_length: float
    """Chosen draft lengths, summed over steps."""
    num_verifications: float
    """Drafts that the policy verified, summed over steps and requests."""
    num_accepted: float
    num_requests: float
    """Requests in the batch, summed over steps."""


class Engine(Protocol):
    """One vLLM instance. Every method has a deadline and raises EngineLostError if the engine is lost."""

    @property
    def name(self) -> str: ...

    async def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Queue requests. Return when the engine has accepted them."""
        ...

    async def collect(self) -> Sequence[Rollout]:
        """Wait for finished rollouts and return all of them, each exactly once."""
        ...

    async def abort(self, ids: Sequence[RolloutId]) -> None:
        """Stop sampling submitted rollouts. Finished ones may still be collected."""
        ...

    async def pause(self) -> None:
        """Stop stepping. Requests in flight keep their state."""
        ...

    async def resume(self) -> None: ...

    async def sleep(self) -> None:
        """Free memory while idle (level 1: move weights to the host, drop the KV cache)."""
        ...

    async def wake(self) -> None: ...

    async def metrics(self) -> Mapping[str, float]:
        """Return totals since the start, by metric key."""
        ...

    async def take_timeline(self) -> Sequence[DraftBin]:
        """Return draft counts over time since the last call; empty without speculation."""
        ...

    async def close(self) -> None: ...


class Learner(Protocol):
    """The process group that updates the policy. One step: `score`, then `apply` or `discard`."""

    async def score(
        self, samples: Sequence[Sample], *, correction: CorrectionConfig | None = None, hand_over: bool = False
    ) -> Scores:
        """Score samples under the current policy. With `correction`, also compute the gradients of the samples that it
        corrects, in the same pass, if an update is one optimizer step. With `hand_over`, also write hidden states of
        some samples for drafter training."""
        ...

    async def apply(self, samples: Sequence[Sample], *, pending: PendingGradients | None = None) -> Mapping[str, float]:
        """Update the policy on corrected samples and return metrics. With `pending`, use these gradients instead of
        computing them from the samples. A learner that was restarted after `score` has lost them and computes them
        again, with the same result bit for bit."""
        ...

    async def discard(self) -> None:
        """Drop pending gradients, if any."""
        ...

    async def calibrate(self, samples: Sequence[Sample], version: int) -> Mapping[str, float]:
        """Calibrate KV scales for policy `version` on some samples. They are pushed with its weights."""
        ...

    async def save(self, path: str) -> None:
        """Write the policy as a Hugging Face checkpoint directory."""
        ...

    async def save_state(self, path: str) -> None:
        """Write parameters, optimizer state and counters into a new directory."""
        ...

    async def load_state(self, path: str) -> None:
        """Restore a directory written by `save_state`."""
        ...

    async def counters(self) -> Mapping[str, float]:
        """Return counts of tolerated failures since the start, by metric key."""
        ...

    async def close(self) -> None: ...


class Sender(Protocol):
    """Sender of the weight wire."""

    async def send(self, version: int) -> Sequence[Receipt]:
        """Push the learner's policy to every engine as `version`. Return a receipt per engine."""
        ...


class Tokenizer(Protocol):
    """Subset of a Hugging Face tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, add_generation_prompt: bool, tokenize: Literal[False]
    ) -> str: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str: ...

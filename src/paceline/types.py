"""Records that cross a boundary, and the protocols of engine, learner and weight sender.

Rollouts carry everything that a later stage needs, so nothing downstream asks the engine again. Every record is
frozen; arrays inside them are numpy (they cross process boundaries without a copy through Ray's object store) and are
never written to.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, Protocol, cast

import numpy as np
import numpy.typing as npt

from paceline.config import CorrectionConfig

Tokens = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
VersionSpans = tuple[tuple[int, int], ...]
"""Policy version and number of tokens of each stretch of a response that one version has drawn, in order."""


DeviceKind = Literal["cpu", "gpu"]
"""What the processes of a run compute on."""


Purpose = Literal["train", "eval"]


@dataclass(frozen=True, slots=True, order=True)
class GroupId:
    """Identity of a group of rollouts. An aborted group is sampled again as another attempt.

    Example: str(GroupId(17, attempt=1)) == "17.1/train"
    """

    number: int
    """Position among the prompts of its purpose."""
    _: KW_ONLY
    attempt: int = 0
    purpose: Purpose = "train"

    def __str__(self) -> str:
        return f"{self.number}.{self.attempt}/{self.purpose}"

    @classmethod
    def parse(cls, text: str) -> GroupId:
        number, attempt, purpose = re.split("[./]", text)
        return cls(int(number), attempt=int(attempt), purpose=cast("Purpose", purpose))


@dataclass(frozen=True, slots=True, order=True)
class RolloutId:
    """Identity of a rollout: its group and its index in the group.

    Example: str(RolloutId(GroupId(17), 3)) == "17.0/train:3"
    """

    group_id: GroupId
    index: int

    def __str__(self) -> str:
        return f"{self.group_id}:{self.index}"

    @classmethod
    def parse(cls, text: str) -> RolloutId:
        group_id, index = text.split(":")
        return cls(GroupId.parse(group_id), int(index))


class PacelineError(Exception):
    """Base of every error that Paceline raises on purpose, apart from ValueError for a user's wrong setting."""


class EngineLostError(PacelineError):
    """An engine died, froze past its deadline, or may hold a half-written policy: nothing more may be asked of it."""

    def __init__(self, engine: str, why: str) -> None:
        super().__init__(engine, why)  # the arguments, so that the error survives a process boundary
        self.engine = engine
        self.why = why

    def __str__(self) -> str:
        return f"engine {self.engine} is lost: {self.why}"


class LearnerLostError(PacelineError):
    """A process of the learner died or did not answer in time, and was not or could not be started again."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why

    def __str__(self) -> str:
        return f"the learner is lost: {self.why}"


class PushRefusedError(PacelineError):
    """A weight push was refused before it touched the model; the engine keeps the version it had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One task for the policy.

    Example: Prompt(id="train/17", text="12 + 7 = ?", token_ids=np.array([5, 6, 7], np.int32), row={"answer": 19})
    """

    id: str
    """Stable across epochs: earlier lengths (and, later, earlier rollouts) are found by it."""
    text: str
    token_ids: Tokens
    row: Mapping[str, Any]
    """The dataset row it came from, for the reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """One response to sample."""

    group_id: GroupId
    index: int
    prompt_ids: Tokens
    max_tokens: int
    temperature: float
    seed: int | None = None
    """None leaves the draw to the engine's own stream, which is faster; a test that wants equal samples fixes it."""

    @property
    def id(self) -> RolloutId:
        return RolloutId(self.group_id, self.index)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """One sampled response with its behaviour log-probabilities and the policy versions that drew it."""

    group_id: GroupId
    index: int
    prompt_ids: Tokens
    token_ids: Tokens
    logp: Floats
    """Log-probability of each token under the distribution that it was drawn from (after temperature)."""
    finish_reason: Literal["stop", "length"]
    version_spans: VersionSpans
    """Covers all tokens; more than one stretch when a sync came in between (asynchronous training)."""
    engine: str
    started_s: float
    """Seconds on the monotonic clock of the machine; a RemoteEngine gives them on the driver's."""
    finished_s: float
    num_verifications: int = 0
    """Engine steps in which the policy had a draft of this rollout to verify."""
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def id(self) -> RolloutId:
        return RolloutId(self.group_id, self.index)

    @property
    def policy_version(self) -> int:
        """Version of the first token, and so the oldest."""
        return self.version_spans[0][0]

    @property
    def policy_version_end(self) -> int:
        """Version of the last token."""
        return self.version_spans[-1][0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """All rollouts of one prompt, in order of their index."""

    group_id: GroupId
    prompt: Prompt
    rollouts: tuple[Rollout, ...]

    @property
    def policy_version(self) -> int:
        """Version of its oldest token."""
        return min(rollout.policy_version for rollout in self.rollouts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """What the learner trains on: one rollout with its advantage."""

    token_ids: Tokens
    """Prompt and response."""
    num_prompt_tokens: int
    logp: Floats
    """Behaviour log-probabilities of the response tokens."""
    advantage: float
    version_spans: VersionSpans = ()
    """Those of the rollout; without any, all tokens count as drawn by the present policy."""
    engine: str = ""
    """Engine that drew the rollout: a mismatch of one engine has another cause than one of all."""
    rollout_id: RolloutId | None = None
    old_logp: Floats | None = None
    """The learner's log-probabilities before the update. None: the loss uses `logp`, see correction.py."""
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
        """A prompt that nobody has answered yet."""
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
    """What one engine answered to one push."""

    engine: str
    version: int
    num_tensors: int
    num_bytes: int
    seconds: float
    scales_version: int | None = None
    """Version of the policy that the KV scales of this push were calibrated for; None without any."""
    mismatched: tuple[str, ...] = ()
    """Tensors whose fingerprint at the receiver differs from the sender's."""
    error: str | None = None
    """Why the push was refused or the engine lost; None when it holds `version` now."""
    lost: bool = False
    """True when the engine must not be used any more."""

    @property
    def ok(self) -> bool:
        return self.error is None and not self.mismatched


@dataclass(frozen=True, slots=True)
class DraftBin:
    """What an engine drafted in a short span of time; counts, from which a reader makes means."""

    begin_s: float
    """Seconds on the monotonic clock of the machine; a RemoteEngine gives them on the driver's."""
    width_s: float
    num_steps: float
    draft_length: float
    """Draft lengths that were chosen, summed over steps."""
    num_verifications: float
    """Drafts that the policy verified, summed over steps and requests."""
    num_accepted: float
    num_requests: float
    """Requests in the batch, summed over steps."""


class Engine(Protocol):
    """One vLLM instance. Every method has a deadline of its own and raises EngineLostError when the engine is gone."""

    @property
    def name(self) -> str: ...

    async def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Queue requests; returns when the engine has accepted them, not when they are done."""
        ...

    async def collect(self) -> Sequence[Rollout]:
        """Wait until at least one rollout has finished, then return all that have, each exactly once."""
        ...

    async def abort(self, ids: Sequence[RolloutId]) -> None:
        """Stop sampling rollouts that were submitted. One that has finished may be collected all the same."""
        ...

    async def pause(self) -> None:
        """Stop stepping; requests in flight keep their state."""
        ...

    async def resume(self) -> None: ...

    async def sleep(self) -> None:
        """Give memory back while idle (level 1: weights to the host, KV cache dropped)."""
        ...

    async def wake(self) -> None: ...

    async def metrics(self) -> Mapping[str, float]:
        """Totals since the start, by metric key."""
        ...

    async def take_timeline(self) -> Sequence[DraftBin]:
        """What was drafted over time since the last call; nothing without speculation."""
        ...

    async def close(self) -> None:
        """End the engine and every process that it started."""
        ...


class Learner(Protocol):
    """The process group that updates the policy.

    One step: `score`, then `apply` or `discard`.
    """

    async def score(
        self, samples: Sequence[Sample], *, correction: CorrectionConfig | None = None, hand_over: bool = False
    ) -> Scores:
        """Score samples under the current policy.

        With `correction`, also compute the gradients of the samples that it corrects, in the same pass, if an update
        is one optimizer step. With `hand_over`, also write hidden states of some samples for drafter training.
        """
        ...

    async def apply(self, samples: Sequence[Sample], *, pending: PendingGradients | None = None) -> Mapping[str, float]:
        """Update the policy on corrected samples and return metrics.

        With `pending`, use these gradients instead of computing them from the samples. A learner that was restarted
        after `score` has lost them and computes them again, with the same result bit for bit.
        """
        ...

    async def discard(self) -> None:
        """Drop pending gradients, if any."""
        ...

    async def calibrate(self, samples: Sequence[Sample], version: int) -> Mapping[str, float]:
        """Find KV scales for the current policy, `version`, from some samples; they are sent with its weights."""
        ...

    async def save(self, path: str) -> None:
        """Write the policy as a Hugging Face checkpoint directory."""
        ...

    async def save_state(self, path: str) -> None:
        """Write all that the next update depends on into a new directory."""
        ...

    async def load_state(self, path: str) -> None:
        """Go on from a directory that `save_state` wrote."""
        ...

    async def counters(self) -> Mapping[str, float]:
        """Failures that cost nothing but what they are about, summed since the start, by metric key."""
        ...

    async def close(self) -> None: ...


class Sender(Protocol):
    """The sender of the weight wire, which lives in the learner's process."""

    async def send(self, version: int) -> Sequence[Receipt]:
        """Push the learner's policy to every engine as `version`; one receipt per engine."""
        ...


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that Paceline uses."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, add_generation_prompt: bool, tokenize: Literal[False]
    ) -> str: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str: ...

"""The learner's actors as the loop sees them: a learner that is lost is started again, and made what it was.

    apply, calibrate ──▶ actors             each is noted until a checkpoint covers it
    save_state, load_state ──▶ checkpoint ──┐
    a rank is lost ──▶ new actors ──▶ load_state ──▶ what was noted since, again ──▶ the call that was under way

The learner draws nothing at random that does not follow from its seed and its counters (learner/state.py), so from the
same calls it becomes the same learner, bit for bit. The loop waits longer for an answer and sees nothing else of it.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.exceptions import RayError, RayTaskError

from paceline.cluster.proxies import CLOSE_DEADLINE_S, plain, why_lost
from paceline.config import Config, CorrectionConfig, EngineConfig, LearnerConfig
from paceline.devices import Transport
from paceline.files import final_path
from paceline.learner.hidden_states import HiddenStateWriterSettings
from paceline.orchestrator.store import verify
from paceline.orchestrator.supervision import STEADY_S
from paceline.types import DeviceKind, LearnerLostError, PacelineError, PendingGradients, Sample, Scores
from paceline.weights.distributed import GroupAddress
from paceline.weights.message import Push

_CHANGING = frozenset({"apply", "calibrate"})
"""Calls that make another learner of it."""
_MEETINGS = frozenset({"join_group", "transmit"})
"""Calls that others take part in; those have failed with the learner, and all of them begin again."""

Call = tuple[str, Sequence[Any]]
"""A method and its arguments, which are Ray's references: what does not fit into its store goes to the disk."""


class Tell(Protocol):
    """Records an event."""

    def __call__(self, what: str, **fields: object) -> None: ...


class LearnerLog:
    """What makes a new learner the one that was lost: a checkpoint, and the calls since. Not more than one interval
    between checkpoints is kept."""

    def __init__(self) -> None:
        self._base: Path | None = None
        """State that the calls follow; None is the policy that the run began with."""
        self._calls: list[Call] = []
        self._saved: tuple[Path, int] | None = None
        """State that was written last, and how many of the calls it covers."""

    def add(self, method: str, args: Sequence[Any]) -> None:
        self._advance()
        self._calls.append((method, args))

    def loaded(self, path: str) -> None:
        self._base, self._calls, self._saved = Path(path), [], None

    def saved(self, path: str) -> None:
        """The state was written, into a checkpoint that may have its name later or never."""
        self._advance()
        directory = final_path(Path(path).parent)
        self._saved = directory / Path(path).name, len(self._calls)

    def recall(self) -> tuple[Path | None, list[Call]]:
        """The state to load, None if there is none, and the calls to repeat; raises PacelineError if it is damaged."""
        self._advance()
        if self._base is not None:
            verify(self._base.parent)
        return self._base, list(self._calls)

    def _advance(self) -> None:
        if self._saved is not None and self._saved[0].is_dir():
            self._base, self._calls, self._saved = self._saved[0], self._calls[self._saved[1] :], None


class RemoteLearner:
    """types.Learner over the LearnerActors; rank 0 speaks for all."""

    def __init__(self, create: Callable[[], Sequence[Any]], config: LearnerConfig, *, max_restarts: int) -> None:
        """`create` makes an actor for each rank."""
        self._create = create
        self.actors = create()
        self._config = config
        self._max_restarts = max_restarts
        self._log: LearnerLog | None = None
        self._reviving = asyncio.Lock()
        self.num_restarts = 0
        self._in_a_row = 0
        self._restarted_s = 0.0
        self.pushed = asyncio.Event()
        """The policy is the one that engines were given last."""
        self.still = asyncio.Lock()
        """Whoever holds it finds the policy as it is until it lets go."""

    def heal(self, tell: Tell) -> None:
        """From now on start the learner again when it is lost; `tell` gets events. Checkpoints must be written, or all
        calls of the run would have to be kept."""
        self._log, self._tell = LearnerLog(), tell

    async def start(
        self,
        model_path: str,
        config: Config,
        num_threads: int | None,
        cores: Sequence[int] | None = None,
        hand_over: HiddenStateWriterSettings | None = None,
        *,
        device: DeviceKind,
        transport: Transport,
    ) -> None:
        self._engine = config.rollout.engine
        self._before_engine = (
            model_path,
            config.learner,
            config.objective,
            config.rollout.temperature,
            config.run.seed,
        )
        self._after_engine = (num_threads, cores, hand_over, device, transport)
        await self._start()

    async def _start(self) -> None:
        rendezvous = None
        if len(self.actors) > 1:
            (rendezvous,) = await self._ask("rendezvous", (self._config.deadline_s,), self.actors[:1])
        args = (*self._before_engine, rendezvous, self._engine, *self._after_engine)
        await self._ask("start", [ray.put(arg) for arg in args])

    async def score(
        self, samples: Sequence[Sample], *, correction: CorrectionConfig | None = None, hand_over: bool = False
    ) -> Scores:
        return await self._all("score", list(samples), correction, hand_over)

    async def apply(self, samples: Sequence[Sample], *, pending: PendingGradients | None = None) -> Mapping[str, float]:
        async with self.still:
            self.pushed.clear()
            return await self._all("apply", list(samples), pending)

    async def discard(self) -> None:
        await self._all("discard")

    async def calibrate(self, samples: Sequence[Sample], version: int) -> Mapping[str, float]:
        return await self._all("calibrate", list(samples), version)

    async def stage_for(self, engine: EngineConfig) -> None:
        async with self.still:
            self.pushed.clear()
            self._engine = engine
            await self._all("stage_for", engine)

    async def stage(self, version: int) -> Push:
        return await self._all("stage", version)

    async def stage_drafter(self, checkpoint: Path, file: Path, version: int) -> Push:
        return await self._all("stage_drafter", str(checkpoint), str(file), version)

    async def host_group(self, num_workers: int, timeout_s: float) -> GroupAddress:
        return await self._all("host_group", num_workers, timeout_s)

    async def join_group(self) -> str | None:
        return await self._all("join_group")

    async def transmit(self) -> str | None:
        return await self._all("transmit")

    async def counters(self) -> Mapping[str, float]:
        """Summed over ranks."""
        ranks = await self._every("counters")
        totals = {key: sum(counted[key] for counted in ranks) for key in ranks[0]}
        return {**totals, "learner/restarted": float(self.num_restarts)}

    async def save(self, path: str) -> None:
        await self._all("save", path)

    async def save_state(self, path: str) -> None:
        await self._all("save_state", path)
        if self._log is not None:
            self._log.saved(path)

    async def load_state(self, path: str) -> None:
        await self._all("load_state", path)
        if self._log is not None:
            self._log.loaded(path)

    async def close(self, deadline_s: float = CLOSE_DEADLINE_S) -> None:
        with suppress(TimeoutError, PacelineError):  # they are killed next in either case
            await asyncio.wait_for(self._ask("close", ()), deadline_s)
        self._kill()

    def _kill(self) -> None:
        for actor in self.actors:
            ray.kill(actor)

    async def _all(self, method: str, *args: Any) -> Any:
        """The answer of rank 0."""
        return (await self._every(method, *args))[0]

    async def _every(self, method: str, *args: Any) -> Sequence[Any]:
        """Call every rank with the same arguments, each of them shipped once per node; again if the learner is lost
        meanwhile."""
        shared = [ray.put(arg) for arg in args]
        while True:
            async with self._reviving:  # a new learner is not asked before it is what the old one was
                life = self.num_restarts
            try:
                answers = await self._ask(method, shared)
            except LearnerLostError as lost:
                await self._revive(life, lost)
                if method in _MEETINGS:
                    return ["the learner was lost meanwhile"]
                continue
            if self._log is not None and method in _CHANGING:
                self._log.add(method, shared)
            return answers

    async def _ask(self, method: str, shared: Sequence[Any], actors: Sequence[Any] | None = None) -> Sequence[Any]:
        """Answers of the present ranks, or of some of them."""
        try:
            answers = [plain(getattr(actor, method).remote(*shared)) for actor in actors or self.actors]
            return await asyncio.wait_for(asyncio.gather(*answers), self._config.deadline_s)
        except TimeoutError:
            raise LearnerLostError(
                f"it did not answer {method} within {self._config.deadline_s:.0f} s; raise learner.deadline_s if it is "
                "only slow"
            ) from None
        except RayError as error:
            why = why_lost(error, method)
            if why is None:
                raise
            if isinstance(error, RayTaskError) and _is_about_files(error.cause):
                raise PacelineError(f"the learner failed: {why}") from None
            raise LearnerLostError(why) from None

    async def _revive(self, life: int, lost: LearnerLostError) -> None:
        """Replace the learner that was lost in this life by a new one that is what it was."""
        async with self._reviving:
            if self.num_restarts != life:
                return  # for another call that was under way
            if self._log is None:
                raise lost
            began_s = time.monotonic()
            if began_s - self._restarted_s >= STEADY_S:
                self._in_a_row = 0
            while True:
                self._tell("learner_lost", why=lost.why)
                if self._in_a_row == self._max_restarts:
                    raise LearnerLostError(
                        f"{lost.why}; it was started again {self._in_a_row} times in a row"
                    ) from None
                self._in_a_row += 1
                self._kill()
                self.actors = self._create()
                try:
                    num_repeated = await self._rebuild(self._log)
                except LearnerLostError as again:
                    lost = again
                    continue
                self.num_restarts += 1
                self._restarted_s = time.monotonic()
                healing_s = round(self._restarted_s - began_s, 4)
                self._tell("learner_healed", healing_s=healing_s, calls_repeated=num_repeated)
                return

    async def _rebuild(self, log: LearnerLog) -> int:
        """Returns how many calls were repeated."""
        await self._start()
        base, calls = await asyncio.to_thread(log.recall)
        if base is not None:
            await self._ask("load_state", [ray.put(str(base))])
        for method, args in calls:
            await self._ask(method, args)
        return len(calls)


def _is_about_files(cause: object) -> bool:
    """A full disk costs what was to be written, and not the learner."""
    return isinstance(cause, OSError) and cause.errno != errno.ENOMEM

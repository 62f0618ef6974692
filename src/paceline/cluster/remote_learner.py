"""Learner proxy over Ray actors. Restart a failed learner and restore its state.

    apply, calibrate ──▶ actors             logged until a checkpoint covers them
    save_state, load_state ──▶ checkpoint ──┐
    a rank is lost ──▶ new actors ──▶ load_state ──▶ logged calls since ──▶ the interrupted call

All randomness of the learner follows from its seed and its counters (learner/state.py), so the same calls restore the
same learner bit for bit. The loop only waits longer for an answer.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.exceptions import RayError, RayTaskError

from paceline.cluster.proxies import CLOSE_DEADLINE_S, plain, why_lost
from paceline.cluster.specs import CurrentSettings, EngineSettings, LearnerRankSpec
from paceline.config import CorrectionConfig
from paceline.files import final_path
from paceline.orchestrator.store import verify
from paceline.orchestrator.supervision import STEADY_S
from paceline.types import LearnerLostError, PacelineError, PendingGradients, Sample, Scores
from paceline.weights.distributed import GroupAddress
from paceline.weights.message import Push

_LOGGED = frozenset({"apply", "calibrate"})
"""Calls that change the learner's state."""
_COLLECTIVE = frozenset({"join_group", "transmit"})
"""Collective calls with engines. They are not repeated: the sender restarts the whole collective."""

Call = tuple[str, Sequence[Any]]
"""A method and its arguments, as Ray references, which Ray spills to disk if memory is short."""


class RecordEvent(Protocol):
    def __call__(self, what: str, **fields: object) -> None: ...


class LearnerLog:
    """Latest checkpoint of the learner and the calls since: everything needed to restore it."""

    def __init__(self) -> None:
        self._base: Path | None = None
        """State before the calls; None is the initial policy."""
        self._calls: list[Call] = []
        self._saved: tuple[Path, int] | None = None
        """State written last, and the number of calls it covers."""

    def add(self, method: str, args: Sequence[Any]) -> None:
        self._advance()
        self._calls.append((method, args))

    def loaded(self, path: str) -> None:
        self._base, self._calls, self._saved = Path(path), [], None

    def saved(self, path: str) -> None:
        """Note a written state. It counts once its checkpoint directory has its final name."""
        self._advance()
        directory = final_path(Path(path).parent)
        self._saved = directory / Path(path).name, len(self._calls)

    def recall(self) -> tuple[Path | None, list[Call]]:
        """Return the state to load, if any, and the calls to repeat. Raise PacelineError if the state is damaged."""
        self._advance()
        if self._base is not None:
            verify(self._base.parent)
        return self._base, list(self._calls)

    def _advance(self) -> None:
        if self._saved is not None and self._saved[0].is_dir():
            self._base, self._calls, self._saved = self._saved[0], self._calls[self._saved[1] :], None


class RemoteLearner:
    """types.Learner over LearnerActors. Rank 0 answers."""

    def __init__(
        self,
        create: Callable[[], Sequence[Any]],
        spec: LearnerRankSpec,
        settings: CurrentSettings,
        *,
        max_restarts: int,
    ) -> None:
        """`create` makes one actor per rank. `settings` are the engines' settings, for which weights are staged."""
        self._create = create
        self.actors = create()
        self.spec = spec
        self._settings = settings
        self._deadline_s = spec.learner.deadline_s
        self._max_restarts = max_restarts
        self._log: LearnerLog | None = None
        self._restarting = asyncio.Lock()
        self.num_restarts = 0
        self._in_a_row = 0
        self._restarted_s = 0.0
        self.pushed = asyncio.Event()
        """Set while the engines hold the current policy."""
        self.still = asyncio.Lock()
        """Held while the policy must not change."""

    def heal(self, record_event: RecordEvent) -> None:
        """Restart the learner when it fails. Needs checkpoints, which bound the number of logged calls."""
        self._log, self._record_event = LearnerLog(), record_event

    async def start(self) -> None:
        spec = replace(self.spec, engine=self._settings.now.engine)
        if len(self.actors) > 1:
            (rendezvous,) = await self._ask("rendezvous", (self._deadline_s,), self.actors[:1])
            spec = replace(spec, rendezvous=rendezvous)
        await self._ask("start", [ray.put(spec)])

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

    async def change_settings(self, settings: EngineSettings) -> None:
        """Change the engines' settings between two pushes, and stage the next push for them."""
        async with self.still:
            self.pushed.clear()
            self._settings.now = settings
            await self._all("stage_for", settings.engine)

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
        """Return the counters, summed over ranks."""
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
        with suppress(TimeoutError, PacelineError):  # the actors are killed next
            await asyncio.wait_for(self._ask("close", ()), deadline_s)
        self._kill()

    def _kill(self) -> None:
        for actor in self.actors:
            ray.kill(actor)

    async def _all(self, method: str, *args: Any) -> Any:
        """Call every rank and return the answer of rank 0."""
        return (await self._every(method, *args))[0]

    async def _every(self, method: str, *args: Any) -> Sequence[Any]:
        """Call every rank with the same arguments, shipped once per node. Repeat the call after a restart."""
        shared = [ray.put(arg) for arg in args]
        while True:
            async with self._restarting:  # wait until a restart has restored the state
                num_restarts = self.num_restarts
            try:
                answers = await self._ask(method, shared)
            except LearnerLostError as lost:
                await self._restart(num_restarts, lost)
                if method in _COLLECTIVE:
                    return ["the learner was lost and restarted"]
                continue
            if self._log is not None and method in _LOGGED:
                self._log.add(method, shared)
            return answers

    async def _ask(self, method: str, shared: Sequence[Any], actors: Sequence[Any] | None = None) -> Sequence[Any]:
        """Call these actors, by default all ranks."""
        try:
            answers = [plain(getattr(actor, method).remote(*shared)) for actor in actors or self.actors]
            return await asyncio.wait_for(asyncio.gather(*answers), self._deadline_s)
        except TimeoutError:
            why = f"{method} did not answer within {self._deadline_s:.0f} s; raise learner.deadline_s if it is slow"
            raise LearnerLostError(why) from None
        except RayError as error:
            why = why_lost(error, method)
            if why is None:
                raise
            if isinstance(error, RayTaskError) and _is_about_files(error.cause):
                raise PacelineError(f"the learner failed: {why}") from None
            raise LearnerLostError(why) from None

    async def _restart(self, num_restarts: int, lost: LearnerLostError) -> None:
        """Restart the learner that failed after this number of restarts, and restore its state."""
        async with self._restarting:
            if self.num_restarts != num_restarts:
                return  # another call has restarted it
            if self._log is None:
                raise lost
            began_s = time.monotonic()
            if began_s - self._restarted_s >= STEADY_S:
                self._in_a_row = 0
            while True:
                self._record_event("learner_lost", why=lost.why)
                if self._in_a_row == self._max_restarts:
                    raise LearnerLostError(f"{lost.why}; it was restarted {self._in_a_row} times in a row") from None
                self._in_a_row += 1
                self._kill()
                self.actors = self._create()
                try:
                    num_repeated = await self._restore(self._log)
                except LearnerLostError as again:
                    lost = again
                    continue
                self.num_restarts += 1
                self._restarted_s = time.monotonic()
                healing_s = round(self._restarted_s - began_s, 4)
                self._record_event("learner_healed", healing_s=healing_s, calls_repeated=num_repeated)
                return

    async def _restore(self, log: LearnerLog) -> int:
        """Start the new actors and restore their state. Return the number of repeated calls."""
        await self.start()
        base, calls = await asyncio.to_thread(log.recall)
        if base is not None:
            await self._ask("load_state", [ray.put(str(base))])
        for method, args in calls:
            await self._ask(method, args)
        return len(calls)


def _is_about_files(cause: object) -> bool:
    """Return whether the error concerns files, such as a full disk, which leaves the learner intact."""
    return isinstance(cause, OSError) and cause.errno != errno.ENOMEM

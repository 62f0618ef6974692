"""Checkpoint and resume.

    every group, every step    finished groups, and the groups of each step ──▶ batches/    (batch_log.py)
    every checkpoint_every     learner, loop, drafter ──▶ state/step-N                      (store.py)
    resume                     load the newest checkpoint, repeat the logged steps after it, then run new steps

The run waits while the learner writes its state and while the log is flushed at the end of a step. Checksums and disk
syncs of a checkpoint run beside the next step. Failed writes are counted in `checkpoint/failed`; the run continues.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from paceline.config import Config, adjustable_keys
from paceline.files import atomic_file, installed
from paceline.metrics import Sum
from paceline.orchestrator.batch_log import BatchLog, Taken
from paceline.orchestrator.journal import Journal
from paceline.orchestrator.online_drafter import OnlineDrafter
from paceline.orchestrator.store import Store
from paceline.types import Group, Learner, PacelineError, Prompt


class Recovery:
    """The checkpoints and the batch log of one run. Without a directory, nothing is kept."""

    def __init__(self, directory: Path | None, config: Config) -> None:
        """Find the newest checkpoint of an earlier driver. No other driver may be alive."""
        self._directory = directory if config.run.checkpoint_every else None
        self._every = config.run.checkpoint_every
        self._keeps_all = config.run.keep_rollouts
        self._facts = {"config": config.fixed(), "versions": installed(["paceline", "torch", "vllm"])}
        self._log: BatchLog | None = None
        self.taken: Mapping[int, Taken] = {}
        """Logged steps after the checkpoint, which are repeated."""
        self._rewards: dict[int, list[float]] = {}
        """Rewards of their groups, by position."""
        self._covered: dict[int, Mapping[str, Any]] = {}
        """State of the intake in each checkpoint that was written or resumed from."""
        self._store: Store | None = None
        self._written: ExitStack | None = None
        """Close it to finish the checkpoint that was written."""
        self._sealing: asyncio.Task[None] | None = None
        self._num_failed = 0
        self.path: Path | None = None
        """The checkpoint to resume from."""
        self.tree: Mapping[str, Any] | None = None
        """Its state of the loop."""
        self.elapsed_s = 0.0
        """Duration of the run up to there."""
        self.problems: list[str] = []
        """Problems of newer checkpoints, which are damaged."""
        if directory is not None and (self._every or (directory / "state").is_dir()):
            self._find(Store(directory / "state"))

    @property
    def step(self) -> int:
        """Last completed step at the checkpoint; 0 without one."""
        return 0 if self.tree is None else self.tree["step"]

    def drop_records(self, metrics: Path) -> int:
        """Remove the records of repeated steps from metrics.jsonl; return their number. Without a checkpoint, keep only
        the description of the run. The clock of the run continues after the last record kept."""
        num_dropped = 0
        with atomic_file(metrics, durable=True) as partial_path:
            with metrics.open(encoding="utf-8") as old, partial_path.open("w", encoding="utf-8") as new:
                for line in old:
                    record = json.loads(line) if line.endswith("\n") else None
                    if record is not None and (record["kind"] == "run" or 0 < self.step >= record.get("step", 0)):
                        new.write(line)
                        self.elapsed_s = max(self.elapsed_s, record.get("time_s", 0.0))
                    else:
                        num_dropped += 1
            partial_path.chmod(metrics.stat().st_mode)
        return num_dropped

    @asynccontextmanager
    async def running(self, journal: Journal, drafter: OnlineDrafter) -> AsyncGenerator[None]:
        """Restore drafter training and keep the log open; write its queue however the block ends."""
        self._journal = journal
        if self.tree is not None and self.path is not None:
            drafter.load_state(self.tree["drafter"], self.path / "drafter")
        if self._directory is not None:
            self._log = BatchLog(self._directory / "batches", began_s=journal.run_began_s)
            self.taken = {step: taken for step, taken in self._log.taken().items() if step > self.step}
            for taken in self.taken.values():
                self._rewards |= zip(taken.groups, taken.rewards, strict=True)
            self._report_broken()
        try:
            yield
        finally:
            if self._log is not None:
                self._log.close()

    def logged(self, position: int, prompt: Prompt) -> Group | None:
        """Return the group at this position of the prompts if an earlier driver logged it."""
        if self._log is None:
            return None
        group = self._log.group(position, prompt)
        self._report_broken()
        return group

    def keep(self, position: int, group: Group) -> None:
        if self._log is not None:
            self._log.put(position, group)

    def logged_rewards(self, position: int) -> list[float] | None:
        """Return the rewards of a logged group if an earlier driver has trained on it."""
        return self._rewards.get(position)

    def keep_taken(self, step: int, taken: Taken) -> None:
        if self._log is not None and taken != self.taken.get(step):
            self._log.put_taken(step, taken)

    async def write(
        self, state: Callable[[], Mapping[str, Any]], learner: Learner, drafter: OnlineDrafter, *, last: bool
    ) -> None:
        """Flush the log, and write a checkpoint of the loop, the learner and the drafter if one is due; `seal` finishes
        it."""
        if self._log is None:
            return
        for error in await asyncio.to_thread(self._log.flush):
            self._failed(error)
        if last or self._journal.step % self._every == 0:
            with self._journal.stage("checkpoint"):
                await self.finish()
                await self._write(state(), learner, drafter)
        self._journal.metrics.add("checkpoint/failed", Sum(self._num_failed))
        self._num_failed = 0

    def seal(self) -> None:
        """Start a task that checksums, syncs and renames the checkpoint that was written, if any."""
        if self._written is not None:
            self._sealing = asyncio.create_task(self._seal(self._written))
            self._written = None

    async def finish(self) -> None:
        """Wait until the last checkpoint has its final name."""
        if self._sealing is not None:
            await self._sealing

    def _find(self, store: Store) -> None:
        store.tidy()
        self._store = store
        found, self.problems = store.newest()
        if found is None:
            return
        if found.facts["config"] != self._facts["config"]:
            raise ValueError(
                "config.json: differs from the config that this run was checkpointed with; must be the same except for "
                f"{', '.join(adjustable_keys())}"
            )
        self.path = found.path
        tree = self.tree = json.loads((found.path / "run.json").read_text(encoding="utf-8"))
        self.elapsed_s = tree["elapsed_s"]
        self._covered[found.step] = tree["intake"]

    async def _write(self, tree: Mapping[str, Any], learner: Learner, drafter: OnlineDrafter) -> None:
        assert self._store is not None
        try:
            with ExitStack() as stack:  # a failure inside removes the partial checkpoint
                partial_path = stack.enter_context(self._store.writing(tree["step"], self._facts))
                await learner.save_state(str(partial_path / "learner"))
                drafter_state = await asyncio.to_thread(drafter.save_state, partial_path / "drafter")
                text = json.dumps({**tree, "drafter": drafter_state}) + "\n"
                (partial_path / "run.json").write_text(text, encoding="utf-8")
                self._written = stack.pop_all()
                self._covered[tree["step"]] = tree["intake"]
        except (OSError, PacelineError) as error:
            self._failed(error)

    async def _seal(self, written: ExitStack) -> None:
        try:
            await asyncio.to_thread(written.close)
            await asyncio.to_thread(self._forget_covered)
        except OSError as error:
            self._failed(error)

    def _forget_covered(self) -> None:
        """Remove groups and steps that the oldest checkpoint covers from the log."""
        assert self._store is not None and self._log is not None
        if self._keeps_all:
            return
        oldest = min(self._store.steps())
        if oldest in self._covered:  # else an earlier driver wrote it, and the next checkpoint replaces it
            self._covered = {step: state for step, state in self._covered.items() if step >= oldest}
            state = self._covered[oldest]
            self._log.forget(step=oldest, num_opened=state["num_taken"], still_open=set(state["open"]))

    def _report_broken(self) -> None:
        if self._log is not None and self._log.num_broken:
            self._journal.event("broken_log_files", files=self._log.num_broken)
            self._log.num_broken = 0

    def _failed(self, error: Exception) -> None:
        if not isinstance(error, (OSError, PacelineError)):
            raise error
        if not self._num_failed:  # a full disk fails every write of a step
            self._journal.event("checkpoint_failed", why=str(error))
        self._num_failed += 1

"""One RL run on one page, over protocols: no ray, no vllm.

    step s:  data ──▶ generation ──▶ prepare ──▶ logprob ──▶ train ──▶ sync ──▶ (eval)
             open      wait for      last         score,       apply     new policy version
             groups    groups        rewards,     guard,       or        to every engine
               │          ▲          advantages   correct      discard
               └─ intake ─┘
                  fleet ──on_group──▶ rewards

Synchronous (`run.max_age` 0) and asynchronous training share this code; intake.py decides which groups are open and
which the learner takes. An asynchronous sync pauses engines amid rollouts, which record the version of every token. The
simulator runs this file on a virtual clock, so all times are the event loop's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.config import Config
from paceline.metrics import Recorder
from paceline.orchestrator.batch_log import Taken
from paceline.orchestrator.fleet import Fleet
from paceline.orchestrator.healing import Healer
from paceline.orchestrator.intake import Intake
from paceline.orchestrator.journal import Journal, clock_s
from paceline.orchestrator.losslessness import LosslessnessMonitor
from paceline.orchestrator.members import Members
from paceline.orchestrator.mismatch import MismatchMonitor
from paceline.orchestrator.online_drafter import OnlineDrafter
from paceline.orchestrator.recovery import Recovery
from paceline.orchestrator.rewards import Score, Scoring, make_samples
from paceline.orchestrator.stages import calibrate, calibrate_on_prompts, evaluate, push_policy
from paceline.types import Group, Learner, Prompt, Sender, Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Real, remote or simulated parts of a run."""

    members: Members
    learner: Learner
    sender: Sender
    prompts: Iterator[Prompt]
    heldout: Sequence[Prompt]
    score: Score
    decode: Callable[[Tokens], str] | None = None
    """Decodes the responses recorded at evaluations. If None, no text is recorded."""
    drafter: OnlineDrafter = field(default_factory=OnlineDrafter)
    healer: Healer = field(default_factory=Healer)
    raise_precision: Callable[[bool], Awaitable[None]] | None = None
    """Restarts idle engines in full precision (True) or as configured (False), before a push; None if impossible."""
    stop_speculation: Callable[[str], Awaitable[None]] | None = None
    """Lets an engine draft no more until it restarts; None if impossible."""


async def train(
    parts: Parts, config: Config, recorder: Recorder, *, save_to: str | None = None, recovery: Recovery | None = None
) -> None:
    """Run all steps after the checkpoint of `recovery`, if any, and save policies under `save_to`."""
    recovery = recovery or Recovery(None, config)
    journal = Journal(recorder, step=recovery.step, elapsed_s=recovery.elapsed_s, decode=parts.decode)
    fleet = Fleet(
        parts.members,
        parts.drafter,
        # A few requests wait in the engine, so that a free slot is filled without a round trip.
        max_in_flight=config.rollout.engine.max_num_seqs * 9 // 8 + 1,
        on_lost=journal.engine_lost,
        on_progress=journal.progress,
        on_quarantine=journal.quarantined,
    )
    run = _Run(parts, config, journal, fleet, recovery, None if save_to is None else Path(save_to).parent)
    drafter, healer = parts.drafter.running(journal), parts.healer.running(journal)
    async with recovery.running(journal, parts.drafter), drafter, healer, fleet, run.scoring:
        await run.begin()
        for step in range(recovery.step + 1, config.run.steps + 1):
            journal.begin_step(step)
            last = step == config.run.steps
            await run.one_step()
            if config.eval.every and (step % config.eval.every == 0 or last):
                await run.evaluate()
            wanted = last or (config.run.save_every and step % config.run.save_every == 0)
            if save_to and wanted and not Path(f"{save_to}/step-{step}").exists():  # a resumed run repeats steps
                await parts.learner.save(f"{save_to}/step-{step}")
            journal.metrics.add_means(parts.drafter.metrics())
            journal.learner_counters(await parts.learner.counters())
            await recovery.write(run.state, parts.learner, parts.drafter, last=last)
            journal.end_step(fleet)
            recovery.seal()
        await recovery.finish()


class _Run:
    def __init__(
        self, parts: Parts, config: Config, journal: Journal, fleet: Fleet, recovery: Recovery, save_to: Path | None
    ) -> None:
        self.parts, self.config, self.journal, self.fleet, self.recovery = parts, config, journal, fleet, recovery
        self.scoring = Scoring(parts.score)
        can_raise = parts.raise_precision is not None
        self.mismatch = MismatchMonitor(config, parts.learner, journal, can_raise=can_raise, save_to=save_to)
        self.monitor = LosslessnessMonitor(journal, parts.stop_speculation)
        self.version = 0
        self.intake = Intake(parts.prompts, config, fleet, recovery, journal, self.scoring)

    def state(self) -> dict[str, Any]:
        """Return the loop's own state after this step, for a checkpoint."""
        return {
            "step": self.journal.step,
            "elapsed_s": self.journal.elapsed_s(),
            "version": self.version,
            "intake": self.intake.state(),
            "mismatch": self.mismatch.state(),
        }

    async def begin(self) -> None:
        """Restore the checkpoint, if any, and push the policy to the engines."""
        tree, raise_precision = self.recovery.tree, self.parts.raise_precision
        if tree is not None:
            self.version = tree["version"]
            self.intake.restore(tree["intake"])
            self.mismatch.restore(tree["mismatch"])
            await self.parts.learner.load_state(f"{self.recovery.path}/learner")
            if self.mismatch.raised and raise_precision is not None:
                await raise_precision(True)
            await self.parts.drafter.switch(self.config.run.steps - self.journal.step)
        elif self.config.rollout.engine.kv_cache == "fp8":
            prompts = self.intake.prompts.peek(self.config.rollout.prompts_per_step)
            await calibrate_on_prompts(self.parts.learner, prompts, self.journal)
        await self.sync()
        if tree is None:
            await self.evaluate()
        else:
            await self.parts.drafter.publish(restarted=True)

    async def one_step(self) -> None:
        stage, learner, drafter = self.journal.stage, self.parts.learner, self.parts.drafter
        with stage("data"):
            self.intake.open(self.journal.step)
        with stage("generation"):
            taken = await self.generate()
            groups = list(taken.values())
        with stage("prepare"):
            counting = self.journal.counters(self.fleet.engines)
            rewards, totals = await asyncio.gather(self.scoring.take(taken), counting)
            await self.monitor.on_generation(totals, groups)
            logged = Taken(groups=list(taken), dropped=self.intake.dropped, rewards=rewards)
            self.recovery.keep_taken(self.journal.step, logged)
            self.journal.rollouts(groups, rewards, fleet=self.fleet)
            self.journal.ages(groups, policy_version=self.version, max_age=self.config.run.max_age)
            samples = make_samples(groups, rewards, self.config.objective, self.journal)
        if not samples:
            self.journal.event("update_skipped", why="every group has equal rewards, or one that failed")
            return
        with stage("logprob"):
            scores = await learner.score(samples, correction=self.mismatch.correction, hand_over=True)
            await self.monitor.on_scores(samples, scores.logp)
            judged = await self.mismatch.judge(samples, scores, version=self.version)
        if judged.decision.update:
            with stage("train"):
                metrics = await learner.apply(judged.samples, pending=judged.pending)
                self.journal.metrics.add_means(metrics)
                self.version += 1
            if self.config.rollout.engine.kv_cache == "fp8":
                await calibrate(learner, samples, self.version, self.journal)
        else:
            await learner.discard()
        await drafter.train_inline()
        with stage("sync"):
            await drafter.close_phase()
            raise_precision = self.parts.raise_precision if judged.decision.precision is not None else None
            if raise_precision is not None:
                await raise_precision(judged.decision.precision == "raise")
            switched = await drafter.switch(self.config.run.steps - self.journal.step)
            await self.sync()  # without an update the same version again, which repairs a broken sync
            await drafter.publish(restarted=switched or raise_precision is not None)

    async def generate(self) -> dict[int, Group]:
        """Wait for the groups of this step; idle engines may be leased to drafter training."""
        drafter, began_s = self.parts.drafter, clock_s()
        drafter.open_phase()
        taken = await self.intake.take(self.journal.step)
        await drafter.end_generation()
        await drafter.observe(list(taken.values()), clock_s() - began_s)
        return taken

    async def sync(self) -> None:
        await push_policy(self.parts.sender, self.version, self.parts.members, self.journal)
        self.intake.on_version(self.version)

    async def evaluate(self) -> None:
        await evaluate(self.config, self.fleet, self.parts.heldout, self.parts.score, self.journal)

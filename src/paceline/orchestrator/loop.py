"""One RL run on one page, over protocols: no ray, no vllm.

    step s:  data ──▶ generation ──▶ prepare ──▶ logprob ──▶ train ──▶ sync ──▶ (eval)
             open      wait for      rewards,     learner's    one       new policy version
             batches   batch s       advantages   own logp,    update    to every engine
                                                  correction,  unless the guard says to push again
                                                  guard
               │          ▲
               └─ fleet ──┘   with lag n, batches s .. s+n are open while the learner works on batch s

Synchronous (lag 0) and asynchronous training are this same code; a sync pauses engines, so with a lag it may come in
the middle of rollouts, which then carry the version of their first and of their last token. The simulator runs this
file with simulated engines and a simulated learner on a virtual clock: time is the event loop's, never the machine's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path

from paceline.config import Config
from paceline.learner.objective import advantages, is_trained_on
from paceline.metrics import Mean, Recorder
from paceline.orchestrator.fleet import Batch, Fleet, Sampling
from paceline.orchestrator.journal import Journal, Rewards
from paceline.orchestrator.members import Members
from paceline.orchestrator.mismatch import MismatchMonitor
from paceline.orchestrator.online_drafter import Off, OnlineDrafter
from paceline.orchestrator.sync import push_policy
from paceline.types import Group, Learner, Prompt, Sample, Sender, Tokens

_WITHOUT_QK_NORM = "nothing bounds its keys: watch the mismatch, and above a share of about 0.2 keep kv_cache full"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a run is made of; real, remote or simulated."""

    members: Members
    """The engines, and which of them are alive."""
    learner: Learner
    sender: Sender
    prompts: Iterator[Prompt]
    """Endless."""
    heldout: Sequence[Prompt]
    score: Callable[[Sequence[Group]], Awaitable[Rewards]]
    """A reward for every rollout of every group."""
    decode: Callable[[Tokens], str] | None = None
    """Returns the text of a response, for the few that are recorded at an evaluation. None: none are."""
    drafter: OnlineDrafter = field(default_factory=Off)
    """Trains the drafter beside the run."""
    raise_precision: Callable[[bool], Awaitable[None]] | None = None
    """Restarts idle engines in full precision (True) or as configured (False); a push follows. None: impossible."""


async def train(parts: Parts, config: Config, recorder: Recorder, *, save_to: str | None = None) -> None:
    """Run all steps; the policy is saved under `save_to`."""
    journal = Journal(recorder)
    # A few requests wait inside the engine, so that a slot that falls free is filled without a round trip.
    in_flight = config.rollout.engine.max_num_seqs * 9 // 8 + 1
    fleet = Fleet(
        parts.members,
        parts.drafter,
        max_in_flight=in_flight,
        on_lost=journal.engine_lost,
        on_progress=journal.progress,
    )
    async with parts.drafter.running(journal), fleet:
        run = _Run(parts, config, journal, fleet, save_to=None if save_to is None else Path(save_to).parent)
        if config.rollout.engine.kv_cache == "fp8":
            await run.calibrate_on_prompts()
        await run.sync()
        await run.evaluate()
        for step in range(1, config.run.steps + 1):
            journal.begin_step(step)
            await run.one_step()
            if config.eval.every and (step % config.eval.every == 0 or step == config.run.steps):
                await run.evaluate()
            if save_to and (step == config.run.steps or (config.run.save_every and step % config.run.save_every == 0)):
                await parts.learner.save(f"{save_to}/step-{step}")
            for key, value in parts.drafter.metrics().items():
                journal.metrics.add(key, Mean(value))
            journal.learner_counters(await parts.learner.counters())
            journal.end_step(fleet)


class _Run:
    """What a run remembers from step to step: open batches and the policy version."""

    def __init__(self, parts: Parts, config: Config, journal: Journal, fleet: Fleet, *, save_to: Path | None) -> None:
        self.parts, self.config, self.journal, self.fleet = parts, config, journal, fleet
        can_raise = parts.raise_precision is not None
        self.mismatch = MismatchMonitor(config, parts.learner, journal, can_raise=can_raise, save_to=save_to)
        self.version = 0
        self.prompts = parts.prompts
        self.batches: deque[Batch] = deque()

    async def one_step(self) -> None:
        stage, learner, drafter = self.journal.stage, self.parts.learner, self.parts.drafter
        with stage("data"):
            self.open_batches()
        with stage("generation"):
            groups = await self.generate()
        with stage("prepare"):
            counting = self.journal.counters(self.fleet.engines)
            rewards, _ = await asyncio.gather(self.parts.score(groups), counting)
            self.journal.rollouts(groups, rewards, policy_version=self.version, fleet=self.fleet)
            samples = self.make_samples(groups, rewards)
        if not samples:
            self.journal.event("update_skipped", why="every group has equal rewards, or one that failed")
            return
        with stage("logprob"):
            samples, decision = await self.mismatch.judge(samples, await learner.logp(samples))
        if decision.update:
            with stage("train"):
                for key, value in (await learner.update(samples)).items():
                    self.journal.metrics.add(key, Mean(value))
                self.version += 1
            if self.config.rollout.engine.kv_cache == "fp8":
                await self.calibrate(samples)
        await drafter.train_inline()
        with stage("sync"):
            await drafter.close_phase()
            raise_precision = self.parts.raise_precision if decision.precision is not None else None
            if raise_precision is not None:
                await raise_precision(decision.precision == "raise")
            await self.sync()  # without an update this is the same version again: what a broken sync needs
            await drafter.publish(restarted=raise_precision is not None)

    async def generate(self) -> list[Group]:
        """The oldest batch; engines that have nothing left to do for it may be leased to drafter training."""
        drafter, began_s = self.parts.drafter, asyncio.get_running_loop().time()
        drafter.open_phase()
        groups = await self.batches.popleft().wait()
        await drafter.end_generation()
        await drafter.observe(groups, asyncio.get_running_loop().time() - began_s)
        return groups

    def open_batches(self) -> None:
        """Keep batches `step` .. `step + lag` in flight, none beyond the last step."""
        rollout, run = self.config.rollout, self.config.run
        sampling = Sampling(
            group_size=rollout.group_size, temperature=rollout.temperature, max_tokens=rollout.max_tokens
        )
        wanted = min(1 + run.lag, run.steps - self.journal.step + 1)
        while len(self.batches) < wanted:
            prompts = list(islice(self.prompts, rollout.prompts_per_step))
            self.batches.append(self.fleet.open(prompts, sampling))

    def make_samples(self, groups: Sequence[Group], rewards: Rewards) -> list[Sample]:
        """Rollouts with their advantages, without groups that teach nothing or of which a reward failed."""
        samples: list[Sample] = []
        for group, group_rewards in zip(groups, rewards, strict=True):
            keep = is_trained_on(group_rewards, self.config.objective)
            self.journal.metrics.add("policy/groups_kept_share", Mean(float(keep)))
            if keep:
                group_advantages = advantages(group_rewards, self.config.objective.advantage)
                samples += [Sample.of(r, float(a)) for r, a in zip(group.rollouts, group_advantages, strict=True)]
        return samples

    async def calibrate(self, samples: Sequence[Sample]) -> Mapping[str, float]:
        """KV scales of this version; they go out with the weights, which are refused without."""
        with self.journal.stage("calibrate"):
            found = await self.parts.learner.calibrate(samples, self.version)
        for key, value in found.items():
            self.journal.metrics.add(key, Mean(value))
        return found

    async def calibrate_on_prompts(self) -> None:
        """The first policy's scales, from the prompts of the first batch: nothing has been sampled yet."""
        first = list(islice(self.prompts, self.config.rollout.prompts_per_step))
        self.prompts = chain(first, self.prompts)
        found = await self.calibrate([Sample.of_prompt(prompt) for prompt in first])
        if not found["precision/qk_norm"]:
            share = round(found["precision/underflow_share"], 4)
            self.journal.event("fp8_kv_cache_without_qk_norm", underflow_share=share, advice=_WITHOUT_QK_NORM)

    async def sync(self) -> None:
        await push_policy(self.parts.sender, self.version, self.parts.members, self.journal)

    async def evaluate(self) -> None:
        """Mean reward on held-out prompts, sampled as configured."""
        settings, prompts = self.config.eval, self.parts.heldout[: self.config.eval.num_prompts]
        if not settings.every or not prompts:
            return
        max_tokens = self.config.rollout.max_tokens
        sampling = Sampling(
            group_size=settings.samples_per_prompt, temperature=settings.temperature, max_tokens=max_tokens
        )
        with self.journal.stage("eval"):
            groups = await self.fleet.open(prompts, sampling).wait()
            rewards = await self.parts.score(groups)
        self.journal.evaluation(groups, rewards, decode=self.parts.decode)

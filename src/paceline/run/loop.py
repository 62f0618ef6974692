"""One RL run on one page, over protocols: no ray, no vllm.

    step s:  data ──▶ generation ──▶ prepare ──▶ logprob ──▶ train ──▶ sync ──▶ (eval)
             open      wait for      rewards,     learner's    one       new policy version
             batches   batch s       advantages   own logp,    update    to every engine
                                                  correction,  unless the guard says to push again
                                                  guard
               │          ▲
               └─ fleet ──┘   with lag n, batches s .. s+n are open while the learner works on batch s

Synchronous (lag 0) and asynchronous training are this same code; a sync pauses engines, so with a lag it may come in the middle of
rollouts, which then carry the version of their first and of their last token. The simulator runs this file with simulated ends on
a virtual clock: time is the event loop's, never the machine's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from paceline.config import Config
from paceline.metrics import Mean, Recorder
from paceline.policy.objective import advantages
from paceline.run.coach import Coach
from paceline.run.fleet import Batch, Fleet, Sampling
from paceline.run.journal import Journal, Rewards
from paceline.run.watch import Watch
from paceline.types import Engine, Group, Learner, PacelineError, Prompt, Sample, Sender

_WITHOUT_QK_NORM = "nothing bounds its keys: watch the mismatch, and above a share of about 0.2 keep kv_cache full"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a run is made of; real, remote or simulated."""

    engines: Sequence[Engine]
    learner: Learner
    sender: Sender
    prompts: Iterator[Prompt]
    """Endless."""
    heldout: Sequence[Prompt]
    score: Callable[[Sequence[Group]], Awaitable[Rewards]]
    """A reward for every rollout of every group."""
    coach: Coach | None = None
    """Trains the drafter beside the run."""
    raise_precision: Callable[[bool], Awaitable[None]] | None = None
    """Starts idle engines again in full precision (True) or as configured (False); a push follows. None: there is no other."""


async def train(parts: Parts, config: Config, recorder: Recorder, *, save_to: str | None = None) -> None:
    """The whole run; the policy is saved under `save_to`."""
    journal = Journal(recorder)
    # A few requests wait inside the engine, so that a slot that falls free is filled without a round trip.
    slots = config.rollout.engine.max_num_seqs * 9 // 8 + 1
    coach = parts.coach
    fleet = Fleet(parts.engines, slots=slots, on_lost=journal.engine_lost, on_progress=journal.progress, lending=coach)
    async with coach.conduct(journal, fleet.lose) if coach is not None else nullcontext(), fleet:
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
            if coach is not None:
                for key, value in coach.metrics().items():
                    journal.metrics.add(key, Mean(value))
            journal.end_step(fleet)


class _Run:
    """What a run remembers from step to step: open batches and the policy version."""

    def __init__(self, parts: Parts, config: Config, journal: Journal, fleet: Fleet, *, save_to: Path | None) -> None:
        self.parts, self.config, self.journal, self.fleet = parts, config, journal, fleet
        can_raise = parts.raise_precision is not None
        self.watch = Watch(config, parts.learner, journal, can_raise=can_raise, save_to=save_to)
        self.version = 0
        self.prompts = parts.prompts
        self.batches: deque[Batch] = deque()

    async def one_step(self) -> None:
        stage, add, learner = self.journal.stage, self.journal.metrics.add, self.parts.learner
        with stage("data"):
            self.open_batches()
        with stage("generation"):
            groups = await self.generate()
        with stage("prepare"):
            rewards = await self.parts.score(groups)
            self.journal.rollouts(groups, rewards, policy_version=self.version, fleet=self.fleet)
            samples = self.make_samples(groups, rewards)
        if not samples:
            self.journal.event("update_skipped", why="every group has equal rewards")
            return
        with stage("logprob"):
            samples, decision = await self.watch.judge(samples, await learner.logp(samples))
        if decision.update:
            with stage("train"):
                for key, value in (await learner.update(samples)).items():
                    add(key, Mean(value))
                self.version += 1
            if self.config.rollout.engine.kv_cache == "fp8":
                await self.calibrate(samples)
        if self.parts.coach is not None:
            with stage("draft"):
                await self.parts.coach.inline()
        with stage("sync"):
            if self.parts.coach is not None:
                await self.parts.coach.close_phase()
            raise_precision = self.parts.raise_precision if decision.precision is not None else None
            if raise_precision is not None:
                await raise_precision(decision.precision == "raise")
            await self.sync()  # without an update this is the same version again: what a broken sync needs
            if self.parts.coach is not None:
                await self.parts.coach.publish(restarted=raise_precision is not None)

    async def generate(self) -> list[Group]:
        """The oldest batch; engines that have nothing left to do for it may be lent."""
        coach = self.parts.coach
        if coach is None:
            return await self.batches.popleft().wait()
        began_s = asyncio.get_running_loop().time()
        coach.open_phase()
        groups = await self.batches.popleft().wait()
        await coach.end_generation()
        await coach.observe(groups, asyncio.get_running_loop().time() - began_s)
        return groups

    def open_batches(self) -> None:
        """Keep batches `step` .. `step + lag` in flight, none beyond the last step."""
        rollout, run = self.config.rollout, self.config.run
        sampling = Sampling(group_size=rollout.group_size, temperature=rollout.temperature, max_tokens=rollout.max_tokens)
        wanted = min(1 + run.lag, run.steps - self.journal.step + 1)
        while len(self.batches) < wanted:
            prompts = list(islice(self.prompts, rollout.prompts_per_step))
            self.batches.append(self.fleet.open(prompts, sampling))

    def make_samples(self, groups: Sequence[Group], rewards: Rewards) -> list[Sample]:
        """Rollouts with their advantages; groups that carry no gradient are left out if the objective says so."""
        samples: list[Sample] = []
        for group, group_rewards in zip(groups, rewards, strict=True):
            keep = len(set(group_rewards)) > 1 or not self.config.objective.drop_uniform_groups
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
        """Push the policy. A push that was refused is tried once more; an engine that cannot follow is not used any more."""
        for last_try in (False, True):
            receipts = await self.parts.sender.send(self.version)
            if receipts:
                self.journal.receipts(receipts, self.version)
            failed = [receipt for receipt in receipts if not receipt.ok]
            for receipt in failed:
                why = receipt.error or f"fingerprints differ: {', '.join(receipt.mismatched[:3])}"
                self.journal.event("push_failed", engine=receipt.engine, version=self.version, why=why)
                if receipt.lost or last_try:
                    self.fleet.lose(receipt.engine, why)
            if all(receipt.lost for receipt in failed):
                break
        if not self.fleet.engines:
            raise PacelineError(f"no engine took policy version {self.version}; the push_failed events in metrics.jsonl say why")

    async def evaluate(self) -> None:
        """Mean reward on held-out prompts, sampled as configured."""
        settings, prompts = self.config.eval, self.parts.heldout[: self.config.eval.num_prompts]
        if not settings.every or not prompts:
            return
        max_tokens = self.config.rollout.max_tokens
        sampling = Sampling(group_size=settings.samples_per_prompt, temperature=settings.temperature, max_tokens=max_tokens)
        with self.journal.stage("eval"):
            groups = await self.fleet.open(prompts, sampling).wait()
            rewards = await self.parts.score(groups)
        accuracy = Mean.of([reward for group_rewards in rewards for reward in group_rewards])
        length = Mean.of([len(rollout.token_ids) for group in groups for rollout in group.rollouts])
        self.journal.evaluation({"eval/accuracy": accuracy.value(), "eval/length_mean": length.value()})

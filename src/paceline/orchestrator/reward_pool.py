"""Processes for a user's reward function, limited in time and memory, killed and replaced when they hang.

    reward = find_reward(data)                       # check that it can be imported and called, before anything starts
    pool = RewardPool(reward, recorder)
    rewards = await pool.score(prompts, completions)
    await pool.close()

A user's function may hang, end its process or exhaust memory. The run only loses a reward, which
`data.on_reward_failure` handles. The other end of the pipes is `reward_worker.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from paceline.config import UserData
from paceline.metrics import Recorder
from paceline.orchestrator import reward_worker
from paceline.types import PacelineError, Prompt

FAILURES = "reward/failures"
_COMMAND = (sys.executable, "-P", str(Path(reward_worker.__file__)))
_LOAD_S = 300.0
"""Timeout for importing the function's module, which may load a model."""
_EXIT_S = 1.0
"""Timeout for the exit code of a process after its pipe has closed."""
_LONGEST_ANSWER = 1 << 20
_EVENT_S = 10.0
"""Minimum interval between events about failures: a function that always fails would flood the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserReward:
    """A user's reward function that can be imported and called."""

    data: UserData
    takes_row: bool


class RewardFailedError(PacelineError):
    """The reward function did not return a finite number for a completion."""


def find_reward(data: UserData) -> UserReward:
    """Import the function in a process as the run will; raise ValueError if it cannot be used."""
    settings = _settings(data)
    pipe = subprocess.PIPE
    with subprocess.Popen(  # noqa: S603  our own file
        _COMMAND, stdin=pipe, stdout=pipe, bufsize=0, start_new_session=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(settings)  # left open: the process ends when it closes
            in_time, _, _ = select.select([process.stdout], [], [], _LOAD_S)
            line = process.stdout.readline() if in_time else None
        finally:
            _kill(process.pid)
    return UserReward(data=data, takes_row=_takes_row(data, line))


class RewardPool:
    """The processes of one reward function, each started at first use."""

    def __init__(self, reward: UserReward, recorder: Recorder) -> None:
        self._reward = reward
        self._recorder = recorder
        self._workers = [RewardWorker(reward.data) for _ in range(reward.data.reward_workers)]
        self._idle: asyncio.LifoQueue[RewardWorker] = asyncio.LifoQueue()  # the last one is already running
        for worker in self._workers:
            self._idle.put_nowait(worker)
        recorder.counts[FAILURES] += 0  # so that steps record 0 failures
        self._unreported: list[RewardFailedError] = []
        self._reported_s = -math.inf

    async def score(self, prompts: Sequence[Prompt], completions: Sequence[Sequence[str]]) -> list[list[float]]:
        """Return rewards of each prompt's completions. Failures are counted and reported in events."""
        jobs = [
            [asyncio.ensure_future(self._one(prompt, completion)) for completion in of_prompt]
            for prompt, of_prompt in zip(prompts, completions, strict=True)
        ]
        flat = [job for of_prompt in jobs for job in of_prompt]
        try:
            outcomes = await asyncio.gather(*flat)
        finally:
            for job in flat:
                job.cancel()
            await asyncio.gather(*flat, return_exceptions=True)
        if failures := [outcome for outcome in outcomes if isinstance(outcome, RewardFailedError)]:
            self._recorder.counts[FAILURES] += len(failures)
            self._unreported += failures
        if asyncio.get_running_loop().time() >= self._reported_s + _EVENT_S:
            self._report()
        return [[self._value(job.result()) for job in of_prompt] for of_prompt in jobs]

    async def close(self) -> None:
        self._report()
        for worker in self._workers:
            await worker.end()

    def _report(self) -> None:
        failures, self._unreported = self._unreported, []
        if failures:
            self._reported_s = asyncio.get_running_loop().time()
            policy = self._reward.data.on_reward_failure
            self._recorder.event("reward_failed", num_failures=len(failures), policy=policy, why=str(failures[0]))

    async def _one(self, prompt: Prompt, completion: str) -> float | RewardFailedError:
        worker = await self._idle.get()
        row = {"row": dict(prompt.row)} if self._reward.takes_row else {}
        try:
            return await worker.ask({"prompt": prompt.text, "completion": completion, **row})
        except RewardFailedError as error:
            what = f"the reward function failed on prompt {prompt.id!r}, completion {completion[:200]!r}: {error}"
            if self._reward.data.on_reward_failure == "stop":
                advice = "data.on_reward_failure=zero or drop lets the run continue"
                raise PacelineError(f"{what}; {advice}") from None
            return RewardFailedError(what)
        finally:
            self._idle.put_nowait(worker)

    def _value(self, outcome: float | RewardFailedError) -> float:
        if isinstance(outcome, float):
            return outcome
        return 0.0 if self._reward.data.on_reward_failure == "zero" else math.nan


class RewardWorker:
    """One process that answers one request at a time and is replaced after a hang, an exit or a broken answer."""

    def __init__(self, data: UserData) -> None:
        self._data = data
        self._process: asyncio.subprocess.Process | None = None

    async def ask(self, request: Mapping[str, Any]) -> float:
        """Return the reward; raise RewardFailedError with the reason."""
        try:
            process = await self._started()
            async with asyncio.timeout(self._data.reward_timeout_s):
                line = await _exchange(process, _line(request))
        except TimeoutError:
            await self.end()
            raise RewardFailedError(
                f"no answer within data.reward_timeout_s, {self._data.reward_timeout_s:g} s"
            ) from None
        except BaseException:  # cancelled: a late answer would be read as the answer to the next request
            await self.end()
            raise
        if not line:
            raise RewardFailedError(f"its process ended with {_exit(await self.end(grace_s=_EXIT_S))}")
        answer = _parse(line)
        if answer is None or answer.get("broken"):
            await self.end()
        match answer:
            case {"reward": int() | float() as reward} if math.isfinite(reward):
                return float(reward)
            case {"error": str(error)}:
                raise RewardFailedError(error)
            case _:
                raise RewardFailedError(f"its process answered {line[:60]!r}")

    async def end(self, *, grace_s: float = 0.0) -> int | None:
        """Kill the process group after a grace period; return the exit code of the process."""
        process, self._process = self._process, None
        if process is None:
            return None
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await process.wait()
        finally:
            _kill(process.pid)
        return await process.wait()

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is not None:
            await self.end()  # it ended while idle
        if self._process is None:
            pipe = asyncio.subprocess.PIPE
            self._process = await asyncio.create_subprocess_exec(
                *_COMMAND, stdin=pipe, stdout=pipe, start_new_session=True, limit=_LONGEST_ANSWER
            )
            line = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOAD_S):
                    line = await _exchange(self._process, _settings(self._data))
            try:
                _takes_row(self._data, line)
            except ValueError as error:  # the import worked before: no later reward would work
                raise PacelineError(f"a reward process could not be replaced: {error}") from None
        return self._process


async def _exchange(process: asyncio.subprocess.Process, request: bytes) -> bytes:
    """Send a line and return the answer; empty if the process has ended."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(request)
        await process.stdin.drain()
        return await process.stdout.readline()
    except (BrokenPipeError, ConnectionResetError):
        return b""
    except ValueError:
        return b"a line without an end"  # asyncio raises ValueError for a line beyond `limit`


def _settings(data: UserData) -> bytes:
    where, colon, name = data.reward.rpartition(":")
    if not colon:
        raise ValueError(f"data.reward: got {data.reward!r}; must be file.py:function or package.module:function")
    memory = int(data.reward_memory_gb * 2**30)
    return _line({"where": where, "name": name, "path": sys.path, "memory_bytes": memory})


def _takes_row(data: UserData, line: bytes | None) -> bool:
    """Read the first answer of a process, None after a timeout; raise ValueError if the function cannot be used."""
    if line is None:
        raise ValueError(f"data.reward: {data.reward!r} was not imported within {_LOAD_S:.0f} s")
    match _parse(line):
        case {"takes_row": bool(takes_row)}:
            return takes_row
        case {"error": str(error)}:
            raise ValueError(f"data.reward: {error}")
        case _:
            raise ValueError(
                f"data.reward: the process that imports {data.reward!r} ended; try it with `python`, and with a larger "
                "data.reward_memory_gb"
            )


def _line(tree: Mapping[str, Any]) -> bytes:
    return json.dumps(tree).encode() + b"\n"


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", answer) if isinstance(answer, dict) else None


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _exit(code: int | None) -> str:
    return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"

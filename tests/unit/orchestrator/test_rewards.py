"""A user's reward function: how it is found and called, and that whatever it does costs a reward and nothing else."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from letters import Letters
from paceline.config import JsonlData, ObjectiveConfig
from paceline.learner.objective import is_trained_on
from paceline.metrics import Recorder
from paceline.orchestrator.reward_pool import RewardPool, find_reward
from paceline.orchestrator.rewards import open_scorer
from paceline.types import Group, GroupId, PacelineError, Prompt, Rollout


class ListSink:
    def __init__(self) -> None:
        self.records: list[tuple[str, Mapping[str, Any]]] = []

    def write(self, kind: str, record: Mapping[str, Any]) -> None:
        self.records.append((kind, record))

    def close(self) -> None: ...


def write(tmp_path: Path, text: str, **settings: Any) -> JsonlData:
    """Settings of a task with this reward file; one worker, so that a test sees who is replaced."""
    (tmp_path / "reward.py").write_text(text)
    return JsonlData(
        path=Path("rows.jsonl"), reward=f"{tmp_path}/reward.py:reward", **{"reward_workers": 1, **settings}
    )


def group_of(*completions: str, row: Mapping[str, Any] | None = None) -> Group:
    prompt = Prompt(id="train/7", text="p", token_ids=np.array([112], np.int32), row=row or {})
    rollouts = [
        Rollout(
            group_id=GroupId(0),
            index=index,
            prompt_ids=prompt.token_ids,
            token_ids=np.asarray([ord(letter) for letter in completion], np.int32),
            logp=np.zeros(len(completion), np.float32),
            finish_reason="stop",
            version_spans=((0, 1),),
            engine="e",
            started_s=0.0,
            finished_s=1.0,
        )
        for index, completion in enumerate(completions)
    ]
    return Group(group_id=GroupId(0), prompt=prompt, rollouts=tuple(rollouts))


def score(data: JsonlData, *groups: Group, sink: ListSink | None = None) -> list[list[float]]:
    recorder = Recorder(sink or ListSink())

    async def work() -> list[list[float]]:
        async with open_scorer(find_reward(data), Letters(), recorder) as scorer:
            return await scorer(groups)

    rewards = asyncio.run(work())
    failed = [record["num_failures"] for kind, record in recorder._truth.records if kind == "event"]  # pyright: ignore
    assert recorder.counts["reward/failures"] == sum(failed)
    return rewards


# How it is found and called.


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("reward", "file.py:function"),
        ("nowhere.py:reward", "no file nowhere.py"),
        ("no.such.module:reward", "'no.such.module' cannot be imported: ModuleNotFoundError: No module named 'no'"),
        ("json:no_such_function", "no function"),
        ("json:dumps", "arguments; must be"),
        ("asyncio:sleep", "asynchronous"),
    ],
)
def test_wrong_reward_spec_says_what_to_write(spec: str, says: str) -> None:
    with pytest.raises(ValueError, match=f"^data.reward: .*{says}"):
        find_reward(JsonlData(path=Path("rows.jsonl"), reward=spec))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1\ndef reward(p, c:\n", r"reward\.py, line 2: SyntaxError: "),
        ("\n\nimport no_such_library\n", r"reward\.py, line 3: ModuleNotFoundError: No module named 'no_such_library'"),
        ("import json\njson.loads('x')\n", r"reward\.py, line 2: .*JSONDecodeError: "),
        ("import sys\nsys.exit(0)\n", r"reward\.py, line 2: SystemExit: 0"),
        ("import os\nos._exit(0)\n", "the process that imports .* ended"),
        ("big = bytearray(10**9)\n", r"reward\.py, line 1: MemoryError"),
    ],
)
def test_reward_file_that_cannot_be_imported_is_told_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ValueError, match=f"^data.reward: .*{says}"):
        find_reward(write(tmp_path, text, reward_memory_gb=0.5))


@pytest.mark.parametrize(
    ("parameters", "body", "takes_row"),
    [
        ("p, c", "2.0", False),
        ("p, c, row", "row['answer']", True),
        ("p, c, anything", "anything['answer']", True),
        ("p, c, anything, /", "anything['answer']", True),
        ("p, c, scale=2.0", "scale", False),
        ("p, c, row=None", "row['answer']", True),
        ("p, c, scale=2.0, row=None", "scale * row['answer'] / 2", True),
        ("p, c, *, row", "row['answer']", True),
        ("p, c, *rest", "2.0 - len(rest)", False),
        ("p, c, **rest", "2.0 - len(rest)", False),
        ("row, c", "2.0", False),
    ],
)
def test_row_goes_to_a_third_parameter_without_default_or_called_row(
    tmp_path: Path, parameters: str, body: str, takes_row: bool
) -> None:
    data = write(tmp_path, f"def reward({parameters}): return {body}\n")
    assert find_reward(data).takes_row is takes_row
    assert score(data, group_of("a", row={"answer": 2.0})) == [[2.0]]


@pytest.mark.parametrize("parameters", ["", "p", "p, c, row, more", "p, c, *, more", "p, *, c"])
def test_function_with_other_parameters_is_refused(tmp_path: Path, parameters: str) -> None:
    with pytest.raises(ValueError, match="arguments; must be"):
        find_reward(write(tmp_path, f"def reward({parameters}): return 1.0\n"))


def test_prints_of_a_reward_and_of_what_it_starts_do_not_break_the_protocol(tmp_path: Path) -> None:
    text = """
import subprocess, sys
print("imported")
def reward(p, c):
    print('{"reward": 7}')
    sys.stdout.flush()
    assert sys.stdin.read() == ""
    subprocess.run([sys.executable, "-c", "print('{\\"reward\\": 8}'); input()"], stderr=subprocess.DEVNULL)
    return 1
"""
    assert score(write(tmp_path, text), group_of("a", "b")) == [[1.0, 1.0]]


def test_text_of_any_kind_arrives(tmp_path: Path) -> None:
    text = "def reward(p, c, row): return float(c == row['answer']) + len(c)"
    told = 'a\n\u2028"\\\x00\U0001f600\x85' + "x" * 200_000
    assert score(write(tmp_path, text), group_of(told, row={"answer": told})) == [[1.0 + len(told)]]


def test_rewards_run_side_by_side(tmp_path: Path) -> None:
    """Each waits for the other, so one after the other they would never end."""
    text = f"""
import time
from pathlib import Path
def reward(p, c):
    Path({str(tmp_path)!r}, c).touch()
    while not all(Path({str(tmp_path)!r}, name).exists() for name in "ab"):
        time.sleep(0.01)
    return 1
"""
    assert score(write(tmp_path, text, reward_workers=2), group_of("a", "b")) == [[1.0, 1.0]]


# Whatever it does costs a reward and nothing else.

BAD = {
    "raises": ("1 / 0", "ZeroDivisionError"),
    "nan": ("float('nan')", "it returned nan; must be a finite number"),
    "text": ("'good'", "ValueError: could not convert"),
    "nothing": ("None", "TypeError"),
    "sys.exit": ("sys.exit(0)", "SystemExit: 0"),
    "os._exit": ("os._exit(0)", "its process ended with exit code 0"),
    "segfault": ("os.kill(os.getpid(), 11)", "its process ended with signal 11"),
    "memory": ("len(bytearray(10**9))", "MemoryError: it needs more than data.reward_memory_gb"),
    "hangs": ("time.sleep(1000)", "no answer within data.reward_timeout_s, 2 s"),
    "spins in C": ("sum(range(10**15))", "no answer within data.reward_timeout_s, 2 s"),
    "unprintable": ("throw()", "str.. failed"),
}
FILE = """
import os, sys, time
class Mute(Exception):
    def __str__(self): raise Mute
def throw(): raise Mute
def reward(p, c):
    if c == "x":
        return {expression}
    return 1.0
"""


@pytest.mark.parametrize("what", BAD)
def test_whatever_a_reward_does_the_others_are_scored(tmp_path: Path, what: str) -> None:
    expression, says = BAD[what]
    limits = {"reward_timeout_s": 2, "reward_memory_gb": 0.5, "on_reward_failure": "zero"}
    sink = ListSink()
    data = write(tmp_path, FILE.format(expression=expression), **limits)
    assert score(data, group_of("a", "x", "b"), group_of("x", "c"), sink=sink) == [[1.0, 0.0, 1.0], [0.0, 1.0]]
    ((_, event),) = sink.records
    assert (event["what"], event["num_failures"]) == ("reward_failed", 2)
    assert "prompt 'train/7', completion 'x'" in event["why"] and says.replace("..", "()") in event["why"]


def test_failure_stops_the_run_and_names_prompt_reason_and_remedy(tmp_path: Path) -> None:
    data = write(tmp_path, FILE.format(expression="1 / 0"))
    says = r"'train/7', completion 'x': .*reward\.py, line 8: ZeroDivisionError.*data\.on_reward_failure=zero or drop"
    with pytest.raises(PacelineError, match=says):
        score(data, group_of("a", "x", "b"))


def test_group_with_a_failed_reward_is_dropped_and_the_others_are_trained_on(tmp_path: Path) -> None:
    data = write(tmp_path, FILE.format(expression="1 / 0"), on_reward_failure="drop")
    failed, whole = score(data, group_of("a", "x"), group_of("a", "b"))
    assert math.isnan(failed[1]) and failed[0] == 1.0 and whole == [1.0, 1.0]
    keep = ObjectiveConfig(drop_uniform_groups=False)
    assert not is_trained_on(failed, keep) and is_trained_on(whole, keep)


def test_exception_keeps_the_process_and_what_it_has_loaded(tmp_path: Path) -> None:
    """A reward that imports for seconds and raises for every tenth completion would otherwise crawl."""
    text = "import os\ndef reward(p, c):\n    assert c != 'x'\n    return os.getpid()"
    ((first, failed, second),) = score(write(tmp_path, text, on_reward_failure="zero"), group_of("a", "x", "b"))
    assert first == second and failed == 0.0


def test_no_process_is_left_when_the_block_ends_not_even_one_that_the_reward_started(tmp_path: Path) -> None:
    text = f"""
import os, subprocess, sys
from pathlib import Path
def reward(p, c):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    Path({str(tmp_path)!r}, "pids").write_text(f"{{os.getpid()}} {{child.pid}}")
    return 1
"""
    assert score(write(tmp_path, text), group_of("a")) == [[1.0]]
    await_end((tmp_path / "pids").read_text())


def test_cancelled_question_is_not_answered_to_the_next_one(tmp_path: Path) -> None:
    text = "import time\ndef reward(p, c):\n    time.sleep(1000 * (c == 'x'))\n    return float(c)"
    data = write(tmp_path, text)

    async def work() -> list[list[float]]:
        async with open_scorer(find_reward(data), Letters(), Recorder(ListSink())) as scorer:
            hanging = asyncio.ensure_future(scorer([group_of("x")]))
            done, _ = await asyncio.wait([hanging], timeout=1)
            assert not done
            hanging.cancel()
            with pytest.raises(asyncio.CancelledError):
                await hanging
            return await scorer([group_of("1", "2")])

    assert asyncio.run(work()) == [[1.0, 2.0]]


def test_file_that_changed_under_the_run_stops_it(tmp_path: Path) -> None:
    data = write(tmp_path, FILE.format(expression="os._exit(0)"), on_reward_failure="zero")
    reward = find_reward(data)
    (tmp_path / "reward.py").write_text("def reward(p, c:")

    async def work() -> None:
        pool = RewardPool(reward, Recorder(ListSink()))
        await pool.score([group_of("a").prompt], [["a"]])

    with pytest.raises(PacelineError, match=r"could not be replaced: data\.reward: .*SyntaxError"):
        asyncio.run(work())


# A driver that ends.

DRIVER = """
import asyncio, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # is ignored where a shell started this in the background
sys.path[:0] = {path!r}
from test_rewards import Letters, ListSink, group_of
from paceline.config import JsonlData
from paceline.metrics import Recorder
from paceline.orchestrator.reward_pool import find_reward
from paceline.orchestrator.rewards import open_scorer

async def work():
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asyncio.current_task().cancel)
    data = JsonlData(path="rows.jsonl", reward={spec!r}, reward_timeout_s=10_000)
    async with open_scorer(find_reward(data), Letters(), Recorder(ListSink())) as score:
        await score([group_of("a", "b")])

asyncio.run(work())
"""
HANGING = """
import os, time
from pathlib import Path
def reward(p, c):
    child = os.fork()
    Path({directory!r}, f"pid-{{os.getpid()}}").touch()
    while True:
        {wait}
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("wait", ["time.sleep(1000)", "sum(range(10**15))"])
def test_run_ends_at_once_while_a_reward_hangs_and_takes_its_processes_along(
    tmp_path: Path, number: int, wait: str
) -> None:
    (tmp_path / "reward.py").write_text(HANGING.format(directory=str(tmp_path), wait=wait))
    script = DRIVER.format(path=[str(Path(__file__).parents[up]) for up in (0, 2)], spec=f"{tmp_path}/reward.py:reward")
    driver = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
    try:
        while len(pids := [file.name.partition("-")[2] for file in tmp_path.glob("pid-*")]) < 4:
            assert driver.poll() is None, "the driver ended before its rewards were called"
            time.sleep(0.02)
        driver.send_signal(number)
        driver.wait(timeout=120)
    finally:
        driver.kill()
    await_end(" ".join(pids))


def await_end(pids: str) -> None:
    """Wait until none of the processes is running."""
    deadline = time.monotonic() + 120
    for pid in map(int, pids.split()):
        while is_running(pid):
            assert time.monotonic() < deadline, f"process {pid} was left behind"
            time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False

"""Checkpoints and the batch log as files: whole or not there, every flipped bit found, no reader but the owner."""

import json
import os
import random
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from paceline.files import ChecksumError
from paceline.orchestrator.batch_log import BatchLog, Taken
from paceline.orchestrator.store import Store, seal, verify
from paceline.types import Group, GroupId, Prompt, Rollout

NUM_KILLS = int(os.environ.get("PACELINE_NUM_KILLS", "20"))


def fill(directory: Path, step: int) -> None:
    (directory / "learner").mkdir()
    (directory / "run.json").write_text(json.dumps({"step": step}))
    for part in range(3):
        (directory / "learner" / f"shard-{part}.safetensors").write_bytes(bytes([step % 256]) * 20_000)


def write(store: Store, step: int) -> None:
    with store.writing(step, {"config": "abc"}) as directory:
        fill(directory, step)


def test_two_checkpoints_are_kept_and_the_newest_is_found(tmp_path):
    store = Store(tmp_path / "state")
    for step in (10, 20, 30):
        write(store, step)
    assert store.steps() == [20, 30]
    found, problems = store.newest()
    assert found is not None and found.step == 30 and found.facts == {"config": "abc"} and problems == []
    assert json.loads((found.path / "run.json").read_text()) == {"step": 30}


def test_a_writer_that_fails_leaves_no_checkpoint(tmp_path):
    store = Store(tmp_path / "state")
    write(store, 10)
    with pytest.raises(OSError, match="full"), store.writing(20, {}) as directory:
        fill(directory, 20)
        raise OSError("full")
    assert store.steps() == [10] and [entry.name for entry in (tmp_path / "state").iterdir()] == ["step-00000010"]


def test_nobody_else_can_read_a_checkpoint_or_the_log(tmp_path):
    write(Store(tmp_path / "state"), 1)
    with closing(BatchLog(tmp_path / "batches", began_s=0.0)) as log:
        log.put(0, make_group(0))
    for entry in (tmp_path / "state", tmp_path / "batches"):
        for path in (entry, *entry.rglob("*")):
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_a_moved_run_finds_its_checkpoint(tmp_path):
    write(Store(tmp_path / "here" / "state"), 1)
    shutil.move(tmp_path / "here", tmp_path / "there")
    found, _ = Store(tmp_path / "there" / "state").newest()
    assert found is not None and found.path == tmp_path / "there" / "state" / "step-00000001"


def test_every_flipped_bit_is_found(tmp_path):
    write(Store(tmp_path), 7)
    (path,) = tmp_path.glob("step-*")
    assert verify(path).step == 7, "a whole checkpoint is read"
    files = sorted(file for file in path.rglob("*") if file.is_file())
    rng = random.Random(0)
    for number in range(320):
        file = files[number % len(files)]
        whole = file.read_bytes()
        place, bit = rng.randrange(len(whole)), rng.randrange(8)
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
        with pytest.raises(ChecksumError):
            verify(path)
        file.write_bytes(whole)


def test_a_missing_file_is_found(tmp_path):
    write(Store(tmp_path / "state"), 7)
    path = tmp_path / "state" / "step-00000007"
    for file in [file for file in path.rglob("*") if file.is_file()]:
        whole = file.read_bytes()
        file.unlink()
        with pytest.raises(ChecksumError):
            verify(path)
        file.write_bytes(whole)
    assert verify(path).step == 7


def test_the_previous_checkpoint_is_taken_when_the_newest_is_damaged(tmp_path):
    store = Store(tmp_path / "state")
    write(store, 10)
    write(store, 20)
    (tmp_path / "state" / "step-00000020" / "run.json").write_text("{}")
    found, problems = store.newest()
    assert found is not None and found.step == 10
    (problem,) = problems
    assert "step-00000020/run.json differs from its checksum" in problem
    write(store, 20)  # the run comes to this step again
    found, problems = store.newest()
    assert found is not None and found.step == 20 and problems == []


def write_atomically(directory: Path, step: int) -> None:
    write(Store(directory), step)


def write_in_place(directory: Path, step: int) -> None:
    """Write under the final name, as a writer without an atomic rename would."""
    path = directory / f"step-{step:08d}"
    path.mkdir()
    fill(path, step)
    seal(path, step, {})


def count_unreadable(directory: Path, num_kills: int, write: Callable[[Path, int], None]) -> int:
    """Kill writers at random moments; count the kills after which the newest checkpoint was damaged or gone."""
    rng = random.Random(1)
    began_s = time.monotonic()
    write_atomically(directory, 1)
    write_s = time.monotonic() - began_s
    newest, num_unreadable = 1, 0
    for _ in range(num_kills):
        child = os.fork()
        if child == 0:
            for step in range(newest + 1, 10**9):
                write(directory, step)
        time.sleep(rng.uniform(0, 4 * write_s + 0.02))  # the moment of the kill is what is drawn
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        store = Store(directory)
        found, problems = store.newest()
        num_unreadable += found is None or bool(problems) or found.step < newest
        newest = newest if found is None else found.step
        store.tidy()
    assert newest > 1, "no writer came far enough, so the kills say nothing"
    return num_unreadable


def test_a_writer_killed_at_any_moment_leaves_a_checkpoint_that_can_be_read(tmp_path):
    """PACELINE_NUM_KILLS=200 for more than CI does."""
    assert count_unreadable(tmp_path / "state", NUM_KILLS, write_atomically) == 0


def test_the_count_of_unreadable_checkpoints_finds_a_writer_that_does_not_rename(tmp_path):
    assert count_unreadable(tmp_path / "state", NUM_KILLS, write_in_place) > 0


def make_prompt(number: int) -> Prompt:
    return Prompt(id=f"p{number}", text="", token_ids=np.arange(number + 3, dtype=np.int32), row={})


def make_group(number: int) -> Group:
    prompt, rng = make_prompt(number), np.random.default_rng(number)
    rollouts = tuple(
        Rollout(
            group_id=GroupId(number),
            index=index,
            prompt_ids=prompt.token_ids,
            token_ids=rng.integers(0, 99, 5 + index).astype(np.int32),
            logp=rng.normal(size=5 + index).astype(np.float32),
            finish_reason="stop",
            version_spans=((3, 2), (4, 3 + index)),
            engine="engine-1",
            started_s=101.5,
            finished_s=102.25,
            num_accepted=index,
        )
        for index in range(2)
    )
    return Group(group_id=GroupId(number), prompt=prompt, rollouts=rollouts)


def test_logged_groups_come_back_bit_for_bit_on_the_new_clock(tmp_path):
    with closing(BatchLog(tmp_path, began_s=100.0)) as log:
        log.put(13, make_group(1))
    log = BatchLog(tmp_path, began_s=7.0)
    found = log.group(13, make_prompt(1))
    assert found is not None and log.group(12, make_prompt(0)) is None
    for one, other in zip(found.rollouts, make_group(1).rollouts, strict=True):
        assert one.logp.tobytes() == other.logp.tobytes() and one.token_ids.tobytes() == other.token_ids.tobytes()
        assert one.logp.dtype == np.float32 and one.token_ids.dtype == np.int32
        assert (one.started_s, one.finished_s) == (8.5, 9.25)
        assert (one.id, one.engine, one.version_spans) == (other.id, "engine-1", other.version_spans)
        assert one.num_accepted == other.num_accepted


def test_what_a_step_took_comes_back_and_what_a_checkpoint_covers_is_forgotten(tmp_path):
    """A group that is still open at the checkpoint is not covered by it, however old."""
    log = BatchLog(tmp_path, began_s=0.0)
    taken = {
        step: Taken(groups=[step, 9], dropped=[7], rewards=[[0.1, step], [float("-inf"), 1e-300]]) for step in (1, 2, 3)
    }
    for step, record in taken.items():
        log.put_taken(step, record)
    for position in range(6):
        log.put(position, make_group(position))
    assert log.flush() == []
    log.forget(step=2, num_opened=5, still_open={1, 4})
    again = BatchLog(tmp_path, began_s=0.0)
    assert again.taken() == {3: taken[3]}
    assert [position for position in range(6) if again.group(position, make_prompt(position))] == [1, 4, 5]


def test_a_step_that_takes_something_else_the_second_time_has_one_record(tmp_path):
    for groups in ([3], [1], [2]):
        log = BatchLog(tmp_path, began_s=0.0)
        log.put_taken(1, Taken(groups=groups, dropped=[], rewards=[[1.0]]))
        log.close()
    assert BatchLog(tmp_path, began_s=0.0).taken()[1].groups == [2]


def test_a_logged_group_with_a_flipped_bit_is_sampled_again(tmp_path):
    log = BatchLog(tmp_path, began_s=0.0)
    log.put(0, make_group(0))
    log.put(1, make_group(1))
    log.close()
    (file,) = tmp_path.glob("group-00000001.*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    log = BatchLog(tmp_path, began_s=0.0)
    assert log.group(0, make_prompt(0)) is not None and log.group(1, make_prompt(1)) is None
    assert log.num_broken == 1


def test_a_logged_group_of_other_data_is_refused(tmp_path):
    with closing(BatchLog(tmp_path, began_s=0.0)) as log:
        log.put(0, make_group(0))
    with pytest.raises(ValueError, match="the data that it began with"):
        BatchLog(tmp_path, began_s=0.0).group(0, make_prompt(5))


def test_the_log_has_checksums_of_sha256sum(tmp_path):
    with closing(BatchLog(tmp_path, began_s=0.0)) as log:
        for position in range(5):
            log.put(position, make_group(position))
        log.put_taken(1, Taken(groups=[0, 1], dropped=[], rewards=[[1.0], [0.0]]))
    checked = subprocess.run(
        ["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=tmp_path, check=True, capture_output=True
    )
    assert len(checked.stdout.splitlines()) == 6


def test_a_group_counts_as_logged_only_once_its_checksum_is_written(tmp_path):
    """A kill between the file and its line, or within the line, costs this group and no other."""
    with closing(BatchLog(tmp_path, began_s=0.0)) as log:
        for position in range(3):
            log.put(position, make_group(position))
    recorded = tmp_path / "SHA256SUMS"
    whole = recorded.read_bytes()
    for lost in (1, len(whole.splitlines(keepends=True)[-1])):
        recorded.write_bytes(whole[:-lost])
        with closing(BatchLog(tmp_path, began_s=0.0)) as log:
            assert [log.group(position, make_prompt(position)) is None for position in range(3)] == [False, False, True]
            assert not (tmp_path / "group-00000002.safetensors").exists()
            log.put(2, make_group(2))
        whole = recorded.read_bytes()
        assert len(whole.splitlines()) == 3


def test_a_log_that_cannot_be_written_reports_each_error_once(tmp_path):
    log = BatchLog(tmp_path, began_s=0.0)
    (tmp_path / "group-00000000.safetensors").mkdir()
    log.put(0, make_group(0))
    log.put(1, make_group(1))
    assert [type(error) for error in log.flush()] == [IsADirectoryError]
    assert log.flush() == []
    log.close()
    (tmp_path / "group-00000000.safetensors").rmdir()
    assert BatchLog(tmp_path, began_s=0.0).group(1, make_prompt(1)) is not None


def test_a_checkpoint_with_a_file_or_a_line_too_many_or_too_few_is_refused(tmp_path):
    write(Store(tmp_path / "state"), 7)
    path = tmp_path / "state" / "step-00000007"
    (path / "extra").write_text("")
    with pytest.raises(ChecksumError, match="extra is not in SHA256SUMS"):
        verify(path)
    (path / "extra").unlink()
    lines = (path / "SHA256SUMS").read_text().splitlines(keepends=True)
    (path / "SHA256SUMS").write_text("".join(lines[1:]))
    with pytest.raises(ChecksumError, match="is not in SHA256SUMS"):
        verify(path)

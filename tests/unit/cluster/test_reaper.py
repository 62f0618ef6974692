"""The reaper: it ends what carries its mark and what that has started, and nothing else."""

import os
import secrets
import subprocess
import sys
import time

import psutil
import pytest

from paceline.cluster import reaper
from paceline.cluster.ray_session import _reaped  # pyright: ignore[reportPrivateUsage]
from paceline.files import SEGMENT_PREFIX, SHARED_MEMORY, create_owned

UNMARKED = f"""
import os, subprocess, time
os.environ.pop({reaper.VARIABLE!r})
subprocess.Popen(['sleep', '60'])
time.sleep(60)  # does not end with its child, whichever of them is killed first
"""


def marked(mark: str, *command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env={**os.environ, reaper.VARIABLE: mark}, start_new_session=True)


@pytest.fixture
def theirs():
    process = marked("theirs", "sleep", "60")
    yield process
    process.kill()
    process.wait()


def test_end_of_the_driver_ends_marked_processes_and_no_others(theirs):
    ours = marked("ours", "sleep", "60")
    watch = subprocess.Popen([sys.executable, "-m", reaper.__name__, "ours"], stdin=subprocess.PIPE)
    assert ours.poll() is None
    watch.communicate(timeout=120)  # closes the pipe, as the end of a driver does
    assert ours.wait(timeout=60) == -9
    assert theirs.poll() is None


def test_child_without_the_mark_is_ended_too(theirs):
    """Ray's agents wipe the mark when they set their title, and outlived every killed driver for which they did so."""
    ours = marked("ours", sys.executable, "-c", UNMARKED)
    children: list[psutil.Process] = []
    deadline = time.monotonic() + 120
    while not children and time.monotonic() < deadline:
        children = psutil.Process(ours.pid).children()
    watch = subprocess.Popen([sys.executable, "-m", reaper.__name__, "ours"], stdin=subprocess.PIPE)
    watch.communicate(timeout=120)
    assert not children[0].is_running() or children[0].status() == psutil.STATUS_ZOMBIE
    assert ours.wait(timeout=60) == -9
    assert theirs.poll() is None


def test_directories_of_a_run_go_though_its_reaper_was_killed(tmp_path):
    """A command that takes long to end after SIGTERM has its children killed, this one too."""
    run = tmp_path / "run"
    run.mkdir()
    before = set(psutil.Process().children())
    with _reaped(run, None):
        (watch,) = set(psutil.Process().children()) - before
        watch.kill()
    assert not run.exists()


def test_weights_of_a_killed_learner_go_with_the_run():
    """They are as large as the policy, in the machine's memory, and nobody may start another run there."""
    path = SHARED_MEMORY / f"{SEGMENT_PREFIX}0-policy-{secrets.token_hex(8)}"
    os.close(create_owned(path))  # as the end of its owner does
    reap = [sys.executable, "-m", reaper.__name__, "ours"]
    subprocess.run(reap, stdin=subprocess.DEVNULL, check=True, timeout=120)
    assert not path.exists()

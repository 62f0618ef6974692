"""The reaper: it ends what carries its mark, and nothing else."""

import os
import subprocess
import sys

from paceline.run import reaper


def sleeper(mark: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "60"], env={**os.environ, reaper.VARIABLE: mark}, start_new_session=True)


def test_end_of_the_driver_ends_marked_processes_and_no_others():
    ours, theirs = sleeper("ours"), sleeper("theirs")
    try:
        watch = subprocess.Popen([sys.executable, "-m", reaper.__name__, "ours"], stdin=subprocess.PIPE)
        assert ours.poll() is None
        watch.communicate(timeout=20)  # closes the pipe, as the end of a driver does
        assert ours.wait(timeout=5) == -9
        assert theirs.poll() is None
    finally:
        theirs.kill()
        theirs.wait()

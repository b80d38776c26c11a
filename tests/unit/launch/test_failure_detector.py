"""How long signs of life are waited for: the promised time, and longer only where they come late."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time

import pytest

from farandole.launch.ssh.frames import SILENCE_SECONDS
from farandole.launch.supervise.process import Reaper
from farandole.launch.supervise.stopped_process import FailureDetector


def hear(patience: FailureDetector, *times: float) -> FailureDetector:
    for now in times:
        patience.heard(now)
    return patience


def test_in_time_means_the_promised_limit() -> None:
    patience = FailureDetector(SILENCE_SECONDS, 0.0)
    hear(patience, 20.0)  # how long the connection took says nothing
    hear(patience, *(20.0 + 0.25 * beat for beat in range(1, 40)))
    last = patience.last_heard
    assert patience.limit_seconds == SILENCE_SECONDS
    assert not patience.is_over(last + SILENCE_SECONDS)
    assert patience.is_over(last + SILENCE_SECONDS + 0.01)


def test_late_signs_are_waited_for_longer_but_not_for_ever() -> None:
    patience = hear(FailureDetector(2.0, 0.0), 0.0, 1.0, 2.5)
    assert patience.limit_seconds == pytest.approx(4.5)
    assert not patience.is_over(2.5 + 4.4)
    assert hear(patience, 8.5, 60.0).limit_seconds == 10.0
    # When they come in time again it is forgotten.
    hear(patience, *(60.0 + 0.25 * beat for beat in range(600)))
    assert patience.limit_seconds == 2.0


@pytest.mark.full("slow")
def test_a_reaper_waits_longer_for_a_supervisor_that_is_late() -> None:
    """The third pause is above what was promised, and the two before it were growing."""
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as rank:
        began, ended = os.pipe()
        supervisor = os.fork()
        if supervisor == 0:
            reaper = Reaper(silence_seconds=0.6)
            reaper.watch(rank.pid)
            for pause in (0.1, 0.4, 0.9):
                time.sleep(pause)
                reaper.beat()
            os.write(ended, b"x")
            time.sleep(600)
        os.close(ended)
        try:
            assert select.select([began], [], [], 30)[0]
            assert os.read(began, 1) == b"x", "it was killed for being late"
            assert rank.poll() is None
            # And now that it says nothing any more:
            assert os.waitstatus_to_exitcode(os.waitpid(supervisor, 0)[1]) == -signal.SIGKILL
            assert rank.wait(10) == -signal.SIGKILL
        finally:
            os.close(began)
            rank.kill()

"""`fd.preempted` in a world of one: who listens, and what a second signal does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from farandole.core.vocabulary.errors import ConfigError
from farandole.train import preemption


@pytest.fixture(autouse=True)
def _handlers_are_put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}
    monkeypatch.setattr(preemption, "_warning", preemption._WarningSignal())
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_warning_is_seen_and_stays(number: int) -> None:
    assert not preemption.preempted()
    os.kill(os.getpid(), number)
    assert preemption.preempted()
    assert preemption.preempted()


def test_nobody_listens_before_the_first_question() -> None:
    before = signal.getsignal(signal.SIGTERM)
    preemption.preempted()
    assert signal.getsignal(signal.SIGTERM) is not before


def fails() -> None:
    raise ValueError("in the handler")


@pytest.mark.parametrize("end", [lambda: sys.exit(4), fails], ids=["SystemExit", "ValueError"])
def test_a_handler_that_the_script_had_is_called_too_and_does_not_end_the_rank(
    end: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    came: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: came.append(number))
    signal.signal(signal.SIGTERM, lambda *_: end())
    assert not preemption.preempted()
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGTERM)
    assert preemption.preempted()
    assert came == [signal.SIGUSR1]
    assert "the script's handler of SIGTERM would end this rank" in capsys.readouterr().err


def test_a_handler_that_replaces_ours_is_warned_of_once(capsys: pytest.CaptureFixture[str]) -> None:
    preemption.preempted()
    assert capsys.readouterr().err == ""
    signal.signal(signal.SIGTERM, lambda *_: None)
    preemption.preempted()
    preemption.preempted()
    said = capsys.readouterr().err
    assert said.count("has set a handler of SIGTERM after Farandole's") == 1
    assert "SIGUSR1" not in said


def test_only_the_main_thread_can_begin_to_listen() -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(ConfigError, match="call it once in the main thread"):
        pool.submit(preemption.preempted).result()


@pytest.mark.full("further")
def test_the_same_request_twice_is_one_and_a_later_one_ends() -> None:
    code = (
        "import os, farandole as fd; from farandole.train import preemption; fd.preempted(); "
        "os.kill(os.getpid(), 10); os.kill(os.getpid(), 15); os.kill(os.getpid(), 15); "
        "print(fd.preempted(), flush=True); preemption._warning.asked_seconds -= 5; "
        "os.kill(os.getpid(), 15); print('still here')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert (done.stdout, done.returncode) == ("True\n", -signal.SIGTERM)

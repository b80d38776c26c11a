"""The reaper: what it ends when its supervisor dies, what it leaves alone, and its own end."""

from __future__ import annotations

import io
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from farandole.launch.job.contract import JobSpec, RankSpec
from farandole.launch.output import Output
from farandole.launch.supervise.process import RankProcess, Reaper, end_group, has_ended
from farandole.launch.supervise.ranks import Supervisor
from farandole.launch.supervise.stopped_process import state_of


@contextmanager
def groups(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    started = [subprocess.Popen(["sleep", "600"], start_new_session=True) for _ in range(count)]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def supervised(act: Callable[[], None]) -> None:
    """Let a process of its own `act` with a reaper, and be killed after it."""
    began, ended = os.pipe()
    supervisor = os.fork()
    if supervisor == 0:
        try:
            act()
            os.write(ended, b"x")
            time.sleep(600)
        finally:
            os._exit(1)
    os.close(ended)
    assert select.select([began], [], [], 30)[0]
    assert os.read(began, 1) == b"x"
    os.close(began)
    os.kill(supervisor, signal.SIGKILL)
    os.waitpid(supervisor, 0)


def test_a_group_that_has_ended_is_forgotten_as_its_number_may_be_anothers() -> None:
    with groups(2) as (another, ours):

        def act() -> None:
            reaper = Reaper()
            reaper.watch(another.pid)
            reaper.watch(ours.pid)
            reaper.forget(another.pid)

        supervised(act)
        assert ours.wait(10) == -signal.SIGKILL
        assert another.poll() is None


def test_a_killed_reaper_is_replaced_by_one_that_knows_all(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    with groups(3) as (first, second, ended):

        def act() -> None:
            said: list[str] = []
            reaper = Reaper(say=said.append)
            reaper.watch(first.pid)
            reaper.watch(ended.pid)
            reaper.forget(ended.pid)
            reaper.remove(str(tree))
            os.kill(reaper._process, signal.SIGKILL)
            time.sleep(0.2)
            reaper.watch(second.pid)  # a pipe that nobody reads
            os.kill(reaper._process, signal.SIGKILL)
            time.sleep(0.2)
            reaper.mind()
            reaper.mind()
            (tmp_path / "said").write_text("\n".join(said))

        supervised(act)
        assert first.wait(10) == second.wait(10) == -signal.SIGKILL
        assert ended.poll() is None
        end = time.monotonic() + 10
        while tree.exists() and time.monotonic() < end:
            time.sleep(0.01)
        assert not tree.exists()
        lines = (tmp_path / "said").read_text().splitlines()
        assert len(lines) == 2
        assert all(line.startswith("note: the process that ends all ranks") for line in lines)


def test_a_stopped_reaper_holds_nobody_up() -> None:
    said: list[str] = []
    reaper = Reaper(say=said.append)
    os.kill(reaper._process, signal.SIGSTOP)
    for _ in range(20_000):  # more than a pipe takes
        reaper.beat()
    assert len(said) == 1
    reaper.dismiss()


def test_without_room_for_another_process_it_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    reaper = Reaper(say=said.append)
    os.kill(reaper._process, signal.SIGKILL)
    time.sleep(0.1)

    def no_room() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", no_room)
    for _ in range(3):
        reaper.beat()
        reaper.mind()
    reaper.dismiss()
    assert len(said) == 1
    assert said[0].startswith("warning: the process that ends all ranks")
    assert "no other can be started: " in said[0]


def test_what_a_rank_has_started_ends_before_its_number_can_be_anothers() -> None:
    """The leader has ended by itself; its group lives on."""
    text = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True)"
    with subprocess.Popen(
        [sys.executable, "-S", "-c", text], stdout=subprocess.PIPE, start_new_session=True
    ) as leader:
        assert leader.stdout is not None
        child = int(leader.stdout.readline())
        end = time.monotonic() + 10
        while not has_ended(leader) and time.monotonic() < end:
            time.sleep(0.01)
        assert state_of(leader.pid) == "Z", "looking does not reap it"
        assert end_group(leader) == 0
        while state_of(child) not in ("", "Z") and time.monotonic() < end:
            time.sleep(0.01)
        assert state_of(child) in ("", "Z")
        assert has_ended(leader)


def test_the_supervisor_forgets_a_rank_while_its_number_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, str]] = []
    sent: list[int] = []
    forget, send = Reaper.forget, RankProcess.signal

    def forget_group(reaper: Reaper, group: int) -> None:
        told.append(("forget", state_of(group)))
        forget(reaper, group)

    def send_signal(process: RankProcess, number: int) -> None:
        sent.append(number)
        told.append(("signal", state_of(process.process_group)))
        send(process, number)

    monkeypatch.setattr(Reaper, "forget", forget_group)
    monkeypatch.setattr(RankProcess, "signal", send_signal)
    output = Output(tmp_path, 1, out=io.BytesIO(), err=io.BytesIO())
    job = JobSpec("127.0.0.1", 1, tmp_path)
    assert Supervisor(["true"], [RankSpec(0, 1, 0, 1)], job, output, dict(os.environ)).run().exit_code == 0
    output.close()
    assert told == [("signal", "Z"), ("forget", "Z")]

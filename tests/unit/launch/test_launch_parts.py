"""The launcher's parts, without starting anything long."""

from __future__ import annotations

import io
import json
import os
import selectors
import socket
import stat
import sys
import time
from pathlib import Path

import pytest

from farandole.core.env import read_run_settings
from farandole.core.rank_variables import read_rank_variables
from farandole.core.vocabulary.errors import ConfigError
from farandole.core.vocabulary.run_files import Crash
from farandole.launch import output as rank_output
from farandole.launch.job.contract import JobSpec, RankSpec, rank_environment
from farandole.launch.job.placement import ReservedPort, crowding_warnings, divide_cores
from farandole.launch.job.run_directory import make_run_directory, write_run
from farandole.launch.output import Output
from farandole.launch.supervise.failure import Exit, find_failure
from farandole.launch.supervise.ranks import Supervisor


def test_what_is_told_is_what_is_read() -> None:
    job = JobSpec("192.0.2.1", 4711, Path("runs/x"), Path("plan.toml"), threads=3, verify_steps=5)
    told = rank_environment(RankSpec(2, 4, 0, 2, 1, 2), job, {})
    place, settings = read_rank_variables(told), read_run_settings(told)
    assert place is not None
    assert (place.rank, place.size, place.local_rank, place.local_size) == (2, 4, 0, 2)
    assert (place.node_rank, place.node_count, place.address, place.port) == (1, 2, "192.0.2.1", 4711)
    assert (settings.run_directory, settings.plan_file, settings.verify_steps) == ("runs/x", "plan.toml", 5)
    for family in ("FARANDOLE", "HOROVOD"):
        other = {name: value for name, value in told.items() if not name.startswith(family)}
        again = read_rank_variables(other)
        assert again is not None
        assert (again.rank, again.size, again.node_rank) == (2, 4, 1)
    assert told["OMP_NUM_THREADS"] == told["TF_NUM_INTRAOP_THREADS"] == told["TF_NUM_INTEROP_THREADS"] == "3"
    assert "GLOO_SOCKET_IFNAME" not in told, "two hosts"


def test_what_the_user_set_stays() -> None:
    job = JobSpec("127.0.0.1", 1, Path("x"), threads=3)
    told = rank_environment(RankSpec(0, 1, 0, 1), job, {"OMP_NUM_THREADS": "7", "GLOO_SOCKET_IFNAME": "eth9"})
    assert not {"OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"} & told.keys()
    assert told["TF_NUM_INTRAOP_THREADS"] == "7"
    assert "TF_NUM_INTRAOP_THREADS" not in rank_environment(
        RankSpec(0, 1, 0, 1), job, {"TF_NUM_INTRAOP_THREADS": "2"}
    )
    assert rank_environment(RankSpec(0, 1, 0, 1), job, {})["GLOO_SOCKET_IFNAME"] == "lo"


@pytest.mark.parametrize(
    ("threads", "asked", "inherited", "intra", "inter"),
    [
        (1, {}, {}, "1", "2"),
        (4, {}, {}, "4", "4"),
        (4, {}, {"OMP_NUM_THREADS": "1"}, "1", "2"),
        (4, {}, {"OMP_NUM_THREADS": "3,2"}, "4", "4"),
        (4, {"OMP_NUM_THREADS": "6"}, {"OMP_NUM_THREADS": "1"}, "6", "6"),
        (4, {}, {"TF_NUM_INTRAOP_THREADS": "8"}, None, "4"),
        (4, {}, {"TF_NUM_INTEROP_THREADS": "8"}, "4", None),
        (4, {"TF_NUM_INTEROP_THREADS": "7"}, {}, "4", "7"),
    ],
)
def test_pools_of_tensorflow(
    threads: int, asked: dict[str, str], inherited: dict[str, str], intra: str | None, inter: str | None
) -> None:
    job = JobSpec("127.0.0.1", 1, Path("x"), threads=threads, environment=asked)
    told = rank_environment(RankSpec(0, 1, 0, 1), job, inherited)
    assert (told.get("TF_NUM_INTRAOP_THREADS"), told.get("TF_NUM_INTEROP_THREADS")) == (intra, inter)


def test_cores() -> None:
    assert divide_cores([0, 1, 2, 3], 2) == [(0, 1), (2, 3)]
    assert divide_cores([5, 6, 7], 2) == [(5,), (6,)]
    assert divide_cores([0, 1], 3) == [(), (), ()]


@pytest.mark.parametrize(
    ("ranks", "cores", "bind", "threads", "said"),
    [
        (2, 2, True, "1", ""),
        (3, 2, True, "1",
         "3 ranks on 2 cores: they share cores, none is bound, and a step takes the longer; -np 2"),
        (2, 1, False, "1", "2 ranks on 1 core: "),
        (2, 8, True, "5", "OMP_NUM_THREADS=5, and each rank is bound to 4 cores: leave it out, or set it to 4"),
        (2, 8, False, "5", ""),
        (2, 8, True, "many", ""),
    ],
)  # fmt: skip
def test_too_few_cores_are_said(ranks: int, cores: int, bind: bool, threads: str, said: str) -> None:
    environment = {"OMP_NUM_THREADS": threads}
    lines = crowding_warnings(ranks, cores, bind=bind, remedy="-np {}", environment=environment)
    assert len(lines) == bool(said)
    assert "".join(lines).startswith(said)


def test_a_reserved_port_is_nobody_elses_but_rank_0s() -> None:
    with ReservedPort() as first, ReservedPort() as second:
        assert first.port != second.port
        plain = socket.socket()
        with plain, pytest.raises(OSError, match="in use"):
            plain.bind(("127.0.0.1", first.port))
        server = socket.socket()
        with server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("0.0.0.0", first.port))  # as rank 0's store does
            server.listen()
            with socket.create_connection(("127.0.0.1", first.port), timeout=5):
                pass


class Console:
    def __init__(self, tmp_path: Path, size: int = 2) -> None:
        self.out, self.err = io.BytesIO(), io.BytesIO()
        self.directory = tmp_path
        self.output = Output(tmp_path, size, out=self.out, err=self.err)

    def log(self, rank: int) -> bytes:
        return (self.directory / "logs" / f"rank_{rank}.log").read_bytes()


def test_lines_get_prefixes_and_logs_get_everything(tmp_path: Path) -> None:
    console = Console(tmp_path, 11)
    console.output.feed(3, False, b"one\ntw")
    console.output.feed(10, True, b"bad\xff\xfe bytes\n")
    console.output.feed(3, False, b"o\n")
    console.output.close()
    assert console.out.getvalue() == b"[ 3] one\n[ 3] two\n"
    assert console.err.getvalue() == b"[10] bad\xff\xfe bytes\n"
    assert console.log(3) == b"one\ntwo\n"
    mode = stat.S_IMODE((tmp_path / "logs" / "rank_3.log").stat().st_mode)
    assert mode == 0o600


def test_partial_lines_bars_and_endless_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(tmp_path)
    console.output.feed(0, False, b"name? ")
    console.output.tick()
    assert console.out.getvalue() == b""
    monkeypatch.setattr(rank_output, "PARTIAL_SECONDS", 0.0)
    time.sleep(0.001)
    console.output.tick()
    assert console.out.getvalue() == b"[0] name? \n"
    for i in range(50):
        console.output.feed(1, False, b" %d%%\r" % i)
    assert console.out.getvalue().count(b"[1]") == 1, "a progress bar is thinned"
    console.output.feed(0, False, b"x" * (rank_output.LONGEST_LINE_BYTES + 1))
    assert console.out.getvalue().count(b"x") == rank_output.LONGEST_LINE_BYTES + 1
    console.output.close()


def test_a_traceback_is_held_for_the_report_or_printed_when_the_rank_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    console = Console(tmp_path)
    text = b"Traceback (most recent call last):\n  File\nValueError: x\n"
    console.output.feed(0, True, b"before\n")
    console.output.feed(0, True, text.replace(b"Trace", b"[rank0]: Trace", 1))
    console.output.feed(1, True, text)
    assert console.err.getvalue() == b"[0] before\n"
    assert console.output.finish(0, failed=True) == text.decode()
    monkeypatch.setattr(rank_output, "HOLD_SECONDS", 0.0)
    time.sleep(0.001)
    console.output.tick()
    assert console.err.getvalue().count(b"[1] ") == 3
    assert console.output.finish(1, failed=False) == ""
    console.output.close()


def test_the_last_words_of_a_rank_that_takes_its_time_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its traceback was held for long and printed; what it says meanwhile, while it ends, does not count."""
    console = Console(tmp_path, 3)
    monkeypatch.setattr(rank_output, "HOLD_SECONDS", 0.0)
    for rank in range(3):
        console.output.feed(rank, True, b"Traceback (most recent call last):\n  File x\nMemoryError: boom\n\n")
    time.sleep(0.001)
    console.output.tick()
    console.output.feed(0, True, b"warning: 1 semaphore leaked\n")
    held = console.output.finish(0, failed=True)
    assert held == "MemoryError: boom\n"
    found = find_failure([Exit(0, 1, 1.0, held=held)], [], host="h", stop_seconds=0)
    assert found.cause == "MemoryError: boom"
    assert found.to_text(Path("r")).count("boom") == 1, "its traceback is above"
    console.output.feed(1, False, b"caught it, epoch 2\n")
    assert console.output.finish(1, failed=True) == ""
    monkeypatch.setattr(rank_output, "LAST_WORDS_SECONDS", 0.0)
    assert console.output.finish(2, failed=True) == ""
    console.output.close()


@pytest.mark.parametrize(
    ("code", "said", "cause"),
    [
        (3, "farandole: note: all is well\n", "exit code 3"),
        (1, "farandole: note: all is well\n", "exit code 1"),
        (3, "Traceback (most recent call last):\n  File x\nKeyError: 'k'\nfarandole: 2 saves\n", "KeyError: 'k'"),
        (
            2,
            "farandole: note: all is well\nfarandole: plan.toml: no such file\n",
            "farandole: plan.toml: no such file",
        ),
    ],
)
@pytest.mark.parametrize("hold_seconds", [0.0, 60.0])
def test_a_notice_is_no_cause_and_an_error_of_ours_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, said: str, cause: str, hold_seconds: float
) -> None:
    monkeypatch.setattr(rank_output, "HOLD_SECONDS", hold_seconds)
    console = Console(tmp_path)
    for line in said.splitlines(keepends=True):
        console.output.feed(0, True, line.encode())
    time.sleep(0.001)
    console.output.tick()
    held = console.output.finish(0, failed=True)
    found = find_failure([Exit(0, code, 1.0, held=held)], [], host="h", stop_seconds=0)
    assert found.cause == cause
    assert all(line in console.err.getvalue().decode() + found.to_text(tmp_path) for line in said.splitlines()[1:])
    console.output.close()


def crash(rank: int, when: float, *, consequence: bool = False, trace: str = "tb") -> Crash:
    return Crash(rank, "host-a", 5, "ValueError", f"m{rank}", trace, consequence, 1, when)


def test_the_first_cause_is_found() -> None:
    exits = [Exit(0, 1, 1.0), Exit(1, 1, 1.3), Exit(2, -15, 1.5, stopped_by_us=True)]
    found = find_failure(exits, [crash(0, 0.9, consequence=True), crash(1, 1.2)], host="h", stop_seconds=0.2)
    assert (found.rank, found.cause, found.step, found.host) == (1, "ValueError: m1", 5, "host-a")
    assert (found.also_failed, found.stopped, found.exit_code) == ((0,), (2,), 1)
    text = found.to_text(Path("runs/x"))
    assert text.splitlines()[0] == "farandole: rank 1 on host-a failed after step 5: ValueError: m1"
    assert "farandole: stopped rank 2 after 0.20 s" in text


def test_a_killed_rank_is_the_cause_and_not_those_who_noticed() -> None:
    noticed = Exit(0, 1, 1.0, held="Traceback\nRuntimeError: Connection closed by peer\n")
    killed = Exit(1, -9, 1.01, is_out_of_memory=True)
    found = find_failure([noticed, killed], [], host="h", stop_seconds=0)
    assert (found.rank, found.exit_code) == (1, 137)
    assert "killed by signal 9 (SIGKILL)" in found.cause
    assert "out-of-memory killer was at work" in found.remedy


def test_a_killed_rank_is_on_its_own_host() -> None:
    killed = Exit(1, -9, 1.0, host="host1")
    found = find_failure([killed, Exit(0, 0, 2.0)], [], host="host0", stop_seconds=0)
    assert found.host == "host1"


def test_an_abort_at_the_end_of_a_stock_script_has_its_remedy(tmp_path: Path) -> None:
    console = Console(tmp_path, 1)
    console.output.feed(0, True, b"a warning\nterminate called without an active exception\n")
    held = console.output.finish(0, failed=True)
    console.output.close()
    assert held == "terminate called without an active exception\n"
    found = find_failure([Exit(0, -6, 1.0, held=held)], [], host="h", stop_seconds=0)
    assert found.cause == "killed by signal 6 (SIGABRT)"
    assert "call torch.distributed.destroy_process_group() at the script's end" in found.to_text(tmp_path)
    other = find_failure([Exit(0, -6, 1.0, held="KeyError")], [], host="h", stop_seconds=0)
    assert not other.remedy


def test_an_error_of_ours_is_one_line_and_a_crashing_rank_that_we_ended_is_still_the_cause() -> None:
    exits = [Exit(0, -15, 2.0, stopped_by_us=True), Exit(1, -9, 2.0, stopped_by_us=True)]
    found = find_failure(exits, [crash(1, 1.0, trace="")], host="h", stop_seconds=0)
    assert (found.rank, found.cause, found.exit_code, found.stopped) == (1, "m1", 1, (0,))
    assert len(found.to_text(Path("r")).splitlines()) == 3


def test_a_script_without_farandole_is_read_from_its_stderr() -> None:
    held = "Traceback (most recent call last):\n  File x\nKeyError: 'k'\n"
    found = find_failure([Exit(0, 3, 1.0, held=held)], [], host="h", stop_seconds=0)
    assert (found.cause, found.exit_code, found.step) == ("KeyError: 'k'", 3, None)


def test_run_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = make_run_directory(None, "a b/../c"), make_run_directory(None, "a b/../c")
    assert first != second
    assert first.parent == tmp_path / "runs"
    assert stat.S_IMODE(first.stat().st_mode) == 0o700
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    write_run(first, command=["python", "x", "--hf-token", "hunter2"], size=2, plan=None, extra={})
    text = (first / "run.json").read_text()
    assert "hunter2" not in text
    facts = json.loads(text)
    assert (facts["size"], facts["command"], facts["plan"]["accumulate"]) == (
        2,
        ["python", "x", "--hf-token", "***"],
        1,
    )
    with pytest.raises(ConfigError, match="holds a run already"):
        make_run_directory(str(first), "x")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is not a directory"):
        make_run_directory("file", "x")
    with pytest.raises(ConfigError, match="cannot make a run directory"):
        make_run_directory("file/below", "x")
    assert make_run_directory("new/deep", "x") == tmp_path / "new" / "deep"


def test_the_status_line_is_printed_where_there_is_no_terminal(tmp_path: Path) -> None:
    console = Console(tmp_path)
    console.output.status("step 3")
    console.output.status(None)
    console.output.say("hello")
    assert console.err.getvalue() == b"step 3\nhello\n"
    assert not console.output.is_live
    console.output.close()
    assert os.listdir(tmp_path / "logs")  # noqa: PTH208


def test_a_rank_whose_end_and_last_words_come_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end is handled first and closes the pipes; the event of a pipe in the same batch must not be read."""
    console = Console(tmp_path, 1)
    command = [sys.executable, "-c", "print('last words')"]
    job = JobSpec("127.0.0.1", 1, tmp_path)
    supervisor = Supervisor(command, [RankSpec(0, 1, 0, 1)], job, console.output, dict(os.environ))
    select = supervisor.ranks._selector.select

    def all_at_once(timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        time.sleep(0.3)  # until the process has ended, and all its events are there
        events = select(timeout)
        return sorted(events, key=lambda event: event[0].data is not None and event[0].data[1] is not None)

    monkeypatch.setattr(supervisor.ranks._selector, "select", all_at_once)
    assert supervisor.run().exit_code == 0
    console.output.close()
    assert console.out.getvalue() == b"[0] last words\n"

"""A disk that is full ends no job: every writer of the launcher stops, says so once, and goes on."""

from __future__ import annotations

import argparse
import errno
import io
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from farandole.cli.commands.run import _summarise
from farandole.core.vocabulary import run_files
from farandole.core.vocabulary.errors import ConfigError
from farandole.core.vocabulary.spec import Plan
from farandole.launch.job.run_directory import make_run_directory
from farandole.launch.output import Output, OutputStyle
from farandole.launch.start.request import JobRequest
from farandole.launch.start.start import open_run, report_failure
from farandole.launch.supervise.failure import Failure
from farandole.launch.supervise.job_loop import Outcome
from farandole.observe.records.line_file import LineFile


@contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """Let the kernel refuse longer files, as a full disk does; Python ignores the signal of it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def refuse_to_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no new file be made, as on a disk without a free inode."""
    real = os.open

    def no_room(path: str, flags: int, mode: int = 0o777, **more: int) -> int:
        if flags & os.O_CREAT and not os.path.exists(path):  # noqa: PTH110 - what os.open is given
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return real(path, flags, mode, **more)

    monkeypatch.setattr(os, "open", no_room)


def test_log_files_stop_and_what_is_printed_goes_on(tmp_path: Path) -> None:
    to_out, to_err = io.BytesIO(), io.BytesIO()
    with files_of_at_most(100):
        output = Output(tmp_path, 2, out=to_out, err=to_err, style=OutputStyle(directory=tmp_path / "copies"))
        for rank in (0, 1, 0, 1):
            output.feed(rank, False, b"x" * 79 + b"\n")
            output.tick()
        for rank in (0, 1):
            output.feed(rank, True, b"Traceback (most recent call last):\nValueError: 1\n")
            assert output.finish(rank, failed=True).endswith("ValueError: 1\n")
        output.close()
    assert to_out.getvalue().count(b"x" * 79 + b"\n") == 4
    assert to_err.getvalue().decode() == (
        f"farandole: {run_files.log_path(tmp_path, 0)} is written no more: File too large; "
        "the job goes on without its logs\n"
    )
    assert run_files.log_path(tmp_path, 0).read_bytes() == (b"x" * 79 + b"\n") + b"x" * 20, "what fitted is kept"


def test_a_worker_that_comes_while_the_disk_is_full_has_no_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    output = Output(tmp_path, 1, style=OutputStyle(directory=tmp_path / "copies"))
    refuse_to_open(monkeypatch)
    output.open_logs(3)
    output.feed(2, False, b"works\n")
    output.tick()
    output.close()
    out, err = capfdbinary.readouterr()
    assert out == b"[2] works\n"
    assert err.count(b"is written no more: No space left on device") == 1


@pytest.mark.parametrize("full", ["stdout", "stderr"])
def test_a_console_that_is_a_full_disk(full: str, tmp_path: Path) -> None:
    with open("/dev/full", "wb") as nowhere, open(tmp_path / "good", "wb") as good:  # noqa: PTH123
        out, err = (nowhere, good) if full == "stdout" else (good, nowhere)
        output = Output(tmp_path, 1, out=out, err=err)
        for count in range(3):
            output.feed(0, full == "stderr", b"lost %d\n" % count)
            output.feed(0, full == "stdout", b"kept %d\n" % count)
            output.say("said")
        output.close()
        nowhere.flush()  # as Python does at its end, with another exit code when it fails
    written = (tmp_path / "good").read_text()
    assert [line for line in written.splitlines() if "kept" in line] == [f"[0] kept {count}" for count in range(3)]
    note = "farandole: stdout is written no more: No space left on device; the job goes on"
    assert written.splitlines().count(note) == (1 if full == "stdout" else 0)
    assert run_files.log_path(tmp_path, 0).read_text().count("lost") == 3


def test_run_json_and_its_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    request = JobRequest(["true"], run_dir=str(tmp_path / "run"))
    with files_of_at_most(0):
        directory = open_run(request, size=1)
    assert capsys.readouterr().err == (
        f"farandole: warning: cannot write into {directory}: File too large; the job goes on without its records\n"
    )
    assert not (directory / run_files.PLAN).exists()


def test_a_job_does_not_begin_without_the_plan_it_was_given(tmp_path: Path) -> None:
    request = JobRequest(["true"], Plan(accumulate=2), run_dir=str(tmp_path / "run"))
    with (
        files_of_at_most(0),
        pytest.raises(ConfigError, match=r"cannot write the plan into .*: File too large; choose another"),
    ):
        open_run(request, size=1)
    open_run(request, size=1)  # it left nothing in the way


def test_failure_json_and_the_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failure = Failure(1, "here", "ValueError: x", 7, step=3)
    options = argparse.Namespace(baseline=None, json=False, quiet=True)
    with files_of_at_most(0):
        report_failure(Outcome(7, 1.0, failure), tmp_path)
        _summarise(options, tmp_path, Outcome(7, 1.0, failure))
    said = capsys.readouterr().err
    assert "farandole: rank 1 on here failed after step 3: ValueError: x\n" in said
    assert "farandole: no failure.json was written: File too large\n" in said
    assert f"farandole: the summary was not written into {tmp_path}: File too large\n" in said
    assert not list(tmp_path.iterdir())


def test_a_rank_that_finds_the_disk_full_trains_without_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(FileNotFoundError):
        LineFile(tmp_path / "missing" / "events-rank1.jsonl")
    refuse_to_open(monkeypatch)
    lines = LineFile(tmp_path / "events-rank1.jsonl")
    lines.write({"x": 1})
    lines.close()
    assert "farandole: nothing is recorded, cannot write " in capsys.readouterr().err


# -- one directory, two jobs ----------------------------------------------------------------------


def test_a_run_directory_has_one_job(tmp_path: Path) -> None:
    """Two that have both looked and seen nothing: one of them gets it."""
    chosen = str(tmp_path / "run")
    assert make_run_directory(chosen, "x") == tmp_path / "run"
    with pytest.raises(ConfigError, match=r"--run-dir .*/run holds a run already; choose another name"):
        make_run_directory(chosen, "x")


def test_two_that_look_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farandole.core.host.paths.exists", lambda path: False)
    make_run_directory(str(tmp_path / "run"), "x")
    with pytest.raises(ConfigError, match="holds a run already"):
        make_run_directory(str(tmp_path / "run"), "x")

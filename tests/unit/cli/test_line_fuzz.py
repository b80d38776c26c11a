"""Some thousand random host files and command lines; benchmarks/fuzz_command_line.py tries a hundred thousand."""

from __future__ import annotations

import pytest

from tests.line_fuzz import Fault, try_host_files, try_line, try_lines


@pytest.mark.timeout(120)
def test_random_host_files_are_read_or_refused_with_their_line() -> None:
    ends = try_host_files(1500, seed=11)
    assert ends["read"] > 100, "not all of it is noise"
    assert ends["refused"] > 100


@pytest.mark.timeout(120)
def test_random_lines_end_in_what_would_be_started_or_in_one_account() -> None:
    ends = try_lines(600, seed=12)
    assert ends["exit code 0"] > 50, "not all of it is noise"
    assert ends["exit code 2"] > 50


def test_the_fuzzer_sees_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farandole.cli.commands.run.read_settings", lambda options: 1 // 0)
    with pytest.raises(Fault, match="ZeroDivisionError"):
        try_line(["true"])

"""Whether a file can be written, asked before the work."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from farandole.cli.options.files import check_output
from farandole.core.vocabulary.errors import ConfigError


def test_asking_leaves_everything_as_it_was(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.write_text("old")
    assert check_output("--output", None) is None
    assert check_output("--output", str(tmp_path / "new")) == tmp_path / "new"
    assert check_output("--output", str(there)) == there
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    assert there.read_text() == "old"


@pytest.mark.timeout(10)
def test_a_pipe_that_nobody_reads_yet_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert check_output("--output", str(pipe)) == pipe


@pytest.mark.parametrize("name", ["", "missing/file"])
def test_what_cannot_be_written_is_refused_with_its_option(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--output: cannot write"):
        check_output("--output", str(tmp_path / name))

"""Prefixes and files of what ranks print, as horovodrun's readers expect them."""

from __future__ import annotations

import io
import re
import stat
from pathlib import Path

import pytest

from farandole.core.vocabulary.errors import ConfigError
from farandole.core.vocabulary.run_files import log_path
from farandole.launch.output import Output, OutputStyle, RankFiles


def printed(directory: Path, style: OutputStyle, size: int = 12) -> tuple[bytes, bytes]:
    out, err = io.BytesIO(), io.BytesIO()
    output = Output(directory, size, out=out, err=err, style=style)
    output.feed(3, False, b"one\ntwo")
    output.feed(11, True, "größer\n".encode())
    for rank in range(size):
        output.finish(rank, failed=False)
    output.close()
    return out.getvalue(), err.getvalue()


def test_prefixes(tmp_path: Path) -> None:
    assert printed(tmp_path, OutputStyle()) == (b"[ 3] one\n[ 3] two\n", "[11] größer\n".encode())
    assert printed(tmp_path, OutputStyle("horovod")) == (
        b"[3]<stdout>:one\n[3]<stdout>:two\n", "[11]<stderr>:größer\n".encode()
    )  # fmt: skip
    out, _ = printed(tmp_path, OutputStyle("horovod with time"))
    assert re.fullmatch(rb"\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}\[3\]<stdout>:one", out.splitlines()[0])


def test_each_rank_has_its_files_with_the_bytes_it_printed(tmp_path: Path) -> None:
    kept = tmp_path / "a" / "kept"
    printed(tmp_path, OutputStyle("horovod", kept))
    assert (kept / "rank.03" / "stdout").read_bytes() == b"one\ntwo"
    assert (kept / "rank.11" / "stderr").read_text() == "größer\n"
    assert len(list(kept.iterdir())) == 12
    assert stat.S_IMODE((kept / "rank.11" / "stderr").stat().st_mode) == 0o600
    RankFiles(tmp_path / "one", 1).close()
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["rank.0"]
    RankFiles(tmp_path / "ten", 10).close()
    assert (tmp_path / "ten" / "rank.9").exists()


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--output-filename .*file.*: .*name a directory"):
        RankFiles(tmp_path / "file", 2)


def test_a_warning_of_two_ranks_is_shown_once_and_kept_in_both_logs(tmp_path: Path) -> None:
    for style, shown in ((OutputStyle(warnings_once=True), 1), (OutputStyle(), 2)):
        directory = tmp_path / str(shown)
        err = io.BytesIO()
        output = Output(directory, 2, out=io.BytesIO(), err=err, style=style)
        for rank in (0, 1):
            output.feed(rank, True, b"/a b/x.py:3: FutureWarning: soon\n  call()\nother\n")
            output.feed(rank, True, b"x.py:4: UserWarning: of rank %d\n" % rank)
        output.close()
        lines = err.getvalue().splitlines()
        assert sum(line.endswith(b"soon") for line in lines) == shown
        assert sum(line.endswith(b"call()") for line in lines) == shown
        assert sum(b"other" in line for line in lines) == 2
        assert sum(b"of rank" in line for line in lines) == 2
        assert all(b"soon" in log_path(directory, rank).read_bytes() for rank in (0, 1))

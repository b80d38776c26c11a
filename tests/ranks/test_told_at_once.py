"""What a person is told who started ranks in a way that cannot work, or has no terminal: with real processes."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.ranks.test_launch import FARANDOLE, script

UNGUARDED = """
import farandole as fd
from torch.utils.data import DataLoader
fd.init()
if __name__ == "__main__":
    for batch in DataLoader(range(4), num_workers=1, multiprocessing_context="spawn"):
        pass
"""


@pytest.mark.full("slow")
@pytest.mark.timeout(100)
def test_the_workers_of_a_script_without_a_guard_are_the_cause(tmp_path: Path) -> None:
    name = script(tmp_path, UNGUARDED)
    result = warm.run(tmp_path, "run", "-np", "2", "--", sys.executable, name, timeout=80)
    assert result.returncode == 2, result.stderr
    assert "this is a spawned worker of rank" in result.stderr.splitlines()[0]
    assert "under if __name__ == '__main__'" in result.stderr
    assert "Traceback" not in result.stderr


SECRETS = """
import torch, farandole as fd
fd.init()
model, optimizer = fd.distribute(model := torch.nn.Linear(2, 1), torch.optim.SGD(model.parameters(), 0.1))
for _ in range(3):
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()
"""


@pytest.mark.full("slow")
def test_no_file_of_a_run_has_a_secret_of_its_command_line(tmp_path: Path) -> None:
    name = script(tmp_path, SECRETS)
    given = ["--token=canary", "--api-key", "canary", "--db.password", "canary", "HF_TOKEN=canary"]
    given += ["--max-tokens", "64"]
    words = (
        "run",
        "-np",
        "1",
        "--run-dir",
        "run",
        "-x",
        "WANDB_API_KEY=canary",
        "--",
        sys.executable,
        name,
        *given,
    )
    assert warm.run(tmp_path, *words).returncode == 0
    assert warm.run(tmp_path, "report", "run").returncode == 0
    assert "canary" not in warm.run(tmp_path, "diagnose", "run").stdout
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not [path for path in files if b"canary" in path.read_bytes()]
    command = json.loads((tmp_path / "run" / "run.json").read_text())["command"]
    assert command[-len(given) :] == [
        "--token=***", "--api-key", "***", "--db.password", "***", "HF_TOKEN=***", "--max-tokens", "64"
    ]  # fmt: skip
    assert "--token=***" in (tmp_path / "run" / "report.html").read_text()


def answered(directory: Path, size: int, text: str) -> subprocess.CompletedProcess[str]:
    """Run a script of `text` in a terminal where ``7`` is typed, then ``c``."""
    ours, theirs = pty.openpty()
    try:
        os.write(ours, b"7\nc\n")
        words = [
            *FARANDOLE,
            "run",
            "-np",
            str(size),
            "--run-dir",
            "run",
            "--",
            sys.executable,
            script(directory, text),
        ]
        return subprocess.run(
            words, cwd=directory, stdin=theirs, capture_output=True, text=True, timeout=40, check=False
        )
    finally:
        os.close(ours)
        os.close(theirs)


ASKS = "print('got', int(input('how many? ')) + 1, flush=True)\nbreakpoint()\nprint('went on')\n"


def test_one_rank_inherits_the_terminal_and_its_log_has_what_it_printed(tmp_path: Path) -> None:
    result = answered(tmp_path, 1, ASKS)
    assert result.returncode == 0, result.stderr
    assert "got 8" in result.stdout
    log = (tmp_path / "run" / "logs" / "rank_0.log").read_text()
    assert "how many? got 8" in log
    assert log.splitlines()[-1].endswith("went on")


@pytest.mark.parametrize("text", [ASKS, "breakpoint()\n"])
def test_several_ranks_have_none_and_are_told_so(tmp_path: Path, text: str) -> None:
    result = answered(tmp_path, 2, text)
    assert result.returncode == 1
    assert "ranks have no terminal" in result.stderr
    assert "farandole run -np 1" in result.stderr

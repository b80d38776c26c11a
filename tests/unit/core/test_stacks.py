"""A rank's own account of where it stands, when it is asked by a signal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ASKS = """
import os, signal, sys
from pathlib import Path
from farandole.core.vocabulary.run_files import stacks_path
from farandole.core.host.stacks import STACKS_SIGNAL, StackWriter

signal.signal(STACKS_SIGNAL, eval(sys.argv[2]))
before = signal.getsignal(STACKS_SIGNAL)
directory = Path(sys.argv[1])

def stands_here():
    os.kill(os.getpid(), STACKS_SIGNAL)

writer = StackWriter(directory, 3)
stands_here()
print("stands_here" in stacks_path(directory, 3).read_text())
writer.close()
print(signal.getsignal(STACKS_SIGNAL) == before)
"""


@pytest.mark.parametrize(
    ("handler", "answers"), [("signal.SIG_DFL", True), ("signal.SIG_IGN", True), ("lambda *_: None", False)]
)
def test_a_rank_answers_unless_its_program_uses_the_signal(handler: str, answers: bool, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ASKS, str(tmp_path), handler],
        check=True,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.stdout.split() == [str(answers), "True"], done.stderr

"""A rank's own account of where it stands, when it is asked by a signal."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from farandole.core.host import stacks
from farandole.core.host.stacks import StackFrame, stack_of

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


def _stands(ready: threading.Event, stop: threading.Event) -> None:
    ready.set()
    stop.wait()


@pytest.mark.parametrize("name", ["plain", "größer_日本"])
def test_the_stack_of_another_thread_is_read_without_its_frames(name: str, tmp_path: Path) -> None:
    """As text of the handler in C, which escapes what is not ASCII."""
    path = tmp_path / f"{name}.py"
    path.write_text("def begins(stands, *events):\n    stands(*events)\n")
    scope: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    ready, stop = threading.Event(), threading.Event()
    thread = threading.Thread(target=scope["begins"], args=(_stands, ready, stop))
    thread.start()
    assert ready.wait(10)
    assert thread.ident is not None
    found = stack_of(thread.ident)
    stop.set()
    thread.join()
    functions = [each.function for each in found]
    assert functions.index("_stands") + 1 == functions.index("begins")
    assert found[functions.index("begins")] == StackFrame(str(path), 2, "begins")
    assert stack_of(thread.ident) == []
    assert stack_of(threading.get_ident())[0].function == "stack_of"


def test_no_frames_of_other_threads_are_read() -> None:
    """Which has ended processes: see [Note: frames of another thread] in `core.host.stacks`."""
    source = Path(stacks.__file__).parents[2]
    readers = [path.name for path in source.rglob("*.py") if "_current_frames()" in path.read_text()]
    assert readers == []

"""Which files of the source are entered on the way from a call or a command to its end.

A file is entered when one of its functions is called by the thread that makes the call: what others do meanwhile,
samplers for example, is another number each time. What a module does while it is imported does not count.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCE = REPOSITORY / "src" / "farandole"
TRAINING = """\
import sys
sys.path.insert(0, {repository!r})
from tests.style.entered import Entered

entered = Entered()
import torch
import farandole as fd

world = fd.init()
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
with entered.during("distribute"):
    model, optimizer = fd.distribute(model, optimizer)

def step():
    torch.nn.functional.cross_entropy(model(torch.randn(8, 64)), torch.zeros(8).long()).backward()
    optimizer.step()
    optimizer.zero_grad()

for _ in range(4):  # what looks ever more rarely does so at powers of two: the next one is like most
    step()
with entered.during("step"):
    step()
with entered.during("save"):
    fd.save("saved", model, optimizer, step=5)
with entered.during("load"):
    fd.load("saved", model, optimizer)
entered.write(f"rank{{world.rank}}.json")
fd.shutdown()
"""
"""What most people do, on each rank."""


class Entered:
    """The files that this process enters."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, float]] = {}
        """By part of the walk: when each was entered first, of the clock that all processes here have."""
        self._now: dict[str, float] | None = None
        self._root = f"{SOURCE}{os.sep}"

    @contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Look on this thread."""
        self._now = self.files.setdefault(part, {})
        sys.setprofile(self._look)
        try:
            yield
        finally:
            sys.setprofile(None)
            self._now = None

    def write(self, file: str) -> None:
        """Write what was entered."""
        Path(file).write_text(json.dumps(self.files))

    def _look(self, frame: Any, event: str, _: Any) -> None:
        now, code = self._now, frame.f_code
        if now is None or event != "call" or code.co_name == "<module>":
            return
        if not code.co_filename.startswith(self._root):
            return
        name = code.co_filename[len(self._root) :].removesuffix(".py")
        if name not in now and not self._is_imported(frame):
            now[name] = time.monotonic()

    def _is_imported(self, frame: Any) -> bool:
        """Return whether a call is of a module's own code, as the body of a class is."""
        while frame is not None:
            code = frame.f_code
            if code.co_name == "<module>" and code.co_filename.startswith(self._root):
                return not code.co_filename.endswith("__main__.py")
            frame = frame.f_back
        return False


def of_a_training(directory: Path) -> dict[str, set[str]]:
    """Return the files that ``distribute``, a step, a save and a load enter, on rank 0 of two."""
    (directory / "train.py").write_text(TRAINING.format(repository=str(REPOSITORY)))
    _run(directory, "run", "-np", "2", "--quiet", "--", sys.executable, "train.py")
    found = json.loads((directory / "rank0.json").read_text())
    return {part: set(files) for part, files in found.items()}


def of_a_job(directory: Path) -> set[str]:
    """Return the files that a launcher enters until its ranks run."""
    (directory / "begins.py").write_text("import time\nprint(time.monotonic(), flush=True)\n")
    words = ["run", "-np", "2", "--", sys.executable, "begins.py"]
    begins = min(float(line.split()[-1]) for line in _run(directory, *words).splitlines() if line.startswith("["))
    return {name for name, at in _of_command(directory).items() if at < begins}


def of_a_plan(directory: Path) -> set[str]:
    """Return the files that ``farandole plan`` enters, from a profile."""
    from farandole.plan.profile import write_profile
    from tests.unit.plan.search.models import make_profile

    write_profile(make_profile(), directory / "model.json")
    words = ["--profile", "model.json", "--cluster", "dgx-a100", "--gpus", "8", "--global-batch", "64"]
    _run(directory, "plan", *words, "--effort", "20")
    return set(_of_command(directory))


def _of_command(directory: Path) -> dict[str, float]:
    found: dict[str, dict[str, float]] = json.loads((directory / "command.json").read_text())
    return found["command"]


def _run(directory: Path, *words: str) -> str:
    code = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); from tests.style import entered; entered.main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def main() -> None:
    """Be a ``farandole`` whose files are written down: the words after ours are those of its command line."""
    entered, sys.argv = Entered(), ["farandole", *sys.argv[1:]]
    directory = Path.cwd()
    try:
        with entered.during("command"):
            runpy.run_module("farandole", run_name="__main__", alter_sys=True)
    finally:
        entered.write(str(directory / "command.json"))

"""Tests run on a copy of the source tree, each time in a process forked of one that has imported torch.

The copy is written to, the working tree never is. Its modules are compiled beforehand and taken as they are,
except the one that is changed. Ranks are forked of the process that runs the tests, so they see the change too.
"""

from __future__ import annotations

import compileall
import contextlib
import os
import py_compile
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

_PARTS = ("src", "tests", "benchmarks", "examples", "pyproject.toml", "README.md", "docs")
_PASSED, _FAILED = 0, 1


def warm_up() -> None:
    """Import what all tests import. Nothing of farandole: every trial imports its own."""
    import hypothesis  # noqa: F401
    import psutil  # noqa: F401
    import torch
    import torch.distributed
    import torch.nn.parallel

    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)


class Tree:
    """A copy of the repository in which one file at a time is changed."""

    def __init__(self, repository: Path, root: Path) -> None:
        self.root, self.source = root, root / "src"
        for part in _PARTS:
            place = repository / part
            if place.is_dir():
                shutil.copytree(place, root / part, ignore=shutil.ignore_patterns("__pycache__"))
            elif place.exists():
                shutil.copy2(place, root / part)
        compileall.compile_dir(
            self.source, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
        )

    def write(self, path: str, source: bytes, *, compiled: bool) -> None:
        """Replace one file; only what is worth it is compiled, the rest is compiled by whoever imports it."""
        file = self.source / path
        file.write_bytes(source)
        for old in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
            old.unlink()
        if compiled:
            py_compile.compile(str(file), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)


@dataclass
class Trial:
    """A running set of tests."""

    process: int
    log: Path
    begin_seconds: float
    limit_seconds: float
    exit_code: int | None = None
    seconds: float = 0.0
    timed_out: bool = False

    def is_over(self) -> bool:
        """Look whether the tests have ended; end them when their time is over."""
        if self.exit_code is not None:
            return True
        self.seconds = time.monotonic() - self.begin_seconds
        done, status = os.waitpid(self.process, os.WNOHANG)
        if not done and self.seconds > self.limit_seconds:
            self.timed_out = True
            os.killpg(self.process, signal.SIGKILL)
            done, status = os.waitpid(self.process, 0)
        if not done:
            return False
        self.exit_code = -1 if self.timed_out else os.waitstatus_to_exitcode(status)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process, signal.SIGKILL)  # ranks that hang
        return True

    @property
    def killed(self) -> bool:
        """Whether the tests noticed: failed, could not be collected, died or hung."""
        return self.exit_code != _PASSED

    def first_failure(self) -> str:
        """Return the test that noticed, if one did."""
        for line in self.log.read_text(errors="replace").splitlines():
            if line.startswith(("FAILED ", "ERROR ")):
                return line.split(" ")[1]
        return ""


def start(
    tree: Tree, tests: Sequence[str], limit_seconds: float, *, job_seconds: float, plugin: Any = None
) -> Trial:
    """Start `tests` (files or test ids) in a forked process; without `plugin`, up to the first that fails.

    Args:
        tree: where.
        tests: what.
        limit_seconds: for all of them together.
        job_seconds: for one of them.
        plugin: of pytest, set up in the forked process.
    """
    log = tree.root / "log.txt"
    process = os.fork()
    if process == 0:
        code = 70
        try:
            code = _run(tree, tests, log, job_seconds, plugin)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    with contextlib.suppress(OSError):
        os.setpgid(process, process)  # the child does so too: whoever comes first
    return Trial(process, log, time.monotonic(), limit_seconds)


def _run(tree: Tree, tests: Sequence[str], log: Path, job_seconds: float, plugin: Any) -> int:
    os.setpgid(0, 0)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(tree.root)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "farandole")]:
        del sys.modules[name]
    paths = [str(tree.source), str(tree.root)]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = plugin is None
    from tests.ranks import pool

    vars(pool).update(START_METHOD="fork", PATIENCE_SECONDS=0.2, LIMIT_SECONDS=job_seconds, START_SECONDS=5.0)
    if plugin is not None:
        plugin.begin(pool)
    words = [
        "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--noconftest", "-p", "tests.unit.comm.conftest",
        "-p", "tests.ranks.conftest", f"--timeout={job_seconds}", "--hypothesis-seed=1", "--tb=short",
        "-W", "ignore::pytest.PytestAssertRewriteWarning", "--rootdir", str(tree.root),
        *(["-x"] if plugin is None else []), *tests,
    ]  # fmt: skip
    return int(pytest.main(words, plugins=[] if plugin is None else [plugin]))

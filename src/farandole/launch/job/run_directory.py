"""Making a run directory, and writing down what is about to run."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from ...core.host import paths
from ...core.host.installed import working_directory_commit
from ...core.host.open_sockets import congestion_control
from ...core.vocabulary import run_files
from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.spec import Plan
from ...version import VERSION


def make_run_directory(chosen: str | None, label: str) -> Path:
    """Make the directory of a new run: `chosen`, or a fresh one under ``runs/`` named by time and `label`.

    Raises `ConfigError` when it holds a run already or cannot be made. If two jobs ask for the same one at
    the same time one gets it.
    """
    try:
        if chosen is not None:
            return _make_chosen(Path(chosen))
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        name = f"{stamp}-{re.sub(r'[^A-Za-z0-9_.-]+', '-', label)[:40] or 'run'}"
        parent = Path("runs")
        parent.mkdir(mode=0o700, exist_ok=True)
        for attempt in range(1000):
            path = parent / (name if not attempt else f"{name}-{attempt}")
            try:
                path.mkdir(mode=0o700)
            except FileExistsError:
                continue
            return path.resolve()
        raise ConfigError(f"1000 runs are called {parent / name} already", remedy="name one with --run-dir")
    except OSError as problem:
        raise ConfigError(f"cannot make a run directory: {problem}", remedy="choose one with --run-dir") from None


def write_run(
    directory: Path,
    *,
    command: Sequence[str],
    size: int | None,
    plan: Plan | None,
    extra: Mapping[str, Any],
) -> str:
    """Write ``run.json`` and ``plan.toml``, and make the folders of the rest.

    `size` is None when it may change, `plan` when none was given.

    Returns what could not be written, "" as a rule: a job can do without. Not without a plan that was given;
    raises `ConfigError` then, and leaves the directory to the next job.
    """
    facts = {
        "version": 1,
        "command": run_files.hide_secrets(command),
        **({} if size is None else {"size": size}),
        "hosts": [socket.gethostname()],
        "started": datetime.now().astimezone().isoformat(timespec="milliseconds"),
        "directory": str(Path.cwd()),
        "versions": _versions(),
        "commit": working_directory_commit(),
        "cores": os.cpu_count(),
        "congestion_control": congestion_control(),
        "plan_given": plan is not None,
        "plan": (plan or Plan()).to_mapping(),
        **extra,
    }
    try:
        run_files.write_private(directory / run_files.PLAN, (plan or Plan()).to_toml())
    except OSError as problem:
        if plan is not None:
            (directory / run_files.RUN).unlink(missing_ok=True)
            raise ConfigError(
                f"cannot write the plan into {directory}: {problem.strerror}",
                remedy="choose another with --run-dir",
            ) from None
    try:
        run_files.write_private(directory / run_files.RUN, json.dumps(facts, indent=1) + "\n")
        for name in ("logs", "crashes"):
            (directory / name).mkdir(mode=0o700, exist_ok=True)
    except OSError as problem:
        return f"cannot write into {directory}: {problem.strerror}; the job goes on without its records"
    return ""


def _make_chosen(path: Path) -> Path:
    if paths.exists(path) and not paths.is_directory(path):
        raise ConfigError(f"--run-dir {path} is not a directory", remedy="name a new one, such as runs/first")
    if any(paths.exists(path / name) for name in (run_files.RUN, run_files.METRICS)):
        raise _holds_a_run(path)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        # Looking first is no claim: another job may be looking too.
        os.close(os.open(path / run_files.RUN, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        raise _holds_a_run(path) from None
    return path.resolve()


def _holds_a_run(path: Path) -> ConfigError:
    return ConfigError(f"--run-dir {path} holds a run already", remedy="choose another name, or remove it")


def _versions() -> dict[str, str]:
    versions = {"farandole": VERSION, "python": platform.python_version(), "platform": platform.platform()}
    for package in ("torch", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    versions["executable"] = sys.executable
    return versions

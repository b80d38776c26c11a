"""The commit of the working directory: in the records of a run, in measurements, and compared between hosts."""

from __future__ import annotations

import subprocess
from pathlib import Path

_SECONDS = 2.0


def working_directory_commit() -> str | None:
    """Return the commit of the working directory, with a + when tracked files differ from it; None outside git."""
    commit = head_commit()
    # Without locks: killed at its time limit, it would leave one that stops every later commit.
    changed = commit and _git("--no-optional-locks", "status", "--porcelain", "--untracked-files=no")
    return None if changed is None else f"{commit}{'+' if changed else ''}"


def head_commit() -> str | None:
    """Return the commit alone, which takes no look at the files; None outside git."""
    if not any((parent / ".git").exists() for parent in (Path.cwd(), *Path.cwd().parents)):
        return None
    return _git("rev-parse", "HEAD")


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(["git", *words], capture_output=True, text=True, timeout=_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()

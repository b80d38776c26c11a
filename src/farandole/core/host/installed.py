"""What is installed, as the packages say it: none of them is imported, which can take seconds.

And the commit of the working directory.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from ..env import read_command_path

# Compilers on this host, by the names of their programs.

C = ("cc", "gcc", "clang")
CPP = ("c++", "g++", "clang++")


def find_compiler(names: Sequence[str]) -> str | None:
    """Return the path of the first of `names` on the PATH; None where there is none."""
    # Not left to the default of `which`, which finds compilers where PATH names none.
    path = read_command_path()
    found = (shutil.which(name, path=path) for name in names if path)
    return next((each for each in found if each is not None), None)


TENSORFLOW_DISTRIBUTIONS = (
    "tensorflow",
    "tensorflow-cpu",
    "tensorflow-gpu",
    "tensorflow-rocm",
    "tf-nightly",
    "tf-nightly-cpu",
)
"""All of them write the same folder, so a machine should have one of them."""


def package_version(name: str) -> str:
    """Return the version of an installed package without importing it; empty when there is none."""
    from importlib import metadata  # not at the top: agents of hosts start in milliseconds

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def installed_tensorflow() -> dict[str, str]:
    """Return the versions of TensorFlow that are installed, by the name of the distribution."""
    versions = {name: package_version(name) for name in TENSORFLOW_DISTRIBUTIONS}
    return {name: version for name, version in versions.items() if version}


# The commit of the working directory: in the records of a run, in measurements, and compared between hosts.


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

"""Compilers on this host, by the names of their programs."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from ..environ.env import read_command_path

C = ("cc", "gcc", "clang")
CPP = ("c++", "g++", "clang++")


def find_compiler(names: Sequence[str]) -> str | None:
    """Return the path of the first of `names` on the PATH; None where there is none."""
    # Not left to the default of `which`, which finds compilers where PATH names none.
    path = read_command_path()
    found = (shutil.which(name, path=path) for name in names if path)
    return next((each for each in found if each is not None), None)

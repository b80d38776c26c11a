"""Is it there? For names that a user typed, among them those that no file can have.

`pathlib` raises for a name that is too long; to a user it is a file that does not exist.
"""

from __future__ import annotations

import os
from pathlib import Path


def exists(path: Path) -> bool:
    """Return whether there is anything of that name."""
    return os.path.exists(path)  # noqa: PTH110


def is_file(path: Path) -> bool:
    """Return whether it is a file."""
    return os.path.isfile(path)  # noqa: PTH113


def is_directory(path: Path) -> bool:
    """Return whether it is a directory."""
    return os.path.isdir(path)  # noqa: PTH112

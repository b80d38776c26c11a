"""The folder through which a function and its results travel.

It is 0700 and its files are 0600, so that no other user can replace a pickle.
"""

from __future__ import annotations

import os
from pathlib import Path

FUNCTION = "function.pkl"


def result_path(folder: Path, rank: int) -> Path:
    """Return where rank `rank` leaves its result."""
    return folder / f"result_{rank}.pkl"


def write_private_bytes(path: Path, data: bytes) -> None:
    """Write a file of mode 0600 atomically."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    aside.replace(path)

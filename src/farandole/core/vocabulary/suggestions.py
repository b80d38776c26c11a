"""What a remedy suggests: the nearest of some names, and how Farandole is installed. The only home of such texts.

It is installed from its folder, because no package index has it.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable
from pathlib import Path

_SOURCE = Path(__file__).resolve().parents[4]
FOLDER = str(_SOURCE) if (_SOURCE / "pyproject.toml").is_file() else "FARANDOLES_FOLDER"
"""Where the running copy was installed from; a word to replace where that is not known."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name closest to `name`, or None when nothing is close."""
    names = list(known)
    found = [each for each in names if _is_swapped(name, each)]
    found += difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return found[0] if found else None


def _is_swapped(name: str, other: str) -> bool:
    """Return whether two neighbouring letters changed places: the commonest slip, to difflib two of them."""
    swaps = (f"{name[:at]}{name[at + 1]}{name[at]}{name[at + 2 :]}" for at in range(len(name) - 1))
    return name != other and other in swaps


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a remedy: the nearest name, or all of them.

    >>> did_you_mean("bucket_byte", ["accumulate", "bucket_bytes"])
    "did you mean 'bucket_bytes'?"
    """
    names = sorted(known)
    close = nearest(name, names)
    return f"did you mean {close!r}?" if close else f"known: {', '.join(names) or 'none'}"


def install_command(extra: str = "") -> str:
    """Return the command that installs this copy, with the packages of `extra`."""
    return f"pip install -e {shlex.quote(f'{FOLDER}[{extra}]' if extra else FOLDER)}"


def upgrade_remedy() -> str:
    """Return what to do where a file is of a newer Farandole."""
    return f"upgrade with: git -C {shlex.quote(FOLDER)} pull"


def elsewhere_remedy(python: str) -> str:
    """Return what to do on another host, whose interpreter is `python`, to have this version there."""
    return f"install the same version there: copy {FOLDER}, then {python} -m pip install -e COPY"

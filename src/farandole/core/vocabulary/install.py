"""How Farandole is installed: from its folder, because no package index has it. The only home of such texts."""

from __future__ import annotations

import shlex
from pathlib import Path

_SOURCE = Path(__file__).resolve().parents[4]
FOLDER = str(_SOURCE) if (_SOURCE / "pyproject.toml").is_file() else "FARANDOLES_FOLDER"
"""Where the running copy was installed from; a word to replace where that is not known."""


def install_command(extra: str = "") -> str:
    """Return the command that installs this copy, with the packages of `extra`."""
    return f"pip install -e {shlex.quote(f'{FOLDER}[{extra}]' if extra else FOLDER)}"


def upgrade_remedy() -> str:
    """Return what to do where a file is of a newer Farandole."""
    return f"upgrade with: git -C {shlex.quote(FOLDER)} pull"


def elsewhere_remedy(python: str) -> str:
    """Return what to do on another host, whose interpreter is `python`, to have this version there."""
    return f"install the same version there: copy {FOLDER}, then {python} -m pip install -e COPY"

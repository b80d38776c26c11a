"""What has to be alike on all hosts: farandole, torch, and the commit of the working directory."""

from __future__ import annotations

import platform
import site
import sys
from collections.abc import Mapping
from pathlib import Path

from ....core.host.commit import head_commit
from ....version import VERSION


def own_versions(python_path: str = "") -> dict[str, str]:
    """Return this host's versions, without importing torch; "" for what is not known."""
    return {
        "farandole": VERSION,
        "python": platform.python_version(),
        "torch": _torch_version(python_path),
        "commit": head_commit() or "",
    }


def differences(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    """Return what is not alike, a sentence's part each; what one side does not know is no difference."""
    found = []
    for name in ("torch", "python", "commit"):
        mine, theirs = here.get(name, ""), there.get(name, "")
        if name == "python":
            mine, theirs = (text.rpartition(".")[0] for text in (mine, theirs))
        if mine and theirs and mine != theirs:
            what = "the commit of the working directory" if name == "commit" else name
            found.append(f"{what} is {theirs[:12]} there and {mine[:12]} here")
    return found


def _torch_version(python_path: str) -> str:
    """Return the version of torch's files where a rank would look for it: importing it takes a second."""
    try:
        places = [*python_path.split(":"), *sys.path, *site.getsitepackages()]
        if site.ENABLE_USER_SITE is not False:
            places.append(site.getusersitepackages())
    except (AttributeError, OSError):
        places = list(sys.path)
    for place in filter(None, places):
        for found in sorted(Path(place).glob("torch-*.dist-info")):
            return found.name.removeprefix("torch-").removesuffix(".dist-info")
    return ""

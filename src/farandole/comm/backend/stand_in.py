"""The variables of ranks whose scripts ask for gloo and get this backend: ``farandole run --backend farandole``.

Imports no torch: the launcher asks for them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ...core.environ.env import BACKEND

SHIM = Path(__file__).resolve().parent / "shim"
"""A folder for PYTHONPATH with a `sitecustomize`, which calls `farandole.backend.replace_gloo` in time."""


def backend_environment(backend: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ranks that use `backend`, one of `env.BACKENDS`, beside those they inherit."""
    if backend == "gloo":
        return {BACKEND: backend}
    entries = [entry for entry in inherited.get("PYTHONPATH", "").split(os.pathsep) if entry]
    others = [entry for entry in entries if Path(entry).resolve() != SHIM]
    return {BACKEND: backend, "PYTHONPATH": os.pathsep.join([str(SHIM), *others])}

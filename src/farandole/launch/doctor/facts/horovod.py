"""What shows that Horovod is to be built: the variables of its build, and a script that imports it."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from ....core.environ.env import set_variables
from ....core.host.packages import package_version

_PARTS = ("PYTORCH", "TENSORFLOW", "MXNET", "MPI", "GLOO")
_BUILD = (
    *(f"HOROVOD_{word}_{part}" for word in ("WITH", "WITHOUT") for part in _PARTS),
    *(f"HOROVOD_{name}" for name in ("GPU", "GPU_OPERATIONS", "GPU_ALLREDUCE", "GPU_ALLGATHER", "GPU_BROADCAST")),
    *(f"HOROVOD_{name}" for name in ("CUDA_HOME", "NCCL_HOME", "NCCL_LINK", "BUILD_CUDA_CC_LIST")),
)
"""What pip install horovod reads, as Horovod's install guide lists it."""
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
"""A name that a line to paste may have as it is."""
_IMPORT = re.compile(r"^[ \t]*(?:import|from)[ \t]+horovod\b", re.M)
_MOST_FILES, _MOST_BYTES = 100, 20_000


def read_horovod() -> dict[str, Any]:
    """Return the package's version, the first variable of its build, and the first script here that imports it."""
    return {
        "horovod": package_version("horovod"),
        "horovod_build": next(iter(set_variables(_BUILD)), ""),
        "horovod_script": _script(Path()),
    }


def _script(directory: Path) -> str:
    paths: list[Path] = []
    with suppress(OSError):  # a directory that cannot be read shows nothing
        paths = sorted(directory.glob("*.py"))[:_MOST_FILES]
    for path in paths:
        with suppress(OSError):
            if path.is_file() and _PLAIN_NAME.fullmatch(path.name):
                with path.open("rb") as file:
                    if _IMPORT.search(file.read(_MOST_BYTES).decode("utf-8", errors="replace")):
                        return path.name
    return ""

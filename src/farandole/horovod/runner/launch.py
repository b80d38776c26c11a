"""`horovod.runner.launch`: horovodrun's command line as a function."""

from __future__ import annotations

import importlib
import os
import sys
from importlib.metadata import PackageNotFoundError, distribution

from ..as_horovod import API_VERSION

__all__ = ["run_commandline"]


def horovodrun() -> None:
    """Be the `horovodrun` on the PATH of who installed farandole: Horovod's own, where that is installed too."""
    try:
        distribution("horovod")
    except PackageNotFoundError:
        run_commandline()
        return
    importlib.import_module("horovod.runner.launch").run_commandline()


def run_commandline() -> None:
    """Become horovodrun with this process's arguments, on farandole's launcher."""
    if sys.argv[1:2] in (["-v"], ["--version"]):
        sys.stdout.write(f"{API_VERSION}\n")
        return
    command = [sys.executable, "-m", "farandole", "run", "--as-horovod", "--output-prefix", "horovod"]
    os.execv(sys.executable, [*command, *sys.argv[1:]])

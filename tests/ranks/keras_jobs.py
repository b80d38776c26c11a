"""Jobs of the tests of TensorFlow and Keras: in processes of their own, as no test may import either."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests import warm

ROOT = Path(__file__).resolve().parents[2]
MOST_SECONDS = 240.0
Job: TypeAlias = "warm.Started | subprocess.Popen[str]"
FOLDER = Path(sys.prefix) / "tensorflow"
"""Where `make check` installs TensorFlow: beside other packages, others would import it (tensorboard does)."""


def is_installed(package: str) -> bool:
    """Return whether jobs find a package."""
    return (FOLDER / package).is_dir() or importlib.util.find_spec(package) is not None


def has_compiler() -> bool:
    """Return whether the kernel in C++ can be made."""
    return any(map(shutil.which, ("c++", "g++", "clang++")))


needs_tensorflow = pytest.mark.skipif(
    not is_installed("tensorflow"),
    reason=f"TensorFlow is missing: pip install --target {FOLDER} tensorflow-cpu",
)
needs_compiler = pytest.mark.skipif(not has_compiler(), reason="needs a C++ compiler (apt-get install g++)")
needs_tf_keras = pytest.mark.skipif(
    not is_installed("tf_keras"), reason=f"tf_keras is missing: pip install --no-deps --target {FOLDER} tf_keras"
)
needs_keras = pytest.mark.skipif(not is_installed("keras"), reason="Keras is missing")


def start(
    module: str, results: Path, *words: str, ranks: int = 0, options: tuple[str, ...] = (), **variables: str
) -> Job:
    """Begin a script of tests.ranks that writes `results`.

    On `ranks` ranks of ``farandole run --as-horovod`` with `options`, or without it (0).
    """
    run_directory = ["--run-dir", f"{results}.run", *options]
    launcher = ["-m", "farandole", "run", "--as-horovod", "-np", str(ranks), *run_directory, "--", sys.executable]
    return start_module(f"tests.ranks.{module}", results, *words, prefix=launcher if ranks else [], **variables)


def start_module(module: str, results: Path, *words: str, prefix: Sequence[str] = (), **variables: str) -> Job:
    """Begin a module that writes `results`, on warm Python. `prefix`: what Python is to play, and run this with.

    [Note: warm Keras] Processes of these jobs are forked of one that has imported Keras, with their backend (see
    `tests.warm`): for most trainings here the import takes longer than the training. By then TensorFlow has begun
    no thread and run no operation. The two ranks whose steps test_keras_example compares, and those of
    ``farandole verify`` in test_keras_watch, import all by themselves, in the order of a user's script.
    """
    told = environment(results.parent, **variables)
    with said_file(results).open("w") as said:
        return warm.start(
            ROOT, *prefix, "-m", module, *words, str(results), out=said, err=said, environment=told,
            imports=packages_of(told),
        )  # fmt: skip


def packages_of(environment: dict[str, str]) -> tuple[str, ...]:
    """Return what is imported before a job is forked."""
    return ("tf_keras",) if environment.get("TF_USE_LEGACY_KERAS") == "1" else ("keras",)


def said_file(results: Path) -> Path:
    """Return where a job's output is."""
    return Path(f"{results}.said")


def environment(home: Path, **variables: str) -> dict[str, str]:
    """Return the variables of a job. `home`: where Keras keeps its settings."""
    paths = [str(FOLDER), variables.pop("PYTHONPATH", ""), os.environ.get("PYTHONPATH", "")]
    settings = {
        "KERAS_BACKEND": "tensorflow",
        "OMP_NUM_THREADS": "1",
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "KERAS_HOME": str(home),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "10",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "120",  # longer than a busy machine needs
    }
    return {**os.environ, **settings, **variables}


def finish(job: Job, results: Path) -> Any:
    """Wait for a job; return what it wrote."""
    try:
        job.wait(MOST_SECONDS)
    except subprocess.TimeoutExpired:
        job.send_signal(signal.SIGTERM)
        job.wait(30)
    assert job.returncode == 0, said_file(results).read_text()
    return json.loads(results.read_text())

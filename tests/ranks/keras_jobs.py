"""Jobs of the tests of TensorFlow and Keras: in processes of their own, as no other test imports either."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_SECONDS = 240.0
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
needs_jax = pytest.mark.skipif(
    not is_installed("jax"), reason=f"JAX is missing: pip install --target {FOLDER} jax"
)
needs_keras = pytest.mark.skipif(not is_installed("keras"), reason="Keras is missing")


def start(
    module: str, results: Path, *words: str, ranks: int = 0, options: tuple[str, ...] = (), **variables: str
) -> subprocess.Popen[str]:
    """Begin a script of tests.ranks that writes `results`.

    On `ranks` ranks of ``farandole run --as-horovod`` with `options`, or without it (0).
    """
    run_directory = ["--run-dir", f"{results}.run", *options]
    launcher = ["-m", "farandole", "run", "--as-horovod", "-np", str(ranks), *run_directory, "--"] if ranks else []
    prefix = [sys.executable, *launcher] if ranks else []
    return start_module(f"tests.ranks.{module}", results, *words, prefix=prefix, **variables)


def start_module(
    module: str, results: Path, *words: str, prefix: Sequence[str] = (), **variables: str
) -> subprocess.Popen[str]:
    """Begin a module that writes `results`, where TensorFlow is found. `prefix`: what runs the command."""
    return subprocess.Popen(
        [*prefix, sys.executable, "-m", module, *words, str(results)],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=environment(results.parent, **variables),
    )  # fmt: skip


def environment(home: Path, **variables: str) -> dict[str, str]:
    """Return the variables of a job. `home`: where Keras keeps its settings."""
    paths = [str(FOLDER), variables.pop("PYTHONPATH", ""), os.environ.get("PYTHONPATH", "")]
    settings = {
        "OMP_NUM_THREADS": "1",
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "KERAS_HOME": str(home),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "10",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "30",  # what goes wrong ends with a reason
    }
    return {**os.environ, **settings, **variables}


def finish(job: subprocess.Popen[str], results: Path) -> Any:
    """Wait for a job; return what it wrote."""
    try:
        output, _ = job.communicate(timeout=MOST_SECONDS)
    except subprocess.TimeoutExpired:
        job.terminate()
        output, _ = job.communicate(timeout=30)
    assert job.returncode == 0, output
    return json.loads(results.read_text())

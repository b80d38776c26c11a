"""TensorFlow itself: imported here and nowhere else, so that a missing one, or one too old, is one clear error.

[Note: torch first] The engine needs torch. TensorFlow's wheels load their libraries for all to see, and a part of
torch that is loaded after them (triton, in builds for CUDA) may crash; so torch is imported first.
"""

from __future__ import annotations

import importlib.metadata
import warnings
from collections.abc import Sequence
from typing import Any

import torch  # noqa: F401 - see [Note: torch first]

OLDEST = (2, 16)
_INSTALL = "pip install 'farandole[tensorflow]', or pip install tensorflow-cpu where there is no GPU"


DISTRIBUTIONS = (
    "tensorflow",
    "tensorflow-cpu",
    "tensorflow-gpu",
    "tensorflow-rocm",
    "tf-nightly",
    "tf-nightly-cpu",
)
"""All of them write the same folder."""


def import_tensorflow() -> Any:
    """Return the module; raise ImportError, saying what to install, where it is missing or too old."""
    try:
        import tensorflow as tf
    except ModuleNotFoundError as missing:
        if missing.name != "tensorflow":
            raise
        raise ImportError(f"farandole.horovod.tensorflow: TensorFlow is not installed; {_INSTALL}") from None
    found = installed_distributions()
    version = getattr(tf, "__version__", None)
    if version is None:  # a folder that another distribution left behind
        which = f"{' and '.join(found)} {'are' if len(found) > 1 else 'is'} installed" if found else "no package"
        raise ImportError(f"farandole.horovod.tensorflow: {which}, and the folder is incomplete; {_remedy(found)}")
    if tuple(int(number) for number in version.split(".")[:2]) < OLDEST:
        raise ImportError(
            f"farandole.horovod.tensorflow: TensorFlow {version} is installed, expected "
            f"{'.'.join(map(str, OLDEST))} or newer; {_INSTALL}"
        )
    if len(found) > 1:
        warnings.warn(
            f"farandole: {' and '.join(found)} are installed, and all of them write the same folder, so what is "
            f"imported (TensorFlow {version}) may be a mixture; {_remedy(found)}",
            RuntimeWarning,
            stacklevel=3,
        )
    return tf


def installed_distributions() -> list[str]:
    """Return which distributions of TensorFlow there are, with their versions."""
    found = []
    for name in DISTRIBUTIONS:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _remedy(found: Sequence[str]) -> str:
    names = " ".join(each.partition(" ")[0] for each in found)
    return f"pip uninstall {names}, then install one: {_INSTALL}" if len(found) > 1 else _INSTALL


tf: Any = import_tensorflow()
"""The module."""

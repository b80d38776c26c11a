"""TensorFlow itself: imported here and nowhere else, so that a missing one, or one too old, is one clear error.

[Note: torch first] The engine needs torch. TensorFlow's wheels load their libraries for all to see, and a part of
torch that is loaded after them (triton, in builds for CUDA) may crash; so torch is imported first.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import Any

import torch  # noqa: F401 - see [Note: torch first]

from ...core.host.installed import installed_tensorflow
from ...core.vocabulary.text import install_command

OLDEST = (2, 16)
_INSTALL = f"{install_command('tensorflow')}, or pip install tensorflow-cpu where there is no GPU"


def import_tensorflow() -> Any:
    """Return the module; raise ImportError, saying what to install, where it is missing or too old."""
    try:
        import tensorflow as tf
    except ModuleNotFoundError as missing:
        if missing.name != "tensorflow":
            raise
        raise ImportError(f"farandole.horovod.tensorflow: TensorFlow is not installed; {_INSTALL}") from None
    installed = installed_tensorflow()
    found = [f"{name} {version}" for name, version in installed.items()]
    version = getattr(tf, "__version__", None)
    if version is None:  # a folder that another distribution left behind
        which = f"{' and '.join(found)} {'are' if len(found) > 1 else 'is'} installed" if found else "no package"
        raise ImportError(
            f"farandole.horovod.tensorflow: {which}, and the folder is incomplete; {_remedy(installed)}"
        )
    if tuple(int(number) for number in version.split(".")[:2]) < OLDEST:
        raise ImportError(
            f"farandole.horovod.tensorflow: TensorFlow {version} is installed, expected "
            f"{'.'.join(map(str, OLDEST))} or newer; {_INSTALL}"
        )
    if len(found) > 1:
        warnings.warn(
            f"farandole: {' and '.join(found)} are installed, and all of them write the same folder, so what is "
            f"imported (TensorFlow {version}) may be a mixture; {_remedy(installed)}",
            RuntimeWarning,
            stacklevel=3,
        )
    return tf


def _remedy(names: Collection[str]) -> str:
    return f"pip uninstall {' '.join(names)}, then install one: {_INSTALL}" if len(names) > 1 else _INSTALL


tf: Any = import_tensorflow()
"""The module."""

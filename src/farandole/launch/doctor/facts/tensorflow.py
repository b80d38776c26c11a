"""What is installed of TensorFlow and Keras, as packages say it: neither is imported, which would take seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ....core.environ.env import set_variables
from ....core.host.compilers import CPP, find_compiler
from ....core.host.packages import installed_tensorflow, package_version


def read_tensorflow() -> dict[str, Any]:
    """Return the versions, Keras's backend, and the compiler that operations in graphs are made with."""
    found: dict[str, Any] = {"tensorflow": installed_tensorflow()}
    found |= {"keras": package_version("keras"), "tf_keras": package_version("tf-keras")}
    variables = set_variables(("KERAS_BACKEND", "KERAS_HOME", "HOME", "TF_USE_LEGACY_KERAS"))
    found["keras_backend"] = _keras_backend(variables) if found["keras"] else ""
    found["uses_legacy_keras"] = variables.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true")
    found["cpp_compiler"] = find_compiler(CPP) or ""
    return found


def _keras_backend(variables: Mapping[str, str]) -> str:
    """Return the backend that Keras 3 takes: of KERAS_BACKEND, else of its file of settings, else TensorFlow."""
    if "KERAS_BACKEND" in variables:
        return variables["KERAS_BACKEND"]
    home = variables.get("KERAS_HOME") or f"{variables.get('HOME', '')}/.keras"
    try:
        settings = json.loads((Path(home) / "keras.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "tensorflow"
    named = settings.get("backend") if isinstance(settings, dict) else None
    return named if isinstance(named, str) else "tensorflow"

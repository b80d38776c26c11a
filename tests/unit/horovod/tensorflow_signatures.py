"""Played by test_tensorflow_names.py: writes the parameters of all public names, by module and name, as JSON.

In a process of its own, as no other test imports TensorFlow.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any

MODULES = (
    "tensorflow", "tensorflow.elastic", "keras", "keras.callbacks", "keras.elastic",
    "tensorflow.keras", "tensorflow.keras.callbacks", "tensorflow.keras.elastic",
)  # fmt: skip
LAZY = ("SyncBatchNormalization", "elastic")


def parameters(found: Any, none: Any, everybody: Any) -> str | None:
    """Return the parameters of a function or class as the tables write them; None for what has none."""
    if not callable(found):
        return None
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return None
    shown = []
    for each in signature.parameters.values():
        text = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "") + each.name  # type: ignore[call-overload]
        if each.default is everybody:
            text += "=<all>"
        elif each.default is none:
            text += "=<none>"
        elif each.default is not each.empty:
            text += f"={each.default!r}"
        shown.append(text)
    return ", ".join(shown)


def main() -> None:
    """Write what there is."""
    told: dict[str, dict[str, str | None]] = {}
    for module in MODULES:
        front_end = importlib.import_module(f"farandole.horovod.{module}")
        root = importlib.import_module(f"farandole.horovod.{module.partition('.')[0]}")
        names = [*vars(front_end), *LAZY]
        told[module] = {
            name: parameters(getattr(front_end, name), root.Compression.none, root.global_process_set)
            for name in names
            if hasattr(front_end, name)
        }
    hvd = importlib.import_module("farandole.horovod.tensorflow")
    keras = importlib.import_module("keras")
    tape = type(hvd.DistributedGradientTape(importlib.import_module("tensorflow").GradientTape()))
    optimizer = type(hvd.DistributedOptimizer(keras.optimizers.SGD()))
    for label, kind in (("tape", tape), ("optimizer", optimizer)):
        told[label] = {
            name: parameters(getattr(kind, name), object(), object())
            for name in dir(kind)
            if callable(getattr(kind, name))
        }
    Path(sys.argv[1]).write_text(json.dumps(told))


if __name__ == "__main__":
    main()

"""The layout of `src/farandole`: packages with their ranks, folders with their levels, and what is still to come.

This is the one table. `tests/style/test_layers.py` tests the imports against it, CONTRIBUTING shows it
(``python -m tests.style`` writes it there), and a test compares the two.
"""

from __future__ import annotations

PACKAGES = {
    "core": (0, "shared types, errors and settings; standard library only"),
    "comm": (1, "exchange tensors"),
    "plan": (1, "describe a run and predict its step"),
    "observe": (1, "record and analyse runs"),
    "launch": (1, "start processes"),
    "sync": (2, "when replicas synchronise"),
    "parallel": (2, "how one model is distributed"),
    "train": (3, "helpers of the training loop, each usable alone"),
    "bench": (4, "benchmarks"),
    "horovod": (4, "compatibility front ends"),
    "cli": (5, "parse arguments, call one function, print; no logic"),
}
"""Package -> its rank and purpose. A package imports packages of lower rank only."""

WITHOUT_TORCH = ("core", "plan", "observe", "launch")
"""Packages that import no torch, so that commands start in milliseconds."""

FOLDERS: dict[str, list[tuple[str, str]]] = {
    "comm": [
        ("device", "streams, events, pinned memory and asynchronous copies; the CPU is one device"),
        ("backend", "a `torch.distributed` process group: `init_process_group(\"farandole\")`"),
    ],
    "plan": [(".", "the planner: predicts the step of a plan with core's step model, and writes `plan.toml`")],
    "sync": [
        (".", "when replicas synchronise: every step, local SGD, DiLoCo, gossip; by comm's codec session"),
    ],
    "parallel": [
        ("zero", "sharded optimizer state, gradients and parameters"),
        ("tensor", "layers split over ranks"),
        ("pipeline", "schedules as lists of actions: validated, simulated, drawn and executed"),
        ("expert", "mixture of experts: routing and all-to-all"),
        ("context", "sequences split over ranks"),
    ],
    "train": [
        ("checkpoint", "safetensors, a manifest with hashes, one rename; any plan loads into any other"),
        ("precision", "mixed precision and loss scaling"),
        ("recompute", "activations computed again in backward"),
        ("balance", "batches in proportion to the speed of a rank"),
    ],
    "horovod": [
        ("tensorflow", "the TensorFlow front end; shares `horovod/common` and comm's named operations"),
        ("keras", "the Keras front end, on top of the one for TensorFlow"),
    ],
}  # fmt: skip
"""Package -> its folders from low to high: a folder imports only those before it. ``.``: the package's own files.

A path may have several parts (``ssh/link``) and may name one file (``report/page``, ``torch/__init__``), which is
then a level of its own. A module belongs to the longest path that fits, so a folder's folders need no own rows.
"""

TO_COME = {
    "plan", "sync", "comm/device", "comm/backend",
    "parallel/zero", "parallel/tensor", "parallel/pipeline", "parallel/expert", "parallel/context",
    "train/checkpoint", "train/precision", "train/recompute", "train/balance",
    "horovod/tensorflow", "horovod/keras",
}  # fmt: skip
"""Rows of the tables above that hold a place: nothing is there yet."""

FLAT_FOR_NOW = {"bench", "cli", "comm", "core", "horovod", "launch", "observe", "parallel", "train"}
"""Packages whose levels are not tested yet."""

LIMITS = {"files": 15, "attributes": 15, "lines": 400}
"""The most Python files of a folder, attributes of a class and lines of a file."""

FRONT_DOOR = ("__init__", "__main__", "version")
"""Files of the root: lazy names (PEP 562) and the version, which every package may import."""

ENVIRONMENT_FILE = "core/env"
"""The one module that reads environment variables."""

"""``import farandole.backend`` registers the backend "farandole" with `torch.distributed`.

::

    import farandole.backend
    torch.distributed.init_process_group("farandole")

`farandole.comm.backend` is what it is made of, and is loaded with the first group.

[Note: registered by an import alone] With an entry point torch would find the name in every process that uses it.
But with any backend registered in Python it makes a group of "cpu:gloo" without a default backend, and warns: what
is installed must not change scripts that do not use it.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch.distributed as _dist


def register() -> None:
    """Make "farandole" known as a backend for CPU tensors; may be called any number of times."""
    if _dist.is_available() and "FARANDOLE" not in _dist.Backend._plugins:
        _dist.Backend.register_backend("farandole", _make_group, extended_api=True, devices=["cpu"])


def _make_group(options: Any, backend_options: object = None) -> Any:
    return importlib.import_module("farandole.comm.backend.create").make_group(options, backend_options)


register()

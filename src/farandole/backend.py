"""``import farandole.backend`` registers the backend "farandole" with `torch.distributed`.

::

    import farandole.backend
    torch.distributed.init_process_group("farandole")

Where farandole is installed, torch imports this itself when it starts (its entry points "torch.backends"), so a
script needs no import: one changed word is enough. `farandole.comm.backend` is what it is made of, and is loaded
with the first group.
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

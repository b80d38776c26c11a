"""``import farandole.backend`` registers the backend "farandole" with `torch.distributed`.

::

    import farandole.backend
    torch.distributed.init_process_group("farandole")

`farandole.comm.backend` is what it is made of, and is loaded with the first group.

[Note: registered by an import alone] With an entry point torch would find the name in every process that uses it.
But with any backend registered in Python it makes a group of "cpu:gloo" without a default backend, and warns: what
is installed must not change scripts that do not use it.

[Note: instead of gloo] Under ``farandole run --backend farandole`` scripts that ask for gloo, or for no backend,
get this one. All groups of torch read their devices and backends from a `BackendConfig`: there "gloo" for the CPU
becomes "farandole". `get_backend` goes on to return what the script asked for, so that code which decides by it
decides as before; `get_backend_config` and the group's `name` tell what it is.

[Note: instead of NCCL] A script that asks for "nccl" cannot make a group where torch sees no GPU. Under
``--backend farandole`` it gets this one there.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
import torch.distributed as _dist

from .core.rank_variables import read_rank_variables
from .core.vocabulary.text import write_notice


def register() -> None:
    """Make "farandole" known as a backend for CPU tensors; may be called any number of times."""
    if _dist.is_available() and "FARANDOLE" not in _dist.Backend._plugins:
        _dist.Backend.register_backend("farandole", _make_group, extended_api=True, devices=["cpu"])


def replace_gloo() -> None:
    """Let groups of this process that would be gloo's for CPU tensors be Farandole's from now on.

    For `farandole run --backend farandole`. Other devices keep their backends. Rank 0 says it at the first group.
    May be called any number of times. See [Note: instead of gloo].
    """
    if not _dist.is_available() or replaces_gloo():
        return
    register()
    configure: Any = _dist.BackendConfig.__init__

    @functools.wraps(configure)
    def configure_ours(self: Any, backend: Any) -> None:
        configure(self, backend)
        known = self.device_backend_map
        is_for_gpus = known == {"cuda": "nccl"} and not _sees("cuda")  # [Note: instead of NCCL]
        if is_for_gpus or known.get("cpu") == "gloo":
            # The CPU first: torch makes nothing of what stands behind a group in Python, which makes it itself.
            others = {device: name for device, name in known.items() if device != "cpu"}
            self.device_backend_map = {"cpu": "farandole", **({} if is_for_gpus else others)}
            _report_once("NCCL's, for which torch sees no GPU" if is_for_gpus else "gloo's")

    configure_ours.replaces_gloo = True  # type: ignore[attr-defined]
    _dist.BackendConfig.__init__ = configure_ours  # type: ignore[method-assign]


def replaces_gloo() -> bool:
    """Return whether `replace_gloo` was called in this process."""
    return _dist.is_available() and hasattr(_dist.BackendConfig.__init__, "replaces_gloo")


def _sees(kind: str) -> bool:
    """Return whether torch sees a device of a kind; said here, as this module may import nothing of `comm`."""
    return bool(torch.get_device_module(kind).is_available())


@functools.cache
def _report_once(whose: str) -> None:
    place = read_rank_variables()
    if place is None or place.rank == 0:
        write_notice(f"process groups for CPU tensors are Farandole's instead of {whose} (--backend farandole)")


def _make_group(options: Any, backend_options: object = None) -> Any:
    return importlib.import_module("farandole.comm.backend.create").make_group(options, backend_options)


register()

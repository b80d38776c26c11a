"""Which devices have passed ``farandole test --device`` here: one small file each in the user's cache.

A pass counts for one host, kind and model of device, and the versions that compute there: with another driver or
another torch it is asked for again.
"""

from __future__ import annotations

import hashlib
import json
import socket
from contextlib import suppress
from pathlib import Path

import torch

from ...core.env import read_cache_directory
from ...core.vocabulary.run_files import write_private
from ...version import VERSION
from .accelerator import GPU, nccl_version
from .streams import streams_of


def versions_of(device: torch.device) -> dict[str, str]:
    """Return what computes on a device, by name; empty texts for what torch does not tell."""
    streams = streams_of(device)
    is_cuda, read_driver = device.type == GPU, getattr(torch._C, "_cuda_getDriverVersion", None)
    nccl = ".".join(map(str, nccl_version())) if is_cuda else ""
    return {
        "device": device.type if streams is None else streams.model,
        "farandole": VERSION,
        "torch": str(torch.__version__),
        "toolkit": torch.version.cuda or torch.version.hip or "",
        "driver": str(read_driver()) if is_cuda and read_driver is not None else "",
        "NCCL": nccl,
    }


def was_tested(device: torch.device) -> bool:
    """Return whether a device of this kind and model has passed on this host with these versions."""
    path = _path(device)
    with suppress(OSError):
        return path is not None and path.is_file()
    return False


def keep_tested(device: torch.device) -> Path | None:
    """Keep that `device` has passed. Returns the file; None where there is no cache, or it cannot be written."""
    path = _path(device)
    if path is None:
        return None
    try:
        for missing in [place for place in path.parents if not place.exists()][::-1]:
            missing.mkdir(mode=0o700, exist_ok=True)
        write_private(path, json.dumps({"version": 1, "host": socket.gethostname(), **versions_of(device)}))
    except OSError:
        return None
    return path


def _path(device: torch.device) -> Path | None:
    cache = read_cache_directory()
    if cache is None:
        return None
    facts = [socket.gethostname(), device.type, *versions_of(device).values()]
    key = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
    return Path(cache) / "farandole" / "devices" / f"{device.type}-{key}.json"

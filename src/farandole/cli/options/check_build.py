"""``farandole run --check-build``: what there is, in the layout that tools which call horovodrun read."""

from __future__ import annotations

import importlib.util

from ...version import VERSION


def check_build() -> str:
    """Return the page."""
    torch, gloo, nccl = _torch()
    tensorflow = importlib.util.find_spec("tensorflow") is not None
    sections = {
        "Available Frameworks": {"TensorFlow": tensorflow, "PyTorch": torch, "MXNet": False},
        "Available Controllers": {"MPI": False, "Gloo": gloo},
        "Available Tensor Operations": {"NCCL": nccl, "DDL": False, "CCL": False, "MPI": False, "Gloo": gloo},
    }
    lines = [f"Farandole v{VERSION}:"]
    for title, entries in sections.items():
        lines += ["", f"{title}:"]
        lines += [f"    [{'X' if there else ' '}] {name}" for name, there in entries.items()]
    return "\n".join(lines)


def _torch() -> tuple[bool, bool, bool]:
    """Return whether torch is there, and its gloo and NCCL backends."""
    if importlib.util.find_spec("torch") is None:
        return False, False, False
    import torch.distributed as dist

    if not dist.is_available():
        return True, False, False
    return True, dist.is_gloo_available(), dist.is_nccl_available()

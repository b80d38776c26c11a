"""For tests that emulate hosts: they skip, with the reason, where this machine allows no namespaces."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest


def why_impossible() -> str:
    """Return what keeps this user from emulating hosts here; nothing when they can."""
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
    missing = [tool for tool in ("ip", "tc", "nsenter", "unshare") if shutil.which(tool, path=path) is None]
    if missing:
        return f"needs {', '.join(missing)} (apt-get install iproute2 util-linux)"
    root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    tried = subprocess.run(
        ["unshare", *root, "--net", "--uts", "--mount", "ip", "link", "add", "type", "veth"],
        capture_output=True, text=True, check=False, env={**os.environ, "PATH": path},
    )  # fmt: skip
    return "" if tried.returncode == 0 else f"no namespaces here: {tried.stderr.strip()}"


@pytest.fixture(scope="session", autouse=True)
def _namespaces_are_possible() -> None:
    if reason := why_impossible():
        pytest.skip(reason)

"""On systems that are no Linux the import says so in one line."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_systems_are_refused_at_import(platform: str) -> None:
    code = f"import sys; sys.platform = {platform!r}; import farandole"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: farandole runs on Linux only, and this is {platform}: ")
    assert "WSL2" in last

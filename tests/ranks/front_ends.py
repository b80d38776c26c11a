"""Plays a script of trainings twice: on one process with the package's own means, and on two ranks with ours."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests import warm

ROOT = Path(__file__).resolve().parents[2]


def play_both(script: str, folder: Path, *settings: str) -> tuple[dict[str, Any], dict[str, Any], Path]:
    """Return the results of "stock" on one process, of "ours" on two ranks, and the run directory of these.

    `settings`: of the plan of these, ``key=value``. What both printed is the file ``said`` in `folder`.
    """
    plan = [word for each in settings for word in ("--set", each)]
    run = ["-m", "farandole", "run", "-np", "2", "--run-dir", str(folder / "run")]
    launcher = [*run, *plan, "--", sys.executable]
    with (folder / "said").open("w+") as said:
        jobs = [
            warm.start(
                ROOT, *words, "-m", f"tests.ranks.{script}", kind, str(folder / f"{kind}.json"),
                out=said, err=said, environment={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            )
            for kind, words in (("ours", launcher), ("stock", []))
        ]  # fmt: skip
        try:
            for job in jobs:
                assert job.wait(150) == 0, (folder / "said").read_text()
        finally:
            for job in jobs:
                job.kill()
                job.wait()
    stock, ours = (json.loads((folder / f"{kind}.json").read_text()) for kind in ("stock", "ours"))
    return stock, ours, folder / "run"

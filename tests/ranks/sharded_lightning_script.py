"""A fit whose checkpoint is saved: ``python -m tests.ranks.sharded_lightning_script stock|ours FILE``."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import farandole as fd
from tests.ranks.lightning_script import Job


def main(kind: str, file: str) -> None:
    warnings.filterwarnings("ignore")
    job = Job(kind)
    job.fit("plain", 24).save_checkpoint(Path(file).with_suffix(".ckpt"))
    if kind == "stock" or fd.world().rank == 0:
        Path(file).write_text(json.dumps(job.results), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

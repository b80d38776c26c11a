"""``farandole test --device``: runs the checks of one process, and those of the engine on all devices, as jobs.

A device that ends its process ends a job, not the command. Imports no torch.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ..core.vocabulary.errors import ConfigError
from .cluster_test import Proof
from .launch_ranks import FollowedJob, Say, account_of, follow_job

_MOST_SECONDS = 300.0
"""For one job, the start included."""
_MOST_RANKS = 8
_CPU = "cpu"
SHARED_KINDS = (_CPU, "cuda")
"""Whose backend takes several ranks of one device: NCCL by sockets, where they name hosts of their own."""
_RANKS_OF_ONE = 2
_NO_ENGINE = "one device of this kind takes one rank"
_IS_CPU = "cpu: it is what other devices are compared with"


def prove_device(kind: str, *, say: Say) -> Proof:
    """Check the devices of `kind` on this machine: against the CPU, one alone, then the engine on all of them.

    Raises `ConfigError` for a kind that is not there.
    """
    begin = time.monotonic()
    alone = _run(kind, 1, (), say)
    if alone.result is not None and "refused" in alone.result:
        raise ConfigError(alone.result["refused"], remedy=alone.result["remedy"])
    if alone.code or alone.result is None:
        return _failed(alone, [], begin)
    checks: list[dict[str, Any]] = alone.result["checks"]
    devices = int(alone.result["devices"])
    ranks = _RANKS_OF_ONE if kind in SHARED_KINDS and devices == 1 else min(devices, _MOST_RANKS)
    if ranks == 1 or kind == _CPU:
        answer = _IS_CPU if kind == _CPU else _NO_ENGINE
        checks.append({"name": "engine on ranks", "passed": None, "answer": answer, "remedy": ""})
        return Proof(checks, 1, 1, seconds=time.monotonic() - begin)
    say(f"the engine on {ranks} ranks")
    passed = all(check["passed"] is not False for check in checks)
    together = _run(kind, ranks, ("--keep",) if passed else (), say)
    if together.code or together.result is None:
        return _failed(together, checks, begin)
    return Proof([*checks, *together.result["checks"]], ranks, 1, seconds=time.monotonic() - begin)


def _run(kind: str, ranks: int, more: tuple[str, ...], say: Say) -> FollowedJob:
    job = [sys.executable, "-m", "farandole.bench.device_test_worker", "--kind", kind, *more]
    with tempfile.TemporaryDirectory(prefix="farandole-test-") as directory:
        run = ["run", "-np", str(ranks), "--json", "--run-dir", str(Path(directory) / "run"), "--", *job]
        end = time.monotonic() + _MOST_SECONDS
        return follow_job([sys.executable, "-m", "farandole", *run], say, end)


def _failed(job: FollowedJob, checks: list[dict[str, Any]], begin: float) -> Proof:
    return Proof(checks, failure=account_of(job.code, job.output), seconds=time.monotonic() - begin)

"""``farandole test``: a real job over all hosts that proves the set-up, and one word for it.

Runs through the ordinary commands, as a user would run them. Imports no torch.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.vocabulary.errors import ConfigError
from ..core.vocabulary.units import format_bits_per_second
from .launch_ranks import FollowedJob, Say, account_of, follow_job, refusal

LEAST_SHARE = 0.5
"""Share of the weakest link's rate; below it something is wrong with how ranks use the network."""
SHARED_CORES_BITS_PER_SECOND = 1.5e9
"""Above it hosts that are one machine wait for the cores they share, not for their links."""
START_SECONDS = 60.0


@dataclass(frozen=True)
class Proof:
    """What the job found. `failure`: what the launcher said of a job that did not end well."""

    checks: list[dict[str, Any]]
    ranks: int = 0
    hosts: int = 0
    bits_per_second: float | None = None
    failure: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether the job ended well and no check failed."""
        return (
            not self.failure and bool(self.checks) and all(check["passed"] is not False for check in self.checks)
        )

    def to_mapping(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {"version": 1, "passed": self.passed, **vars(self), "failure": list(self.failure)}


def prove(words: Sequence[str], *, seconds: float, expected: float | None, shared_cores: bool, say: Say) -> Proof:
    """Run the job on the hosts that `words`, options of ``farandole run``, name; takes about `seconds`.

    `expected` is the weakest link's rate. `shared_cores`: the hosts are one machine. Raises `ConfigError` when the
    job is refused for its options.
    """
    begin = time.monotonic()
    job = [sys.executable, "-m", "farandole.bench.cluster_test_worker", "--seconds", f"{seconds:g}"]
    if expected is not None:
        job += ["--bits-per-second", f"{expected:g}"]
    with tempfile.TemporaryDirectory(prefix="farandole-test-") as directory:
        run = ["run", *words, "--json", "--run-dir", str(Path(directory) / "run"), "--", *job]
        code, result, output = follow_job(
            [sys.executable, "-m", "farandole", *run], say, begin + seconds + START_SECONDS
        )
    passed = time.monotonic() - begin
    if code == ConfigError.exit_code:
        raise ConfigError(refusal(output))
    if code or result is None:
        return Proof([], failure=account_of(code, output), seconds=passed)
    rate = result["bits_per_second"]
    checks = [*result["checks"], check_rate(rate, expected, shared_cores=shared_cores)]
    return Proof(checks, result["ranks"], result["hosts"], rate, seconds=passed)


def check_rate(rate: float | None, expected: float | None, *, shared_cores: bool) -> dict[str, Any]:
    """Judge the rate of an all-reduce between hosts by that of the weakest link."""
    remedy = ""
    passed: bool | None = None
    if rate is None:
        answer = "the ranks are on one host"
    elif expected is None or expected <= 0:
        answer = f"{format_bits_per_second(rate)} in an all-reduce; no link was measured to compare it with"
    else:
        share = rate / expected
        answer = (
            f"{format_bits_per_second(rate)} from each host in an all-reduce, {share:.0%} of the weakest link's "
            f"{format_bits_per_second(expected)}"
        )
        if shared_cores and expected > SHARED_CORES_BITS_PER_SECOND:
            answer += "; not judged: these hosts share the cores of one machine"
        else:
            passed = share >= LEAST_SHARE
    if passed is False:
        remedy = "farandole doctor; then look for other users of the network and of the CPUs"
    return {"name": "rate between hosts", "passed": passed, "answer": answer, "remedy": remedy}


# ``farandole test --device``: runs the checks of one process, and those of the engine on all devices, as jobs.
#
# A device that ends its process ends a job, not the command. Imports no torch.


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

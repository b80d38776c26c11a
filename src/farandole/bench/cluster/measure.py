"""``farandole measure``: a job over all hosts that measures what the planner needs to know. Imports no torch.

It runs through the ordinary commands: here, over ssh, or on the hosts of ``farandole emulate``.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ...core.cluster.cluster import Cluster
from ...core.cluster.decode import FieldPath, decode
from ...core.cluster.limits import check_cluster
from ...core.vocabulary.errors import ConfigError, FarandoleError
from ..measure.follow_job import account_of, follow_job, refusal
from ..measure.launch_ranks import remove_unless_failed

DEFAULT_SECONDS, MOST_SECONDS = 90.0, 3600.0
_START_SECONDS = 90.0
_MOST_SHARE = 4.0
"""A job that takes so many times its time hangs."""


def measure_cluster(
    words: Sequence[str], *, seconds: float, name: str, disk: str, say: Callable[[str], None]
) -> Cluster:
    """Run the job on the hosts that `words`, options of ``farandole run``, name; its phases take about `seconds`.

    Args:
        words: options that place the job, such as ``["-np", "2"]``.
        seconds: for all phases together; the start of the ranks, and their end, come on top.
        name: of the cluster.
        disk: folder whose disk is measured, on the hosts that have it.
        say: is given lines of progress.

    Raises:
        ConfigError: the job is refused for its options, or the hosts have different numbers of ranks.
        FarandoleError: a rank failed; the message is the launcher's, which names the logs.
    """
    job = [sys.executable, "-m", "farandole.bench.cluster.worker", "--seconds", f"{seconds:g}"]
    job += ["--name", name, "--disk", disk]
    directory = Path(tempfile.mkdtemp(prefix="farandole-measure-"))
    code = 0
    try:
        run = ["run", *words, "--json", "--run-dir", str(directory / "run"), "--", *job]
        end = time.monotonic() + _MOST_SHARE * seconds + _START_SECONDS
        code, result, output = follow_job([sys.executable, "-m", "farandole", *run], say, end)
    finally:
        remove_unless_failed(directory, code)
    if code == ConfigError.exit_code:
        raise ConfigError(refusal(output))
    if code or result is None:
        raise FarandoleError(
            "the measurement failed: " + "\n".join(account_of(code, output)),
            remedy="check the hosts: farandole test",
        )
    cluster = decode(Cluster, result, FieldPath("measured"))
    check_cluster(cluster, "measured")
    return cluster

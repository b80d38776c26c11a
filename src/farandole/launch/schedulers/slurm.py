"""``--on slurm``: a batch script for sbatch or, inside an allocation, srun.

One task a node: srun starts ``farandole run`` on each, which starts the node's ranks, watches them and names
the first that fails. The meeting point needs no line in the script (see `core.slurm`).
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

from ...core.env import own_environment
from ...core.slurm import slurm_allocation_nodes
from ...core.vocabulary.errors import ConfigError, LaunchError
from .submission import SubmitSpec, need_command, run_child

FORMAT = "sbatch"
_PROGRAM = (sys.executable, "-m", "farandole")
_SUBMIT_SECONDS = 60.0
_TIME = re.compile(r"(?:(\d+)-)?(\d+(?::\d+){0,2})")
_OWN = {"qos": "qos", "account": "account", "time": "time", "priority": "priority", "partition": "partition"}


def render(spec: SubmitSpec) -> str:
    """Return the batch script."""
    nodes, per_node = spec.shape()
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={re.sub(r'[^A-Za-z0-9_.-]+', '-', spec.name) or 'run'}",
        f"#SBATCH --nodes={nodes}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --cpus-per-task={per_node * (spec.cpus_per_rank or 1)}",
    ]
    if spec.gpus_per_node is not None:
        lines.append(f"#SBATCH --gpus-per-node={spec.gpus_per_node}")
    lines += [f"#SBATCH --{option}={value}" for option, value in _typed(spec).items()]
    lines.append("exec " + shlex.join(_srun(spec, nodes, per_node)))
    return "\n".join(lines) + "\n"


def start(spec: SubmitSpec) -> int:
    """Hand the batch script in and say its number; inside an allocation run srun and return its exit code."""
    there_are = slurm_allocation_nodes(own_environment())
    if there_are is None:
        return _submit(render(spec))
    for option in _typed(spec):
        raise ConfigError(
            f"--{option}: this is inside an allocation of Slurm, which has that already", remedy="leave it out"
        )
    nodes, per_node = spec.shape(there_are)
    if nodes > there_are:
        raise ConfigError(f"--nodes {nodes}: this allocation of Slurm has {there_are}")
    need_command("srun", "is Slurm installed here?")
    return run_child(_srun(spec, nodes, per_node))


def _typed(spec: SubmitSpec) -> dict[str, str]:
    """Return sbatch's options for what was typed: a queue is a partition here."""
    spec.only("slurm", "queue", "warn-before", *_OWN)
    found = {theirs: spec.word(ours) for ours, theirs in _OWN.items()}
    queue = spec.word("queue")
    if queue is not None and found["partition"] not in (None, queue):
        raise ConfigError(
            f"--queue {queue} and --partition {found['partition']}: a queue is a partition in Slurm",
            remedy="drop one of them",
        )
    found["partition"] = found["partition"] or queue
    limit = _limit_seconds(found["time"])
    priority = found["priority"]
    if not (priority is None or priority.isdecimal() or priority.upper() == "TOP"):
        raise ConfigError(f"--priority {priority}: expected a number from 0, or TOP")
    seconds = spec.word("warn-before")
    if seconds is not None and limit is not None and seconds.isdecimal() and int(seconds) >= limit:
        raise ConfigError(
            f"--warn-before {seconds}: the job ends after {limit} s (--time {found['time']})",
            remedy="give fewer seconds than the limit has",
        )
    if seconds is not None:
        if not (seconds.isdecimal() and 0 < int(seconds) <= 65535):
            raise ConfigError(f"--warn-before {seconds}: expected 1 to 65535 seconds")
        found["signal"] = f"USR1@{seconds}"
    return {option: value for option, value in found.items() if value is not None}


def _limit_seconds(time: str | None) -> int | None:
    """Return the seconds of a time limit as sbatch reads it; None where there is none."""
    if time is None or time.upper() in ("0", "-1", "UNLIMITED", "INFINITE"):
        return None
    found = _TIME.fullmatch(time)
    if found is None:
        raise ConfigError(f"--time {time}: expected minutes, hours:minutes:seconds or days-hours, such as 2:00:00")
    days, words = found[1], [int(word) for word in found[2].split(":")]
    # "5" is minutes, "5:30" minutes and seconds; after days hours come first.
    hours, minutes, seconds = [*words, 0, 0][:3] if days or len(words) == 3 else [0, *words, 0][:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _srun(spec: SubmitSpec, nodes: int, per_node: int) -> list[str]:
    # srun does not take the CPUs of a task from the batch script (since Slurm 22.05).
    return [
        "srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1",
        f"--cpus-per-task={per_node * (spec.cpus_per_rank or 1)}", "--kill-on-bad-exit=1",
        *spec.inner(nodes * per_node, _PROGRAM),
    ]  # fmt: skip


def _submit(script: str) -> int:
    need_command("sbatch", "is Slurm installed here? --dry-run prints the script")
    try:
        done = subprocess.run(
            ["sbatch", "--parsable"], input=script, text=True, capture_output=True, timeout=_SUBMIT_SECONDS,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"sbatch did not answer within {_SUBMIT_SECONDS:g} s", remedy="does sinfo answer?"
        ) from None
    if done.returncode:
        raise LaunchError(f"sbatch refused the job: {done.stderr.strip() or done.returncode}")
    sys.stdout.write(done.stdout.partition(";")[0].strip() + "\n")
    return 0

"""Slurm: srun starts ranks, or one command a node; the rendezvous follows from what it tells all tasks alike.

Rank 0's host is the first of the step's nodes, and the port follows from the numbers of job and step, so that two
jobs on a host do not meet.

>>> expand_node_list("node[1-3,07],gpu5")
['node1', 'node2', 'node3', 'node07', 'gpu5']
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import product

from .env import read_number
from .launcher_env import FIRST_PORT, LOOPBACK, PORTS, LauncherEnv, NodeInfo, RankNames, read_first, read_whole
from .vocabulary.errors import ConfigError

# Lists of nodes as Slurm writes them, expanded: ``node[1-3,07],gpu5``. Pure parsing, no command is asked.

MOST_NODES = 65536
_PIECE = re.compile(r"([A-Za-z0-9_.:-]*)(?:\[([0-9,-]+)\])?")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


def expand_node_list(text: str, *, where: str = "the list of nodes") -> list[str]:
    """Return the names in `text`, in their order.

    Numbers keep their leading zeros (``[08-10]`` is 08, 09, 10); a name may hold several brackets. Raises
    `ConfigError` naming `where` for what is no list of nodes, and for more than 65,536 names.
    """
    names: list[str] = []
    for item in _split(text, where):
        names += _expand_one(item, where, MOST_NODES - len(names))
    return names


def _split(text: str, where: str) -> list[str]:
    """Split at the commas outside brackets."""
    items, depth, begin = [], 0, 0
    for position, letter in enumerate(text):
        if letter == "[":
            depth += 1
        elif letter == "]":
            depth -= 1
        elif letter == "," and depth == 0:
            items.append(text[begin:position])
            begin = position + 1
        if depth not in (0, 1):
            break
    items.append(text[begin:])
    if depth != 0 or not all(items):
        raise _refuse(text, where)
    return items


def _expand_one(item: str, where: str, room: int) -> list[str]:
    parts: list[list[str]] = []
    position = 0
    while position < len(item):
        found = _PIECE.match(item, position)
        if found is None or found.end() == position:
            raise _refuse(item, where)
        position = found.end()
        parts.append([found[1]])
        if found[2] is not None:
            parts.append(_numbers(found[2], item, where, room))
    count = 1
    for part in parts:
        count *= len(part)
    if count > room:
        raise _too_many(where)
    return ["".join(words) for words in product(*parts)]


def _numbers(text: str, item: str, where: str, room: int) -> list[str]:
    found: list[str] = []
    for piece in text.split(","):
        match = _RANGE.fullmatch(piece)
        if match is None:
            raise _refuse(item, where)
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise _refuse(item, where)
        if int(last) - int(first) >= room - len(found):
            raise _too_many(where)
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found


def _refuse(text: str, where: str) -> ConfigError:
    return ConfigError(f"{where}: {text!r} is no list of nodes", remedy="expected for example node[1-3,07],gpu5")


def _too_many(where: str) -> ConfigError:
    return ConfigError(f"{where} names more than {MOST_NODES} nodes")


_STEPS = 31
"""Steps of a Slurm job before its ports meet those of the next job."""
_FIRST_SPECIAL_STEP = 0xFFFFFFFA
"""The steps of a batch script, of a shell of salloc, and others that hold no tasks of srun."""


class _Slurm(LauncherEnv):
    def started_rank(self, environ: Mapping[str, str]) -> bool:
        """Only in a step: a batch script has SLURM_PROCID=0 too."""
        return in_slurm_step(environ) and super().started_rank(environ)

    def ranks_here(self, environ: Mapping[str, str], size: int, node_count: int) -> int:
        """Return this node's number of tasks."""
        assert self.ranks is not None, "Slurm starts ranks"
        tasks = slurm_tasks_per_node(environ)
        node = read_first(environ, self.ranks.node_rank, 0, 0)
        if node < len(tasks) and sum(tasks) == size:
            return max(1, tasks[node])
        return super().ranks_here(environ, size, node_count)

    def rendezvous(self, environ: Mapping[str, str], *, one_host: bool) -> tuple[str | None, int | None]:
        """Return the first node of the step, and a port of the step."""
        return slurm_address(environ), slurm_port(environ)

    def started_node(self, environ: Mapping[str, str]) -> bool:
        """In a step; `read_node` tells its one task a node from ranks."""
        return in_slurm_step(environ) and "SLURM_PROCID" in environ

    def read_node(self, environ: Mapping[str, str]) -> NodeInfo | None:
        """Return the place of the one task of a node; a step of several tasks a node has ranks, not nodes."""
        tasks = read_whole(environ.get("SLURM_STEP_NUM_TASKS", "1"), "SLURM_STEP_NUM_TASKS", 1)
        nodes = read_whole(environ.get("SLURM_STEP_NUM_NODES", "1"), "SLURM_STEP_NUM_NODES", 1)
        if tasks == 1:
            return None
        if tasks != nodes:
            raise ConfigError(
                f"srun started {tasks} tasks on {nodes} node(s), and farandole run starts a node's ranks itself",
                remedy="start it with srun --ntasks-per-node=1, "
                "or let srun start the script: srun python train.py",
            )
        address = environ.get("MASTER_ADDR") or slurm_address(environ)
        port_text = environ.get("MASTER_PORT", "")
        port = read_whole(port_text, "MASTER_PORT", 1) if port_text else slurm_port(environ)
        if address is None or port is None:
            raise ConfigError(
                "Slurm names neither the job nor its nodes (SLURM_JOB_ID, SLURM_STEP_NODELIST)",
                remedy="set MASTER_ADDR and MASTER_PORT",
            )
        rank = read_whole(environ["SLURM_PROCID"], "SLURM_PROCID", 0)
        gpus = environ.get("SLURM_GPUS_ON_NODE", "")
        slots = int(gpus) if gpus.isdecimal() and int(gpus) > 0 else None
        return NodeInfo(self.name, rank, nodes, address, port, slots, "".join(slurm_nodes(environ)[1:2]))


SLURM = _Slurm(
    "Slurm",
    RankNames(
        rank=("SLURM_PROCID",),
        size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank=("SLURM_LOCALID",),
        node_rank=("SLURM_NODEID",),
        node_count=("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES"),
    ),
    command="srun",
    block_remedy="start with srun --distribution=block",
)


def in_slurm_step(environ: Mapping[str, str]) -> bool:
    """Return whether this process is a task that srun started: a batch script or a shell of salloc is none."""
    step = environ.get("SLURM_STEP_ID", "")
    return bool(step) and not (step.isdecimal() and int(step) >= _FIRST_SPECIAL_STEP)


def slurm_allocation_nodes(environ: Mapping[str, str]) -> int | None:
    """Return how many nodes the allocation has that this process could use; None outside one."""
    if not environ.get("SLURM_JOB_ID") or in_slurm_step(environ):
        return None
    return read_number(environ, "SLURM_JOB_NUM_NODES", 1, 1)


def slurm_nodes(environ: Mapping[str, str]) -> list[str]:
    """Return the nodes of the step, or of the job; an empty list outside both."""
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if environ.get(name):
            return expand_node_list(environ[name], where=name)
    return []


def slurm_address(environ: Mapping[str, str]) -> str | None:
    """Return the first node of the step: task 0 is there unless the distribution is arbitrary."""
    nodes = slurm_nodes(environ)
    if not nodes:
        return None
    return LOOPBACK if len(nodes) == 1 else nodes[0]


def slurm_port(environ: Mapping[str, str]) -> int | None:
    """Return a port for the step: neighbouring jobs and the steps of a job get different ones."""
    job, step = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "0")
    if not (job.isdecimal() and step.isdecimal()):
        return None
    return FIRST_PORT + (int(job) * _STEPS + int(step)) % PORTS


def slurm_tasks_per_node(environ: Mapping[str, str]) -> list[int]:
    """Return how many tasks of the step each node has (``2(x3),1``); an empty list when it is not said."""
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        text = environ.get(name, "")
        if not text:
            continue
        counts: list[int] = []
        for piece in text.split(","):
            found = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", piece.strip())
            if found is None:
                raise ConfigError(f"{name}={text!r}: expected tasks by node such as 2(x3),1")
            counts += [int(found[1])] * int(found[2] or 1)
        return counts
    return []

"""What would be started, with nothing made: the plan, and each rank's command and environment."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field, replace
from typing import Any

from ...core.environ.env import inherited_environment
from ...core.vocabulary.spec import Plan
from ..job.contract import rank_environment
from .placing import PlacedJob, host_commands, variables_there
from .start import make_job, planned_directory

_FOUND = "(found when it starts)"


@dataclass(frozen=True)
class DryRun:
    """A placed job as `start_job` would start it."""

    placed: PlacedJob
    ranks: list[dict[str, Any]]
    """The number, the cores and the variables of each rank."""
    connections: dict[str, list[str]] = field(default_factory=dict)
    """By host over ssh, the command that connects us to it."""
    variables_sent: tuple[str, ...] = ()

    def to_mapping(self) -> dict[str, Any]:
        """Return everything as plain values."""
        request = self.placed.request
        return {
            "command": request.command, "ranks": self.ranks, "plan": (request.plan or Plan()).to_mapping(),
            "warnings": self.placed.warnings, "connections": self.connections,
            "variables_sent": list(self.variables_sent),
        }  # fmt: skip

    def to_text(self) -> str:
        """Return lines that a shell could run, and comments."""
        request, places = self.placed.request, self.placed.places
        lines = []
        for name, command in self.connections.items():
            count = sum(place.host_name == name for place in places)
            lines.append(f"# host {name}, {count} rank(s): {shlex.join(command)}")
        if self.connections:
            sent = ", ".join(self.variables_sent) or "none"
            lines.append(f"# variables of this environment that hosts are sent: {sent}")
        lines += [f"# warning: {warning}" for warning in self.placed.warnings]
        lines.append("# plan: " + (", ".join((request.plan or Plan()).to_toml().split("\n")[:-1])))
        for rank in self.ranks:
            lines.append(f"# rank {rank['rank']}, cores {','.join(map(str, rank['cores'])) or 'any'}")
            words = [f"{name}={shlex.quote(value)}" for name, value in rank["environment"].items()]
            lines.append("env " + " \\\n    ".join([*words, shlex.join(request.command)]))
        return "\n".join(lines)


def dry_run(placed: PlacedJob) -> DryRun:
    """Return what `start_job` would start. What is found while a job starts is named as such."""
    job = replace(make_job(placed, planned_directory(placed), placed.port or 0), secret="")
    unknown = {} if placed.port is not None else dict.fromkeys(("FARANDOLE_PORT", "MASTER_PORT"), "(a free port)")
    connections, sent = {}, {}
    if placed.over_ssh:
        connections = {name: command for name, _, command in host_commands(placed)}
        sent = variables_there(placed.request)
        unknown |= dict.fromkeys(("FARANDOLE_ADDRESS", "MASTER_ADDR"), _FOUND)
        unknown |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), _FOUND)
        names = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
        unknown |= dict.fromkeys(names, "(a rank's share of its host's cores)")
    ranks = []
    for place in placed.places:
        if placed.over_ssh:
            place = replace(place, interface=_FOUND)  # noqa: PLW2901 - as the host's agent does
        values = rank_environment(place, job, sent if placed.over_ssh else inherited_environment())
        values |= {name: text for name, text in unknown.items() if name in values and name not in job.environment}
        ranks.append({"rank": place.rank, "cores": list(place.cores), "environment": values})
    return DryRun(placed, ranks, connections, tuple(sorted(sent)))

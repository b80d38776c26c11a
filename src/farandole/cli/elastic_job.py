"""Starting a job whose hosts come and go: from the options of the line to `launch.elastic`."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..core.env import inherited_environment
from ..core.errors import ConfigError
from ..launch.backend import LOOPBACK, backend_for
from ..launch.cores import available_cores
from ..launch.elastic.driver import ElasticJob, run_elastic
from ..launch.elastic.options import ElasticOptions
from ..launch.host_list import HostSlots
from ..launch.hosts import Host, read_hosts
from ..launch.local import Outcome
from ..launch.output import Output
from .job import Request, account_for, make_job, open_run


def elastic_request(request: Request, options: ElasticOptions, size: int | None) -> Request:
    """Return `request` for an elastic job: our own address, a share of the cores a rank."""
    here = socket.gethostname()
    address = next((host.address for host in read_hosts() if host.name == here), LOOPBACK)
    ranks = options.max_ranks or size or options.min_ranks
    return replace(
        request,
        threads=max(1, len(available_cores()) // ranks),
        address=address,
        environment={**request.environment, "HOROVOD_ELASTIC": "1"},
    )


def start_elastic(
    request: Request, options: ElasticOptions, hosts: Sequence[HostSlots], *, size: int | None, label: str,
    run_dir: str | None, json: bool = False, status: Any = None,
) -> tuple[Outcome, Path]:  # fmt: skip
    """Start an elastic job on `hosts`, or on those its script finds; return how it ended and its run directory."""
    if not hosts and options.discovery_script is None:
        hosts = [HostSlots(host.name, host.slots) for host in read_hosts()]
        if not hosts and size is None and options.max_ranks is None:
            raise ConfigError(
                "an elastic job needs hosts, or -np for this machine alone",
                remedy="add --host-discovery-script, --hostfile or -H a:2,b:2",
            )
        hosts = hosts or [HostSlots("localhost", size or options.max_ranks or options.min_ranks)]
    emulated = read_hosts()

    def locate(name: str) -> Host | None:
        backend = backend_for([HostSlots(name, 1)], emulated)
        if backend.over_ssh:
            raise ConfigError(
                f"host {name} is not this machine, and elastic jobs are not started over ssh yet",
                remedy="leave --min-np and --host-discovery-script out, or name this machine: localhost:2",
            )
        return backend.host(name)

    for host in hosts:
        locate(host.name)  # a host that cannot be reached is refused now, not at its first start
    directory = open_run(request, label=label, run_dir=run_dir, size=options.min_ranks, extra={"elastic": True})
    asked = ElasticJob(
        command=request.command,
        options=options,
        job=make_job(request, directory, 0),
        environment=inherited_environment(),
        hosts={host.name: host.slots for host in hosts},
        locate=locate,
    )
    output = Output(directory, 0, out=sys.stderr.buffer if json else None, style=request.style)
    try:
        outcome = run_elastic(
            asked, output, status=(lambda: None) if status is None else lambda: status(directory)
        )
    finally:
        output.close()
    account_for(outcome, directory)
    return outcome, directory

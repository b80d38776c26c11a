"""Starting the ranks of a job on Ray."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ...core.vocabulary.errors import ConfigError
from ..schedulers.ray import RayActors, RayJob, RayRequest, cluster
from ..schedulers.submission import SubmitSpec
from ..supervise.job_loop import Outcome
from .placing import PlacedJob, variables_to_send
from .request import JobRequest
from .start import make_job, open_run, run_recorded


def start_on_ray(request: JobRequest, spec: SubmitSpec) -> tuple[Outcome, Path]:
    """Run the ranks of `request` on Ray; return how it ended and its run directory."""
    variables = variables_to_send(request)
    if spec.options:
        raise ConfigError(f"--{next(iter(spec.options))} means nothing to --on ray", remedy="leave it out")
    nodes, per_node = spec.shape()
    threads = spec.cpus_per_rank or 1
    needs = RayRequest(nodes * per_node, threads, 0 if spec.gpus_per_node is None else 1)
    with cluster(needs) as ray:
        actors = RayActors(ray, needs)
        try:
            address, port = actors.place()
            directory = open_run(replace(request, label=spec.name), size=needs.size)
            job = make_job(PlacedJob(request, (), threads=threads, address=address), directory, port)
            return run_recorded(
                request, directory, needs.size,
                lambda output: RayJob(actors, request.command, job, output, variables).run(),
            )  # fmt: skip
        finally:
            actors.close()

"""The smallest size of a request as a job whose every rank is simulated, to be written as a run."""

from __future__ import annotations

from dataclasses import replace

from ...core.cluster.cluster import Cluster
from ..model.profile import ModelProfile
from .request import ScaleRequest
from .scaling import Predictor, candidate_of, coming_seconds, growing, ranks_per_host, sized_cluster, slow_ranks_of
from .simulated_run import SimulatedJob
from .step_roles import step_seconds
from .work_of import work_of


def smallest_job(
    profile: ModelProfile, cluster: Cluster, request: ScaleRequest, predict: Predictor, *, steps: int
) -> SimulatedJob:
    """Return the job of the smallest size, with `steps` steps. Raises as `simulate_scale` does."""
    ranks = request.ranks[0]
    _, plan = growing(request.plan)
    sized = sized_cluster(cluster, ranks, request)
    candidate = candidate_of(plan, ranks, request, "strong")
    placed = work_of(profile, sized, candidate, predict(profile, sized, candidate))
    slow = slow_ranks_of(sized, request, ranks)
    late = coming_seconds(profile, request, placed.work, candidate) - step_seconds(placed.work, slow)
    return SimulatedJob(
        replace(placed.work, data_seconds=placed.work.data_seconds + max(0.0, late)),
        ranks_per_host(sized, ranks),
        steps=steps,
        noise=request.noise,
        slow_ranks=slow,
        slow_links=request.slow_links,
        codec=plan.codec,
        cuts=placed.cuts,
    )

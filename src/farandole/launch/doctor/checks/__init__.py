"""Every check: facts in, findings out. Pure functions, none of which may raise whatever the facts are."""

from __future__ import annotations

from collections.abc import Callable

from ..facts import SEVERITIES, ClusterFacts, ClusterFinding, Findings
from .links import check_connections, check_rates
from .machine import check_clocks, check_cores, check_gpus, check_limits, check_memory
from .names import check_host_names, check_own_names, check_peer_names
from .network import check_congestion_control, check_link_speeds, check_mtu, check_routes, check_socket_variables
from .versions import check_python, check_reached, check_torch, check_working_directory

Check = Callable[[ClusterFacts], Findings]

CHECKS: tuple[Check, ...] = (
    check_reached,
    check_torch,
    check_python,
    check_working_directory,
    check_routes,
    check_socket_variables,
    check_connections,
    check_mtu,
    check_link_speeds,
    check_rates,
    check_congestion_control,
    check_peer_names,
    check_own_names,
    check_host_names,
    check_clocks,
    check_gpus,
    check_memory,
    check_limits,
    check_cores,
)


def judge(facts: ClusterFacts) -> list[ClusterFinding]:
    """Return what all checks find, the worst first."""
    found = [finding for check in CHECKS for finding in check(facts)]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))

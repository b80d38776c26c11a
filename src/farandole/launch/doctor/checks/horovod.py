"""Signs that Horovod is to be built, where nothing has to be built."""

from __future__ import annotations

from ..facts.facts import ClusterFacts
from ..facts.finding import ClusterFinding, Findings


def check_horovod(facts: ClusterFacts) -> Findings:
    """No variable of Horovod's build is set, and no script imports a Horovod that is not installed."""
    for host in facts.hosts:
        found = host.software
        signs = []
        if found.horovod_build:
            signs.append(f"{found.horovod_build} is set on {host.name}")
        if found.horovod_script and not found.horovod:
            signs.append(f"{found.horovod_script} on {host.name} imports horovod, which is not installed")
        if signs:
            yield ClusterFinding(
                ", and ".join(signs),
                "no Horovod has to be built: farandole brings horovod.torch, horovod.tensorflow and horovod.keras "
                "and compiles nothing",
                f"farandole run --as-horovod -np 2 -- python {found.horovod_script or 'train.py'}    "
                "(instead of pip install horovod)",
                "note",
                host.name,
            )

"""Each host for itself: clock, memory, limits, cores and GPUs."""

from __future__ import annotations

from collections import Counter

from ....core.vocabulary.units import format_bytes, format_seconds
from ..facts import ClusterFacts, ClusterFinding, Findings, HostFacts

FAR_SECONDS, OFF_SECONDS = 60.0, 0.5
LITTLE_MEMORY_BYTES, TOO_LITTLE_MEMORY_BYTES = 1_000_000_000, 250_000_000
SMALL_SHARED_BYTES, FULL_SHARED_BYTES = 256 * 2**20, 64 * 2**20
FEW_FILES, TOO_FEW_FILES = 1024, 256
LITTLE_LOCKED_BYTES = 2**30


def check_clocks(facts: ClusterFacts) -> Findings:
    """Clocks agree. Jobs do not need it (only monotonic time counts), but logs and certificates do."""
    for host in facts.hosts:
        offset = host.clock_offset_seconds
        sure = None if offset is None else abs(offset) - (host.clock_error_seconds or 0.0)
        if offset is None or sure is None or sure < OFF_SECONDS:
            continue
        yield ClusterFinding(
            f"the clock of {host.name} is {format_seconds(abs(offset))} {'ahead' if offset > 0 else 'behind'}",
            "times in logs of several hosts cannot be compared; certificates and caches may count as outdated",
            "sudo timedatectl set-ntp true",
            "problem" if sure >= FAR_SECONDS else "warning",
            host.name,
        )


def check_memory(facts: ClusterFacts) -> Findings:
    """Memory is free, and /dev/shm is large enough for the ranks of a host to share it."""
    for host in facts.hosts:
        free = host.resources.memory_available_bytes
        if free is not None and free < LITTLE_MEMORY_BYTES:
            yield ClusterFinding(
                f"{host.name} has {format_bytes(free)} of memory left",
                "a rank needs some 300 MB before its model; the kernel kills ranks when memory ends",
                "ps -eo pid,user,rss,args --sort=-rss | head",
                "problem" if free < TOO_LITTLE_MEMORY_BYTES else "warning",
                host.name,
            )
        yield from _shared_memory(host)


def _shared_memory(host: HostFacts) -> Findings:
    size, free = host.resources.shared_memory_bytes, host.resources.shared_memory_free_bytes
    why = "ranks of a host exchange gradients there, and loaders pass samples: they end with a bus error"
    larger = "sudo mount -o remount,size=8G /dev/shm    (in a container: docker run --shm-size=8g)"
    if size == 0:
        fix = "sudo mount -t tmpfs -o size=8G tmpfs /dev/shm"
        yield ClusterFinding(f"{host.name} has no /dev/shm", why, fix, host=host.name)
    elif size is not None and size < SMALL_SHARED_BYTES:
        yield ClusterFinding(
            f"/dev/shm of {host.name} has {format_bytes(size)}", why, larger, "warning", host.name
        )
    elif free is not None and free < FULL_SHARED_BYTES:
        yield ClusterFinding(
            f"/dev/shm of {host.name} has {format_bytes(free)} left", why,
            "ls -laS /dev/shm    (files of programs that are gone may be removed)", host=host.name,
        )  # fmt: skip


def check_limits(facts: ClusterFacts) -> Findings:
    """Enough files may be open; with InfiniBand, memory may be locked."""
    for host in facts.hosts:
        files = host.resources.open_files
        if files is not None and files < FEW_FILES:
            yield ClusterFinding(
                f"{host.name} allows {files} open files",
                "every connection to another rank and every worker of a loader needs some",
                "ulimit -n 65536    (for good: '* - nofile 65536' in /etc/security/limits.conf)",
                "problem" if files < TOO_FEW_FILES else "warning",
                host.name,
            )
        locked = host.resources.locked_memory_bytes
        if host.network.infiniband and locked is not None and locked < LITTLE_LOCKED_BYTES:
            yield ClusterFinding(
                f"{host.name} has InfiniBand ({', '.join(host.network.infiniband[:2])}) but lets processes lock "
                f"{format_bytes(locked)} only",
                "NCCL cannot register its buffers, and fails or goes by TCP",
                "ulimit -l unlimited    (for good: '* - memlock unlimited' in /etc/security/limits.conf)",
                "warning",
                host.name,
            )


def check_cores(facts: ClusterFacts) -> Findings:
    """The control group allows the cores that processes see."""
    for host in facts.hosts:
        cores, quota = host.resources.cores, host.resources.core_quota
        if quota is not None and cores is not None and quota < 0.99 * cores:
            yield ClusterFinding(
                f"{host.name} shows {cores} cores, its control group allows {quota:.3g}",
                "threads for all of them are stopped in the middle of a step, and the other ranks wait",
                f"export OMP_NUM_THREADS={max(1, int(quota))}    (or give the container more --cpus)",
                "warning",
                host.name,
            )
    counts = Counter(host.resources.cores for host in facts.hosts if host.resources.cores)
    if len(counts) > 1:
        listed = ", ".join(f"{host.name} {host.resources.cores}" for host in facts.hosts if host.resources.cores)
        yield ClusterFinding(
            f"hosts have different numbers of cores: {listed}",
            "a step is as fast as its slowest rank",
            "give each as many slots as its cores allow: -H " + _slots(facts),
            "note",
        )


def _slots(facts: ClusterFacts) -> str:
    least = min((host.resources.cores or 1 for host in facts.hosts), default=1)
    return ",".join(f"{host.name}:{max(1, (host.resources.cores or 1) // least)}" for host in facts.hosts)


def check_gpus(facts: ClusterFacts) -> Findings:
    """GPUs can be used, are free, and are the same on all hosts."""
    for host in facts.hosts:
        gpus, torch = host.resources.gpus, host.torch
        if gpus and torch.endswith("+cpu"):
            yield ClusterFinding(
                f"{host.name} has {len(gpus)} GPU(s), but torch {torch} is built without them",
                "ranks train on the CPU",
                f"{host.pip_install} --force-reinstall torch=={torch.partition('+')[0]}",
                host=host.name,
            )
        busy = [
            index
            for index, gpu in enumerate(host.resources.gpus)
            if 2 * (gpu.used_bytes or 0) > (gpu.memory_bytes or 1e30)
        ]
        if busy:
            yield ClusterFinding(
                f"GPU {', '.join(map(str, busy))} of {host.name}: more than half of the memory is taken",
                "another process uses it, or a rank of an earlier job is still running",
                "nvidia-smi --query-compute-apps=pid,used_memory --format=csv",
                "warning",
                host.name,
            )
    yield from _different_gpus(facts)


def _different_gpus(facts: ClusterFacts) -> Findings:
    kinds = {
        host.name: (
            f"{len(host.resources.gpus)} x {host.resources.gpus[0].name}" if host.resources.gpus else "no GPU"
        )
        for host in facts.hosts
    }
    drivers = {
        host.name: host.resources.gpus[0].driver
        for host in facts.hosts
        if host.resources.gpus and host.resources.gpus[0].driver
    }
    if len(set(kinds.values())) > 1:
        text = ", ".join(f"{name} {what}" for name, what in kinds.items())
        yield ClusterFinding(
            f"hosts have different GPUs: {text}",
            "a step is as fast as its slowest rank, and ranks with and without GPU cannot meet",
            "choose hosts or slots that are alike, with -H, --include or --exclude",
            "warning",
        )
    if len(set(drivers.values())) > 1:
        text = ", ".join(f"{name} {driver}" for name, driver in drivers.items())
        yield ClusterFinding(
            f"hosts have different GPU drivers: {text}",
            "NCCL and CUDA programs may work on one host and fail on another",
            "install the newest of them everywhere, and restart",
            "warning",
        )

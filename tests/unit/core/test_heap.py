"""The allocator is told to keep freed memory, unless the user has tuned it or has set a limit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from farandole.core.env import allocator_is_tuned
from farandole.core.host.process_status import keep_freed_memory

# Frees 64 MiB at the top of the heap, several times, and counts the page faults of taking it again.
FAULTS = """
import resource, torch
from farandole.core.host.process_status import keep_freed_memory
if {keep}:
    assert keep_freed_memory()
for i in range(12):
    if i == 2:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(1 << 24).fill_(1.0)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(keep: bool) -> int:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_") and k != "LD_PRELOAD"}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS.format(keep=keep)],
        check=True, capture_output=True, text=True, env=environment,
    )  # fmt: skip
    return int(done.stdout)


@pytest.mark.full("slow")
def test_freed_memory_is_taken_again_without_page_faults() -> None:
    assert faults(keep=True) < 0.7 * faults(keep=False)


@pytest.mark.parametrize(
    "variables",
    [{"MALLOC_TRIM_THRESHOLD_": "1"}, {"LD_PRELOAD": "libjemalloc.so"}, {"GLIBC_TUNABLES": "glibc.malloc.x=1"}],
)
def test_what_the_user_tuned_stays(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert allocator_is_tuned(variables)
    assert not allocator_is_tuned({})
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert not keep_freed_memory()
    for name in variables:
        monkeypatch.delenv(name)


HELD = """
import resource, torch
import farandole as fd
from farandole.core.host.process_status import keep_freed_memory
from farandole.core.host.process_status import resident_bytes
{prepare}
blocks = [torch.ones(1 << 22) for _ in range(16)]
last = torch.ones(1)
before = resident_bytes()
del blocks
print(before - resident_bytes())
"""
LIMITED = "resource.setrlimit(resource.RLIMIT_DATA, (1 << 33, 1 << 33)); assert not keep_freed_memory()"
LAUNCHED_ON_DISK = """
import os
open("plan.toml", "w").write(fd.Plan(offload="disk").to_toml())
os.environ["FARANDOLE_PLAN"] = "plan.toml"
fd.init()
"""
ON_DISK = """
fd.init()
layer = torch.nn.Linear(8, 8)
fd.distribute(layer, torch.optim.Adam(layer.parameters()), fd.Plan(offload="disk"))
"""


@pytest.mark.full_cases("plain")
@pytest.mark.full_cases("limit above the machine")
@pytest.mark.full_cases("launched", "distributed")
@pytest.mark.parametrize(
    ("prepare", "is_kept"),
    [
        ("assert keep_freed_memory()", True),
        (LIMITED, False),
        (LIMITED.replace("(1 << 33, 1 << 33)", "(1 << 50, 1 << 50)").replace("assert not", "assert"), True),
        (LAUNCHED_ON_DISK, False),
        (ON_DISK, False),
    ],
    ids=["plain", "limited", "limit above the machine", "launched", "distributed"],
)
def test_freed_memory_goes_back_where_less_memory_is_asked_for(
    prepare: str, is_kept: bool, tmp_path: Path
) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_") and k != "LD_PRELOAD"}
    done = subprocess.run(
        [sys.executable, "-c", HELD.format(prepare=prepare)],
        cwd=tmp_path, check=True, capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert (int(done.stdout) < 50e6) is is_kept, "of 268 MB"

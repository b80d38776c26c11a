"""How a run ends: the verdict in one line and the next command; and how soon its first progress comes."""

from __future__ import annotations

import os
import re
import socket
import sys
from pathlib import Path

import pytest

from farandole.cli.commands.run import _what_next
from farandole.launch.job.placement import ReservedPort, is_in_use
from farandole.observe.diagnose import verdict
from farandole.observe.diagnose.verdict import diagnose
from tests import warm
from tests.ranks.test_launch import script
from tests.unit.observe.phased_run import make_phased_run

TRAINS = """
import time, torch, farandole as fd
fd.init()
model = torch.nn.Linear(4, 1)
model, optimizer = fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
for step in range(40):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    time.sleep(0.1)
"""


@pytest.mark.full("slow")
def test_a_run_ends_with_its_verdict_and_the_next_command(tmp_path: Path) -> None:
    result = warm.run(
        tmp_path, "run", "-np", "2", "--run-dir", "a run", "--", sys.executable, script(tmp_path, TRAINS)
    )
    assert result.returncode == 0, result.stderr
    verdict, directory, following = result.stderr.rstrip().splitlines()[-3:]
    assert verdict == f"{'verdict':<24} {diagnose(tmp_path / 'a run').verdict}"
    assert directory.startswith("run directory")
    assert following == f"{'next':<24} farandole diagnose 'a run'"
    first = re.search(r"^step (\d+)", result.stderr, re.M)
    assert first, result.stderr
    assert int(first[1]) < 25, "the first line comes early in 4 s, not after 10 s"


LIMITED = """
import resource, torch, farandole as fd
world = fd.init()
if world.rank == 1:
    resource.setrlimit(resource.RLIMIT_DATA, (9 * 10**9,) * 2)
    torch.empty(10**11)
fd.barrier()
"""


@pytest.mark.full("further")
def test_a_rank_without_memory_says_its_limit_and_what_needs_less(tmp_path: Path) -> None:
    result = warm.run(tmp_path, "run", "-np", "2", "--", sys.executable, script(tmp_path, LIMITED))
    assert result.returncode == 1, result.stderr
    (line,) = [each for each in result.stderr.splitlines() if each.startswith("  out of memory")]
    assert line.startswith("  out of memory at the limit of 9 GB (RLIMIT_DATA): take a smaller batch, or "), line
    assert line.endswith("--set recompute=blocks --set zero=3; farandole estimate says before a run what fits"), (
        line
    )


def test_long_records_are_not_read_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_phased_run(tmp_path / "r", steps=60)
    monkeypatch.chdir(tmp_path)
    assert _what_next(run).startswith("verdict ")
    monkeypatch.setattr(verdict, "MOST_BYTES", 1000)
    assert verdict.brief_verdict(run) == ""
    assert _what_next(run).splitlines() == [f"{'run directory':<24} {run}", f"{'next':<24} farandole diagnose r"]


@pytest.mark.full("further")
def test_two_thousand_steps_still_have_a_verdict(tmp_path: Path) -> None:
    run = make_phased_run(tmp_path / "r", steps=2000)
    assert verdict.brief_verdict(run)


ALONE = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
"""
WITH_DDP = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
model(torch.ones(2, 4)).sum().backward()
dist.destroy_process_group()
"""


def last_notes(directory: Path, text: str, *words: str) -> list[str]:
    result = warm.run(directory, "run", *words, "--", sys.executable, script(directory, text))
    assert result.returncode == 0, result.stderr
    *notes, done = [line for line in result.stderr.splitlines() if line.startswith("farandole: ")]
    assert done.startswith("farandole: done in ")
    return notes


def test_a_job_without_records_says_what_ran_and_which_plan_was_in_vain(tmp_path: Path) -> None:
    (copies,) = last_notes(tmp_path, ALONE, "-np", "2")
    assert copies.startswith(
        "farandole: note: 2 independent copies ran, as far as Farandole can see: no rank called"
    )
    assert "call farandole.init() and farandole.distribute(model, optimizer)" in copies
    own, plan = last_notes(tmp_path, WITH_DDP, "-np", "2", "--set", "codec=int8", "--set", "accumulate=4")
    assert own.startswith(
        "farandole: note: the script used torch.distributed by itself, and nothing was recorded:"
    )
    assert plan.startswith("farandole: plan: accumulate = 4, codec = 'int8' has no effect: ")
    assert last_notes(tmp_path, ALONE, "-np", "1") == []


@pytest.mark.full("further")
def test_a_job_with_records_has_no_such_note(tmp_path: Path) -> None:
    text = "import farandole as fd\nfd.init()\nfd.shutdown()\n"
    assert last_notes(tmp_path, text, "-np", "2", "--set", "codec=int8") == []


def test_a_port_counts_as_used_from_its_listener_on_and_after_its_connections() -> None:
    with ReservedPort() as held:
        assert not is_in_use(held.port)
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind((held.address, held.port))
            server.listen()
            assert is_in_use(held.port)
            assert is_in_use(held.port, os.getpid())
            with socket.create_connection((held.address, held.port), timeout=5):
                server.accept()[0].close()
        assert is_in_use(held.port), "the kernel remembers the connection"

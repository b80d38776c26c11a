"""A stock DistributedDataParallel script under ``farandole run``: recorded by itself, trained to the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from farandole.core.vocabulary.events import BACKWARD, DATA, FORWARD, LOSS, OPTIMIZER
from farandole.launch.job.contract import SHIM
from farandole.observe.diagnose import diagnose
from farandole.observe.records.rows import StepRow
from farandole.observe.records.timeline_reader import read_events
from tests import warm
from tests.ranks import unasked_script
from tests.ranks.pool import patient
from tests.ranks.unasked_script import STEPS
from tests.unit.observe.synthetic import healthy, write_run

SCRIPT = str(Path(unasked_script.__file__))
REFUSED = ("group_of_some", "joined", "blocks_alone")
"""Before any other: a world stays."""
ALL = (
    *REFUSED, "one_rank_tries_the_model", "plain", "accumulated", "static_graph", "unused_parameters",
    "communication_hook", "built_in_hook", "compiled", "compiled_step", "two_models",
    "fully_sharded", "sharded_two", "saved_whole", "again",
)  # fmt: skip


def run(directory: Path, *cases: str, options: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return what ``--json`` prints, with what each rank printed as "cases"."""
    directory.mkdir()
    done = warm.run(
        directory, "run", "-np", "2", "--json", "--run-dir", "run", *options, "--", sys.executable, SCRIPT, *cases,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stderr.splitlines() if "] {" in line)
    assert ("plan: codec = 'int8' has no effect" in done.stderr) == ("codec=int8" in options)
    return {**json.loads(done.stdout), "cases": [json.loads(line.partition("] ")[2]) for line in lines]}


def rows_of(directory: Path) -> list[StepRow]:
    return read_events(directory / "run" / "events-rank1.jsonl").steps


def parts_of(row: StepRow) -> tuple[list[str], int, int, int]:
    """Return the names of the phases, and how many samples, bytes and buckets."""
    names = [phase.name for phase in row.phases if phase.name in (DATA, FORWARD, LOSS, BACKWARD, OPTIMIZER)]
    (exchange,) = row.exchanges
    return sorted(names), row.samples, exchange.sent_bytes, len(exchange.buckets)


@patient
def test_a_stock_script_is_recorded_as_one_that_asks_for_it(tmp_path: Path) -> None:
    unasked = run(tmp_path / "unasked", "plain", options=("--set", "codec=int8"))
    asked = run(tmp_path / "asked", "recorded_by_itself", options=("--set", "codec=int8"))
    for each in (unasked["summary"], asked["summary"]):
        assert each["steps"] == STEPS
    rows, theirs = rows_of(tmp_path / "unasked"), rows_of(tmp_path / "asked")
    assert [row.step for row in rows] == [row.step for row in theirs] == [1, 2, 3, 4]
    assert [parts_of(row) for row in rows[1:]] == [parts_of(row) for row in theirs[1:]]
    assert parts_of(rows[1])[0] == sorted([DATA, FORWARD, LOSS, BACKWARD, OPTIMIZER])
    for mine, other in zip(unasked["cases"], asked["cases"], strict=True):
        assert mine["plain"] == [other["recorded_by_itself"][0], True]


@pytest.mark.full("slow")
@patient
def test_a_stock_script_of_fsdp2_is_recorded_once_with_what_its_units_exchange(tmp_path: Path) -> None:
    unasked = run(tmp_path / "unasked", "fully_sharded", options=("--set", "codec=int8"))
    asked = run(tmp_path / "asked", "sharded_recorded_by_itself", options=("--set", "codec=int8"))
    plain = run(tmp_path / "plain", "fully_sharded", options=("--no-record",))
    rows, theirs = rows_of(tmp_path / "unasked"), rows_of(tmp_path / "asked")
    assert [row.step for row in rows] == [row.step for row in theirs] == [1, 2, 3, 4]
    for row, other in zip(rows[1:], theirs[1:], strict=True):
        names = [phase.name for phase in row.phases]
        assert sorted(names) == sorted([DATA, FORWARD, LOSS, BACKWARD, OPTIMIZER])
        assert sum(each.sent_bytes for each in row.exchanges) == sum(each.sent_bytes for each in other.exchanges)
        assert len(row.exchanges) == 3 * 3 - 1, "the outermost unit stays whole between its passes"
    for mine, other, bare in zip(unasked["cases"], asked["cases"], plain["cases"], strict=True):
        assert mine["fully_sharded"] == [other["sharded_recorded_by_itself"][0], True]
        assert bare["fully_sharded"] == [mine["fully_sharded"][0], False]
    setup = read_events(tmp_path / "unasked" / "run" / "events-rank1.jsonl").setup
    assert (setup["wrapper"], setup["zero"]) == ("FSDPModule", 3)
    found = diagnose(tmp_path / "unasked" / "run")
    pasted = [fix.paste for finding in found.findings for fix in finding.fixes]
    assert not any("fd.accumulate" in paste or "--set" in paste for paste in pasted), pasted


@patient
def test_what_a_script_distributes_is_not_recorded_as_a_model_of_fsdp2(tmp_path: Path) -> None:
    run(tmp_path / "ours", "distributed_by_itself")
    setup = read_events(tmp_path / "ours" / "run" / "events-rank1.jsonl").setup
    assert "wrapper" not in setup
    assert len(rows_of(tmp_path / "ours")) == STEPS


@pytest.mark.full("slow")
@patient
def test_strange_scripts_train_to_the_same_bits(tmp_path: Path) -> None:
    recorded = run(tmp_path / "recorded", *ALL)
    plain = run(tmp_path / "plain", *ALL, options=("--no-record",))
    for mine, theirs in zip(recorded["cases"], plain["cases"], strict=True):
        assert {name: bits for name, (bits, _) in mine.items()} == {
            name: bits for name, (bits, _) in theirs.items()
        }
        assert {name for name, (_, has_world) in mine.items() if not has_world} == {*REFUSED}
        assert not any(has_world for _, has_world in theirs.values())
    assert len(rows_of(tmp_path / "recorded")) > 8 * STEPS
    assert not list(tmp_path.glob("plain/run/events*"))


@pytest.mark.full("further")
@patient
def test_a_job_whose_models_cannot_be_recorded_has_no_records(tmp_path: Path) -> None:
    assert run(tmp_path / "refused", *REFUSED)["summary"]["steps"] == 0
    assert not list(tmp_path.glob("refused/run/events*"))


PASTED = """
import torch, torch.distributed as dist
from torch.nn.functional import mse_loss as loss_function
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
exchanges = 0
def exchange(state, bucket):
    global exchanges
    exchanges += 1
    return dist.all_reduce(bucket.buffer().div_(2), async_op=True).get_future().then(lambda done: done.value()[0])
model.register_comm_hook(None, exchange)
for i in range(8):
    inputs, targets = torch.randn(4, 4), torch.randn(4, 2)
    PASTE
print("exchanges:", exchanges)
dist.destroy_process_group()
"""


@pytest.mark.full("further")
@patient
def test_the_fix_by_fewer_exchanges_runs_where_it_is_pasted(tmp_path: Path) -> None:
    found = diagnose(write_run(tmp_path / "slow", healthy(bytes_per_second=5e7, route=None)))
    (paste,) = [fix.paste for fix in found.findings[0].fixes if "no_sync" in fix.paste]
    (tmp_path / "pasted.py").write_text(PASTED.replace("PASTE", textwrap.indent(paste, "    ").lstrip()))
    done = warm.run(
        tmp_path, "run", "-np", "2", "--run-dir", "run", "--", sys.executable, "pasted.py", timeout=60
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("exchanges: 4") == 2, done.stdout + done.stderr
    setup = read_events(tmp_path / "run" / "events-rank1.jsonl").setup
    assert setup["wrapper"] == "DistributedDataParallel"


def test_a_python_without_farandole_trains_unrecorded(tmp_path: Path) -> None:
    package = tmp_path / "torch" / "nn" / "parallel"
    package.mkdir(parents=True)
    (package / "distributed.py").write_text(
        "class DistributedDataParallel:\n    def __init__(self, a): self.a = a\n"
    )
    text = (
        "import inspect, sitecustomize\nfrom torch.nn.parallel.distributed import DistributedDataParallel as D\n"
        "print(D(3).a, inspect.signature(D))"
    )
    # -S: without site-packages, where farandole is; sitecustomize has to be named then.
    done = subprocess.run(
        [sys.executable, "-S", "-c", text],
        env={"PYTHONPATH": os.pathsep.join([str(SHIM), str(tmp_path)]), "FARANDOLE_RECORD": "1"},
        cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("3 (a)\n", "")

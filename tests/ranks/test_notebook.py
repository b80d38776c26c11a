"""`fd.notebook` in a real Jupyter kernel, which executes a real notebook."""

from __future__ import annotations

import importlib.util
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import farandole as fd
from tests.ranks.pool import free_port

pytestmark = [
    pytest.mark.full("slow"),
    pytest.mark.skipif(importlib.util.find_spec("nbclient") is None, reason="nbclient is missing"),
    pytest.mark.timeout(240),
    # of zmq and of the kernel's clients
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

SETUP = """
import os
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
import farandole as fd

world = fd.init(progress=False)         # the notebook is a world of its own
torch.ones(300, 300) @ torch.ones(300, 300)
data = TensorDataset(torch.arange(12.0).reshape(12, 1), torch.zeros(12, 1))

class Result:
    def __init__(self, rank, weight):
        self.rank, self.weight = rank, weight

def build():
    torch.manual_seed(0)
    return nn.Linear(1, 1)

def train(epochs, rate=0.001):
    here = fd.init()
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    fd.distribute(model, optimizer)
    for epoch in range(epochs):
        for x, y in fd.shard(DataLoader(data, batch_size=3)):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    print(f"rank {here.rank} of {here.size} is done")
    return Result(here.rank, float(model.weight.detach()))

def fail():
    fd.init()
    raise ValueError(f"boom {fd.world().rank + fd.world().size}")

def hang():
    import time
    fd.init()
    print("pid", os.getpid(), flush=True)
    time.sleep(120)
os.getpid()
"""
RUN = """
every = fd.notebook(
    train, (2,), processes=2, kwargs={"rate": 0.002}, all_results=True, run_dir="both", settings={"codec": "none"}
)
assert isinstance(every[0], Result) and [each.rank for each in every] == [0, 1]
assert every[0].weight == every[1].weight
names = sorted(name for name in os.listdir("both") if "events" in name)
(fd.notebook(max, (3, 7), processes=1), world.size, names)
"""
ALONE = """
model = build()
optimizer = torch.optim.SGD(model.parameters(), lr=0.002)
for _ in range(2):
    for x, y in DataLoader(data, batch_size=6):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
assert abs(float(model.weight.detach()) - every[0].weight) < 1e-6
"""
CELLS = (SETUP, RUN, ALONE, "fd.notebook(fail)", "fd.notebook(hang)", "6 * 7")

IDLE_SECONDS = 6.0
TWO = """
import io, os, subprocess, sys, torch, farandole as fd
sys.stderr = heard = io.StringIO()
STEP = '''
import torch, farandole as fd
world = fd.init(progress=False)
model = torch.nn.Linear(2, 1)
fd.distribute(model, optimizer := torch.optim.SGD(model.parameters(), 0.1), fd.Plan(stall_seconds=0.4))
def steps(count):
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.full((2, 2), 1.0 + world.rank)).sum().backward()
        optimizer.step()
steps(10)
'''
os.environ.update(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
                  MASTER_PORT="%port")
other = subprocess.Popen([sys.executable, "-c", STEP + "steps(5)"], stderr=subprocess.PIPE, text=True,
                         env={**os.environ, "RANK": "1", "LOCAL_RANK": "1"})
exec(STEP)
"""
GOES_ON = """
steps(5)
said = heard.getvalue() + other.communicate(timeout=60)[1]
fd.shutdown()
(other.returncode, "no step" in said, said)
"""


def run_cells(cells: tuple[str, ...], folder: Path, between: Any = None) -> list[list[Any]]:
    """Return the outputs of cells that a kernel has executed; `between` is called before each of them."""
    import nbformat
    from nbclient import NotebookClient

    page = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = NotebookClient(page, timeout=120, allow_errors=True, resources={"metadata": {"path": str(folder)}})
    before = os.environ.copy()
    os.environ.update({"OMP_NUM_THREADS": "1", "IPYTHONDIR": str(folder), "JUPYTER_RUNTIME_DIR": str(folder)})
    try:
        with client.setup_kernel():
            for number, cell in enumerate(page.cells):
                if between is not None:
                    between(page.cells, number)
                client.execute_cell(cell, number)
    finally:
        os.environ.clear()
        os.environ.update(before)
    return [cell.outputs for cell in page.cells]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    def interrupt(cells: list[Any], number: int) -> None:
        if "hang" in cells[number].source and number > 0:
            kernel = int(cells[0].outputs[-1]["data"]["text/plain"])
            threading.Thread(target=_interrupt, args=(kernel, cells[number]), daemon=True).start()

    return run_cells(CELLS, tmp_path_factory.mktemp("notebook"), interrupt)


def _interrupt(kernel: int, cell: Any) -> None:
    """Interrupt the kernel, as the button does, once both ranks have said who they are."""
    deadline = time.monotonic() + 60
    while _text(cell.get("outputs", [])).count("pid") < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(kernel, signal.SIGINT)


def _text(outputs: list[Any]) -> str:
    return "".join(output.get("text", "") for output in outputs)


def test_a_function_of_the_notebook_trains_on_two_ranks(outputs: list[list[Any]]) -> None:
    text = _text(outputs[1])
    assert "rank 0 of 2 is done" in text
    assert "rank 1 of 2 is done" in text
    assert "run directory" in text, "the closing summary"
    result = outputs[1][-1]["data"]["text/plain"]
    assert result == "(7, 1, ['events-rank0.jsonl', 'events-rank1.jsonl'])"


def test_it_trains_what_the_notebook_alone_trains(outputs: list[list[Any]]) -> None:
    assert [each["output_type"] for each in outputs[2]] == [], outputs[2]


def test_a_failure_is_shown_with_its_traceback_and_nothing_else(outputs: list[list[Any]]) -> None:
    error = outputs[3][-1]
    assert error["output_type"] == "error"
    assert error["ename"] == "NotebookJobFailed"
    shown = "\n".join(error["traceback"])
    assert "ValueError: boom" in shown
    assert "in fail" in shown
    assert "run_job" not in shown


def test_an_interrupt_stops_all_ranks_and_the_kernel_goes_on(outputs: list[list[Any]]) -> None:
    assert outputs[4][-1]["output_type"] == "error"
    assert outputs[4][-1]["ename"] == "KeyboardInterrupt"
    pids = [int(line.rsplit(None, 1)[-1]) for line in _text(outputs[4]).splitlines() if " pid " in f" {line}"]
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert outputs[5][-1]["data"]["text/plain"] == "42"


def test_a_kernel_that_is_idle_between_cells_is_no_stall(tmp_path: Path) -> None:
    """The kernel is rank 0; rank 1 waits for it in backward for many times the limit."""

    def rest(cells: list[Any], number: int) -> None:
        if number == 1:
            time.sleep(IDLE_SECONDS)

    first, second = run_cells((TWO.replace("%port", str(free_port())), GOES_ON), tmp_path, rest)
    assert not first, first
    assert second[-1]["output_type"] == "execute_result", second
    assert second[-1]["data"]["text/plain"].startswith("(0, False, "), second


def test_what_cannot_be_a_job_is_refused() -> None:
    with pytest.raises(fd.ConfigError, match="expected a function"):
        fd.notebook(3)  # type: ignore[arg-type]
    with pytest.raises(fd.ConfigError, match="processes=0"):
        fd.notebook(print, processes=0)
    lock = threading.Lock()
    with pytest.raises(fd.ConfigError, match=r"cannot be sent to its ranks: TypeError.*lock"):
        fd.notebook(lambda: lock)

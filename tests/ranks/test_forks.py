"""Forked children of a rank: no ranks, whatever they do, and no holders of its connections."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import farandole as fd
import farandole.horovod.torch as hvd
from farandole.comm.world.store_sync import all_gather_json
from farandole.comm.world.world import has_world
from farandole.core.host.open_sockets import borrowed, open_sockets
from farandole.observe.records.line_file import LineFile
from tests import warm
from tests.ranks.pool import free_port, fresh, ranks
from tests.ranks.started import started
from tests.ranks.test_launch import script


def in_child(body: Callable[[], None]) -> None:
    """Run `body` in a forked child; fail with what it raised."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            body()
        except BaseException:
            os.write(write, traceback.format_exc().encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        problem = answer.read()
    os.waitpid(child, 0)
    assert not problem, problem


def connections() -> set[int]:
    """Return the inodes of this process's TCP sockets, listeners too."""
    found = set()
    for descriptor, inode in open_sockets():
        with borrowed(descriptor) as ours:
            if ours.family in (socket.AF_INET, socket.AF_INET6):
                found.add(inode)
    return found


def trained(plan: fd.Plan) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(64, 64)
    model, optimizer = fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), plan)
    one_step(model, optimizer)
    return model, optimizer


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.full((2, 64), float(fd.world().rank + 1))).sum().backward()
    optimizer.step()


@pytest.mark.full("slow")
@ranks(2)
@fresh
def test_a_child_holds_no_connection_that_a_store_accepted_later() -> None:
    """The thread of the store, on rank 0, accepts when another rank connects."""
    world = fd.init()
    assert world.store is not None
    before = connections()
    all_gather_json(world, "test/before", 1)
    store: Any = world.store  # torch's stubs do not know `clone`
    held = store.clone() if world.rank == 1 else None
    end = time.monotonic() + 10
    while world.rank == 0 and not connections() - before and time.monotonic() < end:
        time.sleep(0.01)
    later = connections() - before
    assert later, "a connection was opened"

    def child() -> None:
        assert not connections() & later

    if world.rank == 0:
        in_child(child)
    all_gather_json(world, "test/done", 1)
    del held


PLANS = {
    "shared": fd.Plan(),
    "flat": fd.Plan(route="flat"),
    "int8": fd.Plan(route="flat", codec="int8", lossy=True),
}


@pytest.mark.full("slow")
@ranks(2)
@fresh
def test_a_child_holds_no_connection_of_a_checkpointer(tmp_path: Path) -> None:
    others = connections()
    fd.init()
    model, optimizer = trained(fd.Plan())
    checkpointer = fd.Checkpointer(tmp_path, model, optimizer)
    mine = connections() - others

    def child() -> None:
        assert not connections() & mine

    in_child(child)
    checkpointer.save(1)
    checkpointer.close()


@pytest.mark.gate_cases("shared", "int8")
@pytest.mark.parametrize("kind", list(PLANS))
@ranks(2)
def test_a_child_holds_no_connection_and_computes_for_itself(kind: str) -> None:
    others = connections()
    """What tests before left open in this process: other libraries' too."""
    world = fd.init()
    model, optimizer = trained(PLANS[kind])
    before = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    mine = connections() - others
    assert len(mine) > 2

    def child() -> None:
        assert not has_world()
        assert (fd.world().rank, fd.world().size) == (world.rank, 2)
        assert not connections() & mine
        for gradient, parameter in zip(before, model.parameters(), strict=True):
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, gradient), "as they were when it was forked"
        one_step(model, optimizer)
        weight = next(model.parameters())
        assert weight.grad is not None
        assert weight.grad.eq(2 * (world.rank + 1)).all(), "its own, not the mean over ranks"
        for ask in (lambda: fd.mean(1.0), lambda: all_gather_json(fd.world(), "x", 1), fd.world().new_group):
            with pytest.raises(fd.CommError, match="this process was forked from that rank"):
                ask()
        with pytest.raises(fd.ConfigError, match=f"forked from rank {world.rank} of 2"):
            fd.init()
        fd.world().close()
        fd.shutdown()

    in_child(child)
    for gradient, parameter in zip(before, model.parameters(), strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient), "a child writes to no memory of its parent's"
    for _ in range(3):
        one_step(model, optimizer)
    assert next(model.parameters()).grad is not None
    assert fd.mean(float(world.rank)) == 0.5


ENDS = """
import multiprocessing, os, sys, torch
import farandole as fd
from torch import nn

fd.init()

def train(plan, end):
    model = nn.Linear(64, 64)
    model, optimizer = fd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), plan)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 64)).sum().backward()
        optimizer.step()
        if step == 1 and fd.world().rank == 0:
            end()

def forked(end):
    def fork():
        child = os.fork()
        if child == 0:
            end()
        assert os.waitpid(child, 0)[1] in (0, 256)
    return fork

def fail():
    raise ValueError("of a child")

def by_multiprocessing():
    process = multiprocessing.get_context("fork").Process(target=print, args=("child",))
    process.start()
    process.join()

class Leave(Exception):
    pass

def leave():
    raise Leave

flat = fd.Plan(route="flat", timeout_seconds=60)
int8 = fd.Plan(route="flat", codec="int8", lossy=True, timeout_seconds=60)
try:
    for plan, end in (
        (fd.Plan(timeout_seconds=60), forked(sys.exit)), (fd.Plan(timeout_seconds=60), by_multiprocessing),
        (flat, forked(sys.exit)), (flat, forked(fail)), (flat, forked(leave)), (int8, forked(sys.exit)),
    ):
        train(plan, end)
        print("trained", flush=True)
except Leave:
    pass  # a child that runs off the end of the script
"""


@pytest.mark.full("slow")
@pytest.mark.timeout(200)
def test_a_child_ends_in_the_ordinary_way_and_its_parent_goes_on(tmp_path: Path) -> None:
    name = script(tmp_path, ENDS)
    result = warm.run(tmp_path, "run", "-np", "2", "--run-dir", "run", "--", sys.executable, name, timeout=150)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("trained") == 12
    assert not list((tmp_path / "run" / "crashes").glob("*")), "a child's failure is not its parent's"
    assert len(events_of(tmp_path / "run", 0)) == len(events_of(tmp_path / "run", 1))


def events_of(run_directory: Path, rank: int) -> list[str]:
    lines = (run_directory / f"events-rank{rank}.jsonl").read_text().splitlines()
    lines = [line for line in lines if '"script_plan"' not in line]  # said by each fd.distribute
    assert len(set(lines)) == len(lines), "written twice"
    return [line for line in lines if '"step"' in line]


def test_what_is_not_flushed_is_written_once(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "lines")
    file.write({"a": 1})
    child = os.fork()
    if child == 0:
        file._file.close()  # type: ignore[union-attr]  # as the interpreter does at its end
        os._exit(0)
    os.waitpid(child, 0)
    file.close()
    assert (tmp_path / "lines").read_text() == '{"a":1}\n'


def play_rank(rank: int, port: int, results: multiprocessing.connection.Connection) -> None:
    try:
        for name in [name for name in os.environ if name.startswith("FARANDOLE_")]:
            del os.environ[name]
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
        world = fd.init()
        total = torch.tensor(float(world.rank + 1))
        dist.all_reduce(total, group=world.group)
        results.send((world.rank, world.size, float(total)))
        fd.shutdown()
    except BaseException:
        results.send(traceback.format_exc())


@ranks(1)
def test_children_with_rank_variables_of_their_own_make_their_own_world() -> None:
    """As a notebook's launcher does after the notebook called `fd.init`."""
    assert fd.init().size == 1
    here, there = multiprocessing.Pipe()
    context, port = multiprocessing.get_context("fork"), free_port()
    children = [context.Process(target=play_rank, args=(rank, port, there)) for rank in range(2)]
    for child in children:
        child.start()
    seen = [here.recv() if here.poll(25) else "no answer" for _ in children]
    for child in children:
        child.join(5)
    assert sorted(map(str, seen)) == ["(0, 2, 3.0)", "(1, 2, 3.0)"]
    assert fd.world().size == 1


@ranks(2)
def test_a_child_may_ask_horovods_names_who_its_parent_is() -> None:
    hvd.init()
    hvd.allreduce(torch.ones(3), name="x")
    rank = hvd.rank()

    def child() -> None:
        assert (hvd.rank(), hvd.size()) == (rank, 2)
        assert not hvd.is_initialized()
        with pytest.raises(RuntimeError, match="this process was forked from that rank"):
            hvd.allreduce(torch.ones(3), name="y")
        hvd.shutdown()

    in_child(child)
    assert hvd.allreduce(torch.ones(3), name="z").tolist() == [1, 1, 1]
    hvd.shutdown()


# Two ranks started by hand; rank 1 is killed while a worker of its loader is inside a long __getitem__.
BUSY = """
import os, signal, sys, time, torch
import farandole as fd
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 100
    def __getitem__(self, i):
        if i >= 4:
            time.sleep(30)
        return torch.ones(64)

world = fd.init(timeout_seconds=50)
model = nn.Linear(64, 64)
codec = sys.argv[1]
plan = fd.Plan(route="flat", codec=codec, lossy=codec != "none", timeout_seconds=50)
model, optimizer = fd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), plan)
loader = iter(DataLoader(Slow(), batch_size=1, num_workers=2))
for step in range(4):
    optimizer.zero_grad()
    model(next(loader)).sum().backward()
    optimizer.step()
if world.rank == 1:
    print([worker.pid for worker in loader._workers], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
begin = time.monotonic()
try:
    model(torch.ones(1, 64)).sum().backward()
except fd.CommError as problem:
    print(type(problem).__name__, round(time.monotonic() - begin, 2), flush=True)
    for worker in loader._workers:
        worker.kill()  # nobody ends them otherwise, and they sleep on
    os._exit(0)
"""


@pytest.mark.full("further")
@pytest.mark.timeout(200)
@pytest.mark.parametrize("codec", ["none", "int8"])
def test_a_killed_rank_is_noticed_while_a_worker_of_its_loader_is_busy(tmp_path: Path, codec: str) -> None:
    name = script(tmp_path, BUSY)
    world = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    places = [{**world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    workers: list[int] = []
    try:
        with started(tmp_path, [name, codec], places) as ranks:
            assert ranks[1].process.wait(100) == -signal.SIGKILL, ranks[1].err
            workers = [int(word) for word in ranks[1].out.strip("[]\n").split(",")]
            assert ranks[0].process.wait(60) == 0, ranks[0].err
            kind, seconds = ranks[0].out.split()
            assert kind == "PeerLost", ranks[0].err
            assert float(seconds) < 3, "its workers sleep for 30 s, and look after their parent every 5 s"
    finally:
        for pid in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

"""The plan's `sync = "server"`: real server processes, beside one process that trains on the joined batch."""

from __future__ import annotations

import gc
import os
import random
import shutil
import struct
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

import farandole as fd
from farandole.comm.world.store_sync import all_gather_json
from farandole.core.vocabulary.errors import ConfigError, Mismatch, PeerLost, PlanError
from farandole.parallel.model import DistributedModel
from farandole.sync.server.dense.policy import ServerSync
from tests.ranks import sync_loop
from tests.ranks.pool import ranks, takes
from tests.ranks.reference import assert_close, data, mlp
from tests.ranks.sync_loop import OPTIMIZERS, distributed

STEPS = 9
train = partial(sync_loop.train, decay=0.97)


def batches(steps: int = STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return sync_loop.batches(steps)


def policy(model: nn.Module) -> ServerSync:
    found = DistributedModel.of(model).policy
    assert isinstance(found, ServerSync)
    return found


def bits(model: nn.Module) -> str:
    return "".join(each.detach().numpy().tobytes().hex() for each in model.parameters())


@pytest.mark.gate_cases("3-adamw")
@pytest.mark.full_cases("3-adamw")
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@ranks(2, 3)
def test_whole_steps_train_as_one_process(kind: str) -> None:
    world = fd.init()
    model, optimizer = distributed(f"server:staleness=0,servers={world.size - 1}", kind)
    train(model, optimizer, batches())
    assert not optimizer.state
    alone = mlp().double()
    train(alone, OPTIMIZERS[kind](alone.parameters()), batches(), alone=True)
    assert_close(model, alone, rtol=1e-10, atol=1e-12)
    assert len(set(all_gather_json(world, "bits", bits(model)))) == 1
    with fd.averaged(model):
        assert_close(model, alone, rtol=1e-10, atol=1e-12)


class Marks:
    """How many steps each rank has done, in a file that all ranks map."""

    def __init__(self, folder: Path) -> None:
        world = fd.world()
        self.file = os.open(folder / "done", os.O_RDWR | os.O_CREAT)
        if world.rank == 0:
            os.truncate(self.file, 8 * world.size)
        all_gather_json(world, "marks", 0)

    def say(self, done: int) -> list[int]:
        """Say how many this rank has done; return what all have."""
        world = fd.world()
        os.pwrite(self.file, struct.pack("<q", done), 8 * world.rank)
        return list(struct.unpack(f"<{world.size}q", os.pread(self.file, 8 * world.size, 0)))


@pytest.mark.full("slow")
@pytest.mark.parametrize("sync", ["server:staleness=3", "async", "server:staleness=1,servers=2"])
@ranks(2)
def test_all_that_is_pushed_is_applied_and_ranks_stay_within_the_bound(sync: str, tmp_path: Path) -> None:
    world = fd.init()
    marks, steps, apart = Marks(tmp_path), 20, 0
    model = nn.Linear(8, 3).double()
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    fd.distribute(model, optimizer, fd.Plan(sync=sync))
    bound = policy(model)._spec.staleness
    for step in range(1, steps + 1):
        sum((each * float(step + 100 * world.rank)).sum() for each in model.parameters()).backward()  # type: ignore[union-attr]
        if world.rank == 1 and step % 3 == 0:
            time.sleep(0.03)
        optimizer.step()
        optimizer.zero_grad()
        done = marks.say(step)
        apart = max(apart, done[world.rank] - min(done))
        if (
            bound is not None
        ):  # a rank that has done `step` steps begins the next; what others said may be a step old
            assert step <= min(done) + bound + 1, done
    fd.drain(model)
    whole = -0.5 * sum(step + 100 * rank for step in range(1, steps + 1) for rank in range(2)) / 2
    for each in model.parameters():
        assert each.detach().unique().tolist() == [whole]  # every number on the way is exact
    assert sum(policy(model).staleness.values()) == 2 * steps
    if world.rank == 0:
        assert apart > 0
    os.close(marks.file)


@pytest.mark.full("slow")
@pytest.mark.parametrize("sync", ["server:staleness=2,servers=2", "async:servers=2", "server:servers=2"])
@ranks(2)
@takes(60)
def test_servers_that_are_killed_at_any_moment_lose_no_push_and_apply_none_twice(sync: str) -> None:
    world = fd.init()
    model = nn.Linear(64, 64).double()
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    fd.distribute(model, optimizer, fd.Plan(sync=f"{sync},snapshot_seconds=0.3"))
    servers, choose = policy(model).remote.servers, random.Random(world.rank)
    stop = threading.Event()

    def kill_now_and_then() -> None:
        until = time.monotonic() + 9
        while not stop.wait(choose.uniform(1.5, 3)) and time.monotonic() < until:
            running = [*servers.started, *(each for client in servers.clients for each in client.restored)]
            for process in running[-1:]:
                process.kill()
                process.wait()

    killer = threading.Thread(target=kill_now_and_then)
    killer.start()
    try:
        steps, until = 0, time.monotonic() + 10
        while sum(all_gather_json(world, "time", time.monotonic() < until)) == world.size:
            for _ in range(5):
                steps += 1
                sum((each * float(steps + 1000 * world.rank)).sum() for each in model.parameters()).backward()  # type: ignore[union-attr]
                optimizer.step()
                optimizer.zero_grad()
        fd.drain(model)
    finally:
        stop.set()
        killer.join()
    whole = -0.5 * sum(step + 1000 * rank for step in range(1, steps + 1) for rank in range(2)) / 2
    for each in model.parameters():
        assert each.detach().unique().tolist() == [whole]
    restored = sum(all_gather_json(world, "restored", sum(len(each.restored) for each in servers.clients)))
    assert restored >= 2, restored
    assert steps >= 10


@pytest.mark.full("slow")
@ranks(2)
def test_a_server_that_is_killed_changes_no_bit() -> None:
    world = fd.init()
    ends = []
    for kills in (False, True):
        model, optimizer = distributed("server:staleness=0,servers=2,snapshot_seconds=0.05", "adamw")
        servers = policy(model).remote.servers

        def after(step: int, kills: bool = kills, servers: Any = servers) -> None:
            if kills and step in (3, 6):
                for process in [*servers.started, *(each for c in servers.clients for each in c.restored)][-1:]:
                    if (step == 3) == (world.rank == 0):
                        process.kill()
            time.sleep(0.02)

        train(model, optimizer, batches(), after)
        fd.drain(model)
        ends.append(bits(model))
        if kills:
            restored = sum(len(each.restored) for each in servers.clients)
            assert sum(all_gather_json(world, "restored", restored)) >= 2
        policy(model).close()
    assert ends[0] == ends[1]
    assert len(set(all_gather_json(world, "bits", ends[1]))) == 1


@pytest.mark.full("slow")
@ranks(2)
@takes(60)
def test_checkpoints_go_from_and_to_other_plans(tmp_path: Path) -> None:
    world = fd.init()
    plans = ["server:staleness=0,servers=2", "every_step", "server:staleness=0", "server:staleness=2"]
    done = 0
    for sync in plans:
        model, optimizer = distributed(sync, "adamw")
        if done:
            assert fd.load(tmp_path / f"saved-{done}", model, optimizer) == done
        if sync.endswith("staleness=2"):
            break
        for x, y in batches(9)[done : done + 3]:
            nn.functional.mse_loss(model(x.chunk(2)[world.rank]), y.chunk(2)[world.rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
        done += 3
        fd.save(tmp_path / f"saved-{done}", model, optimizer, step=done)
    alone = mlp().double()
    reference = OPTIMIZERS["adamw"](alone.parameters())
    for x, y in batches(9):
        nn.functional.mse_loss(alone(x), y).backward()
        reference.step()
        reference.zero_grad()
    assert_close(model, alone, rtol=1e-10, atol=1e-12)
    policy(model).gather_states()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(optimizer.state[mine], reference.state[theirs], rtol=1e-10, atol=1e-12)


@pytest.mark.full("slow")
@ranks(2)
def test_parameters_that_all_ranks_load_are_the_servers_and_those_of_one_rank_are_an_error() -> None:
    world = fd.init()
    model, optimizer = distributed("server:staleness=0", "bare")
    train(model, optimizer, batches(2))
    model.load_state_dict(mlp(seed=3).double().state_dict())
    train(model, optimizer, batches(2))
    alone = mlp(seed=3).double()
    reference = torch.optim.SGD(alone.parameters(), optimizer.param_groups[0]["lr"] / 0.97**2)
    train(alone, reference, batches(2), alone=True)
    assert_close(model, alone, rtol=1e-10, atol=1e-12)
    if world.rank == 1:
        model.load_state_dict(mlp(seed=4).double().state_dict())
    with pytest.raises(Mismatch, match=r"'loads other parameters' on rank 1, 'makes a step' on rank 0"):
        train(model, optimizer, batches(1))


@pytest.mark.full("slow")
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@ranks(2)
def test_parameters_that_are_loaded_or_changed_in_place_leave_the_servers_their_states(kind: str) -> None:
    fd.init()
    ends = []
    for alone in (False, True):
        model = mlp().double()
        optimizer = OPTIMIZERS[kind](model.parameters())
        if not alone:
            fd.distribute(model, optimizer, fd.Plan(sync="server:servers=2"))
        train(model, optimizer, batches(3), alone=alone)
        model.load_state_dict(mlp(seed=3).double().state_dict())
        train(model, optimizer, batches(3), alone=alone)
        for each in model.parameters():
            each.data.clamp_(-0.1, 0.1)
        train(model, optimizer, batches(1), alone=alone)
        ends.append(model)
    assert_close(ends[0], ends[1], rtol=1e-10, atol=1e-12)


@pytest.mark.full("slow")
@ranks(2)
def test_groups_that_servers_cannot_follow_are_an_error_and_never_a_server_that_dies() -> None:
    fd.init()
    ends = []
    for alone in (True, False):
        model = mlp().double()
        model[:2].requires_grad_(False)
        optimizer = OPTIMIZERS["adamw"](model[2:].parameters())
        if not alone:
            fd.distribute(model, optimizer, fd.Plan(sync="server"))
        optimizer.add_param_group({"params": list(model[:2].parameters())})
        train(model, optimizer, batches(2), alone=alone)
        ends.append(model)
    assert_close(ends[0], ends[1], rtol=1e-10, atol=1e-12)
    moved = optimizer.param_groups[0]["params"].pop()
    optimizer.param_groups[1]["params"].append(moved)
    with pytest.raises(ConfigError, match="is no more in group 0 of its optimizer"):
        train(model, optimizer, batches(1))
    model, optimizer = distributed("server:staleness=0", "adamw")
    train(model, optimizer, batches(1))
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(ConfigError, match=r"a server cannot make step 1: KeyError: 'max_exp_avg_sq'"):
        train(model, optimizer, batches(1))


@pytest.mark.full("slow")
@ranks(2)
def test_other_learning_rates_are_an_error_on_all_ranks() -> None:
    world = fd.init()
    model, optimizer = distributed("server:staleness=0", "bare")
    train(model, optimizer, batches(1))
    optimizer.param_groups[0]["lr"] = 0.1 + world.rank
    with pytest.raises(Mismatch, match=r"with \[0.1\] and optimizer 0 with \[1.1\]"):
        train(model, optimizer, batches(1))


@pytest.mark.full("slow")
@ranks(2)
def test_other_numbers_of_steps_are_an_error_on_all_ranks() -> None:
    world = fd.init()
    model, optimizer = distributed("server:staleness=0", "bare")
    goes_on = partial(train, model, optimizer, batches(1)) if world.rank == 1 else partial(fd.drain, model)
    with pytest.raises(Mismatch, match=r"'fd\.drain' on rank 0, 'makes a step' on rank 1"):
        goes_on()


@ranks(2)
def test_what_servers_cannot_train_is_refused_by_name() -> None:
    fd.init()

    class Own(torch.optim.SGD):
        pass

    def refused(make: Callable[[Any], Optimizer], model: nn.Module, match: str, **keys: Any) -> None:
        with pytest.raises((ConfigError, PlanError), match=match):
            fd.distribute(model, make(model.parameters()), fd.Plan(**{"sync": "async", **keys}))

    linear = nn.Linear(3, 3)
    refused(lambda p: Own(p, 0.1), nn.Linear(3, 3), r"cannot run .*Own: expected a class of torch.optim")
    refused(torch.optim.LBFGS, nn.Linear(3, 3), "LBFGS")
    refused(torch.optim.Adafactor, nn.Linear(3, 3), "Adafactor: its update of an element depends")
    refused(torch.optim.Rprop, nn.Linear(3, 3), "Rprop, whose steps do not grow")
    batch_norm = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    refused(lambda p: torch.optim.SGD(p, 0.1), batch_norm, "running statistics of '1'")
    refused(lambda p: torch.optim.SGD(p, 0.1), linear, "servers = 3, expected at most 2", sync="server:servers=3")


@pytest.mark.full("busy")
@ranks(2)
def test_a_loop_that_a_server_cannot_follow_is_refused_by_name() -> None:
    fd.init()
    model, optimizer = distributed("server:staleness=0", "bare")
    with pytest.raises(ConfigError, match=r"step\(closure\)"):
        optimizer.step(lambda: 1.0)
    with fd.averaged(model), pytest.raises(ConfigError, match=r"inside fd\.averaged"):
        optimizer.step()


@pytest.mark.full("slow")
@ranks(2)
def test_parameters_that_are_loaded_when_an_optimizer_is_gone_are_refused() -> None:
    fd.init()
    model = mlp().double()
    first, second = (torch.optim.SGD(each.parameters(), 0.1) for each in (model[0], model[2]))
    fd.distribute(model, [first, second], fd.Plan(sync="server"))
    for x, y in batches(2):
        for each in (first, second):
            each.zero_grad()
        nn.functional.mse_loss(model(x.chunk(2)[fd.world().rank]), y.chunk(2)[fd.world().rank]).backward()
        first.step()
        second.step()
    model.load_state_dict({name: each.clone() for name, each in model.state_dict().items()})
    del first
    gc.collect()
    with pytest.raises(ConfigError, match="was given is gone, with what the servers must know"):
        second.step()


@pytest.mark.full("slow")
@ranks(2)
def test_uneven_batches_of_a_loader_with_workers_and_two_optimizers_train_as_one_process() -> None:
    fd.init()
    x, y = (each.double() for each in data(32))
    ends = []
    for shared in (True, False):
        model = mlp().double()
        optimizers = [torch.optim.AdamW(model[:2].parameters(), 0.01), OPTIMIZERS["sgd"](model[2:].parameters())]
        loader: Any = DataLoader(TensorDataset(x, y), batch_size=6, num_workers=1)
        if shared:
            fd.distribute(model, optimizers, fd.Plan(sync="server:servers=2"))
            loader = fd.shard(loader, split=True)
        for _ in range(2):
            for xs, ys in loader:  # the last has two samples
                nn.functional.mse_loss(model(xs), ys).backward()
                for each in optimizers:
                    each.step()
                for each in optimizers:
                    each.zero_grad()
        ends.append(model)
    assert_close(ends[0], ends[1], rtol=1e-10, atol=1e-12)


@pytest.mark.full("slow")
@ranks(2)
def test_a_server_that_cannot_be_restored_is_an_error_on_all_ranks() -> None:
    world = fd.init()
    model, optimizer = distributed("server:staleness=1", "bare")
    train(model, optimizer, batches(1))
    fd.drain(model)
    all_gather_json(world, "all are here", 0)
    if world.rank == 0:
        shutil.rmtree(policy(model).remote.servers.clients[0].place.directory)
        process = policy(model).remote.servers.started[0]
        process.kill()
        process.wait()
    all_gather_json(world, "it is gone", 0)
    with pytest.raises(PeerLost, match=r"server 0 on .*: it is gone and cannot be restored"):
        train(model, optimizer, batches(1))

"""What `init` makes hangs on the world's session, and is gone after `shutdown` and in a forked child."""

from __future__ import annotations

import gc
import io
import sys
import weakref
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import farandole as fd
import farandole.horovod.torch as hvd
from farandole.comm.world.world import current
from farandole.horovod.common.running import Running, find_running
from farandole.parallel.instrument.phase_hooks import observe_passes
from farandole.train.session import TrainSession
from tests.ranks.pool import ranks
from tests.ranks.test_forks import in_child


class Passes:
    """Counts the forward passes it is told of."""

    def __init__(self) -> None:
        self.count = 0

    def forward_begins(self, model: nn.Module, arguments: Any, named: Any) -> None:
        self.count += 1

    def forward_ends(self, model: nn.Module, output: Any) -> None:
        pass


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    model: nn.Module = nn.Linear(8, 8)
    return fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()


@pytest.mark.full("further")
@ranks(2)
def test_after_shutdown_nothing_is_left_and_the_next_world_begins_anew(tmp_path: Path) -> None:
    hook = sys.excepthook
    for turn in range(2):
        world = fd.init(run_dir=tmp_path / str(turn))
        hvd.init()
        assert find_running() is world.session.kept(Running)
        made = [world, world.session, world.session.kept(TrainSession), world.session.kept(Running)]
        assert None not in made
        refs = [weakref.ref(each) for each in made]
        passes, (model, optimizer) = Passes(), small()
        end = observe_passes(world, passes)
        step(model, optimizer)
        if turn:
            fd.shutdown()
        else:
            world.close()  # by other code than ours
            fd.shutdown()
        end()
        seen = passes.count
        assert seen == 1
        model(torch.ones(2, 8))
        assert passes.count == seen, "who looks at a world sees no passes outside it"
        assert current.world is None
        assert not hvd.is_initialized()
        assert sys.excepthook == hook
        del world, made, end, model, optimizer
        gc.collect()
        assert [ref() for ref in refs] == [None] * 4
        assert list((tmp_path / str(turn)).rglob("*")), "its records stay"


@ranks(2)
def test_a_forked_child_inherits_no_watch_and_no_recorder(tmp_path: Path) -> None:
    world = fd.init(run_dir=tmp_path)
    hvd.init()
    passes, (model, optimizer) = Passes(), small()
    observe_passes(world, passes)

    def child() -> None:
        heard = io.StringIO()
        with redirect_stderr(heard):
            step(model, optimizer)
            own = nn.Linear(8, 8)
            step(own, torch.optim.SGD(own.parameters(), 0.1))
        assert not heard.getvalue(), "it is no rank whose model could be forgotten"
        assert passes.count == 0
        assert not hvd.is_initialized()
        assert hvd.rank() == world.rank, "a child may ask who its parent is"
        before = sorted(tmp_path.rglob("*"))
        fd.shutdown()
        hvd.shutdown()
        assert sorted(tmp_path.rglob("*")) == before

    in_child(child)
    step(model, optimizer)
    assert passes.count == 1
    hvd.shutdown()
    fd.shutdown()
    again = fd.init(progress=False)
    assert again.session.kept(Running) is None
    assert fd.mean(float(again.rank)) == 0.5

"""Resumes that are bitwise: stock FSDP2 on another number of ranks, codecs that omit, a user-defined one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import farandole as fd
import farandole.backend  # registers the name
from farandole.checkpoint.listing import verify_checkpoint
from farandole.comm.messages import GroupRank, Message, Rounds
from tests.ranks.pool import ranks, takes
from tests.ranks.test_checkpoint import Run

STEPS = 6
STOP = 3


class Memory(NamedTuple):
    kept: torch.Tensor
    steps: int


class Remembering:
    """A user-defined codec: the larger half of a matrix's rows each second step, and what it did before."""

    def init(self, grad: torch.Tensor, group: GroupRank) -> Memory:
        return Memory(torch.zeros_like(grad), 0)

    def encode(self, grad: torch.Tensor, state: Memory, group: GroupRank) -> Rounds:
        seen = 0.5 * state.kept + grad
        sent = torch.where(seen.abs() > seen.abs().mean(), grad, 0.0) if state.steps % 2 else grad
        everyone = yield Message(sent.to(torch.bfloat16), "all_gather")
        return everyone.float().mean(0), sent.to(torch.bfloat16).float(), Memory(seen, state.steps + 1)


remembering = Remembering()
CODECS = ("threshold:0.001", "randomk:0.01", "tests.ranks.test_checkpoint_resumes.remembering")


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_in(each)


@pytest.mark.gate_cases("2-randomk:0.01")
@pytest.mark.parametrize("codec", CODECS)
@takes(60)
@ranks(2, 3)
def test_a_codec_that_omits_resumes_bitwise(tmp_path: Path, codec: str) -> None:
    fd.init()
    fd.seed(11, per_rank=True)
    run = Run(codec)
    checkpointer = fd.Checkpointer(tmp_path, run.model, run.optimizer, every_steps=1, **run.others)
    run.train(1, STEPS, checkpointer)
    checkpointer.close()
    kept = list(tensors_in(fd.exchange_state(run.model)))
    assert any(bool(each.any()) for each in kept), "the codec keeps something, or this shows nothing"
    for stop in (1, STOP, STEPS - 1):
        fd.seed(99 + stop)
        again = Run(codec, seed=2)
        assert fd.load(tmp_path, again.model, again.optimizer, step=stop, **again.others) == stop
        again.train(stop + 1, STEPS)
        assert again.losses == run.losses[stop:], f"{codec} from step {stop}: other losses"
        assert again.bits == run.bits, f"{codec} from step {stop}: other bits"


class Block(nn.Module):
    calls: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out: torch.Tensor = x + self.linear(self.norm(x)).tanh()
        return out


class Stock:
    """Stock FSDP2, of odd sizes: five rows are no multiple of a number of ranks, and a rank may have none."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        model: Any = nn.Sequential(nn.Linear(7, 33), Block(33), Block(33), nn.Linear(33, 5), nn.BatchNorm1d(5))
        for layer in model:
            fully_shard(layer)
        self.model: Any = fully_shard(model)
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), 0.01)
        self.losses: list[float] = []

    def train(self, first: int, last: int) -> None:
        """Take steps on a batch that is the same on all ranks: 1, 2 and 4 ranks have the same mean, to the bit."""
        for step in range(first, last + 1):
            x = torch.randn(8, 7, generator=torch.Generator().manual_seed(step))
            loss = self.model(x).square().mean() + self.model[0](x).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())

    @property
    def whole(self) -> dict[str, torch.Tensor]:
        """All values, whole on every rank."""
        found = dict(self.model.state_dict())
        for index, state in self.optimizer.state_dict()["state"].items():
            found |= {f"{index} {name}": value for name, value in state.items()}
        plain = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in found.items()}
        return {name: each.clone() for name, each in plain.items()}


@contextmanager
def grouped(backend: str) -> Iterator[None]:
    """The default group of torch, which `fd.init` makes for several ranks only."""
    here = fd.init(backend=backend)
    if here.size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    if here.size == 1:
        dist.destroy_process_group()


@takes(60)
@ranks(1, 2, 4)
def train_stock(tmp_path: Path, backend: str) -> None:
    with grouped(backend):
        train_and_save(tmp_path)


def train_and_save(tmp_path: Path) -> None:
    run = Stock(1)
    run.train(1, STOP)
    fd.save(tmp_path / "run", run.model, run.optimizer, step=STOP)
    at_stop = run.whole
    run.train(STOP + 1, STEPS)
    at_end = run.whole
    if fd.world().is_main:
        verify_checkpoint(tmp_path / "run", STOP)
        torch.save([at_stop, at_end, run.losses], tmp_path / "expected.pt")


@takes(60)
@ranks(1, 2, 3, 4)
def resume_stock(tmp_path: Path, backend: str) -> None:
    with grouped(backend):
        resume_and_train(tmp_path)


def resume_and_train(tmp_path: Path) -> None:
    here = fd.world()
    run = Stock(2)
    assert FSDPModule in type(run.model).__mro__, "it is stock FSDP2"
    assert fd.load(tmp_path / "run", run.model, run.optimizer) == STOP
    at_stop, at_end, losses = torch.load(tmp_path / "expected.pt", weights_only=True)
    require_equal(run.whole, at_stop, f"loaded on {here.size} ranks")
    run.train(STOP + 1, STEPS)
    if here.size != 3:  # thirds are rounded
        assert run.losses == losses[STOP:], f"other losses on {here.size} ranks"
        require_equal(run.whole, at_end, f"trained on {here.size} ranks")
    # And what it saves now can be resumed by the next.
    fd.save(tmp_path / f"next{here.size}", run.model, run.optimizer, step=STEPS)
    again = Stock(3)
    fd.load(tmp_path / f"next{here.size}", again.model, again.optimizer)
    require_equal(again.whole, run.whole, f"saved and loaded again on {here.size} ranks")


def require_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str) -> None:
    assert found.keys() == expected.keys(), what
    different = [name for name, value in found.items() if not torch.equal(value, expected[name])]
    assert not different, f"{what}: other bits of {different}"


@pytest.mark.full("further")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("backend", ["gloo", "farandole"])
@pytest.mark.parametrize(("before", "after"), [(2, (4, 1, 3)), (4, (2,)), (1, (4,))])
def test_stock_fsdp2_resumes_on_another_number_of_ranks(
    tmp_path: Path, backend: str, before: int, after: tuple[int, ...]
) -> None:
    train_stock(tmp_path=tmp_path, backend=backend, world_size=before)
    for size in after:
        resume_stock(tmp_path=tmp_path, backend=backend, world_size=size)

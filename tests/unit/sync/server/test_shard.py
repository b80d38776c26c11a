"""Shards without processes: random programs of pushes, restarts and cuts, beside torch's own optimizer."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import Optimizer

from farandole.core.vocabulary.errors import CommError, Mismatch
from farandole.sync.server.channel import ServerMessage
from farandole.sync.server.dense.clock_service import Clocks
from farandole.sync.server.dense.refuse import write_group
from farandole.sync.server.dense.shard import DenseShard, cut_by_bytes, join_state, part_of, put_part

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, centered=True, momentum=0.3),
}


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=8), servers=st.integers(1, 5), seed=st.integers(0, 9)
)
def test_each_element_is_at_one_server_and_servers_are_equal_in_bytes(
    sizes: list[int], servers: int, seed: int
) -> None:
    kinds = random.Random(seed)
    parameters = [torch.zeros(n, dtype=kinds.choice([torch.float64, torch.float32])) for n in sizes]
    pieces = cut_by_bytes(parameters, servers)
    for number, parameter in enumerate(parameters):
        places = [
            place for each in pieces for p in each if p.parameter == number for place in range(p.begin, p.end)
        ]
        assert places == list(range(parameter.numel()))
    loads = [sum((p.end - p.begin) * parameters[p.parameter].element_size() for p in each) for each in pieces]
    assert max(loads) - min(loads) <= 16


class Programs:
    """Ranks, shards and clocks in one process."""

    def __init__(self, kind: str, ranks: int, servers: int, staleness: int | None) -> None:
        generator = torch.Generator().manual_seed(3)
        self.parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
                           for shape in ((3, 4), (5,), (), (2, 1, 3))]  # fmt: skip
        self.optimizer = OPTIMIZERS[kind](self.parameters)
        self.pieces = cut_by_bytes(self.parameters, servers)
        self.shards = [DenseShard({}) for _ in self.pieces]
        self.clocks = Clocks(staleness, dict.fromkeys(range(ranks), 0))
        said = [{"class": type(self.optimizer).__name__, "groups": [write_group(self.optimizer.param_groups[0])]}]
        for shard, pieces in zip(self.shards, self.pieces, strict=True):
            install = {"do": "install", "version": 0, "optimizers": said, "pieces": [[0, 0]] * len(pieces)}
            install["states"] = [{}] * len(pieces)
            shard.handle(0, ServerMessage(install, [part_of(self.parameters[p.parameter], p) for p in pieces]))

    def push(self, rank: int, step: int, gradients: list[torch.Tensor], lr: float) -> None:
        group = {**write_group(self.optimizer.param_groups[0]), "lr": lr}
        for shard, pieces in zip(self.shards, self.pieces, strict=True):
            values = {
                "do": "push",
                "step": step,
                "optimizer": 0,
                "groups": [group],
                "places": [*range(len(pieces))],
            }
            shard.handle(rank, ServerMessage(values, [part_of(gradients[p.parameter], p) for p in pieces]))

    def restart(self, number: int) -> None:
        """Have a shard made anew of its state."""
        state = copy.deepcopy(self.shards[number].state())
        self.shards[number] = DenseShard({})
        self.shards[number].load(state)

    def read(self) -> list[dict[str, Any]]:
        """Take the parameters into `parameters`, and return the states."""
        states: list[dict[str, Any]] = [{} for _ in self.parameters]
        for shard, pieces in zip(self.shards, self.pieces, strict=True):
            shard.handle(0, ServerMessage({"do": "pull", "version": self.clocks.version, "states": True}))
            ((_, reply),) = shard.due()
            assert isinstance(reply, ServerMessage)
            rest = list(reply.tensors[len(pieces) :])
            for piece, value, written in zip(pieces, reply.tensors, reply.values["states"], strict=False):
                put_part(self.parameters[piece.parameter], piece, value)
                join_state(states[piece.parameter], self.parameters[piece.parameter], piece, written, rest)
        return states


@pytest.mark.gate_cases("adamw")
@pytest.mark.parametrize("kind", OPTIMIZERS)
@given(
    ranks=st.integers(1, 3),
    servers=st.integers(1, 4),
    staleness=st.sampled_from([0, 2, None]),
    seed=st.integers(0, 99),
)
def test_generated_programs_train_as_torchs_optimizer(
    kind: str, ranks: int, servers: int, staleness: int | None, seed: int
) -> None:
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    program = Programs(kind, ranks, servers, staleness)
    alone = [torch.nn.Parameter(each.detach().clone()) for each in program.parameters]
    reference = OPTIMIZERS[kind](alone)
    pushes: dict[tuple[int, int], list[torch.Tensor]] = {}
    steps, lr = dict.fromkeys(range(ranks), 0), 0.03
    for _ in range(8 * ranks):
        may = [rank for rank in steps if program.clocks.may_begin(rank)]
        rank = choose.choice(may)
        gradients = [torch.randn(each.shape, generator=generator, dtype=each.dtype) for each in alone]
        pushes[rank, steps[rank]] = gradients
        program.push(rank, steps[rank], gradients, lr)
        first = program.clocks.version
        entries = program.clocks.finish(rank, steps[rank], choose.choice([0.0, 0.5, 1.5]), first)
        steps[rank] += 1
        for shard in choose.sample(program.shards, len(program.shards)):
            for _ in range(choose.choice([1, 2])):  # two ranks may carry them
                shard.handle(0, ServerMessage({"do": "apply", "first": first, "entries": entries}))
        if choose.random() < 0.3:
            program.restart(choose.randrange(servers))
        for entry in entries:
            if entry["rate"]:
                for place, each in enumerate(alone):
                    each.grad = sum(weight * pushes[of, step][place] for of, step, weight in entry["of"])
                reference.param_groups[0]["lr"] = lr * entry["rate"]
                reference.step()
    states = program.read()
    for mine, theirs, state in zip(program.parameters, alone, states, strict=True):
        torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-10, atol=1e-12)
        assert state.keys() == reference.state[theirs].keys()
        for name, value in reference.state[theirs].items():
            torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-12)


def test_gradients_that_were_lost_with_a_dead_rank_are_an_error_by_name() -> None:
    program = Programs("momentum", 2, 1, None)
    shard = program.shards[0]
    entry = {"of": [[1, 4, 1.0]], "rate": 0.5}
    shard.handle(0, ServerMessage({"do": "apply", "first": 0, "entries": [entry]}))
    shard.handle(0, ServerMessage({"do": "pull", "version": 1, "states": False}))
    assert shard.due() == []
    shard.client_left(1)
    ((rank, error),) = shard.due()
    assert rank == 0
    assert isinstance(error, CommError)
    assert "the gradients of step 4 of rank 1, which is gone, were lost" in str(error)


def test_a_restored_shard_waits_for_what_it_waited_for_and_knows_who_is_gone() -> None:
    program = Programs("momentum", 3, 1, 0)
    ones = [torch.ones_like(each) for each in program.parameters]
    program.push(1, 0, ones, 0.05)
    entry = {"of": [[0, 0, 0.5], [1, 0, 0.5]], "rate": 1.0}
    program.shards[0].handle(1, ServerMessage({"do": "apply", "first": 0, "entries": [entry]}))
    program.shards[0].client_left(2)
    before = program.parameters[1].detach().clone()
    program.restart(0)
    program.push(0, 0, [3 * each for each in ones], 0.05)
    program.clocks.first = 1
    program.read()
    gradient = 2.0 + 0.01 * before  # with nesterov's first step
    torch.testing.assert_close(program.parameters[1].detach(), before - 0.05 * 1.9 * gradient)
    program.restart(0)
    lost = {"of": [[2, 0, 1.0]], "rate": 0.5}
    program.shards[0].handle(0, ServerMessage({"do": "apply", "first": 1, "entries": [lost]}))
    program.shards[0].handle(0, ServerMessage({"do": "pull", "version": 2, "states": False}))
    assert isinstance(program.shards[0].due()[0][1], CommError)


def test_a_step_that_failed_has_failed_after_a_restoration_too() -> None:
    """Its entry is over: without the error ranks would go on without the step."""
    program = Programs("momentum", 2, 1, 0)
    ones = [torch.ones_like(each) for each in program.parameters]
    for rank in (0, 1):
        program.push(rank, 0, ones, 0.05 + rank)
    entry = {"of": [[0, 0, 0.5], [1, 0, 0.5]], "rate": 1.0}
    program.shards[0].handle(0, ServerMessage({"do": "apply", "first": 0, "entries": [entry]}))
    for _ in range(2):
        program.shards[0].handle(0, ServerMessage({"do": "pull", "version": 1, "states": False}))
        ((_, error),) = program.shards[0].due()
        assert isinstance(error, Mismatch)
        assert "with other hyperparameters" in str(error)
        program.restart(0)


def test_gradients_of_no_weight_may_hold_anything_and_an_install_voids_what_came_before() -> None:
    program = Programs("momentum", 2, 1, 0)
    ones = [torch.ones_like(each) for each in program.parameters]
    before = program.parameters[1].detach().clone()
    program.push(0, 0, ones, 0.05)
    program.push(1, 0, [each * float("nan") for each in ones], 0.05)
    entry = {"of": [[0, 0, 1.0], [1, 0, 0.0]], "rate": 1.0}
    for first in (0, 0):  # two ranks carry it
        program.shards[0].handle(0, ServerMessage({"do": "apply", "first": first, "entries": [entry]}))
    assert program.shards[0]._entries == {}
    program.clocks.first = 1
    program.read()
    torch.testing.assert_close(program.parameters[1].detach(), before - 0.05 * 1.9 * (1.0 + 0.01 * before))
    program.push(0, 1, ones, 0.05)
    said = program.shards[0]._installed
    states: list[dict[str, Any]] = [{} for _ in said["pieces"]]
    parts = [part_of(program.parameters[p.parameter], p) for p in program.pieces[0]]
    program.shards[0].handle(0, ServerMessage({**said, "version": 1, "states": states}, parts))
    assert program.shards[0]._pushes == {}

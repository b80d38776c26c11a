"""Kinds of programs that one process does not compute to the last digits: what of them is exact is judged.

`fp16`: a step whose gradients are infinite on one rank is left out on all. `bf16`: two stages, and a training that
goes on from a checkpoint, have the same bits. `codec`: what was applied and what is left to send add up to the
true gradients. `dropout`: ranks that have a parameter agree on its bits, and recomputation changes none. `rows`: a
table of rows at servers is that of one process. `local`: ranks that meet every H steps are those of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import farandole as fd

from .compare import differs, same_bits
from .data import batch, loss_of
from .play import BAD_STEP, Alone, Ranked, Trace, whole
from .program import BATCH, PlanProgram
from .replicas import Replicas

Worlds = Sequence[list[Trace]]


class Kind(NamedTuple):
    """How a program is played on each rank, and how one process judges what the ranks did."""

    train: Callable[[PlanProgram, int, Path], Trace]
    """The program, which of its layouts, and the folder for checkpoints."""
    wrong: Callable[[PlanProgram, Worlds], str]


# -- float16 -----------------------------------------------------------------------------------------


def _train_fp16(program: PlanProgram, number: int, folder: Path) -> Trace:
    training, trace = _resumed(program, number, folder), Trace()
    moved = []
    for step in range(*program.span(number)):
        before = _wholes(training.model)
        training.step(step, trace)
        after = _wholes(training.model)
        moved.append(any(not torch.equal(before[name], after[name]) for name in before))
    trace.notes["moved"] = moved
    training.save(folder / f"saved{number}")
    training.note_parts(trace)
    return trace


def _wrong_fp16(program: PlanProgram, worlds: Worlds) -> str:
    moved: list[bool] = []
    for number, world in enumerate(worlds):
        said = [each.notes["moved"] for each in world]
        if any(each != said[0] for each in said) and not any(
            len(each.parts) < len(world[0].parts) for each in world
        ):
            return f"steps that changed parameters, by rank: {said}"
        moved += said[0]
        text = same_bits([each.parts for each in world])
        if text:
            return f"in {'then' if number else 'first'}: {text}"
    if len(moved) > BAD_STEP and moved[BAD_STEP]:
        return f"a step with an infinity on one rank changed parameters: {moved}"
    alone = Alone(program)
    begin = {name: each.detach().clone() for name, each in alone.model.named_parameters()}
    alone.skipped = frozenset(step for step, each in enumerate(moved) if not each)
    last = program.span(len(worlds) - 1)[1]
    truth = alone.train().parameters[last]
    off, change = 0.0, 0.0
    for name, (found, split) in worlds[-1][0].parts.items():
        right, first = (each if split is None else split.take(each) for each in (truth[name], begin[name]))
        off += float((found - right).square().sum())
        change += float((right - first).square().sum())
    if any(moved) and off > 0.1**2 * change:
        return f"changes are off by {(off / change) ** 0.5:.2g} of those in float32"
    return ""


# -- bfloat16 parameters and dropout: the same bits ----------------------------------------------------


def _train_bits(program: PlanProgram, number: int, folder: Path) -> Trace:
    """Train all steps in the first world; in the other one again, from its checkpoint where there is one."""
    training, trace = Ranked(program, program.layouts[number], is_new=True), Trace()
    first = 0
    if number and program.kind == "bf16":
        training.load(folder / "saved0")
        first = program.save_at
    for step in range(first, program.steps):
        if step == program.save_at and not number and program.kind == "bf16":
            training.save(folder / "saved0")
        training.step(step, trace)
    training.note_parts(trace)
    return trace


def _wrong_bits(program: PlanProgram, worlds: Worlds) -> str:
    for world in worlds:
        text = same_bits([each.parts for each in world])
        if text:
            return text
    # What is computed again weighs more, so that a pipeline may be cut elsewhere: its ranks draw other masks then.
    if len(worlds) > 1 and [list(each.parts) for each in worlds[0]] == [list(each.parts) for each in worlds[1]]:
        text = same_bits([worlds[0][0].parts, worlds[1][0].parts])
        return f"the second training beside the first: {text}" if text else ""
    return ""


# -- codecs --------------------------------------------------------------------------------------------


def _train_codec(program: PlanProgram, number: int, folder: Path) -> Trace:
    training, trace = Ranked(program, program.layouts[number]), Trace()
    steps: list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = []

    def watch(*_: Any) -> None:
        gradients = {n: whole(p.grad) for n, p in training.model.named_parameters() if p.grad is not None}
        steps.append((_wholes(training.model), gradients))

    training.before_update = watch
    for step in range(program.steps):
        training.step(step, trace)
    trace.notes["steps"] = steps
    size, left = training.here.size, {}
    for name, entry in sorted(fd.exchange_state(training.model).get("parameters", {}).items()):
        if "residual" in entry["elements"]:
            residual = entry["elements"]["residual"].double() * entry["scale"]
            dist.all_reduce(residual, group=training.here.group)
            left[name] = residual / size
    trace.notes["left"] = left
    training.note_parts(trace)
    return trace


def _wrong_codec(program: PlanProgram, worlds: Worlds) -> str:
    world = worlds[0]
    text = same_bits([each.parts for each in world])
    if text:
        return text
    alone = Alone(program)
    missing: dict[str, torch.Tensor] = {}
    sizes: dict[str, torch.Tensor] = {}
    for step, (parameters, gradients) in enumerate(world[0].notes["steps"]):
        with torch.no_grad():
            for name, each in alone.model.named_parameters():
                each.copy_(parameters[name])
        true = alone.gradients(step)
        for name, right in true.items():
            missing[name] = missing.get(name, 0.0) + right.double() - gradients[name].double()
            sizes[name] = sizes.get(name, 0.0) + right.double().abs()
    left = world[0].notes["left"]
    largest = max(float(each.max()) for each in sizes.values())
    for name, lost in missing.items():
        rest = lost - left.get(name, torch.zeros_like(lost))
        if not float(rest.abs().max()) <= 3e-4 * max(float(sizes[name].max()), 0.05 * largest):
            return f"{name}: {float(rest.abs().max()):.3g} of {largest:.3g} is neither applied nor left to send"
    is_packed = any(bool(each.any()) for each in left.values())
    return "" if is_packed else "nothing is left to send, so nothing was packed"


# -- rows ----------------------------------------------------------------------------------------------


def _train_rows(program: PlanProgram, number: int, folder: Path) -> Trace:
    here, trace = fd.init(timeout_seconds=20), Trace()
    table, head = _table(program, staleness=0, servers=min(here.size, program.top_k)), _head(program)
    optimizer = torch.optim.SGD(head.parameters(), 0.1)
    fd.distribute(
        head, optimizer, fd.Plan(**{"stall_seconds": 0.0, "timeout_seconds": 20.0, **program.first.keys})
    )
    table.attach(optimizer)
    for step in range(program.steps):
        tokens, targets = (each.chunk(here.size)[here.rank] for each in _rows_of(program, step))
        optimizer.zero_grad()
        loss_of(program)(head(table(tokens)), targets).backward()
        optimizer.step()
    trace.notes["rows"] = table(torch.arange(program.words)).detach().clone()
    fd.barrier()
    trace.parts = {name: (whole(each), None) for name, each in head.named_parameters()}
    return trace


def _wrong_rows(program: PlanProgram, worlds: Worlds) -> str:
    table, head = _table(program), _head(program)
    optimizer = torch.optim.SGD(head.parameters(), 0.1)
    table.attach(optimizer)
    for step in range(program.steps):
        tokens, targets = _rows_of(program, step)
        optimizer.zero_grad()
        loss_of(program)(head(table(tokens)), targets).backward()
        optimizer.step()
    right = table(torch.arange(program.words)).detach()
    for rank, trace in enumerate(worlds[0]):
        text = differs(trace.notes["rows"], right)
        if text:
            return f"rank {rank}: rows: {text}"
        for name, each in head.named_parameters():
            text = differs(trace.parts[name][0], each.detach())
            if text:
                return f"rank {rank}: {name}: {text}"
    return ""


def _table(program: PlanProgram, **keys: Any) -> fd.RowTable:
    kind = {"sgd": "sgd:lr=0.5", "adamw": "adam:lr=0.1"}.get(program.optimizer, "adagrad:lr=0.3")
    return fd.RowTable("words", program.width, optimizer=kind, init_std=0.5, dtype=torch.float64, **keys)


def _head(program: PlanProgram) -> nn.Module:
    torch.manual_seed(program.seed)
    return nn.Linear(program.width, program.words).double()


def _rows_of(program: PlanProgram, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    part = batch(program, step, 0)
    return part.tokens[:BATCH], part.targets[:BATCH]


# -- local steps ---------------------------------------------------------------------------------------


def _train_local(program: PlanProgram, number: int, folder: Path) -> Trace:
    training, trace = Ranked(program, program.first), Trace()
    for step in range(program.steps):
        training.step(step, trace)
    training.note_parts(trace)
    fd.drain(training.model)
    trace.notes["drained"] = _wholes(training.model)
    training.save(folder / "saved0")
    return trace


def _wrong_local(program: PlanProgram, worlds: Worlds) -> str:
    replicas = Replicas(program)
    replicas.train()
    for rank, (trace, alone) in enumerate(zip(worlds[0], replicas.ranks, strict=True)):
        for name, each in alone.model.named_parameters():
            text = differs(trace.parts[name][0], each.detach())
            if text:
                return f"rank {rank}: {name} before the last meeting: {text}"
    right = replicas.drain()
    for rank, trace in enumerate(worlds[0]):
        for name, expected in right.items():
            text = differs(trace.notes["drained"][name], expected)
            if text:
                return f"rank {rank}: {name} after the last meeting: {text}"
    return ""


# -- shared --------------------------------------------------------------------------------------------


def _resumed(program: PlanProgram, number: int, folder: Path) -> Ranked:
    training = Ranked(program, program.layouts[number], is_new=number == 0)
    if number:
        training.load(folder / "saved0")
    return training


def _wholes(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return what this rank has of the parameters, gathered over shards."""
    return {name: whole(each) for name, each in model.named_parameters()}


KINDS = {
    "fp16": Kind(_train_fp16, _wrong_fp16),
    "bf16": Kind(_train_bits, _wrong_bits),
    "dropout": Kind(_train_bits, _wrong_bits),
    "codec": Kind(_train_codec, _wrong_codec),
    "rows": Kind(_train_rows, _wrong_rows),
    "local": Kind(_train_local, _wrong_local),
}

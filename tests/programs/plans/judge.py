"""Plays a program on its ranks and in one process, and says what became of it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

import farandole as fd

from .model import make_model
from .play import Alone, Ranked, Trace, Truth
from .program import Layout, PlanProgram
from .worlds import Outcome, class_of, play_world

TOLERANCE = 1e-10
"""Of float64, relative to 1 or to the largest number of a tensor."""
GOOD = ("right", "refused")


def verdict(program: PlanProgram) -> tuple[str, str]:
    """Return "right", "refused", "wrong", "crash", "hang" or "refused differently", and what to say of it."""
    folder = Path(tempfile.mkdtemp(prefix=f"plan{program.seed}-"))
    try:
        return _verdict(program, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _verdict(program: PlanProgram, folder: Path) -> tuple[str, str]:
    played: list[list[Outcome]] = []
    ended, text = "done", ""
    for number, layout in enumerate(_layouts(program)):
        play = partial(_train, program, number, folder)
        world = play_world(play, layout.ranks, folder, f"world{number}", hosts=layout.hosts)
        ended, text = class_of(world, may_differ=program.skip == "rank")
        if ended != "done":
            text = f"in {'then' if number else 'first'}: {text}"
            break
        played.append(world)
    traces = [[each.value for each in world] for world in played]
    (judged,) = play_world(lambda: _wrong(program, traces, folder, loads=ended == "done"), 1, folder, "judge")
    if judged.kind != "done":
        return "crash", f"in one process: {judged.error} {judged.text}"
    if judged.value:
        return "wrong", judged.value
    return ("right", "") if ended == "done" else (ended, text)


def _layouts(program: PlanProgram) -> list[Layout]:
    return [program.first] if program.then is None else [program.first, program.then]


def _train(program: PlanProgram, number: int, folder: Path) -> Trace:
    layout = _layouts(program)[number]
    training = Ranked(program, layout, is_new=number == 0)
    if number:
        training.load(folder / "saved0")
    first = program.save_at if number else 0
    last = program.steps if number or program.then is None else program.save_at
    trace = training.train(first, last)
    training.save(folder / f"saved{number}")
    return trace


# -- in one process ----------------------------------------------------------------------------------


def _wrong(program: PlanProgram, traces: Sequence[list[Trace]], folder: Path, *, loads: bool) -> str:
    """Return what is wrong with what ranks did; `loads`: their last checkpoint is looked at too."""
    fd.init()
    truth = Alone(program).train()
    at = 0
    for number, world in enumerate(traces):
        last = program.steps if number or program.then is None else program.save_at
        found = _wrong_in(program, world, truth, at, last)
        if found:
            return f"in {'then' if number else 'first'}: {found}"
        at = last
    return _wrong_loaded(program, truth, folder / f"saved{len(traces) - 1}") if loads else ""


def _wrong_in(program: PlanProgram, world: list[Trace], truth: Truth, first: int, last: int) -> str:
    for step, losses in enumerate(zip(*(each.losses for each in world), strict=True), start=first):
        if program.routes:
            break  # the loss of a step has those of routers in it
        passes = list(zip(*losses, strict=True))
        means = [sum(v * c for v, c in ranks) / sum(c for _, c in ranks) for ranks in passes]
        if not _near(sum(means) / len(means), truth.losses[step]):
            return f"loss of step {step}: {sum(means) / len(means):.12g} for {truth.losses[step]:.12g}"
    for what in ("norms", "evaluated"):
        expected = getattr(truth, what)[first:last]
        for rank, trace in enumerate(world):
            for step, (found, right) in enumerate(zip(getattr(trace, what), expected, strict=False), start=first):
                if not _near(found, right):
                    return f"rank {rank}: {what} of step {step}: {found:.12g} for {right:.12g}"
    seen: set[str] = set()
    for rank, trace in enumerate(world):
        for name, (found, split) in trace.parts.items():
            right = truth.parameters[last][name]
            text = differs(found, right if split is None else split.take(right))
            if text:
                return f"rank {rank}: parameter {name} after step {last}: {text}"
            seen.add(name)
    missing = truth.parameters[last].keys() - seen
    return f"no rank has {sorted(missing)[:3]}" if missing else ""


def _wrong_loaded(program: PlanProgram, truth: Truth, folder: Path) -> str:
    training = Ranked(program, Layout(ranks=1), is_new=False)
    training.load(folder)
    for name, parameter in training.model.named_parameters():
        text = differs(parameter.detach(), truth.parameters[program.steps][name])
        if text:
            return f"loaded in one process: parameter {name}: {text}"
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in training.model.named_parameters()}
    states = {names[p]: state for each in training.optimizers for p, state in each.state.items()}
    for name, right in truth.states.items():
        state = states.get(name, {})
        if {*state} != {*right}:
            return f"loaded in one process: states of {name}: {sorted(state)} for {sorted(right)}"
        for key, value in right.items():
            text = differs(torch.as_tensor(state[key]).double(), torch.as_tensor(value).double())
            if text:
                return f"loaded in one process: {key} of {name}: {text}"
    return ""


def differs(found: torch.Tensor, right: torch.Tensor) -> str:
    """Return how two tensors differ; empty if they do not."""
    if found.shape != right.shape:
        return f"shape {tuple(found.shape)} for {tuple(right.shape)}"
    if not right.numel():
        return ""
    worst, largest = float((found - right).abs().max()), float(right.abs().max())
    return "" if worst <= TOLERANCE * max(1.0, largest) else f"off by {worst:.3g} of {largest:.3g}"


def _near(found: float, right: float) -> bool:
    return abs(found - right) <= TOLERANCE * (1 + abs(right))


def names_of(program: PlanProgram) -> list[str]:
    """Return the names of all parameters."""
    return [name for name, _ in make_model(program).named_parameters()]

"""Plays a program on its ranks and in one process, and says what became of it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

import farandole as fd
from farandole.parallel.frozen_weight import FrozenWeight

from .compare import differs, near, same_bits
from .kinds import KINDS
from .play import Alone, Ranked, Trace, Truth
from .program import Layout, PlanProgram
from .worlds import Outcome, class_of, play_world

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
    ended, text, kind = "done", "", KINDS.get(program.kind)
    for number, layout in enumerate(program.layouts):
        play = partial(_train if kind is None else kind.train, program, number, folder)
        world = play_world(play, layout.ranks, folder, f"world{number}", hosts=layout.hosts)
        ended, text = class_of(world, may_differ=program.skip == "rank")
        if ended != "done":
            text = f"in {'then' if number else 'first'}: {text}"
            break
        played.append(world)
    traces = [[each.value for each in world] for world in played]
    judge: Callable[[], str] = partial(_wrong, program, traces, folder, loads=ended == "done")
    if kind is not None:
        judge = partial(_wrong_of_kind, program, traces)
    (judged,) = play_world(judge, 1, folder, "judge")
    if judged.kind != "done":
        return "crash", f"in one process: {judged.error} {judged.text}"
    if judged.value:
        return "wrong", judged.value
    return ("right", "") if ended == "done" else (ended, text)


def _train(program: PlanProgram, number: int, folder: Path) -> Trace:
    training = Ranked(program, program.layouts[number], is_new=number == 0)
    if number:
        training.load(folder / "saved0")
    trace = training.train(*program.span(number))
    training.save(folder / f"saved{number}")
    return trace


# -- in one process ----------------------------------------------------------------------------------


def _wrong(program: PlanProgram, traces: Sequence[list[Trace]], folder: Path, *, loads: bool) -> str:
    """Return what is wrong with what ranks did; `loads`: their last checkpoint is looked at too."""
    fd.init()
    truth = Alone(program).train()
    for number, world in enumerate(traces):
        found = _wrong_in(program, world, truth, *program.span(number))
        if found:
            return f"in {'then' if number else 'first'}: {found}"
    return _wrong_loaded(program, truth, folder / f"saved{len(traces) - 1}") if loads else ""


def _wrong_of_kind(program: PlanProgram, traces: Sequence[list[Trace]]) -> str:
    if program.kind != "rows":  # whose table shall be in this process
        fd.init()
    return KINDS[program.kind].wrong(program, traces) if traces else ""


def _wrong_in(program: PlanProgram, world: list[Trace], truth: Truth, first: int, last: int) -> str:
    for step, losses in enumerate(zip(*(each.losses for each in world), strict=True), start=first):
        if program.routes:
            break  # the loss of a step has those of routers in it
        passes = list(zip(*losses, strict=True))
        means = [sum(v * c for v, c in ranks) / sum(c for _, c in ranks) for ranks in passes]
        if not near(sum(means) / len(means), truth.losses[step], single=program.single):
            return f"loss of step {step}: {sum(means) / len(means):.12g} for {truth.losses[step]:.12g}"
    for what in ("norms", "evaluated"):
        expected = getattr(truth, what)[first:last]
        for rank, trace in enumerate(world):
            for step, (found, right) in enumerate(zip(getattr(trace, what), expected, strict=False), start=first):
                if not near(found, right, single=program.single):
                    return f"rank {rank}: {what} of step {step}: {found:.12g} for {right:.12g}"
    text = same_bits([each.parts for each in world])
    if text:
        return text
    seen: set[str] = set()
    for rank, trace in enumerate(world):
        for name, (found, split) in trace.parts.items():
            right = truth.parameters[last][name]
            text = differs(found, right if split is None else split.take(right))
            if text:
                return f"rank {rank}: parameter {name} after step {last}: {text}"
            seen.add(name)
    missing = {name for name, each in truth.parameters[last].items() if each.requires_grad} - seen
    return f"no rank has {sorted(missing)[:3]}" if missing else ""


def _wrong_loaded(program: PlanProgram, truth: Truth, folder: Path) -> str:
    codec = {"frozen_codec": program.first.keys["frozen_codec"]} if "frozen_codec" in program.first.keys else {}
    training = Ranked(program, Layout(ranks=1, keys=codec), is_new=False)
    training.load(folder)
    for name, parameter in training.model.named_parameters():
        if isinstance(parameter, FrozenWeight):
            continue
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
            text = differs(torch.as_tensor(state[key]), torch.as_tensor(value))
            if text:
                return f"loaded in one process: {key} of {name}: {text}"
    return ""

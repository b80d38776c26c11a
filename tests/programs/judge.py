"""Compares what ranks did with what one process did, and says in a line where they part."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

import farandole as fd
from farandole.core.vocabulary.errors import FarandoleError

from .play import Alone, Loop, Ranks, Tensors, Trace, play
from .program import Program

DIVERGED = 1e4
"""Gradients of a program that does not learn."""


def play_rank(program: Program, folder: Path) -> None:
    """Play `program` as this process's rank and write how it ended below `folder`."""
    outcome = {"kind": "right", "text": ""}
    rank = int(os.environ["FARANDOLE_RANK"])
    try:
        alone = None if program.is_lossy else play(program, Alone(program))
        fd.init(timeout_seconds=20)
        text = _against(program, alone) if alone is not None else _conserves(program)
        if text:
            outcome = {"kind": "wrong", "text": text}
    except FarandoleError as problem:
        outcome = {"kind": "refused", "text": f"{type(problem).__name__}: {problem}"}
    except Exception:
        outcome = {"kind": "crashed", "text": traceback.format_exc()}
    finally:
        fd.shutdown()
    (folder / f"rank{rank}.json").write_text(json.dumps(outcome))


def verdict(program: Program, folder: Path) -> str:
    """Return what is wrong with a program that all ranks have played; empty when nothing is."""
    outcomes = [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]
    if len(outcomes) != program.ranks:
        return f"{len(outcomes)} of {program.ranks} ranks ended"
    kinds = {outcome["kind"] for outcome in outcomes}
    if kinds == {"right"} or (kinds == {"refused"} and program.may_refuse):
        return ""
    return "; ".join(f"rank {r}: {o['kind']} {o['text']}" for r, o in enumerate(outcomes) if o["text"])


# -- exact programs ----------------------------------------------------------------------------------


def _against(program: Program, alone: Trace) -> str:
    here = play(program, Ranks(program))
    if here.kept:
        return f"gradients that were kept have changed: {here.kept[:3]}"
    for what, factor in (
        ("gradients", 1),
        ("parameters", 10),
        ("buffers", 10),
    ):  # an optimizer divides by small numbers
        mine: Sequence[Tensors] = getattr(here, what)
        theirs: Sequence[Tensors] = getattr(alone, what)
        for step, (ours, true) in enumerate(zip(mine, theirs, strict=True)):
            text = _same_everywhere(ours) or _differs(ours, true, factor * _tolerance(program))
            if text:
                return f"{what} of step {step}: {text}"
    return ""


def _tolerance(program: Program) -> float:
    """Return what rounding may make of the largest number of a tensor."""
    if program.dtype == "float64" and not {"mixed", "complex"} & {*program.blocks}:
        return 1e-8
    # What a BatchNorm takes out again is the difference of numbers that are nearly the same.
    return 3e-3 if "batch_norm" in program.blocks else 3e-4


def _differs(ours: Tensors, true: Tensors, tolerance: float) -> str:
    if ours.keys() != true.keys():
        return f"other names: {sorted(ours.keys() ^ true.keys())[:4]}"
    largest = max(
        (float(t.abs().nan_to_num().max()) for t in true.values() if t is not None and t.numel()), default=0.0
    )
    for name, expected in true.items():
        found = ours[name]
        if (found is None) != (expected is None):
            return f"{name} is {'None' if found is None else 'a tensor'}, and the opposite in one process"
        if found is None or expected is None or not expected.numel():
            continue
        if found.dtype != expected.dtype or found.shape != expected.shape:
            return f"{name}: {found.dtype} {tuple(found.shape)}, not {expected.dtype} {tuple(expected.shape)}"
        if not torch.isfinite(expected).all():
            if torch.isfinite(found).all():
                return f"{name} is finite, and not in one process"
            continue
        error = float((found - expected).abs().max())
        scale = max(float(expected.abs().max()), 0.01 * largest, 1e-3)  # small ones are differences of large ones
        if not error <= tolerance * scale:
            return f"{name} is off by {error:.3g} of {scale:.3g}"
    return ""


def _same_everywhere(tensors: Tensors) -> str:
    """Return the name of a tensor that has other bits on another rank."""
    for name, tensor in sorted(tensors.items()):
        present = torch.tensor([tensor is not None], dtype=torch.int64)
        dist.all_reduce(present, group=fd.world().group)
        if int(present) not in (0, fd.world().size):
            return f"{name} is None on some ranks only"
        if tensor is None or not tensor.numel():
            continue
        flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        bits = flat.contiguous().reshape(-1).view(torch.uint8)
        others = [torch.empty_like(bits) for _ in range(fd.world().size)]
        dist.all_gather(others, bits, group=fd.world().group)
        if any(not torch.equal(others[0], other) for other in others):
            return f"{name} has other bits on another rank"
    return ""


# -- programs whose codec loses something ------------------------------------------------------------


def _conserves(program: Program) -> str:
    """Add up what was applied and what is true at the same parameters: they may differ by what is left to send."""
    found: list[str] = []
    true: dict[str, torch.Tensor] = {}
    applied: dict[str, torch.Tensor] = {}
    oracle = Loop(program, Alone(program))

    def watch(step: int, loop: Loop) -> None:
        gradients = loop.trace.gradients[-1]
        found.append(_same_everywhere(gradients))
        for name, gradient in gradients.items():
            _add(applied, name, gradient, loop.trace.scales[-1])
        for name, gradient in oracle.trace.gradients[-1].items():
            _add(true, name, gradient, oracle.trace.scales[-1])

    side = Ranks(program)
    loop = Loop(program, side)
    for step in range(program.steps):
        _copy_parameters(loop, oracle)
        oracle.step(step)
        loop.step(step, watch)
        found.append(_same_everywhere(loop.trace.parameters[-1]))
    wrong = next(filter(None, found), "")
    if wrong:
        return wrong
    if any(not tensor.abs().max() < DIVERGED for tensor in true.values() if tensor.numel()):
        return ""
    if any(not torch.isfinite(tensor).all() for tensor in applied.values()):
        return "a gradient is not finite"
    if (not program.feedback and program.codec != "auto") or program.disturbance == "throw_away":
        return ""  # what was sent and not used is lost, as docs/check/right.md says
    left = _left(loop)
    largest = max((float(tensor.abs().max()) for tensor in true.values() if tensor.numel()), default=0.0)
    for name, expected in true.items():
        missing = expected - applied.get(name, torch.zeros_like(expected)) - left.get(name, 0.0)
        if not expected.numel():
            continue
        error, scale = float(missing.abs().max()), max(float(expected.abs().max()), 0.05 * largest, 1e-3)
        if not error <= 3e-4 * scale:
            return f"{name}: {error:.3g} of {scale:.3g} is neither applied nor left to send"
    return ""


def _copy_parameters(source: Loop, target: Loop) -> None:
    with torch.no_grad():
        theirs = target.parameters
        for name, parameter in source.parameters.items():
            theirs[name].copy_(parameter)


def _add(sums: dict[str, torch.Tensor], name: str, gradient: torch.Tensor | None, scale: float) -> None:
    if gradient is not None:
        wide = gradient.to(torch.complex128 if gradient.is_complex() else torch.float64)
        sums[name] = sums.get(name, 0.0) + wide / scale


def _left(loop: Loop) -> dict[str, torch.Tensor]:
    """Return the mean over the ranks of what each has left to send, by parameter."""
    left = {}
    for number, net in enumerate(loop.models):
        entries = fd.exchange_state(net).get("parameters", {})
        for name, entry in sorted(entries.items()):
            if "residual" in entry["elements"]:
                mine = entry["elements"]["residual"].to(torch.float64) * entry["scale"]
                dist.all_reduce(mine, group=fd.world().group)
                left[f"{number}.{name}"] = mine / fd.world().size / loop.trace.scales[-1]
    return left

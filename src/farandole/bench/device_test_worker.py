"""One rank of ``farandole test --device``: says how far it has come, and the result, as lines of JSON.

A world of one makes the checks of one process, and says how many devices there are; several make those of the
engine. Exceptions end the job, whose launcher names the rank.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

import farandole as fd

from ..comm.device.tested import keep_tested
from ..comm.messages import bytes_of
from ..comm.world.store_sync import all_gather_json
from ..comm.world.world import World
from ..core.env import share_device
from ..core.vocabulary.errors import ConfigError
from ..horovod.named_ops.engine import NamedOpsEngine
from ..horovod.named_ops.group_thread import device_kind
from ..horovod.named_ops.operations import Request
from ..parallel.model import DistributedModel
from ..train.verify.verify import Check, fingerprint
from .cluster_test import SHARED_KINDS
from .codecs_check import (
    CPU,
    FORMS,
    ON_THE_CPU,
    WITHOUT_CODEC,
    CodecRun,
    Form,
    Subject,
    check_alone,
    difference,
    find_devices,
    operations_with_other_bits,
)


def main() -> None:
    """Check it, and say so."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", required=True)
    parser.add_argument("--keep", action="store_true", help="all checks before have passed: keep it if these do")
    options = parser.parse_args()
    try:
        devices = find_devices(options.kind)
    except ConfigError as problem:
        _say({"result": {"refused": problem.message, "remedy": problem.remedy}})
        return
    share_device(devices)
    world = fd.init(device=None if options.kind == "cuda" else CPU)
    device = world.device if options.kind in SHARED_KINDS else torch.device(options.kind, world.local_rank)
    torch.manual_seed(0)
    subject = Subject(device)
    if world.size == 1:
        _say({"progress": "codecs in lock step"})
        checks = check_alone(subject)
    else:
        checks = [check_engine(subject, world, scaled=scaled) for scaled in (False, True)]
        checks.append(check_named(subject, world))
    if world.rank == 0:
        passed = all(each.passed is not False for each in checks)
        if passed and options.keep and device != CPU:  # not of codecs alone
            keep_tested(device)
        _say({"result": {"devices": devices, "ranks": world.size, "checks": [vars(each) for each in checks]}})
    fd.shutdown()


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


# The whole engine on the devices of all ranks, beside the same engine on the CPU: hooks, buckets, the backend.
#
# One model has two matrices for each codec, and its gradients are drawn: a loss is the sum of parameters times
# drawn numbers, so gradients are these numbers, to the bit, on every device. Means and what codecs keep can then
# be compared by bits, and to rounding what the optimizer made of them. A world of accelerators has gloo for
# tensors in CPU memory, so both trainings are of one world.


_SHAPES = ((128, 64), (96, 50))
"""Large enough for every codec; the first has whole blocks for up to eight ranks, the second has not."""
_STEPS, _OVERFLOW = 6, 2
_LEARNING_RATE, _CLIP_NORM, _INITIAL_SCALE = 0.1, 1.0, 64.0
_ROWS, _COLUMNS = 3_000, 40
"""Together more than what travels with the announcement of a named operation."""


class DrawnLoss(nn.Module):
    """The parameters. Called with their gradients, returns the loss, ()."""

    def __init__(self, first: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(map(nn.Parameter, first))

    def forward(self, drawn: Sequence[torch.Tensor]) -> torch.Tensor:
        """See the class."""
        pairs = zip(self.matrices, drawn, strict=True)
        return torch.stack([(matrix * each).sum() for matrix, each in pairs]).sum()


def check_engine(subject: Subject, world: World, *, scaled: bool) -> Check:
    """Compare a training on the devices of all ranks with one on the CPU; called by all, who answer alike."""
    name = f"engine on {world.size} ranks{': loss scale, clipping, accumulation' if scaled else ''}"
    with subject.use():
        mine = operations_with_other_bits(subject.device)
    gathered = all_gather_json(world, "device test/operations", sorted(mine))
    other_bits = {each for row in gathered for each in row}
    forms = [form for form in FORMS for _ in _SHAPES if not (scaled and form.draws)]
    expected = train(forms, world, CPU, scaled=scaled)
    with subject.use():
        found = train(forms, world, subject.device, scaled=scaled)
    answers = [
        [difference(ours, theirs, by_bits=form.stands_on not in other_bits), fingerprint(ours.means)]
        for form, ours, theirs in zip(forms, found, expected, strict=True)
    ]
    by_form = zip(*all_gather_json(world, "device test/answers", answers), strict=True)
    for form, rows in zip(forms, by_form, strict=True):
        for rank, (fault, means) in enumerate(rows):
            if fault or means != rows[0][1]:
                answer = f"codec {form.text}, rank {rank}: {fault or 'its means are not those of rank 0'}"
                return Check(name, False, answer, WITHOUT_CODEC)
    return Check(name, True, f"{len(forms) // len(_SHAPES)} codecs: as on the CPU, equal on all ranks")


def train(forms: Sequence[Form], world: World, device: torch.device, *, scaled: bool) -> list[CodecRun]:
    """Return what each codec came to on this rank, with a matrix for each on `device`; called by all ranks.

    `scaled`: with a loss scale, a step of infinity that it leaves out, clipping, and two passes a step.
    """
    model = DrawnLoss(_draw(0, len(forms), device))
    names, parameters = zip(*model.named_parameters(), strict=True)
    optimizer = torch.optim.SGD(parameters, _LEARNING_RATE)
    codecs = {name: form.text for name, form in zip(names, forms, strict=True)}
    # Routes by memory that ranks share cut buckets otherwise.
    fd.distribute(model, optimizer, fd.Plan(codec_for=codecs, bucket_bytes=4 << 20, route="flat"))
    scaler = torch.amp.GradScaler(device.type, init_scale=_INITIAL_SCALE, growth_interval=100, enabled=scaled)
    means: list[list[torch.Tensor]] = []
    for step in range(_STEPS):
        optimizer.zero_grad()
        for is_last in (False, True) if scaled else (True,):
            loss = model(_draw(1 + is_last + 10 * (world.rank + 100 * step), len(forms), device))
            if scaled and step == _OVERFLOW and world.rank == world.size - 1:
                loss = loss * torch.inf
            with nullcontext() if is_last else fd.accumulate():
                scaler.scale(loss).backward()
        means.append([parameter.grad.cpu().clone() for parameter in parameters])
        if scaled:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(parameters, _CLIP_NORM)
        scaler.step(optimizer)
        scaler.update()
    reducer = DistributedModel.of(model).reducer
    assert reducer is not None, "several ranks have one"
    entries = reducer.exchange_state()
    kept = [entries[name]["elements"].get("residual") if name in entries else None for name in names]
    return [
        CodecRun(
            [[each[k]] for each in means],
            [each.cpu().clone() for each in kept[k : k + 1] if each is not None],
            [parameter.detach().cpu().clone()],
        )
        for k, parameter in enumerate(parameters)
    ]


def _draw(seed: int, count: int, device: torch.device) -> list[torch.Tensor]:
    """Return `count` matrices, of the shapes in turn."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (_SHAPES[k % len(_SHAPES)] for k in range(count))
    return [torch.randn(shape, dtype=torch.float32, generator=generator).to(device) for shape in shapes]


# -- named operations ------------------------------------------------------------------------------


def check_named(subject: Subject, world: World) -> Check:
    """Compare named operations of tensors on the device with those in CPU memory; called by all ranks."""
    name = f"named operations on {world.size} ranks"
    expected = _run_named(world, CPU)
    with subject.use():
        if device_kind(world) != subject.device.type:
            return Check(name, None, f"{subject.device.type}: by CPU memory")
        found = _run_named(world, subject.device)
    wrong = [what for what, one in found.items() if not _is_same(one, expected[what])]
    for rank, faults in enumerate(all_gather_json(world, "device test/named", wrong[:1])):
        if faults:
            return Check(name, False, f"{faults[0]}, rank {rank}: other bits than in CPU memory", ON_THE_CPU)
    return Check(name, True, f"{len(found)} kinds: the bits of tensors in CPU memory")


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(bytes_of(one), bytes_of(other))


def _run_named(world: World, device: torch.device) -> dict[str, torch.Tensor]:
    """Return what each operation gives for numbers drawn by rank, in CPU memory; called by all ranks."""
    engine = NamedOpsEngine(world)
    try:
        requests = _requests(world, device)
        tickets = [engine.submit([each])[0] for each in requests]
        values = [ticket.wait() for ticket in tickets]
        results = [value[0] if isinstance(value, tuple) else value for value in values]
        return {each.name: result.cpu() for each, result in zip(requests, results, strict=True)}
    finally:
        engine.close()


def _requests(world: World, device: torch.device) -> list[Request]:
    generator = torch.Generator().manual_seed(world.rank)
    drawn = torch.randn(_ROWS, _COLUMNS, generator=generator, dtype=torch.float32).to(device)
    rows = [_ROWS // world.size] * world.size
    rows[0] += _ROWS - sum(rows) - 1  # one row stays
    return [
        Request("sum", "allreduce", drawn.double()),
        Request("mean", "allreduce", drawn.clone(), reduction="average"),
        Request("mean of bf16", "allreduce", drawn.bfloat16(), reduction="average"),
        Request("scaled", "allreduce", drawn.half(), in_place=True, prescale=0.3, postscale=1.7),
        Request("largest", "allreduce", drawn.bfloat16(), reduction="max"),
        Request("coded", "allreduce", drawn.clone(), reduction="average", codec="bf16"),  # which divides nothing
        Request("rows", "allgather", drawn[: _ROWS // (world.rank + 1)].clone()),
        Request("copy", "broadcast", drawn.clone(), root=world.size - 1),
        Request("part", "reducescatter", drawn.clone()),
        Request("swap", "alltoall", drawn.clone(), splits=tuple(rows)),
    ]


if __name__ == "__main__":
    main()

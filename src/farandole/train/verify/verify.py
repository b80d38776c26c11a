"""`fd.verify`: what one checks by hand after the move to several processes, as one call.

Compares fingerprints between ranks: nothing is sent but hashes and numbers. Each check answers in
plain words; a check that cannot be made says why instead of passing.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ...comm.batch_weight import tensors_in
from ...comm.messages import bytes_of
from ...comm.world.store_sync import all_gather_json
from ...comm.world.world import World, world
from ...core.vocabulary.degrees import ORDER, OTHER_SAMPLES
from ...core.vocabulary.errors import ConfigError, VerificationFailed
from ...core.vocabulary.text import name_ranks
from ...parallel.data.batch_norm import local_layers
from ...parallel.model import DistributedModel
from ...parallel.split import split_of
from ..same_data import WITHOUT_A_LOADER


@dataclass(frozen=True)
class Check:
    """One question and its answer."""

    name: str
    passed: bool | None
    """None: it could not be checked; `answer` says why."""
    answer: str
    remedy: str = ""
    word: str = ""
    """In place of "not checked": what is known and is neither right nor wrong."""


@dataclass
class Verification:
    """The answers, the same on every rank. True in a condition when no check failed."""

    checks: list[Check] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(check.passed is not False for check in self.checks)

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        marks = {True: "ok", False: "FAIL", None: "not checked"}
        lines = []
        for check in self.checks:
            lines.append(f"{check.word or marks[check.passed]:>11}  {check.name}: {check.answer}")
            if check.remedy and (check.word or check.passed is False):
                lines.append(f"{'':>11}  -> {check.remedy}")
        return "\n".join(lines)

    def raise_if_failed(self) -> None:
        """Raise `VerificationFailed` with the failed answers when there are any."""
        failed = [f"{check.name}: {check.answer}" for check in self.checks if check.passed is False]
        if failed:
            raise VerificationFailed("; ".join(failed))

    def to_mapping(self) -> dict[str, Any]:
        """Return the answers as plain values, as in ``verify.json``."""
        return {"version": 1, "passed": self.passed, "checks": [vars(check) for check in self.checks]}


class HasParameters(Protocol):
    """A model, or what stands for one."""

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Return its parameters."""


def verify(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    batch: Any = None,
    losses: Sequence[float] | None = None,
) -> Verification:
    """Check that the ranks of a data-parallel job are consistent; return the checks, true if none failed.

    Call it on all ranks.

    Args:
        model: the distributed model; parameters, buffers and existing gradients must be equal on all ranks.
        optimizer: its optimizer or several; if given, their state must be equal on all ranks.
        batch: this rank's current batch; if given, it must differ between ranks.
        losses: this rank's losses so far, in order; if given, they must be finite and change.

    Returns:
        The results of all checks, the same on all ranks: true if no check failed; printed, one line per check.

    Raises:
        ConfigError: ranks train on their own by the plan's ``sync``, and are not to be consistent.
    """
    here = world()
    policy = DistributedModel.of(model).policy
    if policy is not None and policy.is_local:
        raise ConfigError(
            "fd.verify: ranks train on their own by the plan's sync, so that parameters and gradients differ",
            remedy="check a training without sync: gradients of a rank are torch's own with it",
        )
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or [])
    checks = [
        check_ranks(here),
        check_parameters(here, model, _COPIES),
        check_buffers(here, model, _BUFFERS),
    ]
    checks += [check_optimizer(here, each, model, _COPIES) for each in optimizers]
    checks += [check_gradients(here, model), *check_batch_norm(here, model)]
    checks.append(check_batches(here, [] if batch is None else [fingerprint(batch)]))
    checks.append(check_loss(here, [] if losses is None else list(losses)))
    return Verification(checks)


_COPIES = "train through fd.distribute, and change parameters on all ranks alike"
_SHARD = "use loader = fd.shard(loader)"
_DIVIDE = f"{_SHARD}; {WITHOUT_A_LOADER}"
_BUFFERS = "use the plan's buffers = 'mean', or change buffers on all ranks alike"


def check_ranks(here: World) -> Check:
    """Every rank once, of one size, on as many hosts as it says."""
    gathered = all_gather_json(here, "verify/ranks", [here.rank, here.size, here.host])
    sizes = sorted({size for _, size, _ in gathered})
    hosts = sorted({host for _, _, host in gathered})
    right = [rank for rank, _, _ in gathered] == list(range(here.size)) and sizes == [here.size]
    answer = f"{here.size} rank{'s' * (here.size > 1)} on {', '.join(hosts)}"
    return Check("ranks", right, answer if right else f"ranks disagree: {gathered}")


def check_equal(
    here: World,
    name: str,
    tensors: Mapping[str, torch.Tensor],
    remedy: str,
    parameters: Mapping[str, torch.Tensor] | None = None,
) -> Check:
    """The same bits on all ranks that have a tensor; names the first one that differs and the minority.

    Sharded tensors are gathered one by one: what differs is then a copy on another host. `parameters`: those that
    `tensors` belong to, by the same labels, where a rank may have a part of them alone.
    """
    parts = {} if parameters is None else {label: _part_of(each) for label, each in parameters.items()}
    mine = [[label, parts.get(label, ""), fingerprint(_whole(tensor))] for label, tensor in tensors.items()]
    gathered = all_gather_json(here, f"verify/{name}", mine)
    if not any(gathered):
        return Check(name, None, "there are none")
    is_divided = not here.degrees.is_data_alone
    if not is_divided and len({len(other) for other in gathered}) > 1:
        counts = [len(other) for other in gathered]
        return Check(name, False, f"ranks hold {counts} tensors", remedy)
    found: dict[tuple[str, str], dict[int, str]] = {}
    for rank, other in enumerate(gathered):
        for at, (label, part, value) in enumerate(other):
            # Without parts the order tells, too: all ranks have the same tensors.
            found.setdefault((label if is_divided else str(at), part), {})[rank] = f"{label} {value}"
    differing = [values for values in found.values() if len(set(values.values())) > 1]
    if not differing:
        count = sum(tensor.numel() for tensor in tensors.values())
        who = "all ranks that have them" if is_divided else "all ranks"
        return Check(name, True, f"the same bits on {who} ({len(mine)} tensors, {count:,} numbers)")
    label = next(iter(differing[0].values())).rpartition(" ")[0]
    more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
    return Check(name, False, f"{label!r}{more} differs on {_minority(differing[0])}", remedy)


def _part_of(parameter: torch.Tensor) -> str:
    split = split_of(parameter)
    return "" if split is None else f"{split.degree} {split.pieces}"


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_parameters(here: World, model: HasParameters, remedy: str) -> Check:
    """Parameters are the same on all ranks that have them."""
    parameters = dict(model.named_parameters())
    return check_equal(here, "parameters", parameters, remedy, parameters)


def check_buffers(here: World, model: nn.Module, remedy: str) -> Check:
    """Buffers are the same on all ranks; a model needs none."""
    return _none_is_right(check_equal(here, "buffers", dict(model.named_buffers()), remedy))


def check_optimizer(here: World, optimizer: Optimizer, model: HasParameters, remedy: str) -> Check:
    """Its state is the same on all ranks that have it; not every optimizer has one."""
    tensors, parameters = optimizer_tensors(optimizer, model)
    return _none_is_right(check_equal(here, "optimizer state", tensors, remedy, parameters))


def _none_is_right(check: Check) -> Check:
    return replace(check, passed=True) if check.passed is None else check


def check_gradients(here: World, model: HasParameters) -> Check:
    """The gradients in place are the same on all ranks."""
    parameters = dict(model.named_parameters())
    grads = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    remedy = "call loss.backward() after fd.distribute, on all ranks"
    check = check_equal(here, "gradients", grads, remedy, parameters)
    return check if check.passed is not None else Check("gradients", None, "no parameter has a gradient now")


def check_batch_norm(here: World, model: nn.Module) -> list[Check]:
    """Name what keeps the ranks from computing what one process would: statistics of each rank's own samples."""
    layers = [] if here.size == 1 else local_layers(model)
    if not layers:
        return []
    shown = ", ".join(layers[:3]) + (", ..." if len(layers) > 3 else "")
    several = len(layers) > 1
    answer = f"{len(layers)} BatchNorm layer{'s normalise' if several else ' normalises'} per rank ({shown})"
    return [Check("batch norm", None, answer, "--set sync_batch_norm=true", word="not exact")]


def check_batches(here: World, hashes: Sequence[str], steps: Sequence[int] = (), remedy: str = _DIVIDE) -> Check:
    """No two ranks saw the same batch. `hashes` are those of this rank's batches, in order, `steps` theirs.

    Ranks that divide one model see the same: the first of them answers.
    """
    owners = here.degrees.first_ranks([name for name in ORDER if name not in OTHER_SAMPLES])
    every = all_gather_json(here, "verify/batches", list(hashes))
    gathered = [every[rank] for rank in owners]
    if not any(gathered):
        return Check("batches", None, "no batch was seen")
    if len(owners) == 1:
        one = "one rank sees" if here.size == 1 else "ranks that divide one model see"
        return Check("batches", True, f"{one} all samples")
    seen = 0
    for at, row in enumerate(zip(*gathered, strict=False)):
        seen += 1
        for value, count in Counter(row).items():
            if count > 1:
                same = name_ranks([owners[place] for place, other in enumerate(row) if other == value])
                return Check(
                    "batches",
                    False,
                    f"{same} saw the same samples in step {steps[at] if steps else at + 1}",
                    remedy,
                )
    count = len(set(steps[:seen])) if steps else seen
    return Check("batches", True, f"different on every rank in {count} step{'s' * (count > 1)}")


def check_sizes(
    here: World, samples: Sequence[int], steps: Sequence[int] = (), remedy: str = _SHARD
) -> list[Check]:
    """Name batches of different sizes that count alike, because no loader of ours knows of them.

    `samples` are the sizes of this rank's batches, in order, `steps` theirs.
    """
    gathered = all_gather_json(here, "verify/samples", [] if here.session.batch_weight.watches else list(samples))
    for at, row in enumerate(zip(*gathered, strict=False)):
        if len(set(row)) > 1 and min(row) > 0:
            listed = ", ".join(str(count) for count in row[:8])
            where = f"in step {steps[at] if steps else at + 1} (the input's first dimension)"
            answer = f"ranks were given {listed} samples {where}, which count alike"
            return [Check("batch sizes", None, answer, remedy, word="not exact")]
    return []


def check_repeats(here: World, passes: Sequence[tuple[int, Sequence[str]]]) -> list[Check]:
    """Say how many samples other ranks trained on, too. `passes`: steps of this rank, and `row_hashes` of each.

    In one step alone, as another epoch may give a sample to another rank. Nothing where a rank has equal samples
    in a batch, as then the data have, and of no more than the placeholders of an epoch's last batch.
    """
    every = all_gather_json(here, "verify/rows", list(passes))
    owners = here.degrees.first_ranks([name for name in ORDER if name not in OTHER_SAMPLES])
    rows = [{(step, row) for step, found in every[rank] for row in found} for rank in owners]
    total = sum(map(len, rows))
    repeats = total - len(set().union(*rows))
    if any(len(set(found)) < len(found) for rank in owners for _, found in every[rank]) or repeats < len(owners):
        return []
    answer = f"{repeats} of {total} were trained on by another rank, too, in the same step"
    # If the data had equal samples, some would have met on one rank.
    is_sure = repeats > _SURE_REPEATS * len(owners)
    return [Check("samples", None if is_sure else True, answer, _DIVIDE, word="seen twice" if is_sure else "")]


def row_hashes(batch: Any) -> list[str]:
    """Return a hash of each of a batch's first samples, of all tensors that have a row for each."""
    found = [each for each in tensors_in(batch) if each.dim() and each.layout is torch.strided]
    count = len(found[0]) if found else 0
    rows = [each.detach()[:_MOST_ROWS].cpu() for each in found if len(each) == count]
    return [fingerprint([each[at] for each in rows]) for at in range(min(count, _MOST_ROWS))]


_MOST_ROWS = 1024
_SURE_REPEATS = 8


def check_loss(here: World, losses: Sequence[float]) -> Check:
    """Losses are finite and do not stand still."""
    gathered = all_gather_json(here, "verify/loss", [repr(float(loss)) for loss in losses])
    values = [[float(text) for text in other] for other in gathered]
    if not any(values):
        return Check("loss", None, "no loss was seen")
    for rank, mine in enumerate(values):
        for step, loss in enumerate(mine):
            if not math.isfinite(loss):
                return Check(
                    "loss", False, f"is {loss} on rank {rank} in step {step + 1}", "lower the learning rate"
                )
    first, last = [_mean(mine[0] for mine in values if mine), _mean(mine[-1] for mine in values if mine)]
    if max(len(mine) for mine in values) < 2:
        return Check("loss", None, f"is {first:.4g}; one step says nothing about movement")
    if all(len(set(mine)) == 1 for mine in values if mine):
        return Check(
            "loss", False, f"stands still at {first:.6g}", "does the optimizer hold the model's parameters?"
        )
    return Check("loss", True, f"finite and moving, {first:.4g} -> {last:.4g}")


def optimizer_tensors(
    optimizer: Optimizer, model: HasParameters
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the tensors of an optimizer's state by parameter and name, and by the same labels the parameters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    tensors, owners = {}, {}
    # `state` of a sharded optimizer has the rows of this rank alone.
    for index, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                label = f"{names.get(id(parameters[index]), '?')}.{key}"
                tensors[label] = value
                if value.shape == parameters[index].shape:
                    owners[label] = parameters[index]
    return tensors, owners


def fingerprint(value: Any) -> str:
    """Return a hash of a tensor's bits, or of all tensors in a nest of lists, tuples and dicts."""
    digest = hashlib.sha256()
    _feed(digest, value)
    return digest.hexdigest()[:32]


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if value.is_sparse:
            value = value.coalesce()
            _feed(digest, [value.indices(), value.values()])
            return
        digest.update(f"{tuple(value.shape)} {value.dtype}".encode())
        digest.update(bytes_of(value.cpu()).numpy().data)
    elif isinstance(value, dict):
        for key in value:
            digest.update(repr(key).encode())
            _feed(digest, value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            _feed(digest, item)
    else:
        digest.update(repr(value).encode())


def _minority(values: Mapping[int, str]) -> str:
    (common, most), *rest = Counter(values.values()).most_common()
    odd = [rank for rank, value in values.items() if value != common]
    if rest and rest[0][1] == most:
        return name_ranks(list(values)) + " (no majority)"
    return name_ranks(odd)


def _mean(values: Any) -> float:
    found = list(values)
    return sum(found) / len(found) if found else float("nan")

"""The norm of all gradients of a model whose ranks have different parameters, and one decision on float16 steps.

[Note: one norm of all ranks] With tensor, expert or pipeline ranks, what a rank sees of the gradients is a part.
`torch.nn.utils.clip_grad_norm_` would divide each part by its own norm, without an error. So torch's function
that adds up the norm is replaced: for gradients of such models it adds up over all ranks of the job, and counts
what several ranks hold once; gradients of models that are not divided are added as they are. A `GradScaler` asks
all ranks in the same way whether a gradient is infinite. Both are then calls of all ranks of the job: clipping
that only some ranks reach ends in `Stalled`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate
from torch.nn.utils import clip_grad

from ..comm.world.comm_errors import translated
from ..core.vocabulary.degrees import ORDER
from .mesh import Mesh
from .model import DistributedModel, Strategy
from .split import is_copy, split_of

_torch_norm: Callable[..., torch.Tensor] = clip_grad._get_total_norm
_torch_clip: Callable[..., None] = clip_grad._clip_grads_with_norm_
_torch_unscale: Callable[..., Any] = torch.amp.GradScaler._unscale_grads_
_Owned = tuple[Iterable[torch.Tensor], Mesh]
"""Parameters of one divided model, and its mesh."""


class NormsOfParts(Strategy):
    """One norm of all gradients, where a rank has a part of the model."""

    keys = ("tensor", "pipeline", "expert")

    def apply(self) -> None:
        """See `watch_norms`."""
        watch_norms()


def watch_norms() -> None:
    """Let norms of the gradients of divided models be those of all ranks. See [Note: one norm of all ranks]."""
    for home, name, ours in (
        (clip_grad, "_get_total_norm", _total_norm),
        (nn.utils, "get_total_norm", _total_norm),
        (clip_grad, "_clip_grads_with_norm_", _clip),
        (nn.utils, "clip_grads_with_norm_", _clip),
        (torch.amp.GradScaler, "_unscale_grads_", _unscale),
    ):
        setattr(home, name, ours)


def _sum_here(parameters: Iterable[torch.Tensor], mesh: Mesh, order: float) -> tuple[float, torch.dtype]:
    """Return what this rank adds to the sum, or the largest element, of all ranks; and the dtype of the norm."""
    total, dtype = 0.0, torch.float32
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None or is_copy(parameter):
            continue
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        if not local.numel():
            continue
        if local.dtype in (torch.float64, torch.complex128):
            dtype = torch.float64
        norm = float(torch.linalg.vector_norm(local.detach(), order, dtype=torch.float64))
        if math.isinf(order):
            total = norm if math.isnan(norm) else max(total, norm)
        else:
            total += norm**order / _copies(parameter, gradient, mesh)
    return total, dtype


def _copies(parameter: torch.Tensor, gradient: torch.Tensor, mesh: Mesh) -> int:
    """Return how many ranks of the job hold the same elements of a gradient."""
    split = split_of(parameter)
    different = {"pipeline", *([] if split is None else [split.degree])}
    copies = mesh.size(*(name for name in ORDER if name not in different))
    if isinstance(gradient, DTensor):
        for dimension, placement in enumerate(gradient.placements):
            if not isinstance(placement, Replicate):
                copies //= gradient.device_mesh.size(dimension)
    return copies


def _norm_of_all(owned: Sequence[_Owned], order: float, rest: torch.Tensor | None) -> torch.Tensor:
    """Return the norm of the gradients of `owned`, models of one world, over all of its ranks; a 0-dim tensor.

    `rest`: the norm of other gradients, which each rank has whole. In float64 if a gradient here is, else float32.
    """
    here, parts = owned[0][1].here, [_sum_here(parameters, mesh, order) for parameters, mesh in owned]
    sums, other = [total for total, _ in parts], 0.0 if rest is None else float(rest)
    broken = any(map(math.isnan, [*sums, other]))
    total = max(sums) if math.isinf(order) else sum(sums)
    pair = torch.tensor([0.0 if broken else total, broken], dtype=torch.float64, device=here.device)
    if here.size > 1:
        with translated(here, "the norm of all gradients"):
            operation = dist.ReduceOp.MAX if math.isinf(order) else dist.ReduceOp.SUM
            dist.all_reduce(pair, operation, group=here.group)
    total, broken = pair.tolist()
    norm = max(total, other) if math.isinf(order) else (total + other**order) ** (1.0 / order)
    is_wide = torch.float64 in [dtype for _, dtype in parts] or (rest is not None and rest.dtype == torch.float64)
    dtype = torch.float64 if is_wide else torch.float32
    return torch.tensor(math.nan if broken else norm, dtype=dtype, device=here.device)


def _owners(gradients: Sequence[torch.Tensor]) -> list[_Owned]:
    """Return the divided models that have some of these gradients: the parameters that do, and their meshes.

    Where there are no gradients at all, models with a pipeline are those: other ranks may have some.
    """
    wanted = {id(each) for each in gradients}
    owners: list[_Owned] = []
    for model in DistributedModel.all():
        _, mesh = DistributedModel.of(model).plan_and_mesh
        if mesh.here.closed or mesh.size("tensor", "pipeline", "expert") == 1:
            continue
        known = {id(each.grad): each for each in model.parameters() if each.grad is not None}
        found = [each for key, each in known.items() if key in wanted]
        if found or (not wanted and mesh.size("pipeline") > 1):
            owners.append((found, mesh))
    return owners


def _total_norm(
    tensors: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """`torch.nn.utils.get_total_norm`; of gradients of a divided model over all ranks."""
    gradients = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    owners = _owners(gradients)
    if not owners:
        return _torch_norm(gradients, norm_type, error_if_nonfinite, foreach)
    owned = {id(each.grad) for parameters, _ in owners for each in parameters}
    others = [each for each in gradients if id(each) not in owned]  # of models that are not divided
    rest = _torch_norm(others, norm_type, foreach=foreach) if others else None
    norm = _norm_of_all(owners, float(norm_type), rest.full_tensor() if isinstance(rest, DTensor) else rest)
    if error_if_nonfinite and not math.isfinite(float(norm)):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
            "clipped: it is that of all ranks"
        )
    return norm


def _clip(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    total_norm: torch.Tensor,
    foreach: bool | None = None,
) -> None:
    """`torch.nn.utils.clip_grads_with_norm_`, where some of the parameters are sharded and some are not."""
    several = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    for is_sharded in (False, True):
        kind = [each for each in several if isinstance(each.grad, DTensor) is is_sharded]
        if kind:
            _torch_clip(kind, max_norm, total_norm, foreach)


def _unscale(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *arguments: Any) -> Any:
    """`GradScaler._unscale_grads_`, with one answer for all ranks of a divided model."""
    found = _torch_unscale(scaler, optimizer, *arguments)
    owners = _owners([p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None])
    if not owners or owners[0][1].here.size == 1:
        return found
    mesh = owners[0][1]
    with translated(mesh.here, "whether gradients are finite"):
        mine = torch.stack([each.float().cpu() for each in found.values()] or [torch.zeros(1)]).amax().reshape(1)
        mine = mine.to(mesh.here.device)
        dist.all_reduce(mine, dist.ReduceOp.MAX, group=mesh.here.group)
    for each in found.values():
        each.fill_(float(mine))
    return found

"""The norm of all gradients of a model whose ranks have different parameters, and one decision on float16 steps.

[Note: one norm of all ranks] With tensor, expert or pipeline ranks, what a rank sees of the gradients is a part.
`torch.nn.utils.clip_grad_norm_` would divide each part by its own norm, without an error. So torch's function
that adds up the norm is replaced: for gradients of such a model it adds up over all ranks of the job, and counts
what several ranks hold once. A `GradScaler` asks all ranks in the same way whether a gradient is infinite. Both
are then calls of all ranks of the job: clipping that only some ranks reach ends in `Stalled`.
"""

from __future__ import annotations

import math
import weakref
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
from .split import is_copy, split_of

_torch_norm: Callable[..., torch.Tensor] = clip_grad._get_total_norm
_torch_clip: Callable[..., None] = clip_grad._clip_grads_with_norm_
_torch_unscale: Callable[..., Any] = torch.amp.GradScaler._unscale_grads_
_divided: weakref.WeakKeyDictionary[nn.Module, Mesh] = weakref.WeakKeyDictionary()


def watch_norms(model: nn.Module, mesh: Mesh) -> None:
    """Let norms of the gradients of `model` be those of all ranks. See [Note: one norm of all ranks]."""
    _divided[model] = mesh
    for home, name, ours in (
        (clip_grad, "_get_total_norm", _total_norm),
        (nn.utils, "get_total_norm", _total_norm),
        (clip_grad, "_clip_grads_with_norm_", _clip),
        (nn.utils, "clip_grads_with_norm_", _clip),
        (torch.amp.GradScaler, "_unscale_grads_", _unscale),
    ):
        setattr(home, name, ours)


def global_norm(parameters: Iterable[torch.Tensor], mesh: Mesh, order: float = 2.0) -> torch.Tensor:
    """Return the norm of the gradients of all ranks, to be called by all ranks of the job.

    It is a 0-dim tensor: float64 if a gradient here is, else float32.

    Args:
        parameters: this rank's; those without a gradient count for nothing.
        mesh: of the model.
        order: of the norm, above 0; ``math.inf`` is the largest element.
    """
    total, dtype = 0.0, torch.float32
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None or is_copy(parameter):
            continue
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        if not local.numel():
            continue
        dtype = torch.promote_types(dtype, local.dtype)
        norm = float(torch.linalg.vector_norm(local.detach(), order, dtype=torch.float64))
        if math.isinf(order):
            total = norm if math.isnan(norm) else max(total, norm)
        else:
            total += norm**order / _copies(parameter, gradient, mesh)
    norm_of_all = _over_all_ranks(total, order, mesh, next(iter(_devices(parameters)), mesh.here.device))
    return norm_of_all.to(torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32)


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


def _devices(parameters: Iterable[torch.Tensor]) -> list[torch.device]:
    return [each.device for each in parameters] if isinstance(parameters, Sequence) else []


def _over_all_ranks(total: float, order: float, mesh: Mesh, device: torch.device) -> torch.Tensor:
    found = torch.tensor([total, math.isnan(total)], dtype=torch.float64, device=device).nan_to_num_(nan=0.0)
    if mesh.here.size > 1:
        with translated(mesh.here, "the norm of all gradients"):
            operation = dist.ReduceOp.MAX if math.isinf(order) else dist.ReduceOp.SUM
            dist.all_reduce(found, operation, group=mesh.here.group)
    value, strange = found.tolist()
    norm = math.nan if strange else value if math.isinf(order) else value ** (1.0 / order)
    return torch.tensor(norm, dtype=torch.float64, device=device)


def _owner(gradients: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Mesh] | None:
    """Return the parameters that have these gradients, and their mesh; None if no divided model has them."""
    wanted = {id(each) for each in gradients}
    for model, mesh in list(_divided.items()):
        if mesh.here.closed:
            continue
        known = {id(each.grad): each for each in model.parameters() if each.grad is not None}
        found: list[torch.Tensor] = [each for key, each in known.items() if key in wanted]
        if found or (not wanted and len(_divided) == 1 and mesh.size("pipeline") > 1):
            return found, mesh
    return None


def _total_norm(
    tensors: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """`torch.nn.utils.get_total_norm`; of gradients of a divided model over all ranks."""
    gradients = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    owner = _owner(gradients)
    if owner is None:
        return _torch_norm(gradients, norm_type, error_if_nonfinite, foreach)
    norm = global_norm(*owner, float(norm_type))
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
    owner = _owner([p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None])
    if owner is None or owner[1].here.size == 1:
        return found
    mesh = owner[1]
    with translated(mesh.here, "whether gradients are finite"):
        mine = torch.stack([each.float().cpu() for each in found.values()] or [torch.zeros(1)]).amax().reshape(1)
        mine = mine.to(mesh.here.device)
        dist.all_reduce(mine, dist.ReduceOp.MAX, group=mesh.here.group)
    for each in found.values():
        each.fill_(float(mine))
    return found

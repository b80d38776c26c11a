"""The ranks' batches joined into one, and the gradient of one pass over it on rank 0."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...comm.batch_weight.nested_tensors import tensors_in
from ...comm.world.comm_errors import translated
from ...comm.world.store_sync import all_gather_json
from ...comm.world.world import World
from .replay import Gradients, RecordedPass, map_tensors

_MOST_BYTES = 256 * 2**20


def joined_gradients(here: World, passes: Sequence[RecordedPass]) -> tuple[Gradients | None, str]:
    """Return on rank 0 the gradients of one pass over all ranks' samples, or None and why not.

    To be called by all ranks.
    """
    problem = _problem(passes)
    facts = ["", ""] if problem else _facts(passes[0])
    gathered = all_gather_json(here, "verify/shapes", [problem, *facts])
    problems = [each[0] for each in gathered if each[0]]
    if problems:
        return None, problems[0]
    if len({each[1] for each in gathered}) > 1:
        return None, "the ranks' inputs differ in more than the number of samples"
    recorded = passes[0]
    rows = [int(each[2]) for each in gathered]
    inputs = map_tensors((recorded.arguments, recorded.named), lambda t: _join(here, t, rows))
    weight = recorded.factor / here.size
    gradients = {i: _join(here, g * weight, rows) for i, g in sorted(recorded.output_gradients.items())}
    if here.rank:
        return None, ""
    try:
        with torch.enable_grad():
            found = recorded.replay_joined(inputs, gradients)
    except Exception as failure:
        return None, f"the model does not take the joined batch ({type(failure).__name__}: {failure})"
    return {name: gradient.double() for name, gradient in found.items()}, ""


def _problem(passes: Sequence[RecordedPass]) -> str:
    if len(passes) != 1:
        return f"{len(passes)} passes led to one exchange"
    recorded = passes[0]
    if recorded.is_random:
        return "the model draws random numbers (dropout?), which one process would draw otherwise"
    if not recorded.factor:
        return "a rank had a placeholder"
    outputs = recorded.output_gradients.values()
    if any(_rows(gradient) != recorded.samples for gradient in outputs):
        return "the model's output is not one row a sample (a loss?)"
    tensors = list(tensors_in((recorded.arguments, recorded.named)))
    if sum(tensor.nbytes for tensor in tensors) > _MOST_BYTES:
        return "the batch is too large to join"
    if any(tensor.layout is not torch.strided for tensor in tensors):
        return "the inputs are sparse"
    return ""


def _facts(recorded: RecordedPass) -> list[Any]:
    tensors = [*tensors_in((recorded.arguments, recorded.named)), *recorded.output_gradients.values()]
    rest = [[str(t.dtype), list(t.shape[1:]), _rows(t) == recorded.samples] for t in tensors]
    return [json.dumps(rest), recorded.samples]


def _join(here: World, tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return all ranks' rows; a tensor with another number of rows is no part of the batch and stays as it is."""
    if _rows(tensor) != rows[here.rank]:
        return tensor
    padded = tensor.detach().new_zeros((max(rows), *tensor.shape[1:]))
    padded[: rows[here.rank]] = tensor.detach()
    flat = padded.contiguous().view(torch.uint8).reshape(-1)
    parts = [torch.empty_like(flat) for _ in rows]
    with translated(here, "joined batch"):
        dist.all_gather(parts, flat, group=here.group)
    pieces = [part.view(padded.dtype).view(padded.shape)[:count] for part, count in zip(parts, rows, strict=True)]
    return torch.cat(pieces).requires_grad_(tensor.requires_grad)


def _rows(tensor: torch.Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 0

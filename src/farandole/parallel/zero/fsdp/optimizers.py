"""An optimizer whose parameters become sharded: it steps with the shards from then on, and keeps what it had."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from ....comm.world.world import World
from ....core.vocabulary.errors import ConfigError
from ....core.vocabulary.text import write_notice
from ...optim.elementwise import why_not_sharded
from ...optim.step_hooks import is_nested_step, undo_after_errors


def refuse_by_trial(optimizers: Sequence[Optimizer], mesh: DeviceMesh) -> None:
    """Raise `ConfigError` for an optimizer whose step is another one with tensors that are sharded over `mesh`.

    A norm or a mean by torch's operations is that of the whole parameter there.
    """
    for i, each in enumerate(optimizers):
        why = why_not_sharded(each, mesh)
        if why:
            raise ConfigError(
                f"zero = 3 shards parameters, and the work of optimizer {i}, a {type(each).__name__}, cannot be "
                f"divided so: {why}",
                remedy="use one that works element by element, such as torch.optim.AdamW, or set zero = 0; norms "
                "by torch's operations are right if their value stays a tensor",
            )


def support_fused(optimizers: Sequence[Optimizer]) -> None:
    """Let torch's sharded tensors take the fused steps that they do not know: those of SGD and Adagrad.

    They work element by element, as that of Adam does, which is known there.

    Raises:
        ConfigError: this torch cannot be told.
    """
    for each in optimizers:
        step = _FUSED_STEPS.get(type(each))
        if step is None or not any(group.get("fused") for group in each.param_groups):
            continue
        try:
            from torch.distributed.tensor._ops._pointwise_ops import _register_single_dim_pointwise

            if step not in _known:
                _register_single_dim_pointwise(step)
                _known.append(step)
        except (ImportError, AttributeError, TypeError):
            raise ConfigError(
                f"zero = 3: the fused step of {type(each).__name__} takes no sharded tensors in torch "
                f"{torch.__version__}",
                remedy="make the optimizer without fused=True",
            ) from None


_FUSED_STEPS: dict[Any, Any] = {
    torch.optim.SGD: torch.ops.aten._fused_sgd_.default,
    torch.optim.Adagrad: torch.ops.aten._fused_adagrad_.default,
}
_known: list[Any] = []


@torch.no_grad()
def move_to_shards(optimizer: Optimizer, shards: Mapping[torch.Tensor, torch.Tensor]) -> None:
    """Let `optimizer` step with `shards`, by the parameter that each is of; its state is cut as they are.

    Groups keep their order and options. State tensors of a parameter's shape are sharded like it; others (a step
    count) stay as they are, equal on all ranks.
    """
    for group in optimizer.param_groups:
        group["params"] = [shards.get(parameter, parameter) for parameter in group["params"]]
    for parameter in [key for key in optimizer.state if key in shards]:
        shard = shards[parameter]
        entries: Any = optimizer.state.pop(parameter)
        optimizer.state[shard] = {name: _cut(value, shard) for name, value in entries.items()}


class StepOneByOne:
    """Hooks around the steps of an optimizer that has sharded parameters and whole ones, such as experts.

    The steps of torch for many parameters at once (``foreach``, ``fused``) take one kind of tensor. Groups with
    both kinds have these options off during a step alone: other stages of a pipeline may have one kind, and what
    is saved is to be the same on all ranks.
    """

    def __init__(self, here: World) -> None:
        self._here = here
        self._asked: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._is_said = False

    def install(self, optimizer: Optimizer) -> None:
        """Surround the steps of `optimizer`."""
        optimizer.register_step_pre_hook(self.before)
        optimizer.register_step_post_hook(self.after)
        undo_after_errors(optimizer, self.after)

    def before(self, optimizer: Optimizer, *_: Any) -> None:
        """See `torch.optim.Optimizer.register_step_pre_hook`."""
        if is_nested_step(optimizer):
            return
        for group in optimizer.param_groups:
            options = {key: group[key] for key in ("foreach", "fused") if group.get(key, False) is not False}
            if options and len({isinstance(each, DTensor) for each in group["params"]}) > 1:
                self._asked.append((group, options))
                group.update(dict.fromkeys(options, False))
        asked = sorted({key for _, options in self._asked for key, value in options.items() if value})
        if asked:
            optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        if asked and not self._is_said and self._here.rank == 0:
            self._is_said = True
            write_notice(
                f"zero = 3: {type(optimizer).__name__} updates one parameter after the other, without "
                f"{' and '.join(asked)}: its groups have sharded parameters and whole ones (experts)"
            )

    def after(self, optimizer: Optimizer, *_: Any) -> None:
        """See `torch.optim.Optimizer.register_step_post_hook`."""
        if not is_nested_step(optimizer):
            for group, options in self._asked:
                group.update(options)
            self._asked = []


def _cut(value: Any, shard: torch.Tensor) -> Any:
    if not isinstance(value, torch.Tensor) or not isinstance(shard, DTensor) or value.shape != shard.shape:
        return value
    # No message: every rank has rank 0's state already, and takes its part.
    cut = distribute_tensor(value.detach(), shard.device_mesh, shard.placements, src_data_rank=None)
    return cut.detach().clone()  # the whole tensor is given back

"""What else a loop may do to a model between two steps."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn

from .model import Mixed, Net
from .program import Program


def change_model(program: Program, net: Net, optimizers: list[torch.optim.Optimizer]) -> None:
    """Do to `net` what the program's disturbance says, if that is about models."""
    dtype = getattr(torch, program.dtype)

    def evaluate(model: nn.Module) -> None:
        with torch.no_grad():
            model.eval()(torch.zeros(2, program.width, dtype=dtype))
        model.train()

    changes: dict[str, Callable[[], object]] = {
        "double_float": lambda: _there_and_back(net),
        "channels_last": lambda: net.to(memory_format=torch.contiguous_format),  # type: ignore[call-overload]
        "to_cpu": lambda: net.to("cpu"),
        "load_state": lambda: net.load_state_dict(copy.deepcopy(net.state_dict())),
        "assign": lambda: net.load_state_dict(copy.deepcopy(net.state_dict()), assign=True),
        "replaced": lambda: _replace(net),
        "late_parameter": lambda: _add_parameter(net, optimizers[0]),
        "copy_model": lambda: evaluate(copy.deepcopy(net)),
        "evaluate": lambda: evaluate(net),
        "param_data": lambda: _move(net, by_set=False),
        "param_set": lambda: _move(net, by_set=True),
    }
    if program.disturbance in changes:
        changes[program.disturbance]()


def _there_and_back(net: Net) -> None:
    net.double()
    net.float()
    for block in net.blocks:
        if isinstance(block, Mixed):
            block.narrow()


def _replace(net: Net) -> None:
    net.head.bias = nn.Parameter(net.head.bias.detach().clone())


def _add_parameter(net: Net, optimizer: torch.optim.Optimizer) -> None:
    if not hasattr(net, "late"):
        net.late = nn.Parameter(torch.ones((), dtype=net.head.bias.dtype))
        optimizer.add_param_group({"params": [net.late]})
        net.head.register_forward_hook(lambda module, inputs, out: out * net.late)


def _move(net: Net, *, by_set: bool) -> None:
    for parameter in net.parameters():
        moved = parameter.detach().clone(memory_format=torch.preserve_format)
        if by_set:
            with torch.no_grad():
                parameter.set_(moved)  # type: ignore[call-overload]
        else:
            parameter.data = moved
